"""The transport on gloo ranks: sent tensors are safe, and a failed wait reports its reason."""

import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.plain_pipeline import SHAPE, stages_for
from runtime.ranks import run_ranks
from shared_costs import shared_costs
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.vocabulary import share_vocabulary
from megatron_vshape.core.program.instructions import Message, Program, Send, Stream
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime import device_collectives, failures, nccl, p2p
from megatron_vshape.runtime.device_collectives import DeviceCollectives
from megatron_vshape.runtime.failures import Watch
from megatron_vshape.runtime.p2p import (
    Edge,
    Transport,
    TransportError,
    _free_lane,
    _PolledSends,
    _Sent,
)
from megatron_vshape.runtime.program_runner import Place, run_program
from megatron_vshape.runtime.variable_p2p import VariableTransport

BIG = (64, 4, 1024)  # more than a socket buffers, so that a send ends only when it is received


def sent_by(program: Program, device: int) -> list[Message]:
    """Return the messages that a device sends, in order."""
    return [
        instruction.message
        for instruction in program.instructions[device]
        if isinstance(instruction, Send)
    ]


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
        place = Place()
        place.instruction, place.last_pass = Send(messages[-1]), messages[-1].work
        assert transport.describe(place) == (
            "rank 0 (device 0): F0.0 waits for a receive of rank 1 (device 1) for F1.0"
        )
        del tensor, garbage
        transport.drain()
        assert transport._sends.left() == []
        assert transport.describe(place) == "rank 0 (device 0): after F0.2"
        assert all(storage.expired() for storage in storages)
    else:
        time.sleep(0.5)
        for message in messages:
            transport.post(message)
        for number, message in enumerate(messages):
            assert (transport.wait(message) == number).all()
    transport.close()


def refuse(rank: int) -> None:
    """An unsupported combination is rejected with a message."""
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
    """Messages of variable shapes arrive complete, also if they are read in another order."""
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


def test_messages_of_any_length() -> None:
    run_ranks(2, send_any_length)


class Replaceable(dist.ProcessGroup):
    """A group whose communicator is replaced, as in slime's ReloadableProcessGroup."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(rank=dist.get_rank(), size=len(ranks))
        self.ranks = ranks
        self.replace()

    def replace(self) -> None:
        """Create the communicator, again after the first time."""
        self.group = dist.new_group(self.ranks)


def unwrapping(call: Any, calls: list[str]) -> Any:
    """Return a function of torch.distributed that accepts such a group and adds its name."""

    def run(*args: Any, group: Any, **options: Any) -> Any:
        calls.append(call.__name__)
        return call(*args, group=group.group, **options)

    return run


def connect_again_after_replacement(rank: int) -> None:
    """Communicators created again by a library connect before the next step, and only once."""
    nothing, head = StageCosts.of(0, 0, 0), StageCosts.of(2, 2, 2, 0, 0)
    costs = shared_costs(Costs.uniform(2, 4), nothing, head, 2, 0.1)
    program = lower(share_vocabulary(make("v-half", 2, 2), costs))  # has collectives
    groups, calls, firsts = [], [], ("send", "recv", "all_reduce")
    for name in (*firsts, "isend", "irecv"):
        setattr(p2p.dist, name, unwrapping(getattr(dist, name), calls))
    transport = Transport([[0, 1]], SHAPE, torch.float32, "cpu", timeout_s=20)
    transport._make_group = lambda ranks, _: groups.append(Replaceable(list(ranks))) or groups[-1]
    transport.prepare(program)
    connected = sorted(calls)
    assert set(connected) == set(firsts)
    calls.clear()
    transport.reconnect()
    assert calls == []  # nothing was replaced
    for group in groups:
        group.replace()
    transport.reconnect()
    assert sorted(calls) == connected
    calls.clear()
    transport.reconnect()
    assert calls == []
    transport.close()


def test_new_communicators_connect_before_the_next_step() -> None:
    run_ranks(2, connect_again_after_replacement)


def wait_for_a_stuck_rank(rank: int) -> str:
    """Return the report of this rank when device 0 hangs in its first pass."""
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


def test_sends_are_safe_and_failed_waits_name_the_waiting_ranks() -> None:
    sender, waiter = run_ranks(2, two_ranks)
    assert waiter == (
        "rank 1 (device 1): F1.0 waits for F0.0 from rank 0 (device 0), "
        "and nothing has moved for 1 s"
    )
    # Device 0 wakes up, and its peer has given up: which wait notices first is a race.
    assert sender.startswith("rank 0 (device 0): ")
    assert "whose connection failed: " in sender


def test_every_rank_has_one_peer_per_stream_and_queue() -> None:
    stream = Stream(Kind.F, 0, upward=True)
    lanes: dict[Edge, int] = {}
    for source, target in [(0, 1), (1, 2), (2, 3), (3, 0)]:
        edge = Edge(stream, source, target)
        lanes[edge] = _free_lane(edge, lanes)
    assert list(lanes.values()) == [0, 1, 0, 1]
    other_edge = Edge(Stream(Kind.B, 0, upward=True), 0, 1)
    assert _free_lane(other_edge, lanes) == 0


class Sending:
    """Fake handle of a send on NCCL, where a failed send counts as completed."""

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
    """Return the queue of these sends, of F0.0, F0.1 and so on from device 0 to device 1."""
    sends = _PolledSends(lambda message: f"{message.work} waits to be taken")
    for message, work in zip(sent_by(lower(make("1f1b", 2, 4)), 0), works, strict=False):
        sends.add(_Sent(message, work, torch.zeros(1)))  # type: ignore[arg-type]
    return sends


@pytest.mark.parametrize("ask", [_PolledSends.poll, _PolledSends.drain])
def test_failed_nccl_send_is_reported_with_its_pass(ask: Any) -> None:
    works = Sending(True), Sending(True, "NCCL error: remote process exited"), Sending()
    sends = polled_sends(*works)
    with pytest.raises(TransportError) as error:
        ask(sends)
    assert str(error.value) == (
        "F0.1 waits to be taken, whose connection failed: NCCL error: remote process exited"
    )
    assert works[2].waits == 0


class Event:
    """Fake CUDA event."""

    def __init__(self, reached: bool) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


class Watched:
    """A watch, its reports, and the operations in progress that the test gives it."""

    def __init__(self, timeout_s: float) -> None:
        self.under_way: list[str] = []
        self.said: list[str] = []
        self.told = threading.Event()
        self.watch = Watch(
            timeout_s,
            lambda: self.under_way.copy(),
            lambda: "rank 1 (device 1): at F0.1",
            self._say,
            self._name_device,
        )

    def _name_device(self) -> None:
        self.named_by = threading.current_thread().name

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.told.set()


def test_watch_reports_a_device_without_progress() -> None:
    watched = Watched(0.2)
    watched.watch.add(Event(True), lambda: "F1.0 waits for F0.0")
    watched.watch.add(Event(False), lambda: "F1.1 waits for F0.1")
    watched.watch.add(Event(False), lambda: "F1.2 waits for F0.2")
    assert watched.told.wait(5)
    assert watched.said == ["F1.1 waits for F0.1, and nothing has moved for 0.2 s"]


@pytest.mark.parametrize("is_closed", [False, True])
def test_watch_reports_unreceived_messages(is_closed: bool) -> None:
    watched = Watched(0.2)
    watched.under_way = ["F0.0 waits to be taken"]
    if is_closed:
        watched.watch.close()
    assert watched.told.wait(5)
    assert watched.said == ["F0.0 waits to be taken, and nothing has moved for 0.2 s"]


def test_watch_closed_quietly_frees_endless_operations() -> None:
    num_threads = threading.active_count()
    watched = Watched(0.2)
    watched.under_way = ["F0.0 waits to be taken"]
    watched.watch.close(quietly=True)
    deadline = time.monotonic() + 10
    while threading.active_count() > num_threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= num_threads
    assert watched.said == []


def test_watch_is_silent_while_the_run_progresses() -> None:
    watched = Watched(0.4)
    events = [Event(False) for _ in range(3)]
    for number, event in enumerate(events):
        watched.watch.add(event, partial(str, number))
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
        if not dist.is_nccl_available():
            pytest.skip("this torch has no NCCL, and so no options of it")
        monkeypatch.setattr(failures, "say_and_exit", self._say)
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
        assert self.transport._under_way() == []  # handle and tensor are freed

    def send(self) -> None:
        self.transport.send(self.outgoing, torch.zeros(SHAPE, device="meta"))

    def drain(self) -> None:
        self.send()
        self.transport.drain()


RECEIVES = "rank 1 (device 1): F1.0 waits for F0.0 from rank 0 (device 0)"
SENDS = "rank 1 (device 1): B1.0 waits for a receive of rank 0 (device 0) for B0.0"


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (OnNccl.post, RECEIVES),
        (OnNccl.wait, RECEIVES),
        (OnNccl.send, SENDS),
        (OnNccl.drain, SENDS),
    ],
)
def test_nccl_watch_ends_runs_that_nccl_would_time_out(
    begin: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = OnNccl(monkeypatch)
    assert set(rank.timeouts) == {timedelta(days=1)}  # so that it ends nothing that moves
    begin(rank)
    rank.transport.close()
    assert rank.told.wait(5)
    assert rank.said == [said + ", and nothing has moved for 0.2 s"]


def test_nccl_watch_ends_a_rank_with_an_unconnected_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm_up = Transport._warm_up
    rank = OnNccl(monkeypatch)
    monkeypatch.setattr(dist, "send", lambda *_, **__: rank.told.wait(5))
    monkeypatch.setattr(Transport, "_warm_up", warm_up)
    with pytest.raises(RuntimeError, match="meta"):  # such a tensor has no number
        rank.transport._warm_up(list(rank.transport._channels))
    assert rank.said == ["rank 1 (device 1): connects to rank 0, and nothing has moved for 0.2 s"]


def test_gloo_ends_one_minute_after_the_report_of_the_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts: list[timedelta] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", lambda *_, timeout, **__: timeouts.append(timeout))
    Transport([[0]], SHAPE, torch.float32, "cpu", timeout_s=40)._make_group([0], "")
    assert timeouts == [timedelta(seconds=100)]


def test_send_is_freed_with_all_earlier_sends() -> None:
    works = [Sending() for _ in range(4)]
    sends = polled_sends(*works)
    messages = sends.left()
    for _ in range(2):  # waited for once only
        sends.release(messages[1])
    assert [work.waits for work in works] == [1, 1, 0, 0]
    (queue,) = sends._left.values()
    assert [work.tensor is None for work in queue] == [True, True, False, False]
    assert sends.left() == messages  # the watch still sees them
    sends.release(messages[3]._replace(target=5))  # that nothing was sent to
    sends.drain()
    assert [work.waits for work in works] == [1, 1, 1, 1]


def test_each_thread_sets_its_device_before_a_query() -> None:
    watched = Watched(0.2)
    queries: list[tuple[str, bool]] = []

    class Asked(Event):
        def query(self) -> bool:
            name = threading.current_thread().name
            queries.append((name, getattr(watched, "named_by", None) == name))
            return super().query()

    watched.watch.add(Asked(False), lambda: "F1.0 waits for F0.0")
    assert watched.told.wait(5)
    assert queries
    assert all(is_named for _, is_named in queries)


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_watch_uses_the_device_of_its_starting_thread(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[int] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    transport = Transport([[0]], SHAPE, torch.float32, device)
    watch = transport._begin_watch()
    watch.name_device()
    watch.close()
    assert set(devices) == {3}  # its threads name theirs, too


def test_unresponsive_driver_ends_the_run() -> None:
    """As where the main thread loads a kernel, which waits for a device that never rests."""
    watched = Watched(0.2)

    class Locked(Event):
        def query(self) -> bool:
            watched.told.wait()
            return False

    watched.watch.add(Locked(False), lambda: "F1.0 waits for F0.0")
    assert watched.told.wait(5)
    assert watched.said == [
        "rank 1 (device 1): at F0.1, and the GPU's driver has not answered for 0.2 s: a call that "
        "does not end holds its lock, such as the loading of a kernel"
    ]


def test_rank_activity_is_reported_without_a_device_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []
    name = threading.main_thread().name
    monkeypatch.setattr(
        Sending, "is_completed", lambda self: bool(threads.append(threading.current_thread().name))
    )
    rank = OnNccl(monkeypatch)
    rank.send()
    assert "before its first pass" in rank.transport.describe(Place())
    assert rank.transport._describe_last() == "rank 1 (device 1): at B1.0, or in a pass after it"
    assert rank.told.wait(5)
    assert rank.transport.describe(Place()) == SENDS
    assert threads
    assert name not in threads


def test_nccl_message_of_any_length_is_received_when_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    OnNccl(monkeypatch).transport.close()
    program = lower(make("1f1b", 2, 4))
    transport = VariableTransport([[0, 1]], SHAPE, torch.float32, "meta", timeout_s=9)
    transport.prepare(program)
    messages: list[Message] = []
    monkeypatch.setattr(transport, "_take", lambda message: messages.append(message) or message)
    first, second = sent_by(program, 0)[:2]
    transport.post(first)
    transport.post(second)
    assert messages == [first, second]
    assert transport.wait(second) is second  # type: ignore[comparison-overlap]
    transport.close()


def groups_of(monkeypatch: pytest.MonkeyPatch, ranks: int) -> list[list[int]]:
    """Return the groups that the transport of rank 1 creates for a V placement, in order."""
    pairs: list[list[int]] = []

    def new_group(pair: list[int], **_: Any) -> dist.ProcessGroup:
        pairs.append(pair)
        return dist.ProcessGroup(0, 2)

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(Transport, "_warm_up", lambda *_: None)
    pipelines = [list(range(ranks)), list(range(ranks, 2 * ranks))]
    transport = Transport(pipelines, SHAPE, torch.float32, "cpu")
    transport.prepare(lower(make("v-half", ranks, 2)))
    assert len(transport._channels) == (8 if ranks > 2 else 4)  # of this rank
    transport.reconnect()  # also in a dry run, whose ranks send nothing to connect
    transport.close()
    return pairs


def test_groups_are_pairs_and_connect_by_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = groups_of(monkeypatch, 4)
    assert len(pairs) == 2 * 4 * 3  # pipelines, streams, pairs
    assert all(len(pair) == 2 for pair in pairs)
    first = [tuple(sorted(pair)) for pair in pairs[:6]]
    # Pairs of one queue share no rank, so they connect at the same time.
    assert first == [(0, 1), (4, 5), (2, 3), (6, 7), (1, 2), (5, 6)]


def test_transport_backend_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes_bytes = iter((1 * 2**30, 3 * 2**29))
    monkeypatch.setattr(nccl, "outside_allocator", lambda device: next(sizes_bytes))
    monkeypatch.setattr(nccl, "class_of", lambda group: "ProcessGroupNCCL2")
    transport = OnNccl(monkeypatch).transport
    transport.close()
    text = (
        f"messages by torch {torch.__version__}'s ProcessGroupNCCL2: 2 communicators of pairs on "
        "rank 1, for which it took 0.500 GiB of the device"
    )
    assert transport.summary() == text
    monkeypatch.setattr(nccl, "class_of", lambda group: "ProcessGroupNCCL3")
    assert "ProcessGroupNCCL3, which this package has not been tried with: 2" in str(
        transport.summary()
    )


needs_nccl = pytest.mark.skipif(
    not dist.is_nccl_available(), reason="this torch has no NCCL, and so no options of it"
)


def like(options: Any) -> Any:
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))


def test_collectives_queued_before_the_end_of_a_run_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(device_collectives, "has_peers", lambda: True)
    monkeypatch.setattr(DeviceCollectives, "connect", lambda _: None)
    collectives = DeviceCollectives([0], lambda _: dist.ProcessGroup(0, 1), torch.device("cpu"), 20)
    started, released = threading.Event(), threading.Event()
    running = collectives.begin(lambda: (started.set(), released.wait(5))[1], ())
    queued = collectives.begin(lambda: None, ())
    assert started.wait(5)
    collectives.close()
    released.set()
    assert running.result()
    with pytest.raises(RuntimeError, match="the run has ended while devices were to meet"):
        queued.wait()


@needs_nccl
def test_nccl_groups_have_the_users_megatron_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
    options.config.max_ctas = 7
    options.config.net_name = "socket"
    group_options: list[Any] = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        dist, "new_group", lambda *_, pg_options, **__: group_options.append(pg_options)
    )
    for device in ("cpu", "meta"):
        transport = Transport([[0]], SHAPE, torch.float32, device, like=like(options))
        transport._make_group([0], "")
        transport.close()
    on_gloo, on_nccl = group_options
    assert on_gloo is None
    assert not on_nccl.is_high_priority_stream
    assert (on_nccl.config.max_ctas, on_nccl.config.net_name) == (7, "socket")
    assert on_nccl._timeout == timedelta(days=1)  # torch warns of any other than new_group's


@needs_nccl
@pytest.mark.parametrize("origin", [None, "nothing", "what torch writes"])
def test_nccl_pair_has_few_thread_blocks_and_priority(origin: str | None) -> None:
    group_options = dist.ProcessGroupNCCL.Options()
    if origin == "what torch writes":  # into the options of a group that has been used
        group_options.config.blocking = 1
    options = nccl.pair_options(
        None if origin is None else like(group_options), timedelta(seconds=1)
    )
    assert options.is_high_priority_stream
    assert options.config.max_ctas == nccl.THREAD_BLOCKS
    assert options.config.min_ctas == nccl._UNSET
    assert getattr(options, "lazy_init", True)


@needs_nccl
@pytest.mark.parametrize(
    ("local", "ranks", "blocks"),
    [
        ("8", [6, 7], nccl.THREAD_BLOCKS_IN_NODE),
        ("8", [7, 8], nccl.THREAD_BLOCKS),
        (None, [0, 1], nccl.THREAD_BLOCKS),
    ],
)
def test_nccl_pair_within_a_node_has_more_thread_blocks(
    monkeypatch: pytest.MonkeyPatch, local: str | None, ranks: list[int], blocks: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    options = nccl.pair_options(None, timedelta(seconds=1), ranks)
    assert options.config.max_ctas == blocks > 0


@needs_nccl
def test_nccl_backend_class_is_known() -> None:
    """Whichever class torch makes for "nccl": the contract that the transport relies on."""
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        pytest.skip("this torch makes its one class for NCCL without a table of makers")
    dist.Backend._ensure_backend_registered("nccl")
    maker = dist.Backend._plugins["NCCL"].creator_fn
    assert set(nccl.CLASSES) & set(maker.__code__.co_names), maker


def test_older_backend_class_is_not_split_from_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to torch 2.14, where a device is bound to the world's group."""
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    monkeypatch.setattr(nccl.dist, "group", SimpleNamespace(WORLD=world))
    older = SimpleNamespace(Options=SimpleNamespace())
    monkeypatch.setattr(nccl.dist, "ProcessGroupNCCL", older, raising=False)
    with nccl.made_by_pairs():
        assert world.bound_device_id is None
    assert world.bound_device_id == torch.device("cuda", 3)
    monkeypatch.setattr(older.Options, "lazy_init", False, raising=False)
    with nccl.made_by_pairs():
        assert world.bound_device_id == torch.device("cuda", 3)


EXITS_WHILE_A_SEND_WAITS = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Send
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.p2p import Transport

peer = os.fork()
rank = int(peer == 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
program = lower(make("1f1b", 2, 2))
transport = Transport([[0, 1]], (3000, 1, 1000), torch.float32, "cpu", timeout_s=60)
transport.prepare(program)
dist.barrier()
if rank == 1:
    time.sleep(120)
    os._exit(0)
first = next(each.message for each in program.instructions[0] if isinstance(each, Send))
transport.send(first, transport.blank())

class KillsPeer:
    def __del__(self, kill=os.kill, sleep=time.sleep):
        kill(peer, signal.SIGKILL)  # while the interpreter ends
        sleep(1)

kills = KillsPeer()
"""


def test_rank_exit_during_a_send_does_not_abort(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXITS_WHILE_A_SEND_WAITS, str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")
