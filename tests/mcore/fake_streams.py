"""Streams without a GPU: what is computed at once is judged as if it had only been launched.

Every operation belongs to the stream that is current; a stream's clock says how much of every
stream is over when it gets there, by events and waits alone. Told are accesses of one piece of
memory that nothing orders, memory that is let go of while another stream may still be using it
(its own stream hands it out again at once), and uses of memory that has been emptied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from megatron.core.pipeline_parallel import utils
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = Counter[str]
"""By stream, how many of its operations are over."""


class EmptiedError(Exception):
    """An operation uses memory that has been emptied."""


class Use(NamedTuple):
    """An operation's use of a part of a storage."""

    stream: str
    number: int  # of the operations of its stream
    writes: bool
    begin: int
    end: int  # in bytes


@dataclass
class Memory:
    """A storage."""

    stream: str  # that it was allocated on
    alive: StorageWeakRef
    uses: list[Use] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


class Streams(TorchDispatchMode):
    """The streams of a device that is not there, and what is wrong with their use."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[str, Clock] = {}
        self.host: Clock = Counter()  # what the host has waited for
        self.current = "main"
        self.wrong: list[str] = []
        self._memories: dict[int, Memory] = {}
        self.made = 0

    def clock(self, stream: str) -> Clock:
        """Return the stream's clock."""
        return self.clocks.setdefault(stream, Counter())

    def wait(self, stream: str, moment: Clock) -> None:
        """Have the stream go on at that moment only."""
        self.collect()
        self.clocks[stream] = self.clock(stream) | moment

    def record(self, tensor: Tensor, stream: str) -> None:
        """Do what record_stream does: the memory is handed out once the stream is through."""
        self._memory(tensor).recorded.add(stream)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        self.collect()
        options = options or {}
        given = [each for each in tree_leaves((args, options)) if isinstance(each, Tensor)]
        known = {id(self._memory(each)) for each in given}
        for each in given:
            if each.numel() and not each.untyped_storage().nbytes():
                self.wrong.append(f"{function} uses memory that has been emptied")
                raise EmptiedError
        result = function(*args, **options)
        clock = self.clocks[self.current] = self.clock(self.current) | self.host
        clock[self.current] += 1
        written = _written(function, args, options)
        for each in given:
            self._use(function, each, any(each is one for one in written))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and id(self._memory(each)) not in known:
                self._use(function, each, True)
        return result

    def _memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memories:
            self._memories[storage._cdata] = Memory(self.current, StorageWeakRef(storage))
        return self._memories[storage._cdata]

    def _use(self, function: Any, tensor: Tensor, writes: bool) -> None:
        clock, stream = self.clock(self.current), self.current
        size, offset = tensor.element_size(), tensor.storage_offset()
        extent = 1 + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        use = Use(stream, clock[stream], writes, offset * size, (offset + extent) * size)
        memory = self._memory(tensor)
        for one in memory.uses:
            meets = one.begin < use.end and use.begin < one.end
            if meets and (writes or one.writes) and clock[one.stream] < one.number:
                self.wrong.append(f"{function} on {stream} does not wait for {one.stream}")
        # What comes later on the stream comes after its earlier uses, whatever it waits for.
        memory.uses = [
            one
            for one in memory.uses
            if (one.stream, one.writes, one.begin, one.end) != (stream, writes, *use[3:])
        ]
        memory.uses.append(use)

    def collect(self) -> None:
        """Look at what has been let go of since the last look: its own stream may write there."""
        for key, memory in list(self._memories.items()):
            if memory.alive.expired():
                del self._memories[key]
                self._let_go(memory)

    def let_go(self, storage: Any) -> None:
        """Note that a storage is emptied."""
        memory = self._memories.get(storage._cdata)
        if memory is not None:
            self._let_go(memory)
            memory.uses.clear()

    def _let_go(self, memory: Memory) -> None:
        clock = self.clock(memory.stream)
        for use in memory.uses:
            is_over = clock[use.stream] >= use.number or use.stream == memory.stream
            if not is_over and use.stream not in memory.recorded:
                self.wrong.append(f"memory of {memory.stream} goes while {use.stream} may use it")


def _written(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that the operation writes to."""
    if function.namespace == "c10d":  # whose schemas do not say; the outputs come first
        return [each for each in tree_leaves(args[0]) if isinstance(each, Tensor)]
    arguments = function._schema.arguments
    pairs = list(zip(arguments, args, strict=False))
    pairs += [(each, options[each.name]) for each in arguments if each.name in options]
    return [
        each
        for argument, value in pairs
        if argument.alias_info is not None and argument.alias_info.is_write
        for each in tree_leaves(value)
        if isinstance(each, Tensor)
    ]


class Stream:
    """Stands in for torch's; of one name all are the same."""

    cuda_stream, device = 0, torch.device("cpu")

    def __init__(self, of: Streams, *args: Any, name: str | None = None, **options: Any) -> None:
        of.made += name is None
        self._streams, self.name = of, name or f"stream {of.made}"

    def wait_stream(self, other: Stream) -> None:
        self._streams.wait(self.name, self._streams.clock(other.name))

    def synchronize(self) -> None:
        self._streams.host |= self._streams.clock(self.name)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._streams)
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class Event:
    """Stands in for torch's."""

    def __init__(self, of: Streams, *args: Any, **options: Any) -> None:
        self._streams, self._moment = of, Counter()

    def record(self, stream: Stream | None = None) -> None:
        name = stream.name if stream else self._streams.current
        self._moment = Counter(self._streams.clock(name))

    def wait(self, stream: Stream | None = None) -> None:
        self._streams.wait(stream.name if stream else self._streams.current, self._moment)

    def synchronize(self) -> None:
        self._streams.host |= self._moment


@contextmanager
def streams_without_a_gpu() -> Iterator[Streams]:
    """Have torch's streams and events be these, and Megatron's stream of exchanges a new one."""
    streams = Streams()
    resize = torch.UntypedStorage.resize_

    @contextmanager
    def entered(stream: Stream | None) -> Iterator[None]:
        before = streams.current
        # Megatron's stream for counts that go to the host, made before, has nothing to copy here.
        streams.current = getattr(stream, "name", before)
        yield
        streams.current = before

    def resized(storage: Any, size: int) -> Any:
        if not size:
            streams.let_go(storage)
        return resize(storage, size)

    with (
        patch.multiple(
            torch.cuda,
            Stream=partial(Stream, streams),
            Event=partial(Event, streams),
            stream=entered,
            current_stream=lambda device=None: Stream(streams, name=streams.current),
            is_initialized=lambda: True,
        ),
        patch.object(Tensor, "record_stream", lambda tensor, on: streams.record(tensor, on.name)),
        patch.object(torch.UntypedStorage, "resize_", resized),
        patch.object(utils, "_COMM_STREAM", None),
        streams,
    ):
        yield streams
        streams.collect()
