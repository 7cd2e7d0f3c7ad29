"""CUDA graphs without a GPU, with the memory lifetimes of a GPU.

A capture records the operations of torch, and a replay computes them again, into the same memory.
That memory is a pool as in CUDA's allocator: memory without references is given to the next
captured tensor, in this graph or in a later one. Code that keeps a result after a later replay
overwrites it has wrong numbers, and a run that compares numbers detects it.

`start` is a plugin of the farm with Transformer Engine's Python, whose `make_graphed_callables`
captures the graphs.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.mcore.split import graphs
from megatron_vshape.runtime.graph_memory import GraphMemory
from megatron_vshape.runtime.p2p import Transport

POOL_ID = (0, 1)
PRINTED = "captured in the order "


class Pool:
    """The memory that graphs share."""

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}  # by address
        self._free: dict[int, list[np.ndarray]] = {}  # by size

    def segments(self) -> list[dict[str, Any]]:
        """Return the fields of torch.cuda.memory_snapshot."""
        return [
            {"address": address, "total_size": block.nbytes, "segment_pool_id": POOL_ID}
            for address, block in self._blocks.items()
        ]

    def place(self, tensor: Tensor) -> Tensor:
        """Return the tensor in memory of the pool, free again when nothing refers to it."""
        num_bytes = max(tensor.untyped_storage().nbytes(), 8)
        free = self._free.setdefault(num_bytes, [])
        block = free.pop() if free else np.empty(num_bytes, np.uint8)
        self._blocks[block.ctypes.data] = block
        lent = block[:]
        weakref.finalize(lent, free.append, block)
        placed = _on(lent, tensor, tensor.storage_offset())
        placed.copy_(tensor)
        return placed

    def owns(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies in the pool."""
        return tensor.untyped_storage().data_ptr() in self._blocks

    def unowned(self, tensor: Tensor) -> Tensor:
        """Return the tensor without a reference to the pool's memory, if it is there."""
        if not self.owns(tensor):
            return tensor.detach()
        address = tensor.untyped_storage().data_ptr()
        return _on(self._blocks[address], tensor, tensor.storage_offset())


def _on(block: np.ndarray, like: Tensor, offset: int) -> Tensor:
    values = torch.from_numpy(block).view(like.dtype)
    return values.as_strided(like.shape, like.stride(), offset)


pool = Pool()


class _Record(NamedTuple):
    function: Any
    args: Any
    options: Any
    results: list[Tensor | None]  # where they go; None: nowhere, or where it already is


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, *unused: Any) -> None:
        self.records: list[_Record] = []

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, options, results in self.records:
                outputs, _ = tree_flatten(function(*args, **options))
                _wait(outputs)
                for result, value in zip(results, outputs, strict=True):
                    if result is not None:
                        result.copy_(value)

    def reset(self) -> None:
        self.records.clear()

    def register_generator_state(self, state: Any) -> None: ...


def _wait(outputs: list[Any]) -> None:
    """Wait for exchanges: gloo's end on the host, where a stream of CUDA would wait."""
    for output in outputs:
        if isinstance(output, torch.ScriptObject):
            torch.distributed.distributed_c10d.Work.unbox(output).wait()


def _ended_work() -> torch.ScriptObject:
    """Return an exchange that has ended: waiting for gloo's twice would copy its result again."""
    future = torch.futures.Future()
    future.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


class _Recorder(TorchDispatchMode):
    """Runs operations, puts their results into the pool, and records them."""

    runs = False

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._before: list[tuple[Tensor, Tensor]] = []

    def undo(self) -> None:
        """Undo writes to memory outside the pool: nothing has run yet."""
        for tensor, then in reversed(self._before):
            tensor.copy_(then)

    def __torch_dispatch__(self, function, types_, args=(), options=None):
        options = options or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host reads from the device while a graph is captured")
        if function._schema.is_mutable:
            tensors = [tensor.detach() for tensor in _tensors((args, options))]
            self._before += [
                (tensor, tensor.clone()) for tensor in tensors if not pool.owns(tensor)
            ]
        output = function(*args, **options)
        input_pointers = {
            tensor.untyped_storage().data_ptr() for tensor in _tensors((args, options))
        }
        flat, form = tree_flatten(output)
        _wait(flat)
        flat = [_ended_work() if isinstance(x, torch.ScriptObject) else x for x in flat]
        results: list[Tensor | None] = []
        for index, output_leaf in enumerate(flat):
            is_new = (
                isinstance(output_leaf, Tensor)
                and output_leaf.untyped_storage().data_ptr() not in input_pointers
            )
            if is_new:
                flat[index] = pool.place(output_leaf)
            results.append(pool.unowned(flat[index]) if is_new else None)
        unowned = tree_map(lambda x: pool.unowned(x) if isinstance(x, Tensor) else x, args)
        unowned_options = tree_map(
            lambda x: pool.unowned(x) if isinstance(x, Tensor) else x, options
        )
        self._graph.records.append(_Record(function, unowned, unowned_options, results))
        return tree_unflatten(flat, form)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def capturing(graph: Graph, *unused: Any, **options: Any) -> Iterator[None]:
    """torch.cuda.graph."""
    with _Recorder(graph) as recorder:
        _Recorder.runs = True
        try:
            yield
        finally:
            _Recorder.runs = False
    recorder.undo()


def make_weak_ref(value: Any) -> Any:
    """Return tensors without a reference to their memory, as TE's function of that name does."""
    return tree_map(lambda x: pool.unowned(x) if isinstance(x, Tensor) else x, value)


def _printing(original: Callable[..., Any]) -> Callable[..., Any]:
    def capture(*args: Any, **options: Any) -> Any:
        print(PRINTED + json.dumps(options["_order"]), flush=True)
        return original(*args, **options)

    return capture


def copy_nothing() -> None:
    """Have W read static tensors, which TE lends to other microbatches."""
    graphs.Capture._own = lambda capture, value: value


def capture_last_whole() -> None:
    """Capture a chunk's last full backward as one graph, although it runs as B, then W."""
    graphs.with_last_split = lambda passes: passes


CARELESS = {
    "static tensors": copy_nothing,
    "last whole": capture_last_whole,
}
"""Mutations that change the numbers, by the setting that enables them."""


def watch_messages() -> None:
    """Fail if a gradient is written to after it has been sent, within its step.

    A sent message is in the memory of its receiver only.
    """
    send, drain = Transport.send, Transport.drain
    sent_tensors: list[tuple[Any, Tensor, Tensor]] = []

    def noted(transport: Transport, message: Any, tensor: Tensor) -> None:
        if message.work.kind != Kind.F:
            sent_tensors.append((message.work, tensor, tensor.clone()))
        send(transport, message, tensor)

    def checked(transport: Transport) -> None:
        drain(transport)
        for work, tensor, sent_copy in sent_tensors:
            if not torch.equal(tensor, sent_copy):
                raise RuntimeError(f"{work} was overwritten while it was under way")
        sent_tensors.clear()

    Transport.send, Transport.drain = noted, checked


def start(rank: int, setting: Any) -> None:
    """Make Megatron capture such graphs in this rank.

    The values of `setting` are not copied.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs
    from transformer_engine.pytorch import graph
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    # The generators that graphs can replay are CUDA's; nothing here draws numbers within one.
    initialize = random.initialize_rng_tracker
    random.initialize_rng_tracker = lambda *unused, force_reset=False, **options: initialize(
        force_reset=force_reset
    )
    fork = random.CudaRNGStatesTracker.fork

    def forked(tracker: Any, *args: Any) -> Any:
        within = cuda_graphs.is_graph_capturing()
        return contextlib.nullcontext() if within else fork(tracker, *args)

    random.CudaRNGStatesTracker.fork = forked
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capturing
    torch.cuda.memory_snapshot = lambda *unused: pool.segments()
    torch.cuda.is_current_stream_capturing = lambda: _Recorder.runs
    graph.make_weak_ref = make_weak_ref
    graph._graph_pool_handle = lambda: POOL_ID
    graph.graph_safe_rng_available = lambda: False
    dot_product_attention.is_graph_capturing = lambda: False  # it would require such generators
    cuda_graphs.make_graphed_callables = _printing(cuda_graphs.make_graphed_callables)
    watch_messages()
    if setting in CARELESS:
        CARELESS[setting]()
    elif setting == "messages":
        original_kept = GraphMemory.kept
        GraphMemory.kept = lambda memory, value: (
            value if isinstance(value, Tensor) else original_kept(memory, value)
        )
