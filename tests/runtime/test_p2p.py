"""The transport on gloo ranks: what is sent is safe, and a wait that fails says why."""

import re
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.plain_pipeline import SHAPE, stages_for
from runtime.ranks import run_ranks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_vshape.core.catalogue import make
from megatron_vshape.core.lowering import Message, Program, Send, Stream, lower
from megatron_vshape.core.passes import Kind, ScheduleError
from megatron_vshape.runtime import p2p
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
        assert transport._sends.left() == messages
        assert not any(storage.expired() for storage in storages)
        del tensor, garbage
        transport.drain()
        assert transport._sends.left() == []
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
        assert transport._sends.left() == []
    else:
        for message in messages:
            transport.post(message)
        for place in (1, 0, 3, 2):
            received = transport.wait(messages[place])
            assert received.shape == (lengths[place], 2, 3)
            assert (received == lengths[place]).all()
    transport.close()


def test_messages_of_any_length_on_nccl_have_an_order_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    ranks = [list(range(8))]
    on_gloo, on_nccl = (VariableTransport(ranks, SHAPE, torch.float32, t) for t in ("cpu", "meta"))
    deadlocks, runs = lower(make("zb-h1", 8, 8)), lower(make("v-half", 8, 8))
    on_gloo.check(deadlocks)
    for _ in range(2):
        on_nccl.check(runs)
        with pytest.raises(ScheduleError) as error:
            on_nccl.check(deadlocks)
    assert re.fullmatch(
        "zb-h1 with 8 microbatches on 8 devices does not work with variable_seq_lengths on GPUs, "
        r"where device \d could never send [FB]\d\.\d to device \d, which cannot receive ahead: "
        "choose v-min, v-half or v-zb, or make all microbatches equally long",
        str(error.value),
    )
    on_nccl.close()


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


class Watched:
    """A watch, what it has said, and what it is told to be under way."""

    def __init__(self, timeout_s: float) -> None:
        self.under_way: list[str] = []
        self.said: list[str] = []
        self.told = threading.Event()
        self.watch = _Watch(timeout_s, lambda: self.under_way.copy(), self._say)

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.told.set()


def test_the_watch_tells_of_a_device_that_stands_still() -> None:
    watched = Watched(0.2)
    watched.watch.add(Event(True), "F1.0 waits for F0.0")
    watched.watch.add(Event(False), "F1.1 waits for F0.1")
    watched.watch.add(Event(False), "F1.2 waits for F0.2")
    assert watched.told.wait(5)
    assert watched.said == ["F1.1 waits for F0.1, and nothing has moved for 0.2 s"]


@pytest.mark.parametrize("is_closed", [False, True])
def test_the_watch_tells_of_what_nobody_takes(is_closed: bool) -> None:
    watched = Watched(0.2)
    watched.under_way = ["F0.0 waits to be taken"]
    if is_closed:
        watched.watch.close()
    assert watched.told.wait(5)
    assert watched.said == ["F0.0 waits to be taken, and nothing has moved for 0.2 s"]


def test_the_watch_is_silent_while_anything_moves() -> None:
    watched = Watched(0.4)
    events = [Event(False) for _ in range(3)]
    for number, event in enumerate(events):
        watched.watch.add(event, str(number))
    watched.under_way = ["posted at the start of the step", "a", "b", "c"]
    for event in events:
        time.sleep(0.15)
        event.reached = True
        time.sleep(0.15)
        watched.under_way.pop()
    time.sleep(0.2)
    watched.under_way.clear()
    time.sleep(0.6)  # nothing to wait for
    watched.watch.close()
    assert watched.said == []


class OnNccl:
    """The second of two ranks with a transport that does as on NCCL, where no peer ever answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.told = threading.Event()
        self.timeouts: list[timedelta] = []
        monkeypatch.setattr(p2p, "say_and_exit", self._say)
        monkeypatch.setattr(p2p, "_recorded_event", lambda: Event(False))
        monkeypatch.setattr(Transport, "_warm_up", lambda *_: None)
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        monkeypatch.setattr(dist, "new_group", self._new_group)
        monkeypatch.setattr(dist, "isend", lambda *_, **__: Sending())
        monkeypatch.setattr(dist, "irecv", lambda *_, **__: Sending())
        program = lower(make("1f1b", 2, 4))
        self.transport = Transport([[0, 1]], SHAPE, torch.float32, "meta", timeout_s=0.2)
        self.transport.prepare(program)
        self.incoming, self.outgoing = sent_by(program, 0)[0], sent_by(program, 1)[0]

    def _say(self, text: str, code: int) -> None:
        self.said.append(text)
        self.told.set()

    def _new_group(self, *_: Any, timeout: timedelta, **__: Any) -> dist.ProcessGroup:
        self.timeouts.append(timeout)
        return dist.ProcessGroup(1, 2)

    def post(self) -> None:
        self.transport.post(self.incoming)

    def wait(self) -> None:
        self.post()
        self.transport.wait(self.incoming)
        assert self.transport._under_way() == []  # the handle, and with it the tensor, is let go of

    def send(self) -> None:
        self.transport.send(self.outgoing, torch.zeros(SHAPE, device="meta"))

    def drain(self) -> None:
        self.send()
        self.transport.drain()


RECEIVES = "rank 1 (device 1): F1.0 waits for F0.0 from rank 0 (device 0)"
SENDS = "rank 1 (device 1): B1.0 waits to be taken by rank 0 (device 0) for B0.0"


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (OnNccl.post, RECEIVES),
        (OnNccl.wait, RECEIVES),
        (OnNccl.send, SENDS),
        (OnNccl.drain, SENDS),
    ],
)
def test_on_nccl_the_watch_ends_whatever_its_own_timeout_would_end(
    begin: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = OnNccl(monkeypatch)
    assert set(rank.timeouts) == {timedelta(days=1)}  # so that it ends nothing that moves
    begin(rank)
    rank.transport.close()
    assert rank.told.wait(5)
    assert rank.said == [said + ", and nothing has moved for 0.2 s"]


def test_on_nccl_the_watch_ends_a_rank_whose_peer_does_not_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm_up = Transport._warm_up
    rank = OnNccl(monkeypatch)
    monkeypatch.setattr(dist, "send", lambda *_, **__: rank.told.wait(5))
    monkeypatch.setattr(Transport, "_warm_up", warm_up)
    with pytest.raises(RuntimeError, match="meta"):  # such a tensor has no number
        rank.transport._warm_up(list(rank.transport._channels))
    assert rank.said == ["rank 1 (device 1): connects to rank 0, and nothing has moved for 0.2 s"]


def test_gloo_ends_a_minute_after_the_transport_has_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[timedelta] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", lambda *_, timeout, **__: found.append(timeout))
    Transport([[0]], SHAPE, torch.float32, "cpu", timeout_s=40)._make_group([0], "")
    assert found == [timedelta(seconds=100)]


def test_on_nccl_groups_have_the_settings_of_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL, and so no options of it")
    theirs = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    theirs.config.max_ctas = 7
    like = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=theirs))
    found: list[Any] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", lambda *_, pg_options, **__: found.append(pg_options))
    for device in ("cpu", "meta"):
        Transport([[0]], SHAPE, torch.float32, device, like=like)._make_group([0], "")
    on_gloo, on_nccl = found
    assert on_gloo is None
    assert on_nccl.is_high_priority_stream
    assert on_nccl.config.max_ctas == 7
    assert on_nccl._timeout == timedelta(days=1)  # torch warns of any other than new_group's
