"""CUDA graphs without a GPU, with the memory lifetimes of a GPU.

A capture records the operations of torch, and a replay computes them again, into the same memory.
That memory is a pool as in CUDA's allocator: memory without references is given to the next
captured tensor, in this graph or in a later one. Code that keeps a result after a later replay
overwrites it has wrong numbers, and a run that compares numbers detects it.

`start` is a plugin of the farm. If Transformer Engine's Python is available, its
`make_graphed_callables` captures the graphs; otherwise `make_graphed_callables` below, which keeps
and drops the same tensors. Megatron captures its graphs itself, and drops the tensors that TE would
allow it to drop.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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


class _Replayed(torch.autograd.Function):
    """TE's `Graphed`: copies inputs, replays, and returns views of the graph's memory."""

    @staticmethod
    def forward(ctx, captured, *inputs):
        ctx.captured = captured
        for static, current in zip(captured.inputs, inputs, strict=False):
            if static.data_ptr() != current.data_ptr():
                static.data.copy_(current)
        captured.forward.replay()
        return tuple(output.detach() for output in captured.outputs)

    @staticmethod
    def backward(ctx, *grads):
        captured = ctx.captured
        for static, current in zip(captured.grad_outputs, grads, strict=True):
            static.copy_(current)
        captured.backward.replay()
        clones = [False] * len(captured.inputs) + [True] * len(captured.parameters)
        gradients = [
            gradient
            if gradient is None
            else gradient.detach().clone()
            if clone
            else gradient.detach()
            for gradient, clone in zip(captured.grad_inputs, clones, strict=True)
        ]
        return None, *gradients


class _Captured:
    """The state of one layer's graphs of one microbatch."""

    def __init__(self, function: Any, args: Sequence[Tensor], options: dict[str, Tensor]) -> None:
        self.function, self.args, self.options = function, args, options
        self.inputs = [*args, *options.values()]
        self.parameters = [
            parameter for parameter in function.parameters() if parameter.requires_grad
        ]
        self.forward, self.backward = Graph(), Graph()

    def capture_forward(self) -> None:
        with capturing(self.forward):
            outputs = self.function(*self.args, **self.options)
        self.outputs, self.form = tree_flatten(outputs)

    def capture_backward(self) -> None:
        self.grad_outputs = [torch.empty_like(output) for output in self.outputs]
        inputs_with_grad = [
            tensor for tensor in (*self.inputs, *self.parameters) if tensor.requires_grad
        ]
        original_grads = [tensor.grad for tensor in inputs_with_grad]
        for tensor in inputs_with_grad:
            tensor.grad = None
        with capturing(self.backward):
            torch.autograd.backward(self.outputs, self.grad_outputs)
        grads = {id(tensor): tensor.grad for tensor in inputs_with_grad}
        for tensor, grad in zip(inputs_with_grad, original_grads, strict=True):
            tensor.grad = grad
        self.grad_inputs = [grads.get(id(tensor)) for tensor in (*self.inputs, *self.parameters)]
        # The outputs are needed no more, nor a parameter's gradient, which a replay copies.
        self.outputs = make_weak_ref(self.outputs)
        many = len(self.inputs)
        self.grad_inputs[many:] = make_weak_ref(self.grad_inputs[many:])

    def __call__(self, *args: Tensor, **options: Any) -> Any:
        option_values = [options[name] for name in self.options]
        outputs = _Replayed.apply(self, *args, *option_values, *self.parameters)
        return tree_unflatten(list(outputs), self.form)

    def reset(self) -> None:
        self.forward.reset()
        self.backward.reset()


def make_graphed_callables(
    callables: Sequence[Any],
    sample_args: Sequence[Any],
    *,
    sample_kwargs: Sequence[dict[str, Any]],
    _order: Sequence[int],
    _num_layers_per_chunk: Sequence[int],
    num_warmup_iters: int,
    **unused: Any,
) -> tuple[_Captured, ...]:
    """Capture in `_order`, and drop tensors at the same time as TE does.

    TE assumes that the gradient of a chunk's input has been sent or read when the next B ends.
    """
    microbatches = len(_order) // len(_num_layers_per_chunk) // 2
    first, captured = [], []
    first_callable = 0
    for layers in _num_layers_per_chunk:
        first.append(len(captured))
        for _ in range(microbatches):
            for layer in range(layers):
                number = len(captured)
                layer_function = callables[first_callable + layer]
                captured.append(
                    _Captured(layer_function, sample_args[number], sample_kwargs[number])
                )
        first_callable += layers
    last_captured = None
    num_captured = {True: [0] * len(first), False: [0] * len(first)}
    for entry in _order:
        chunk, is_forward = abs(entry) - 1, entry > 0
        layers = _num_layers_per_chunk[chunk]
        start = first[chunk] + num_captured[is_forward][chunk] * layers
        num_captured[is_forward][chunk] += 1
        if is_forward:
            for captured_layer in captured[start : start + layers]:
                captured_layer.capture_forward()
            continue
        following = None
        for captured_layer in reversed(captured[start : start + layers]):
            captured_layer.capture_backward()
            if following is not None:
                following.grad_inputs = make_weak_ref(following.grad_inputs)
            following = captured_layer
        if last_captured is not None:
            last_captured.grad_inputs = make_weak_ref(last_captured.grad_inputs)
        last_captured = following
    assert num_captured[True] == num_captured[False] == [microbatches] * len(first)
    return tuple(captured)


def _printing(original: Callable[..., Any]) -> Callable[..., Any]:
    def capture(*args: Any, **options: Any) -> Any:
        print(PRINTED + json.dumps(options["_order"]), flush=True)
        return original(*args, **options)

    return capture


class _Norm(torch.autograd.Function):
    """torch's layer norm, which saves its input in Python as TE's and apex's do.

    Megatron keeps the tensors saved by such a function until B has been captured, and no others.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        normed, mean, deviation = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, deviation)
        return normed

    @staticmethod
    def backward(ctx, gradient):
        x, weight, bias, mean, deviation = ctx.saved_tensors
        arguments = gradient, x, weight.shape, mean, deviation, weight, bias, [True] * 3
        return *torch.ops.aten.native_layer_norm_backward(*arguments), None


def copy_nothing() -> None:
    """Have W read static tensors, which TE lends to other microbatches."""
    graphs.Capture._own = lambda capture, value: value


def check_nothing() -> None:
    """The same, unnoticed."""
    copy_nothing()
    graphs.Capture.check = lambda capture, memory: None


def run_layer_by_layer() -> None:
    """Make every layer run its job of a W when TE calls it."""
    put, run = graphs.Capture.put, graphs.Capture._run

    def put_apart(capture: Any, layer: Any, job: Any, parameters: Any) -> None:
        job.of = layer
        put(capture, layer, job, parameters)

    def run_apart(capture: Any, layer: Any) -> None:
        layer_jobs, other_jobs = defaultdict(list), defaultdict(list)
        for key, jobs in capture._jobs.items():
            for deferred_job in jobs:
                (layer_jobs if deferred_job[0].of is layer else other_jobs)[key].append(
                    deferred_job
                )
        capture._jobs = layer_jobs
        run(capture, layer)
        capture._jobs = other_jobs

    graphs.Capture.put, graphs.Capture._run = put_apart, run_apart


def capture_last_whole() -> None:
    """Capture a chunk's last full backward as one graph, although it runs as B, then W."""
    graphs.with_last_split = lambda passes: passes


CARELESS = {
    "static tensors": copy_nothing,
    "static tensors, unnoticed": check_nothing,
    "layer by layer": run_layer_by_layer,
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

    The values of `given` are not copied.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs, transformer_layer

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
    if cuda_graphs.HAVE_TE_GRAPHS:
        from transformer_engine.pytorch import graph
        from transformer_engine.pytorch.attention.dot_product_attention import (
            dot_product_attention,
        )

        graph.make_weak_ref = make_weak_ref
        graph._graph_pool_handle = lambda: POOL_ID
        graph.graph_safe_rng_available = lambda: False
        dot_product_attention.is_graph_capturing = lambda: False  # it would require such generators
    else:
        cuda_graphs.HAVE_TE_GRAPHS = True
        cuda_graphs.make_graphed_callables = make_graphed_callables
        cuda_graphs.te_set_capture_start = cuda_graphs.te_set_capture_end = lambda: None
        for module in (cuda_graphs, transformer_layer):
            module.is_te_min_version = lambda *unused, **options: True
        given_args = transformer_layer.TransformerLayer._get_te_cuda_graph_replay_args

        def masked(layer: Any, *args: Any, **options: Any) -> Any:
            # Megatron omits the mask, and TE's attention is causal.
            if "attention_mask" in options and options["attention_mask"] is None:
                hidden = args[0] if args else options["hidden_states"]
                length = hidden.shape[0]
                mask = torch.ones(hidden.shape[1], 1, length, length, dtype=torch.bool)
                options["attention_mask"] = mask.triu(1)
            return given_args(layer, *args, **options)

        transformer_layer.TransformerLayer._get_te_cuda_graph_replay_args = masked
        for name in ("transformer_engine", "transformer_engine.pytorch"):
            sys.modules[name] = types.ModuleType(name)  # imported to test whether it exists
    cuda_graphs.make_graphed_callables = _printing(cuda_graphs.make_graphed_callables)
    watch_messages()
    if setting in CARELESS:
        CARELESS[setting]()
    elif setting in ("messages", "jobs"):
        original_kept, careless = GraphMemory.kept, {"messages": Tensor, "jobs": list}[setting]
        GraphMemory.kept = lambda memory, value: (
            value if isinstance(value, careless) else original_kept(memory, value)
        )
