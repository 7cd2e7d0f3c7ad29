"""The transport on gloo ranks: what is sent is safe, and a wait that fails says why."""

import threading
import time
from typing import Any

import pytest
import torch
from runtime.plain_pipeline import SHAPE, stages_for
from runtime.ranks import run_ranks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_vshape.core.catalogue import make
from megatron_vshape.core.lowering import Message, Program, Send, Stream, lower
from megatron_vshape.core.passes import Kind
from megatron_vshape.runtime.p2p import (
    Edge,
    Transport,
    TransportError,
    _free_lane,
    _PolledSends,
    _Sent,
    _Watch,
)
from megatron_vshape.runtime.program_runner import run_program
from megatron_vshape.runtime.variable_p2p import VariableTransport

BIG = (64, 4, 1024)  # more than a socket buffers, so that a send ends only when it is received


def sent_by(program: Program, device: int) -> list[Message]:
    """Return the messages that a device sends, in order."""
    return [each.message for each in program.instructions[device] if isinstance(each, Send)]


def send_to_a_late_receiver(rank: int) -> None:
    """A sent tensor's memory may be swapped at once, lives until it is received, and no longer."""
    program = lower(make("1f1b", 2, 3))
    transport = Transport([[0, 1]], BIG, torch.float32, "cpu", timeout_s=20)
    transport.prepare(program)
    messages = sent_by(program, 0)
    if rank == 0:
        storages = []
        for number, message in enumerate(messages):
            tensor = torch.full(BIG, float(number))
            storages.append(StorageWeakRef(tensor.untyped_storage()))
            transport.send(message, tensor)
            tensor.data = torch.empty(1)  # as Megatron's deallocate_output_tensor does
            garbage = torch.full(BIG, -1.0)
            transport.poll()
        assert transport.pending_sends == 3
        assert not any(storage.expired() for storage in storages)
        del tensor, garbage
        transport.drain()
        assert transport.pending_sends == 0
        assert all(storage.expired() for storage in storages)
    else:
        time.sleep(0.5)
        for message in messages:
            transport.post(message)
        for number, message in enumerate(messages):
            assert (transport.wait(message) == number).all()
    transport.close()


def refuse(rank: int) -> None:
    """What does not fit is refused with a sentence."""
    transport = Transport([[0, 1]], SHAPE, torch.float32, "cpu")
    program = lower(make("1f1b", 2, 1))
    message = sent_by(program, 0)[0]
    with pytest.raises(TransportError, match=r"no channel for F0\.0 from device 0 to device 1"):
        transport.send(message, torch.zeros(SHAPE))
    with pytest.raises(TransportError, match="program is for 3 devices, the pipeline of rank"):
        transport.prepare(lower(make("1f1b", 3, 1)))
    with pytest.raises(TransportError, match=f"rank {rank} is in 0 of the pipelines"):
        Transport([[1 - rank]], SHAPE, torch.float32, "cpu")
    transport.prepare(program)
    if rank == 0:
        with pytest.raises(TransportError, match=r"result of F0\.0 is \[1\] of torch.float32"):
            transport.send(message, torch.zeros(1))


def send_any_length(rank: int) -> None:
    """Messages of unlike shapes arrive whole, also where they are read in another order."""
    program = lower(make("1f1b", 2, 4))
    transport = VariableTransport([[0, 1]], SHAPE, torch.float32, "cpu", timeout_s=20)
    transport.prepare(program)
    messages = sent_by(program, 0)
    lengths = [5, 0, 7, 2]
    if rank == 0:
        for length, message in zip(lengths, messages, strict=True):
            transport.send(message, torch.full((length, 2, 3), float(length)))
        with pytest.raises(TransportError, match=r"is \[2, 3\] of .* expects \[s, b, h\]"):
            transport.send(messages[0], torch.zeros(2, 3))
        transport.drain()
        assert transport.pending_sends == 0
    else:
        for message in messages:
            transport.post(message)
        for place in (1, 0, 3, 2):
            received = transport.wait(messages[place])
            assert received.shape == (lengths[place], 2, 3)
            assert (received == lengths[place]).all()
    transport.close()


def test_messages_of_any_length() -> None:
    run_ranks(2, send_any_length)


def wait_for_a_stuck_rank(rank: int) -> str:
    """Return what this rank says when device 0 hangs in its first pass."""
    schedule = make("v-half", 2, 4)
    program = lower(schedule)
    transport = Transport([[0, 1]], SHAPE, torch.float32, "cpu", timeout_s=1)
    transport.prepare(program)
    stages: Any = stages_for(schedule, rank, 0, torch.float32)
    if rank == 0:
        forward = stages[0].forward
        stages[0].forward = lambda *args: (time.sleep(2.5), forward(*args))[1]
    try:
        run_program(program, rank, stages, transport)
    except TransportError as error:
        return str(error)
    return "nothing"


def two_ranks(rank: int) -> str:
    """Run all that needs two ranks; the last leaves the connections broken."""
    send_to_a_late_receiver(rank)
    refuse(rank)
    return wait_for_a_stuck_rank(rank)


def test_sends_are_safe_and_a_failed_wait_tells_who_waits_for_whom() -> None:
    sender, waiter = run_ranks(2, two_ranks)
    assert waiter == (
        "rank 1 (device 1): F1.0 waits for F0.0 from rank 0 (device 0), "
        "and nothing has moved for 1 s"
    )
    # Device 0 wakes up, and its peer has given up: which wait notices first is a race.
    assert sender.startswith("rank 0 (device 0): ")
    assert "whose connection failed: " in sender


def test_every_rank_has_one_peer_per_stream_and_lane() -> None:
    stream = Stream(Kind.F, 0, upward=True)
    lanes: dict[Edge, int] = {}
    for source, target in [(0, 1), (1, 2), (2, 3), (3, 0)]:
        edge = Edge(stream, source, target)
        lanes[edge] = _free_lane(edge, lanes)
    assert list(lanes.values()) == [0, 1, 0, 1]
    other = Edge(Stream(Kind.B, 0, upward=True), 0, 1)
    assert _free_lane(other, lanes) == 0


class Sending:
    """Stands in for the handle of a send on NCCL, where one that has failed has completed too."""

    def __init__(self, is_completed: bool = False, error: str = "") -> None:
        self.completed, self.error = is_completed, error
        self.waits = 0

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        self.waits += 1
        if self.error:
            raise RuntimeError(self.error)


def polled_sends(*works: Sending) -> _PolledSends:
    """Return what keeps these sends, of F0.0, F0.1 and so on from device 0 to device 1."""
    sends = _PolledSends(lambda message: f"{message.work} waits to be taken")
    for message, work in zip(sent_by(lower(make("1f1b", 2, 4)), 0), works, strict=False):
        sends.add(_Sent(message, work, torch.zeros(1)))  # type: ignore[arg-type]
    return sends


@pytest.mark.parametrize("ask", [_PolledSends.poll, _PolledSends.drain])
def test_a_send_that_failed_on_nccl_is_told_with_its_pass(ask: Any) -> None:
    works = Sending(True), Sending(True, "NCCL error: remote process exited"), Sending()
    sends = polled_sends(*works)
    with pytest.raises(TransportError) as error:
        ask(sends)
    assert str(error.value) == (
        "F0.1 waits to be taken, whose connection failed: NCCL error: remote process exited"
    )
    assert works[2].waits == 0


class Event:
    """Stands in for a CUDA event."""

    def __init__(self, reached: bool) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


def test_the_watch_tells_of_a_device_that_stands_still() -> None:
    said: list[str] = []
    told = threading.Event()
    watch = _Watch(0.2, lambda text: (said.append(text), told.set()))
    watch.add(Event(True), "F1.0 waits for F0.0")
    watch.add(Event(False), "F1.1 waits for F0.1")
    watch.add(Event(False), "F1.2 waits for F0.2")
    assert told.wait(5)
    assert said == ["F1.1 waits for F0.1, and nothing has moved for 0.2 s"]


def test_the_watch_is_silent_while_the_device_moves() -> None:
    said: list[str] = []
    watch = _Watch(0.4, said.append)
    events = [Event(False) for _ in range(6)]
    for number, event in enumerate(events):
        watch.add(event, str(number))
    for event in events:
        time.sleep(0.15)
        event.reached = True
    time.sleep(0.3)
    watch.close()
    assert said == []
