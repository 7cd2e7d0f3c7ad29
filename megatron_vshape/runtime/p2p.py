"""One transport of messages over torch.distributed, for gloo and for NCCL.

A message of a stream travels in a process group of its two ranks and of one direction, so that none
queues behind another that it has nothing to do with, and each is matched by its order alone.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.core.model.kinds import KINDS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Await, Message, Program, Run, Send, Stream
from megatron_vshape.runtime import first_cause, nccl
from megatron_vshape.runtime.program_runner import Place, describe
from megatron_vshape.runtime.together import Together
from megatron_vshape.runtime.watch import Watch, no_progress

GIB = 2.0**30

A_DAY = timedelta(days=1)
"""Timeout of NCCL, counted from the posting of a receive."""


class TransportError(RuntimeError):
    """A message did not come, or did not leave; the text says which, and whose it is."""


class Edge(NamedTuple):
    """A stream between two devices: what one pair of sender and receiver shares."""

    stream: Stream
    source: int
    target: int

    @classmethod
    def of(cls, message: Message) -> "Edge":
        """Return the edge that a message goes along."""
        return cls(message.stream, message.source, message.target)


class Transport:
    """P2P communication of this rank, with process groups that are reused by later programs.

    Received tensors have the shape and dtype given here or to `expect`. Everything sent stays
    alive until it has left: gloo holds the tensor object but not the memory that a caller
    may swap under it, NCCL neither.
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
        """Prepare nothing yet; `prepare` makes what a program needs.

        `pipelines` lists, for the whole world and in the same order on every rank, the ranks of
        every pipeline, device by device: making a group takes all ranks of the world. On NCCL the
        groups have the settings of the group `like`, where its user has given it any.

        Raises:
            TransportError: this rank is not in just one of the pipelines, or they differ in length.
        """
        self._pipelines = tuple(map(tuple, pipelines))
        self._rank = dist.get_rank()
        self._ranks = _own_pipeline(self._pipelines, self._rank)
        self._torch_device = torch.device(torch_device)
        self._timeout_s = timeout_s
        self._like = like
        self._lanes: dict[Edge, int] = {}
        self._channels: dict[Edge, tuple[dist.ProcessGroup, int]] = {}
        self._took_bytes = 0  # of the device, by communicators
        self._posted: dict[Message, tuple[dist.Work, Tensor]] = {}
        # gloo blocks in wait; NCCL's wait only orders CUDA streams, and must not get a timeout,
        # for then it blocks too.
        self._waits_block = self._torch_device.type == "cpu"
        self._sends: _PolledSends | _WaitedSends = (
            _WaitedSends(timeout_s, self._tell_send)
            if self._waits_block
            else _PolledSends(self._tell_send)
        )
        self.together: Together | None = None  # once a program has passes that all devices join
        self._meeting: list[str] = []  # whom this rank meets for the first time just now
        self._last: Message | None = None  # that was posted, sent or waited for
        self._watch = None if self._waits_block else self._begin_watch()
        self.expect(shape, dtype)

    @property
    def device(self) -> int:
        """Return which device of its pipeline this rank is."""
        return self._ranks.index(self._rank)

    def expect(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Set the shape, [s, b, h], and the dtype of all messages posted from now on."""
        self._shape = tuple(shape)
        self._dtype = dtype

    def blank(self) -> Tensor:
        """Return a tensor like those that messages carry, to measure with."""
        return torch.zeros(self._shape, dtype=self._dtype, device=self._torch_device)

    def prepare(self, program: Program) -> None:
        """Make the process groups that the program needs beyond those there, and warm them up.

        All ranks of the world call this with the same programs in the same order. The first use
        of a communicator blocks until both ends are there, so it may not happen in a schedule.

        Raises:
            TransportError: the program is for another number of devices.
        """
        if program.schedule.num_devices != len(self._ranks):
            raise TransportError(
                f"the program is for {program.schedule.num_devices} devices, the pipeline of rank "
                f"{self._rank} has {len(self._ranks)} ranks"
            )
        used = {
            Edge.of(each.message)
            for row in program.instructions
            for each in row
            if isinstance(each, Send)
        }
        fresh = sorted(used - self._lanes.keys())
        for edge in fresh:
            self._lanes[edge] = _free_lane(edge, self._lanes)
        # All pairs of a lane connect at once, and not one after the other along the pipeline.
        fresh.sort(key=lambda edge: (edge.stream, self._lanes[edge], edge))
        before_bytes = nccl.outside_allocator(self._torch_device)
        with nullcontext() if self._waits_block else nccl.made_by_pairs():
            for edge in fresh:
                self._connect(edge)
        self._warm_up(fresh)
        if self.together is None and any(kind.joins for kind in program.schedule.kinds):
            self.together = Together(
                self._ranks, self._make_pipelines_group, self._torch_device, self._timeout_s
            )
        self._took_bytes += nccl.outside_allocator(self._torch_device) - before_bytes

    def summary(self) -> str | None:
        """Return what carries messages over NCCL in a line, or None where they go over gloo."""
        if self._waits_block or not self._channels:
            return None
        name = nccl.class_of(next(iter(self._channels.values()))[0])
        known = "" if name in nccl.CLASSES else ", which this package has not been tried with"
        return (
            f"messages by torch {torch.__version__}'s {name}{known}: {len(self._channels)} "
            f"communicators of pairs on rank {self._rank}, for which it took "
            f"{self._took_bytes / GIB:.3f} GiB of the device"
        )

    def post(self, message: Message) -> None:
        """Post the receive of a message; does not wait."""
        self._receive(message, self._shape, self._dtype)

    def _receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype) -> None:
        group, peer = self._channel(message)
        self._last = message
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._torch_device)
        with _failing(self._tell_receive, message, self._timeout_s):
            work = dist.irecv(tensor, src=peer, group=group)
        self._posted[message] = (_work(work, message), tensor)

    def wait(self, message: Message) -> Tensor:
        """Return a posted message's tensor, there for all that this rank computes from now on.

        Raises:
            TransportError: it did not come in time, or its sender is gone.
        """
        work, tensor = self._posted[message]
        with _failing(self._tell_receive, message, self._timeout_s):
            if self._waits_block:
                work.wait(timedelta(seconds=self._timeout_s))
            else:
                work.wait()
        if self._watch is not None:
            self._watch.add(_recorded_event(), partial(self._tell_receive, message))
        del self._posted[message]  # not earlier: the watch may never lose sight of it
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send; does not wait. The tensor's memory is kept until the send has ended."""
        # An alias, so that the caller may swap the memory of its own tensor (Megatron's
        # deallocate_output_tensor does) while gloo still reads.
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
        with _failing(self._tell_send, message, self._timeout_s):
            work = _work(dist.isend(alias, dst=peer, group=group), message)
        self._sends.add(_Sent(message, work, alias))
        return work

    def release(self, message: Message) -> None:
        """Let go of what was sent (NCCL: what is computed from now on waits until it has left).

        So the memory that sends keep is what the program says, however far the host is ahead.
        """
        self._sends.release(message)

    def poll(self) -> None:
        """Let go of what has been sent; does not wait.

        Raises:
            TransportError: a send has failed since the last call.
        """
        self._sends.poll()

    def drain(self) -> None:
        """Wait until all that was sent has left (on NCCL: have the CUDA stream wait).

        Raises:
            TransportError: a receiver did not take its message in time, or is gone.
        """
        self._sends.drain()

    def tell(self, place: Place) -> str:
        """Return what this rank does or waits for at `place`; any thread may ask."""
        # The host runs ahead of the device, so what the device waits for tells more. It is not
        # asked here: while a call holds the driver's lock, it would not answer.
        stuck = None if self._watch is None else self._watch.waits_for()
        if stuck is not None:
            return stuck
        doing = f"rank {self._rank} (device {self.device}): "
        match place.instruction:
            case Await(message):
                return self._tell_receive(message)
            case Run() as run:
                waits = [] if self.together is None else self.together.tell()
                return "; ".join([doing + f"in {describe(*run.passes)}", *waits])
            case None if place.last_pass is None:
                return doing + "before its first pass"
            case None:
                return doing + f"after {place.last_pass}, its last pass of a step"
        unsent = self._sends.left() if self._watch is None else []
        return self._tell_send(unsent[0]) if unsent else doing + f"after {place.last_pass}"

    def rest(self) -> None:
        """Let go of all that has left, on a device that has nothing to do, and ask it no more.

        So CUDA graphs can be captured before the next message.
        """
        self._sends.poll()
        if self._watch is not None:
            self._watch.forget()

    def close(self, quietly: bool = False) -> None:
        """End the threads of this transport, once all that it has sent and posted has ended.

        What never ends ends the process, or `quietly` only the threads, where the process is to
        train again. Its process groups end with torch.distributed.
        """
        self._sends.close()
        if self.together is not None:
            self.together.close()
        if self._watch is not None:
            self._watch.close(quietly)

    def _under_way(self) -> list[str]:
        """Return what is sent or posted and has not ended; any thread may ask."""
        sent = [self._tell_send(message) for message in self._sends.left()]
        posted = [
            self._tell_receive(message)
            for message, (work, _) in self._posted.copy().items()
            if not work.is_completed()
        ]
        together = [] if self.together is None else self.together.tell()
        return [*self._meeting, *together, *sent, *posted]

    def _begin_watch(self) -> Watch:
        name_device = (
            partial(torch.cuda.set_device, self._index())
            if self._torch_device.type == "cuda"
            else lambda: None
        )
        return Watch(self._timeout_s, self._under_way, self._tell_last, name_device=name_device)

    def _index(self) -> int:
        """Return the GPU's number: that of a device which is just called cuda is this thread's."""
        index = self._torch_device.index
        return torch.cuda.current_device() if index is None else index

    def _tell_last(self) -> str:
        """Return what this rank did last with a message, without asking the device."""
        last = "before its first message" if self._last is None else f"at {self._last.work}"
        return f"rank {self._rank} (device {self.device}): {last}, or in a pass after it"

    def _make_group(self, ranks: Sequence[int], description: str) -> Any:
        # gloo itself says less, so it speaks a minute after this transport has spoken.
        timeout = timedelta(seconds=self._timeout_s + 60) if self._waits_block else A_DAY
        options = None if self._waits_block else nccl.pair_options(self._like, timeout, ranks)
        return dist.new_group(
            list(ranks), timeout=timeout, pg_options=options, group_desc=description
        )

    def _make_pipelines_group(self, description: str) -> Any:
        """Make a group of all ranks of every pipeline, and return this rank's own."""
        made = [self._make_group(ranks, f"{description}, {ranks}") for ranks in self._pipelines]
        return made[self._pipelines.index(self._ranks)]

    def _connect(self, edge: Edge) -> None:
        """Make the group of an edge in every pipeline, and keep this rank's own."""
        (kind, chunk, upward), source, target = edge
        content = "activations" if kind is Kind.F else "gradients"
        way = "up" if upward else "down"
        for ranks in self._pipelines:
            pair = [ranks[source], ranks[target]]
            made = self._make_group(pair, f"pipeline {content} of chunk {chunk}, {way}, {pair}")
            if ranks == self._ranks and self._rank in pair:
                self._channels[edge] = made, pair[1] if self._rank == pair[0] else pair[0]

    def _warm_up(self, edges: Sequence[Edge]) -> None:
        """Send one number along every edge, all ranks in the same order, so that none can wait."""
        for edge in edges:
            if edge not in self._channels:
                continue
            group, peer = self._channels[edge]
            self._meeting = [f"rank {self._rank} (device {self.device}): connects to rank {peer}"]
            number = torch.full((1,), self._rank, dtype=torch.int32, device=self._torch_device)
            if self.device == edge.source:
                dist.send(number, dst=peer, group=group)
            else:
                dist.recv(number, src=peer, group=group)
            met = int(number)  # on a GPU this waits until the number has arrived, or left
            if self.device == edge.target and met != peer:
                raise TransportError(
                    f"rank {self._rank} expected rank {peer} on stream {edge.stream} and met rank "
                    f"{met}: the ranks do not run the same program"
                )
        self._meeting = []

    def _channel(self, message: Message) -> tuple[dist.ProcessGroup, int]:
        channel = self._channels.get(Edge.of(message))
        if channel is None:
            raise TransportError(
                f"no channel for {message.work} from device {message.source} to device "
                f"{message.target} on rank {self._rank}; call prepare(program) first"
            )
        return channel

    def _tell_receive(self, message: Message) -> str:
        return (
            f"rank {self._rank} (device {message.target}): {_reader(message)} waits for "
            f"{message.work} from rank {self._ranks[message.source]} (device {message.source})"
        )

    def _tell_send(self, message: Message) -> str:
        return (
            f"rank {self._rank} (device {message.source}): {message.work} waits for a receive of "
            f"rank {self._ranks[message.target]} (device {message.target}) for "
            f"{_reader(message)}"
        )


@contextmanager
def _failing(
    tell: Callable[[Message], str], message: Message, timeout_s: float = math.inf
) -> Iterator[None]:
    """Tell of the message whose transfer fails inside: late, or the peer is gone."""
    since = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        is_late = time.monotonic() - since >= timeout_s
        late = no_progress(timeout_s) if is_late else None
        why = late or f", whose connection failed: {error}{first_cause.found()}"
        raise TransportError(tell(message) + why) from error


def _own_pipeline(pipelines: Sequence[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    own = [ranks for ranks in pipelines if rank in ranks]
    if len(own) != 1 or len({len(ranks) for ranks in pipelines}) != 1:
        raise TransportError(
            f"rank {rank} is in {len(own)} of the pipelines {list(map(list, pipelines))}; every "
            "rank must be in one, and all must be equally long"
        )
    return own[0]


def _free_lane(edge: Edge, lanes: dict[Edge, int]) -> int:
    """Return the least lane in which neither end has a peer yet on this stream.

    Two ranks connect when both are there; the pairs of a lane do so all at once. In a linear or V
    placement two lanes alternate.
    """
    ends = {edge.source, edge.target}
    taken = {
        lane
        for other, lane in lanes.items()
        if other.stream == edge.stream and ends & {other.source, other.target}
    }
    return next(lane for lane in range(len(taken) + 1) if lane not in taken)


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
    tensor: Tensor | None  # only held, so that its memory lives until the send has ended


class _PolledSends:
    """Keeps what is sent until that has ended; for NCCL, which can be asked whether it has."""

    def __init__(self, tell: Callable[[Message], str]) -> None:
        self._tell = tell
        self._left: dict[Edge, deque[_Sent]] = {}

    def left(self) -> list[Message]:
        """Return what has not left yet, in the order of each channel; any thread may ask."""
        kept = [each for queue in self._left.copy().values() for each in queue.copy()]
        return [each.message for each in kept if not each.work.is_completed()]

    def add(self, sent: _Sent) -> None:
        self._left.setdefault(Edge.of(sent.message), deque()).append(sent)

    def poll(self) -> None:
        for left in self._left.values():
            while left and left[0].work.is_completed():
                self._wait(left.popleft())  # one that failed has completed too; this tells

    def release(self, message: Message) -> None:
        queue = self._left.get(Edge.of(message), deque())
        last = max((at for at, sent in enumerate(queue) if sent.message == message), default=-1)
        self._let_go(queue, last + 1)  # those before it have left before it

    def drain(self) -> None:
        self.poll()
        for queue in self._left.values():
            self._let_go(queue, len(queue))

    def _let_go(self, queue: deque[_Sent], number: int) -> None:
        for at in range(number):
            # Orders the CUDA stream, on which alone the memory can be used again. The watch
            # still has to see whether the send ends.
            if queue[at].tensor is not None:
                self._wait(queue[at])
                queue[at] = queue[at]._replace(tensor=None)

    def _wait(self, sent: _Sent) -> None:
        with _failing(self._tell, sent.message):
            sent.work.wait()

    def close(self) -> None: ...


class _WaitedSends:
    """The same for gloo, whose sends do not tell that they have ended until they are waited for.

    So a thread per channel waits for them, in the order in which they were started and end.
    """

    def __init__(self, timeout_s: float, tell: Callable[[Message], str]) -> None:
        self._timeout_s = timeout_s
        self._tell = tell
        self._queues: dict[Edge, SimpleQueue[_Sent | None]] = {}
        self._ended = threading.Condition()
        self._left: list[Message] = []  # in the order in which they were started
        self._failure: str | None = None

    def left(self) -> list[Message]:
        with self._ended:
            return self._left.copy()

    def add(self, sent: _Sent) -> None:
        edge = Edge.of(sent.message)
        queue = self._queues.get(edge)
        if queue is None:
            queue = self._queues[edge] = SimpleQueue()
            name = f"sends to device {sent.message.target}"
            threading.Thread(target=self._reap, args=(queue,), name=name, daemon=True).start()
        with self._ended:
            self._left.append(sent.message)
        queue.put(sent)

    def release(self, message: Message) -> None: ...  # each goes by itself, as soon as it has left

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
        while (sent := queue.get()) is not None:
            failure, message = None, sent.message
            try:
                with _failing(self._tell, message, self._timeout_s):
                    sent.work.wait(timedelta(seconds=self._timeout_s))
            except TransportError as error:
                failure = str(error)
            sent = None  # not held while the thread waits for the next
            with self._ended:
                self._left.remove(message)
                self._failure = self._failure or failure
                self._ended.notify_all()
