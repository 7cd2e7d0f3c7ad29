"""Fake GPUs: hosts run the real runtime on simulated devices, where a message is a kernel.

As on a GPU, a host launches kernels and continues. Kernels run later on streams, in any order that
streams, events and the hardware queues allow. A receive or a send is a kernel that occupies thread
blocks until its peer has started too and the transfer has ended. The simulation runs one event at a
time, a step of a host or the end of a kernel, drawn from a seed: the same seed gives the same run.
Device memory has contents at device time, so a kernel that runs too early reads the wrong message.
All launches are also reported to torch's CUDA sanitizer.
"""

import itertools
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_vshape.runtime import nccl, p2p, variable_p2p

with patch.object(torch._C, "_activate_gpu_trace", lambda: None):  # real GPUs are not traced
    from torch.cuda import _sanitizer

MULTIPROCESSORS = 132
SPOILT = "spoilt"  # content of new memory, and of memory that a kernel is writing to
ANYTHING = "anything"


class Hangs(Exception):
    """No host and no kernel can go on."""


class Race(Exception):
    """Two kernels use the same memory, one writes, and nothing orders them."""


class WrongData(Exception):
    """A kernel has read something else than the message it was to read."""


class Over(BaseException):
    """Ends a host's thread when the run has ended without it."""


class Storage:
    """A block of device memory; free for the next allocation as soon as nothing refers to it."""

    def __init__(self, device: "Device", num_bytes: int) -> None:
        self.device, self.num_bytes, self.stream = device, num_bytes, device.current
        self.pointer = device.allocate(num_bytes)
        self.role: str | None = None

    def take(self, role: str) -> None:
        """Count it as a message of this role from now on."""
        self.role = role
        self.device.count(role, self.num_bytes)

    def __del__(self) -> None:
        self.device.free(self.pointer, self.num_bytes, self.stream)
        if self.role is not None:
            self.device.count(self.role, -self.num_bytes)


class DeviceTensor:
    """The operations of the runtime on a tensor of a device."""

    def __init__(self, storage: Storage, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.storage, self.shape, self.dtype = storage, tuple(shape), dtype

    @property
    def pointer(self) -> int:
        return self.storage.pointer

    def detach(self) -> "DeviceTensor":
        return DeviceTensor(self.storage, self.shape, self.dtype)

    def contiguous(self) -> "DeviceTensor":
        return self

    def dim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: int) -> "DeviceTensor":
        return self  # the content of a connecting message is one number, whatever its size

    def __int__(self) -> int:
        return self._on_host()

    def tolist(self) -> list[int]:
        content = self._on_host()
        if not isinstance(content, tuple):
            raise WrongData(f"a host was to read {self.shape[0]} numbers and found {content}")
        return list(content)

    def _on_host(self) -> Any:
        """Copy it to the host, which waits for that on the current stream."""
        device = self.storage.device
        device.launch(Kernel(device.current, "copy to host", {self.pointer: ANYTHING}))
        device.wait_for_stream()
        return device.memory[self.pointer]


@dataclass(eq=False)
class Stream:
    """Runs its kernels in launch order."""

    device: "Device"
    number: int
    last: "Op | None" = None


class Op:
    """An operation of a stream; the base class is a wait for operations of other streams."""

    thread_blocks = 0

    def __init__(self, stream: Stream, needs: Iterable["Op"] = ()) -> None:
        self.stream, self.needs = stream, [*needs]
        self.has_ended = False

    def can_start(self) -> bool:
        free = MULTIPROCESSORS - self.stream.device.blocks_held
        return free >= self.thread_blocks and all(operation.has_ended for operation in self.needs)

    def start(self) -> None:
        self.end()

    def end(self) -> None:
        self.has_ended = True
        self.needs.clear()  # otherwise the whole run would hang on its last kernel
        self.stream.device.under_way -= 1


class Kernel(Op):
    """Compute kernel: must find its `reads` in memory and leaves its `writes` there.

    Its thread blocks are short, so it delays no other kernel, but it needs room for one block.
    """

    thread_blocks = 1

    def __init__(
        self,
        stream: Stream,
        name: str,
        reads: Mapping[int, Hashable],
        writes: Mapping[int, Hashable] | None = None,
    ) -> None:
        super().__init__(stream)
        self.name, self.reads, self.writes = name, reads, writes or {}
        self.is_pass = False

    def start(self) -> None:
        self._check()
        self.stream.device.memory.update(dict.fromkeys(self.writes, SPOILT))
        self.stream.device.world.running.append(self)

    def end(self) -> None:
        self._check()
        self.stream.device.memory.update(self.writes)
        self.stream.device.lead -= self.is_pass
        super().end()

    def finish(self) -> None:
        self.end()
        self.stream.device.go_on()

    def _check(self) -> None:
        memory = self.stream.device.memory
        for pointer, expected_content in self.reads.items():
            content = memory.get(pointer, SPOILT)
            if content != expected_content and (
                expected_content is not ANYTHING or content == SPOILT
            ):
                raise WrongData(f"{self.name} was to read {expected_content} and found {content}")


class MessageKernel(Op):
    """One end of a message; a short one leaves into a buffer of NCCL's and waits for nobody."""

    thread_blocks = nccl.THREAD_BLOCKS

    def __init__(self, stream: Stream, group: "Group", buffer: Storage, *, sends: bool) -> None:
        super().__init__(stream)
        self.key, self.pointer, self.sends = group.key, buffer.pointer, sends
        self.num_bytes = buffer.num_bytes

    def start(self) -> None:
        device = self.stream.device
        device.blocks_held += self.thread_blocks
        device.most_blocks = max(device.most_blocks, device.blocks_held)
        if self.sends and self.num_bytes <= device.world.buffered_bytes:
            device.world.running.append(self)
        else:
            device.world.meet(self)

    def end(self) -> None:
        self.stream.device.blocks_held -= self.thread_blocks
        super().end()

    def finish(self) -> None:
        """Leave into the buffer."""
        device = self.stream.device
        device.world.meet(Letter(self.key, self.num_bytes, self.content()))
        self.end()
        device.go_on()

    def content(self) -> Hashable:
        return self.stream.device.memory.get(self.pointer, SPOILT)


@dataclass(eq=False)
class Letter:
    """A message that has left and waits in the buffer for its receiver."""

    key: Hashable
    num_bytes: int
    held: Hashable
    sends = True

    def content(self) -> Hashable:
        return self.held

    def end(self) -> None: ...


class Transfer:
    """A message whose sender and receiver have both started."""

    def __init__(self, sender: MessageKernel | Letter, receiver: MessageKernel) -> None:
        if sender.num_bytes != receiver.num_bytes:
            raise WrongData(f"the ends of a message of {sender.key} are of unlike length")
        self.sender, self.receiver = sender, receiver
        self.content = sender.content()
        receiver.stream.device.memory[receiver.pointer] = SPOILT

    def finish(self) -> None:
        content = self.content if self.content == self.sender.content() else SPOILT
        self.receiver.stream.device.memory[self.receiver.pointer] = content
        ends = self.sender, self.receiver
        for end in ends:
            end.end()
        for end in ends:
            if isinstance(end, MessageKernel):
                end.stream.device.go_on()


class Event:
    """A CUDA event."""

    def __init__(self, device: "Device") -> None:
        self._device, self.number = device, next(device.numbers)
        self._op: Op | None = None
        device.races._handle_event_creation(self.number)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.current
        self._op = stream.last
        self._device.races._handle_event_record(self.number, stream.number)

    def query(self) -> bool:
        return self._op is None or self._op.has_ended

    def holds_up(self, stream: Stream) -> None:
        """Have the stream wait for it."""
        self._device.races._handle_event_wait(self.number, stream.number)
        self._device.launch(Op(stream, [] if self._op is None else [self._op]))


class Device:
    """One GPU and the state that its host knows."""

    def __init__(self, world: "World", rank: int) -> None:
        self.world, self.rank = world, rank
        self.numbers = itertools.count(1)
        self.races = _sanitizer.EventHandler()
        self.compute = self.current = Stream(self, _sanitizer.DEFAULT_STREAM_ID)
        self.waits_for_compute = 0  # of the host, for all that the compute stream was given
        self.queues: dict[int, deque[Op]] = {}
        self.under_way = 0
        self.lead = 0  # passes that the host has launched and that have not ended
        self.blocks_held = self.most_blocks = 0
        self.memory: dict[int, Hashable] = {}
        self._free: dict[tuple[int, int], list[int]] = {}  # by stream and blocks
        self.groups = 0
        self.held: Counter[str] = Counter()  # bytes of messages, by role
        self.most: Counter[str] = Counter()
        self.loaded: set[Hashable] = set()  # kinds of kernels

    def launch(self, op: Op) -> None:
        """Give an operation to its stream."""
        self.tell(op)
        stream = op.stream
        if stream.last is not None:
            op.needs.append(stream.last)
        stream.last = op
        self.under_way += 1
        queue = stream.number % self.world.connections
        self.queues.setdefault(queue, deque()).append(op)
        self.go_on()

    def go_on(self) -> None:
        """Start every kernel that can start. A queue is in order: a blocked kernel blocks all later
        ones.
        """
        started = True
        while started:
            started = False
            for queue in self.queues.values():
                while queue and queue[0].can_start():
                    queue.popleft().start()
                    started = True

    def tell(self, op: Op) -> None:
        """Report a kernel to the sanitizer."""
        if isinstance(op, Kernel):
            reads, writes, name = set(op.reads), set(op.writes), op.name
        elif isinstance(op, MessageKernel):
            ends = {op.pointer}, set[int]()
            reads, writes = ends if op.sends else ends[::-1]
            name = f"{'send' if op.sends else 'receive'} of {op.key}"
        else:
            return
        names: dict[int, list[str]] = {pointer: [] for pointer in reads | writes}
        races = self.races._handle_kernel_launch(
            op.stream.number, reads, writes, set(), name, names
        )
        for race in races:
            previous, current = race.previous_access, race.current_access
            raise Race(
                f"{current.operator}, {current.type} {race.data_ptr:#x}, is not ordered after "
                f"{previous.operator}, {previous.type} it"
            )

    def allocate(self, num_bytes: int) -> int:
        """Return memory of the current stream; the block that was freed last is reused first.

        Only new memory is reported to the sanitizer, which would treat reused memory as foreign.
        """
        key = self.current.number, -(-num_bytes // 512)
        if self._free.get(key):
            return self._free[key].pop()
        pointer = next(self.numbers) << 12
        self.races._handle_memory_allocation(pointer)
        return pointer

    def free(self, pointer: int, num_bytes: int, stream: Stream) -> None:
        self._free.setdefault((stream.number, -(-num_bytes // 512)), []).append(pointer)

    def count(self, role: str, num_bytes: int) -> None:
        for name in (role, "messages"):
            self.held[name] += num_bytes
            self.most[name] = max(self.most[name], self.held[name])

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> DeviceTensor:
        return DeviceTensor(Storage(self, math.prod(shape) * dtype.itemsize), shape, dtype)

    def filled(self, shape: Sequence[int], dtype: torch.dtype, content: Hashable) -> DeviceTensor:
        tensor = self.empty(shape, dtype)
        self.launch(Kernel(self.current, "fill", {}, {tensor.pointer: content}))
        return tensor

    def wait_for_stream(self) -> None:
        """Have the host wait for all that the current stream was given."""
        stream = self.current
        self.waits_for_compute += stream is self.compute
        last = stream.last
        self.world.pause(lambda: last is None or last.has_ended)
        self.races._handle_stream_synchronization(stream.number)

    def new_stream(self) -> Stream:
        """Make a stream."""
        stream = Stream(self, next(self.numbers))
        self.races._handle_stream_creation(stream.number)
        return stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one meanwhile."""
        former_stream, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = former_stream

    def wait_for_all(self) -> None:
        """Have the host wait for all that the device was given."""
        self.world.pause(lambda: not self.under_way)
        self.races._handle_device_synchronization()


class Group(dist.ProcessGroup):
    """A communicator of two ranks, from the view of one of them, with a separate stream."""

    def __init__(self, device: Device, key: Hashable, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(device.rank), len(ranks))
        self.device, self.key = device, key
        self.stream = device.new_stream()


class Work:
    """The handle of a message; it keeps the tensor no longer than its caller does."""

    def __init__(self, kernel: MessageKernel) -> None:
        self._kernel = kernel
        self._ended = Event(kernel.stream.device)
        self._ended.record(kernel.stream)

    def is_completed(self) -> bool:
        return self._kernel.has_ended

    def wait(self) -> None:
        self._ended.holds_up(self._kernel.stream.device.current)


class Distributed:
    """Replaces torch.distributed with NCCL for every host."""

    ProcessGroup = dist.ProcessGroup

    def __init__(self, world: "World") -> None:
        self._world = world

    def get_rank(self) -> int:
        return self._world.here.rank

    def new_group(self, ranks: list[int], **options: Any) -> "Group | object":
        here = self._world.here
        here.groups += 1
        if here.rank not in ranks:
            return object()
        return Group(here, (here.groups, options["group_desc"]), ranks)

    def isend(self, tensor: DeviceTensor, dst: int, group: Group) -> Work:
        return self._begin(tensor, group, sends=True)

    def irecv(self, tensor: DeviceTensor, src: int, group: Group) -> Work:
        return self._begin(tensor, group, sends=False)

    def send(self, tensor: DeviceTensor, dst: int, group: Group) -> None:
        self.isend(tensor, dst, group).wait()

    def recv(self, tensor: DeviceTensor, src: int, group: Group) -> None:
        self.irecv(tensor, src, group).wait()

    def _begin(self, tensor: DeviceTensor, group: Group, *, sends: bool) -> Work:
        self._world.pause()
        if tensor.dtype.is_floating_point:  # no number of a rank, and no shape
            tensor.storage.take("sent" if sends else "received")
        kernel = MessageKernel(group.stream, group, tensor.storage, sends=sends)
        self.order(group, sends=sends)
        group.device.launch(kernel)
        return Work(kernel)

    def order(self, group: Group, *, sends: bool) -> None:
        """Make the stream of the group wait for all work launched on the current stream so far."""
        event = Event(group.device)
        event.record()
        event.holds_up(group.stream)


class Torch:
    """Replaces torch where torch creates tensors on a device or events."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.cuda = SimpleNamespace(
            Event=lambda: Event(world.here),
            Stream=lambda device: world.here.new_stream(),
            stream=lambda stream: world.here.using(stream),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: Any) -> DeviceTensor:
        return self._world.here.empty(shape, dtype)

    def full(
        self, shape: Sequence[int], value: int, dtype: torch.dtype, device: Any
    ) -> DeviceTensor:
        return self._world.here.filled(shape, dtype, value)

    def tensor(self, values: Sequence[int], dtype: torch.dtype, pin_memory: bool) -> "HostTensor":
        return HostTensor(self._world, tuple(values), dtype, pin_memory)


class HostTensor(NamedTuple):
    """Numbers of the host, to be copied to a device."""

    world: "World"
    values: tuple[int, ...]
    dtype: torch.dtype
    is_pinned: bool

    def to(self, device: Any, non_blocking: bool) -> DeviceTensor:
        tensor = self.world.here.filled((len(self.values),), self.dtype, self.values)
        if not (self.is_pinned and non_blocking):
            self.world.here.wait_for_stream()
        return tensor


class SilentWatch:
    """Watches nothing: its threads would make a run depend on the time of day."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def add(self, event: Event, describe: Callable[[], str]) -> None: ...

    def close(self, quietly: bool = False) -> None: ...


@dataclass(eq=False)
class Host:
    """A rank's process: a thread that runs only while it has the baton."""

    device: Device
    body: Callable[[Device], None]
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    can_go_on: Callable[[], bool] = lambda: True
    has_ended: bool = False
    error: BaseException | None = None

    def run(self) -> None:
        world = self.device.world
        world.local.host = self
        try:
            self.baton.acquire()
            if not world.is_over:
                self.body(self.device)
        except BaseException as error:  # reported by the thread that runs the simulation
            self.error = error
        self.has_ended = True
        world.baton.release()


class World:
    """All hosts and devices, and the random choice of the next event.

    A host runs up to `lead` passes ahead of its device, and further only if no other event is
    possible; with None it continues at any time. The hardware launches kernels through
    `connections` queues, over which the streams of a device are distributed.
    """

    def __init__(
        self, num_devices: int, seed: int, connections: int = 32, lead: float | None = None
    ) -> None:
        self.draw = random.Random(seed)
        self.connections, self.lead = connections, lead
        self.devices = [Device(self, rank) for rank in range(num_devices)]
        self.buffered_bytes = 512
        self.running: list[Kernel | MessageKernel | Transfer] = []
        self._sent: dict[Hashable, deque[MessageKernel | Letter]] = {}  # by communicator
        self._posted: dict[Hashable, MessageKernel] = {}
        self.baton = threading.Semaphore(0)
        self.local = threading.local()
        self.is_over = False

    @property
    def here(self) -> Device:
        """Return the device of the calling host."""
        return self.local.host.device

    def meet(self, end: MessageKernel | Letter) -> None:
        """Begin the transfer of a message as soon as both its ends are there."""
        letters = self._sent.setdefault(end.key, deque())
        if end.sends:
            letters.append(end)
        else:
            self._posted[end.key] = end
        if letters and end.key in self._posted:
            self.running.append(Transfer(letters.popleft(), self._posted.pop(end.key)))

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let other hosts run; return when the scheduler selects this host and `until` is true."""
        host = self.local.host
        host.can_go_on = until
        self.baton.release()
        host.baton.acquire()
        if self.is_over:
            raise Over

    def run(self, body: Callable[[Device], None]) -> None:
        """Run a host with this body on every device, until all hosts and kernels have ended.

        Raises:
            Hangs, Race, WrongData: see their docstrings.
        """
        hosts = [Host(device, body) for device in self.devices]
        threads = [threading.Thread(target=host.run, daemon=True) for host in hosts]
        with pytest.MonkeyPatch.context() as changed:
            for module in (p2p, variable_p2p):
                changed.setattr(module, "torch", Torch(self))
            changed.setattr(p2p, "dist", Distributed(self))
            changed.setattr(p2p, "Watch", SilentWatch)
            changed.setattr(nccl, "pair_options", lambda *_: None)
            for thread in threads:
                thread.start()
            try:
                while any(not host.has_ended for host in hosts) or self.running:
                    self._step(hosts)
                if any(device.under_way for device in self.devices):
                    raise Hangs("all hosts have ended, and some messages have one end only")
            finally:
                self.is_over = True
                for host, thread in zip(hosts, threads, strict=True):
                    host.baton.release()
                    thread.join()

    def _step(self, hosts: Sequence[Host]) -> None:
        """Let one host or one kernel go on."""
        able = [host for host in hosts if not host.has_ended and host.can_go_on()]
        ahead = [host for host in able if self.lead is not None and host.device.lead >= self.lead]
        first = [host for host in able if host not in ahead]
        if self.lead is None:
            chosen = self.draw.choice([*able, *self.running] or [None])
        else:
            chosen = self.draw.choice(first or self.running or able or [None])
        if chosen is None:
            waiting_ranks = [host.device.rank for host in hosts if not host.has_ended]
            raise Hangs(f"devices {waiting_ranks} wait for ever")
        if not isinstance(chosen, Host):
            self.running.remove(chosen)
            chosen.finish()
            return
        chosen.baton.release()
        self.baton.acquire()
        if chosen.error is not None:
            raise chosen.error
