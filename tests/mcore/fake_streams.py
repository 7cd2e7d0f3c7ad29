"""Streams without a GPU: operations run at once but are checked as asynchronous launches.

Every operation belongs to the current stream. The clock of a stream counts the completed operations
of every stream that it has seen by events and waits. Errors are unordered accesses to the same
memory, memory freed while another stream may still use it (its stream reuses it at once or at its
next allocation), and uses of freed memory. A freed storage that is resized again belongs to the
current stream from then on.
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
from megatron.core.transformer.moe import shared_experts
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_vshape.runtime.activation_tracker import nodes_behind

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
    """The streams of a simulated device, and the errors in their use."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self._at_once = at_once
        self.clocks: dict[str, Clock] = {}
        self.host: Clock = Counter()  # operations that the host has waited for
        self.current = "main"
        self.wrong: list[str] = []
        self._memories: dict[int, Memory] = {}
        self._free: dict[str, list[Use]] = {}  # by stream, the uses of its reusable memory
        self._since: list[tuple[int, str]] = []  # first node number and stream
        self._numbers: dict[Node, int] = {}  # original numbers of renumbered nodes
        self.made = 0

    def clock(self, stream: str) -> Clock:
        """Return the stream's clock."""
        return self.clocks.setdefault(stream, Counter())

    def wait(self, stream: str, moment: Clock) -> None:
        """Have the stream go on at that moment only."""
        self.collect()
        self.clocks[stream] = self.clock(stream) | moment

    def record(self, tensor: Tensor, stream: str) -> None:
        """Emulate record_stream: the memory is reusable when the stream has completed its work."""
        self._memory(tensor).recorded.add(stream)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        self.collect()
        options = options or {}
        inputs = [tensor for tensor in tree_leaves((args, options)) if isinstance(tensor, Tensor)]
        input_memories = {id(self._memory(tensor)) for tensor in inputs}
        for tensor in inputs:
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                self.wrong.append(f"{function} uses memory that has been emptied")
                raise EmptiedError
        result = function(*args, **options)
        clock = self.clocks[self.current] = self.clock(self.current) | self.host
        clock[self.current] += 1
        written = _written(function, args, options)
        for tensor in inputs:
            if not _is_view(function):
                self._use(function, tensor, any(tensor is output for output in written))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(self._memory(leaf)) not in input_memories:
                self._hand_out(self.current)
                self._use(function, leaf, True)
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
        # Later operations of the stream come after its earlier uses, whatever it waits for.
        memory.uses = [
            one
            for one in memory.uses
            if (one.stream, one.writes, one.begin, one.end) != (stream, writes, *use[3:])
        ]
        memory.uses.append(use)

    def collect(self) -> None:
        """Process storages freed since the last call: their streams may reuse them."""
        for key, memory in list(self._memories.items()):
            if memory.alive.expired():
                del self._memories[key]
                self._let_go(memory)

    def end(self) -> None:
        """Have every stream allocate once more, whatever it has waited for by now."""
        self.collect()
        for stream in list(self._free):
            self._hand_out(stream)

    def let_go(self, storage: Any) -> None:
        """Note that a storage is emptied."""
        memory = self._memories.get(storage._cdata)
        if memory is not None:
            self._let_go(memory)
            memory.uses.clear()

    def make_large(self, storage: Any) -> None:
        """Record that a freed storage is allocated again, by the current stream."""
        memory = self._memories.get(storage._cdata)
        self._hand_out(self.current)
        if memory is not None:
            memory.stream = self.current
            memory.recorded.clear()

    def segments(self) -> list[dict[str, Any]]:
        """Return the fields of torch.cuda.memory_snapshot; here, a segment is a storage."""
        self.collect()
        blocks = []
        for memory in self._memories.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(memory.alive.cdata)
            if storage is not None:
                blocks.append(
                    {
                        "address": storage.data_ptr(),
                        "total_size": storage.nbytes(),
                        "stream": Stream(self, name=memory.stream).cuda_stream,
                    }
                )
        return blocks

    def enter(self, stream: str) -> None:
        """Assign the following operations and autograd nodes to that stream."""
        self.current = stream
        with _disable_current_modes():
            number = torch.empty(0, requires_grad=True).exp().grad_fn._sequence_nr()
        self._since.append((number, stream))

    def number(self, tensor: Tensor, value: int) -> None:
        """Give a tensor's node another number, as Megatron does, and store the original."""
        if tensor is not None and tensor.grad_fn is not None:
            self._numbers.setdefault(tensor.grad_fn, tensor.grad_fn._sequence_nr())
            tensor.grad_fn._set_sequence_nr(value)

    @contextmanager
    def backward_of(self, root: Node) -> Iterator[None]:
        """Run every node meanwhile on the stream of its forward, as autograd does on a GPU.

        That stream waits for the inputs of the node, and the current one waits for all at the end.
        """
        outer = self.current
        moments = {
            (root, 0): [Counter(self.clock(outer))]
        }  # by reader and which it is of its inputs
        handles = []

        def begins(node: Node, gradients: tuple[Tensor | None, ...]) -> None:
            self.current = self._stream_of(node, outer)
            for number, gradient in enumerate(gradients):
                for moment in moments.get((node, number), ()) if gradient is not None else ():
                    self.wait(self.current, moment)

        def is_over(node: Node, *gradients: Any) -> None:
            for reader in node.next_functions:
                moments.setdefault(reader, []).append(Counter(self.clock(self.current)))
            self.current = outer

        for node in nodes_behind(root):
            handles.append(node.register_prehook(partial(begins, node)))
            handles.append(node.register_hook(partial(is_over, node)))
        yield
        for handle in handles:
            handle.remove()
        for stream in {self._stream_of(node, outer) for node, _ in moments if node is not None}:
            self.wait(outer, self.clock(stream))

    def _stream_of(self, node: Node, outer: str) -> str:
        if "AccumulateGrad" in node.name():  # made long before
            return outer
        number = self._numbers.get(node, node._sequence_nr())
        streams = [stream for first, stream in self._since if first < number]
        return streams[-1] if streams else outer

    def _let_go(self, memory: Memory) -> None:
        self._free.setdefault(memory.stream, []).extend(
            use
            for use in memory.uses
            if use.stream != memory.stream and use.stream not in memory.recorded
        )
        if self._at_once:
            self._hand_out(memory.stream)

    def _hand_out(self, stream: str) -> None:
        """Return freed memory to the stream, which continues with it."""
        clock = self.clock(stream)
        for use in self._free.pop(stream, ()):
            if clock[use.stream] < use.number:
                self.wrong.append(f"memory of {stream} goes while {use.stream} may use it")


def _is_view(function: Any) -> bool:
    """Return whether the operation looks at no memory, and gives it another shape or name."""
    returned = [alias.alias_info for alias in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _written(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that the operation writes to."""
    if function.namespace == "c10d":  # these schemas lack it; the outputs come first
        return [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
    arguments = function._schema.arguments
    pairs = list(zip(arguments, args, strict=False))
    pairs += [
        (argument, options[argument.name]) for argument in arguments if argument.name in options
    ]
    return [
        leaf
        for argument, value in pairs
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


class Stream:
    """Replaces torch's stream; streams of one name are equal."""

    device = torch.device("cpu")

    def __init__(self, of: Streams, *args: Any, name: str | None = None, **options: Any) -> None:
        of.made += name is None
        self._streams, self.name = of, name or f"stream {of.made}"

    @property
    def cuda_stream(self) -> int:
        """Return the number of the stream in a GPU's driver."""
        return hash(self.name)

    def wait_stream(self, stream: Stream) -> None:
        self._streams.wait(self.name, self._streams.clock(stream.name))

    def synchronize(self) -> None:
        self._streams.host |= self._streams.clock(self.name)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._streams)
        event.record(self)
        return event

    def __eq__(self, operand: object) -> bool:
        return isinstance(operand, Stream) and self.name == operand.name

    def __hash__(self) -> int:
        return hash(self.name)


class Event:
    """Replaces torch's event."""

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
def streams_without_a_gpu(at_once: bool = True) -> Iterator[Streams]:
    """Replace torch's streams and events, and give Megatron a new stream for all-to-alls.

    With `at_once` a stream reuses memory when it is freed, before it waits for anything.
    """
    streams = Streams(at_once)
    resize = torch.UntypedStorage.resize_

    @contextmanager
    def entered(stream: Stream | None) -> Iterator[None]:
        former_stream = streams.current
        # Megatron's stream for counts that go to the host, made before, has nothing to copy here.
        streams.enter(getattr(stream, "name", former_stream))
        try:
            yield
        finally:
            streams.enter(former_stream)

    def resized(storage: Any, size: int) -> Any:
        if not size:
            streams.let_go(storage)
        elif not storage.nbytes():
            streams.make_large(storage)
        return resize(storage, size)

    with (
        patch.multiple(
            torch.cuda,
            Stream=partial(Stream, streams),
            Event=partial(Event, streams),
            stream=entered,
            current_stream=lambda device=None: Stream(streams, name=streams.current),
            is_initialized=lambda: True,
            memory_snapshot=streams.segments,
        ),
        patch.object(shared_experts, "set_tensor_grad_fn_sequence_sr", streams.number),
        patch.object(Tensor, "record_stream", lambda tensor, on: streams.record(tensor, on.name)),
        patch.object(torch.UntypedStorage, "resize_", resized),
        patch.object(utils, "_COMM_STREAM", None),
        streams,
    ):
        yield streams
        streams.end()
