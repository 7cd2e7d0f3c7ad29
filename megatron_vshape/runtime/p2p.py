"""P2P transport over torch.distributed, for gloo and NCCL.

Each stream of messages has a process group for each pair of ranks and direction. So a message never
queues behind an unrelated one, and messages are matched by their order alone.
"""

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.kinds import KINDS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Await, Message, Program, Run, Send, Stream
from megatron_vshape.runtime import nccl
from megatron_vshape.runtime.device_collectives import DeviceCollectives
from megatron_vshape.runtime.failures import WaitingThreads, Watch, cause_of_others, no_progress
from megatron_vshape.runtime.hosts import has_peers
from megatron_vshape.runtime.program_runner import Place, describe

A_DAY = timedelta(days=1)
"""NCCL timeout, counted from the posting of a receive; the watchdog uses `timeout_s`."""


class TransportError(RuntimeError):
    """A send or receive failed; the text names the message and the rank."""


class Edge(NamedTuple):
    """A stream between two pipeline ranks: one direction of one pair of sender and receiver."""

    stream: Stream
    source: int
    target: int

    @classmethod
    def of(cls, message: Message) -> "Edge":
        """Return the edge of a message."""
        return cls(message.stream, message.source, message.target)


class Transport:
    """P2P communication of this rank, with process groups that are reused by later programs.

    Received tensors have the shape and dtype given here or to `expect`. Sent tensors stay alive
    until the send has completed: gloo keeps the tensor object alive, but not memory that the caller
    replaces under it; NCCL keeps neither alive.
    """

    def __init__(
        self,
        pipelines: Sequence[Sequence[int]],
        shape: Sequence[int],
        dtype: torch.dtype,
        torch_device: torch.device | str,
        timeout_s: float = 600.0,
        like: "dist.ProcessGroup | None" = None,
    ) -> None:
        """Store the settings. `prepare` creates the process groups that a program needs.

        Args:
            pipelines: the ranks of every pipeline, in pipeline order. It must be the same on all
                ranks of the world, since creating a group is collective over the world.
            shape: shape of the messages, [s, b, h].
            dtype: dtype of the messages.
            torch_device: device of the received tensors; a CPU uses gloo, a GPU uses NCCL.
            timeout_s: time limit of a message, in seconds.
            like: on NCCL, the group whose user-defined settings the new groups copy.

        Raises:
            TransportError: this rank is in none or several of the pipelines, or they differ in
                length.
        """
        self._pipelines = tuple(map(tuple, pipelines))
        self._rank = dist.get_rank()
        self._ranks = _own_pipeline(self._pipelines, self._rank)
        self._torch_device = torch.device(torch_device)
        self._timeout_s = timeout_s
        self._like = like
        self._lanes: dict[Edge, int] = {}
        self._channels: dict[Edge, tuple[dist.ProcessGroup, int]] = {}
        # Communicators that have connected their ranks, for `reconnect`. A strong reference would
        # keep one that the library has destroyed.
        self._connected: dict[Edge, weakref.ref[Any]] = {}
        self._took_bytes = 0  # GPU memory of the communicators
        self._posted: dict[Message, tuple[dist.Work, Tensor]] = {}
        # gloo blocks in wait. NCCL's wait only orders CUDA streams, and must not get a timeout:
        # with a timeout it blocks too.
        self._waits_block = self._torch_device.type == "cpu"
        self._sends: _PolledSends | _WaitedSends = (
            _WaitedSends(timeout_s, self._describe_send, lambda message: self._channel(message)[0])
            if self._waits_block and has_peers()
            else _PolledSends(self._describe_send)
        )
        # Created once a program has passes with collectives.
        self.collectives: DeviceCollectives | None = None
        self._connecting: list[str] = []  # the peer that is being connected now
        self._last: Message | None = None  # the last message that was posted, sent or waited for
        self._watch = None if self._waits_block else self._begin_watch()
        self.expect(shape, dtype)

    @property
    def device(self) -> int:
        """Index of this rank in its pipeline."""
        return self._ranks.index(self._rank)

    def expect(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Set the shape, [s, b, h], and the dtype of all messages that are posted later."""
        self._shape = tuple(shape)
        self._dtype = dtype

    def blank(self) -> Tensor:
        """Return a zero tensor with the shape and dtype of the messages, for measurements."""
        return torch.zeros(self._shape, dtype=self._dtype, device=self._torch_device)

    def prepare(self, program: Program) -> None:
        """Create the missing process groups of a program and connect their ranks.

        All ranks of the world must call this with the same programs in the same order. The first
        use of a communicator blocks until both ranks have arrived, so it must not happen within a
        schedule.

        Raises:
            TransportError: the program is for another number of pipeline ranks.
        """
        if program.schedule.num_devices != len(self._ranks):
            raise TransportError(
                f"the program is for {program.schedule.num_devices} devices, the pipeline of rank "
                f"{self._rank} has {len(self._ranks)} ranks"
            )
        # From all ranks' rows, not only this rank's: group creation is collective over the world.
        used = {
            Edge.of(instruction.message)
            for row in program.instructions
            for instruction in row
            if isinstance(instruction, Send)
        }
        # Sorted, because a set has another order in each process.
        fresh = sorted(used - self._lanes.keys())
        for edge in fresh:
            self._lanes[edge] = _free_lane(edge, self._lanes)
        fresh = self._by_lane(fresh)
        # Memory of communicators is invisible to torch's allocator, so compare before and after.
        before_bytes = nccl.outside_allocator(self._torch_device)
        with nullcontext() if self._waits_block else nccl.made_by_pairs():
            for edge in fresh:
                self._make_groups_of(edge)
        self._connect_all(fresh)
        if self.collectives is None and any(kind.is_collective for kind in program.schedule.kinds):
            self.collectives = DeviceCollectives(
                self._ranks, self._make_pipelines_group, self._torch_device, self._timeout_s
            )
        # After the warm-up, because NCCL allocates buffers at a communicator's first message.
        self._took_bytes += nccl.outside_allocator(self._torch_device) - before_bytes

    def reconnect(self) -> None:
        """Connect the ranks again if a library has replaced the communicators since the last step.

        slime destroys all communicators while an inference engine uses the GPUs, and creates them
        again inside the same group objects, which connect at their first message. All ranks of the
        world call this before a step.
        """
        replaced = (
            _communicator(group) is not self._connected[edge]()
            for edge, (group, _) in self._channels.items()
        )
        if not any(replaced):
            return
        # All edges, so that all ranks agree: a library replaces all communicators at once.
        self._connect_all(self._by_lane(self._lanes))
        if self.collectives is not None:
            self.collectives.connect()

    def summary(self) -> str | None:
        """Format the NCCL class, number and memory of the communicators; None over gloo."""
        if self._waits_block or not self._channels:
            return None
        name = nccl.class_of(next(iter(self._channels.values()))[0])
        tried_text = "" if name in nccl.CLASSES else ", which this package has not been tried with"
        return (
            f"messages by torch {torch.__version__}'s {name}{tried_text}: {len(self._channels)} "
            f"communicators of pairs on rank {self._rank}, for which it took "
            f"{self._took_bytes / GIB:.3f} GiB of the device"
        )

    def post(self, message: Message) -> None:
        """Post the receive of a message without waiting."""
        self._receive(message, self._shape, self._dtype)

    def _receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype) -> None:
        group, peer = self._channel(message)
        self._last = message
        # NCCL's stream waits for the current stream here, and `wait` orders the readers after it.
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._torch_device)
        with _failing(self._describe_receive, message, self._timeout_s):
            work = dist.irecv(tensor, src=peer, group=group)
        self._posted[message] = (_work(work, message), tensor)

    def wait(self, message: Message) -> Tensor:
        """Return a posted message's tensor, ready for all later computation of this rank.

        Raises:
            TransportError: the message did not arrive in time, or its sender is gone.
        """
        work, tensor = self._posted[message]
        with _failing(self._describe_receive, message, self._timeout_s):
            # On a GPU, wait only orders streams; a timeout would block the host.
            if self._waits_block:
                work.wait(timedelta(seconds=self._timeout_s))
            else:
                work.wait()
        if self._watch is not None:
            # This event is behind the wait in the compute stream: pending for as long as the
            # receive is.
            self._watch.add(_recorded_event(), partial(self._describe_receive, message))
        del self._posted[message]  # not earlier: the watch must always see the message
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start a send without waiting. The tensor stays alive until the send has completed."""
        # An alias, because the caller may replace the memory of its tensor while gloo still reads
        # it, as Megatron's deallocate_output_tensor does.
        # `contiguous` returns the same memory for most results, so the alias costs none.
        alias = tensor.detach().contiguous()
        if alias.shape != self._shape or alias.dtype != self._dtype:
            raise TransportError(
                f"the result of {message.work} is {list(alias.shape)} of {alias.dtype}; the "
                f"receiver expects {list(self._shape)} of {self._dtype}"
            )
        self._start(message, alias)

    def _start(self, message: Message, alias: Tensor) -> dist.Work:
        group, peer = self._channel(message)
        self._last = message
        with _failing(self._describe_send, message, self._timeout_s):
            work = _work(dist.isend(alias, dst=peer, group=group), message)
        self._sends.add(_Sent(message, work, alias))
        return work

    def release(self, message: Message) -> None:
        """Free a sent tensor. On NCCL, later computation waits until the send has completed.

        So the memory of sends follows the program, however far the host runs ahead.
        """
        self._sends.release(message)

    def poll(self) -> None:
        """Free completed sends without waiting.

        Raises:
            TransportError: a send has failed since the last call.
        """
        self._sends.poll()

    def drain(self) -> None:
        """Wait for the completion of all sends; on NCCL, the CUDA stream waits.

        Raises:
            TransportError: a receiver did not accept its message in time, or is gone.
        """
        self._sends.drain()

    def describe(self, place: Place) -> str:
        """Format the activity of this rank or the message that it waits for. Thread-safe."""
        # The host runs ahead of the GPU, so the GPU's wait is more informative. This reads the
        # watch's last result: the driver does not answer while another call has its lock.
        stuck = None if self._watch is None else self._watch.waits_for()
        if stuck is not None:
            return stuck
        doing = f"rank {self._rank} (device {self.device}): "
        match place.instruction:
            case Await(message):
                return self._describe_receive(message)
            case Run() as run:
                waits = [] if self.collectives is None else self.collectives.describe_waits()
                return "; ".join([doing + f"in {describe(*run.passes)}", *waits])
            case None if place.last_pass is None:
                return doing + "before its first pass"
            case None:
                return doing + f"after {place.last_pass}, its last pass of a step"
        # Not with a watch: `left` queries the GPU, which may not answer.
        unsent = self._sends.left() if self._watch is None else []
        return self._describe_send(unsent[0]) if unsent else doing + f"after {place.last_pass}"

    def rest(self) -> None:
        """Free completed sends and stop queries of the idle GPU until the next message.

        CUDA graph capture requires this: any query from another thread during capture is an error.
        """
        self._sends.poll()
        if self._watch is not None:
            self._watch.clear()

    def close(self, quietly: bool = False) -> None:
        """End the threads of this transport once its sends and receives have completed.

        A transfer that never completes ends the process. With `quietly` it ends only the threads,
        for a process that is to train again. The process groups end with torch.distributed.
        """
        self._sends.close()
        if self.collectives is not None:
            self.collectives.close()
        if self._watch is not None:
            self._watch.close(quietly)

    def _under_way(self) -> list[str]:
        """Format the sends and receives that have not completed. Thread-safe."""
        sends = [self._describe_send(message) for message in self._sends.left()]
        posted = [
            self._describe_receive(message)
            for message, (work, _) in self._posted.copy().items()
            if not work.is_completed()
        ]
        collectives = [] if self.collectives is None else self.collectives.describe_waits()
        return [*self._connecting, *collectives, *sends, *posted]

    def _begin_watch(self) -> Watch:
        is_cuda, index = self._torch_device.type == "cuda", self._torch_device.index
        if is_cuda and index is None:
            index = torch.cuda.current_device()  # of this thread, not the watch
        name_device = partial(torch.cuda.set_device, index) if is_cuda else lambda: None
        return Watch(self._timeout_s, self._under_way, self._describe_last, name_device=name_device)

    def _describe_last(self) -> str:
        """Format the last message of this rank, without a query to the GPU."""
        last = "before its first message" if self._last is None else f"at {self._last.work}"
        return f"rank {self._rank} (device {self.device}): {last}, or in a pass after it"

    def _make_group(self, ranks: Sequence[int], description: str) -> Any:
        # gloo's own error has less detail, so it comes a minute after the one of this transport.
        # NCCL counts from the posting, which may be many passes before the send.
        timeout = timedelta(seconds=self._timeout_s + 60) if self._waits_block else A_DAY
        options = None if self._waits_block else nccl.pair_options(self._like, timeout, ranks)
        return dist.new_group(
            list(ranks), timeout=timeout, pg_options=options, group_desc=description
        )

    def _make_pipelines_group(self, description: str) -> Any:
        """Create a group of all ranks of every pipeline, and return the one of this rank."""
        groups = [self._make_group(ranks, f"{description}, {ranks}") for ranks in self._pipelines]
        return groups[self._pipelines.index(self._ranks)]

    def _make_groups_of(self, edge: Edge) -> None:
        """Create the group of an edge in every pipeline, and store the one of this rank."""
        (kind, chunk, upward), source, target = edge
        content = "activations" if kind is Kind.F else "gradients"
        direction = "up" if upward else "down"
        # Groups of other pipelines too: `new_group` is collective over the world.
        for ranks in self._pipelines:
            pair = [ranks[source], ranks[target]]
            group = self._make_group(
                pair, f"pipeline {content} of chunk {chunk}, {direction}, {pair}"
            )
            if ranks == self._ranks and self._rank in pair:
                self._channels[edge] = group, pair[1] if self._rank == pair[0] else pair[0]

    def _by_lane(self, edges: Iterable[Edge]) -> list[Edge]:
        """Sort edges so that all pairs of a lane connect at the same time."""
        # Every rank has at most one edge per stream and lane, so the pairs of a lane do not wait
        # for each other.
        return sorted(edges, key=lambda edge: (edge.stream, self._lanes[edge], edge))

    def _connect_all(self, edges: Sequence[Edge]) -> None:
        """Connect the ranks of these edges, and record the communicators for `reconnect`."""
        self._warm_up(edges)
        self._connected = {
            edge: weakref.ref(_communicator(group)) for edge, (group, _) in self._channels.items()
        }

    def warm_up(self) -> None:
        """Send a message of real size along every edge; all ranks of the pipelines call this."""
        # A network has been reported to stay ten times slower after first messages of four bytes.
        num_bytes = math.prod(self._shape) * self._dtype.itemsize
        self._warm_up(self._by_lane(self._lanes), math.ceil(num_bytes / torch.int32.itemsize))

    def _warm_up(self, edges: Sequence[Edge], size: int = 1) -> None:
        """Send numbers along every edge, in the same order on all ranks to avoid deadlock."""
        if not has_peers():
            return
        for edge in edges:
            # An edge between two other ranks: this rank only took part in creating its group.
            if edge not in self._channels:
                continue
            group, peer = self._channels[edge]
            self._connecting = [
                f"rank {self._rank} (device {self.device}): connects to rank {peer}"
            ]
            numbers = torch.full((size,), self._rank, dtype=torch.int32, device=self._torch_device)
            if self.device == edge.source:
                dist.send(numbers, dst=peer, group=group)
            else:
                dist.recv(numbers, src=peer, group=group)
            met = int(numbers[0])  # on a GPU this waits for the completion of the transfer
            if self.device == edge.target and met != peer:
                raise TransportError(
                    f"rank {self._rank} expected rank {peer} on stream {edge.stream} and met rank "
                    f"{met}: the ranks do not run the same program"
                )
        self._connecting = []

    def _channel(self, message: Message) -> tuple[dist.ProcessGroup, int]:
        channel = self._channels.get(Edge.of(message))
        if channel is None:
            raise TransportError(
                f"no channel for {message.work} from device {message.source} to device "
                f"{message.target} on rank {self._rank}; call prepare(program) first"
            )
        return channel

    def _describe_receive(self, message: Message) -> str:
        return (
            f"rank {self._rank} (device {message.target}): {_reader(message)} waits for "
            f"{message.work} from rank {self._ranks[message.source]} (device {message.source})"
        )

    def _describe_send(self, message: Message) -> str:
        return (
            f"rank {self._rank} (device {message.source}): {message.work} waits for a receive of "
            f"rank {self._ranks[message.target]} (device {message.target}) for "
            f"{_reader(message)}"
        )


@contextmanager
def _failing(
    describe: Callable[[Message], str], message: Message, timeout_s: float = math.inf
) -> Iterator[None]:
    """Convert a failed transfer to a TransportError with the reason: timeout or lost peer."""
    since = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        # Timeouts and lost connections raise the same type, so the elapsed time decides.
        is_late = time.monotonic() - since >= timeout_s
        late_text = no_progress(timeout_s) if is_late else None
        why = late_text or f", whose connection failed: {error}{cause_of_others()}"
        raise TransportError(describe(message) + why) from error


def _communicator(group: dist.ProcessGroup) -> Any:
    """Return the group inside a library's own group class, such as slime's; else the group."""
    return getattr(group, "group", group)


def _own_pipeline(pipelines: Sequence[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    pipelines_of_rank = [ranks for ranks in pipelines if rank in ranks]
    if len(pipelines_of_rank) != 1 or len({len(ranks) for ranks in pipelines}) != 1:
        raise TransportError(
            f"rank {rank} is in {len(pipelines_of_rank)} of the pipelines "
            f"{list(map(list, pipelines))}; every rank must be in one, and all must be equally long"
        )
    return pipelines_of_rank[0]


def _free_lane(edge: Edge, lanes: dict[Edge, int]) -> int:
    """Return the lowest round in which both ranks have no other peer on this stream.

    The pairs of a round connect at the same time. A linear or V placement alternates between two
    rounds.
    """
    ends = {edge.source, edge.target}
    used_lanes = {
        lane
        for other_edge, lane in lanes.items()
        if other_edge.stream == edge.stream and ends & {other_edge.source, other_edge.target}
    }
    return next(lane for lane in range(len(used_lanes) + 1) if lane not in used_lanes)


def _reader(message: Message) -> Pass:
    """Return the pass that reads the message."""
    kind, stage, microbatch = message.work
    return next(
        Pass(reader, stage - read.step, microbatch)
        for reader in KINDS
        for read in reader.reads
        if read.kind == kind and read.step
    )


def _work(work: "dist.Work | None", message: Message) -> dist.Work:
    if work is None:
        raise TransportError(f"this rank is not in the process group of {message.work}")
    return work


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


class _Sent(NamedTuple):
    message: Message
    work: dist.Work
    tensor: Tensor | None  # keeps the memory alive until the send has completed


class _PolledSends:
    """Sends over NCCL. Completion can be polled."""

    def __init__(self, describe: Callable[[Message], str]) -> None:
        self._describe = describe
        self._left: dict[Edge, deque[_Sent]] = {}

    def left(self) -> list[Message]:
        """Return the messages of incomplete sends, in the order of each channel. Thread-safe."""
        pending_sends = [send for queue in self._left.copy().values() for send in queue.copy()]
        return [send.message for send in pending_sends if not send.work.is_completed()]

    def add(self, send: _Sent) -> None:
        self._left.setdefault(Edge.of(send.message), deque()).append(send)

    def poll(self) -> None:
        for pending_sends in self._left.values():
            # Sends of a channel complete in order, so the first incomplete one ends the search.
            while pending_sends and pending_sends[0].work.is_completed():
                # A failed send has completed too; this raises its error.
                self._wait(pending_sends.popleft())

    def release(self, message: Message) -> None:
        queue = self._left.get(Edge.of(message), deque())
        # The last one: a variable-length message has two sends, its shape and its data.
        last = max(
            (position for position, send in enumerate(queue) if send.message == message), default=-1
        )
        self._let_go(queue, last + 1)  # earlier sends of the channel completed before this one

    def drain(self) -> None:
        self.poll()
        for queue in self._left.values():
            self._let_go(queue, len(queue))

    def _let_go(self, queue: deque[_Sent], number: int) -> None:
        for position in range(number):
            # This orders the CUDA stream, the only stream that can reuse the memory. The entry
            # stays, because the watch has to see whether the send completes.
            if queue[position].tensor is not None:
                self._wait(queue[position])
                queue[position] = queue[position]._replace(tensor=None)

    def _wait(self, send: _Sent) -> None:
        with _failing(self._describe, send.message):
            send.work.wait()

    def close(self) -> None: ...


class _WaitedSends:
    """Sends over gloo. Completion is known only by waiting.

    A thread per channel waits for its sends in the order in which they start and complete.
    """

    def __init__(
        self,
        timeout_s: float,
        describe: Callable[[Message], str],
        group_of: Callable[[Message], dist.ProcessGroup],
    ) -> None:
        self._timeout_s = timeout_s
        self._describe = describe
        self._threads = WaitingThreads(self.close, lambda: map(group_of, self.left()))
        self._queues: dict[Edge, SimpleQueue[_Sent | None]] = {}
        self._ended = threading.Condition()
        self._left: list[Message] = []  # in the order of their start
        self._failure: str | None = None

    def left(self) -> list[Message]:
        with self._ended:
            return self._left.copy()

    def add(self, send: _Sent) -> None:
        edge = Edge.of(send.message)
        queue = self._queues.get(edge)
        if queue is None:
            queue = self._queues[edge] = SimpleQueue()
            name = f"sends to device {send.message.target}"
            self._threads.start(self._reap, queue, name=name)
        with self._ended:
            self._left.append(send.message)
        queue.put(send)

    def release(self, message: Message) -> None: ...  # freed by the channel's thread

    def poll(self) -> None:
        if self._failure is not None:
            raise TransportError(self._failure)

    def drain(self) -> None:
        with self._ended:
            self._ended.wait_for(lambda: not self._left or self._failure is not None)
        self.poll()

    def close(self) -> None:
        for queue in self._queues.values():
            queue.put(None)
        self._queues.clear()

    def _reap(self, queue: "SimpleQueue[_Sent | None]") -> None:
        while (send := queue.get()) is not None:
            failure, message = None, send.message
            try:
                with _failing(self._describe, message, self._timeout_s):
                    send.work.wait(timedelta(seconds=self._timeout_s))
            except TransportError as error:
                failure = str(error)
            send = None  # drops the reference while the thread waits for the next send
            with self._ended:
                self._left.remove(message)
                self._failure = self._failure or failure
                self._ended.notify_all()
