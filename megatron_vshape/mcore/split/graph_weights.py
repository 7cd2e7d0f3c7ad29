"""Capture weight gradients in CUDA graphs of their own, which the schedule's W passes replay.

Transformer Engine can capture the W of a callable apart from its B, always for the callable's
latest B. So every layer and microbatch becomes a chunk of its own, whose only B is the latest, and
its W may come any time later. Graphs share one memory pool, in the order of capture: that order
must be the one of the run, down to the last W.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.mcore.replaced import Replaced
from megatron_vshape.mcore.split.graphs import ChunkPass
from megatron_vshape.mcore.split.te_layers import JobStore, StoreError
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.gathering_job import GatheringJob, plain_tensors
from megatron_vshape.runtime.graph_memory import GraphMemory
from megatron_vshape.runtime.weight_jobs import is_open

logger = logging.getLogger(__name__)

_Job = tuple[GatheringJob, list[Tensor]]  # and the parameters that it adds gradients to
_WARM_UP = -1  # microbatch of a B that TE runs before it captures; its W follows at once


def layer_order(
    passes: Sequence[ChunkPass],
    chunks: Sequence[Sequence[bool]],
    microbatches: int,
    splits_last: bool = False,
) -> list[float]:
    """List a rank's passes layer by layer, as TE's `_order`: n for F, -n for B, -n - 0.5 for W.

    n counts from 1 by chunk, microbatch and layer, as Megatron counts its graphs. `chunks` has for
    every layer whether it has weight gradients. With `splits_last`, a chunk's last full backward
    runs as B, then W, as it does with --overlap-grad-reduce.
    """
    starts = [microbatches * sum(map(len, chunks[:at])) for at in range(len(chunks))]
    left = [microbatches] * len(chunks)
    order: list[float] = []
    for kind, chunk, microbatch in passes:
        first = starts[chunk] + microbatch * len(chunks[chunk]) + 1
        layers = [*enumerate(chunks[chunk], first)]
        b, w = Kind.B in kind.does, Kind.W in kind.does
        left[chunk] -= w
        if Kind.F in kind.does:
            order += [number for number, _ in layers]
        parts = [(b, False), (False, w)] if splits_last and not left[chunk] else [(b, w)]
        for has_b, has_w in parts:
            for number, has_weights in reversed(layers):
                order += [-number] * has_b + [-number - 0.5] * (has_w and has_weights)
    return order


class Capture:
    """The weight jobs of captured layers while Transformer Engine warms up and captures.

    TE runs the linear layers of a W in the order of a set, which differs from rank to rank, while
    some jobs gather over ranks. So the first layer that TE calls runs all jobs, in the order of B.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[nn.Module]],
        covered: Collection[nn.Module],
        passes: Sequence[ChunkPass],
        splits_last: bool,
    ) -> None:
        """Take the captured layers of each chunk, all modules in graphs, and the rank's passes."""
        self._chunks, self._passes, self._splits_last = chunks, passes, splits_last
        self._owners: dict[nn.Module, nn.Module] = {}  # of each linear layer: the captured layer
        self._turns: dict[nn.Module, list[int]] = {}  # microbatches in the order of their W
        for at, layers in enumerate(chunks):
            turns = [m for kind, chunk, m in passes if chunk == at and Kind.W in kind.does]
            for layer in layers:
                self._turns[layer] = turns
                own = (each for each in layer.modules() if each in covered and _leaves_jobs(each))
                self._owners.update(dict.fromkeys(own, layer))
        self._jobs: dict[tuple[nn.Module, int], list[_Job]] = defaultdict(list)
        self._forwards: dict[nn.Module, int] = defaultdict(int)
        self._weights_run: dict[nn.Module, int] = defaultdict(int)
        self._running: tuple[nn.Module, int] | None = None  # whose B is captured now
        self._static: set[int] = set()  # addresses of its tensors that TE lends to other B's
        self._read: set[int] = set()  # addresses that captured jobs read
        self._kept: dict[tuple[nn.Module, int], dict[int, int]] = defaultdict(dict)
        self.parameters: dict[nn.Module, list[Tensor]] = {}
        self.copies = self.most_kept = 0  # number of copies; peak bytes between B and W

    def splits(self, layer: nn.Module) -> bool:
        """Return whether the layer's weight gradient is captured apart from its B."""
        return layer in self._owners

    @contextmanager
    def active(self, state: StepState) -> Iterator[None]:
        """Let linear layers hand their jobs over to this capture."""
        with Replaced() as replaced:
            for each in self._owners:
                replaced.put(each, "backward_dw", partial(self._run, each))
            for layer in self._turns:
                # Megatron's layers are captured through a method of their own.
                has_own = hasattr(layer, "_te_cuda_graph_capture")
                name = "_te_cuda_graph_capture" if has_own else "forward"
                replaced.put(layer, name, partial(self._forward, layer, getattr(layer, name)))
            state.capture = self
            try:
                yield
            finally:
                state.capture = None

    def make(
        self, original: Callable[..., Any], callables: Any, sample_args: Any, **options: Any
    ) -> Any:
        """Call `original`, Transformer Engine's make_graphed_callables, for F, B and W."""
        if not all(hasattr(each, "main_grad") for each in _trained(self._owners)):
            raise StoreError(
                "CUDA graphs of weight gradients need the main_grad of Megatron's "
                "DistributedDataParallel, and a parameter has none: add --pipeline-split-graphs off"
            )
        many, enabled = len(sample_args) // len(callables), options.get("fp8_enabled")
        repeated = tuple(each for layers in self._chunks for each in [*layers] * many)
        if isinstance(enabled, tuple):
            of_layer = dict(zip(callables, enabled, strict=True))
            options["fp8_enabled"] = tuple(of_layer[each] for each in repeated)
        owners = set(self._owners.values())
        weights = [[layer in owners for layer in layers] for layers in self._chunks]
        options["_order"] = layer_order(self._passes, weights, many, self._splits_last)
        options["_num_layers_per_chunk"] = [1] * len(repeated)
        return original(repeated, sample_args, **options)

    def _forward(
        self, layer: nn.Module, original: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Run a layer's F, and have its B note which microbatch it is of."""
        made = original(*args, **options)
        if torch.cuda.is_current_stream_capturing():
            given = {_address(e) for e in tree_leaves((args, options)) if isinstance(e, Tensor)}
            begin = partial(self._begin_backward, (layer, self._forwards[layer]), given)
            self._forwards[layer] += 1
            for each in tree_leaves(made):
                if isinstance(each, Tensor) and each.grad_fn is not None:
                    each.register_hook(begin)
        return made

    def _begin_backward(
        self, running: tuple[nn.Module, int], given: set[int], gradient: Tensor
    ) -> None:
        if running != self._running:
            self._running, self._static = running, set(given)
        self._static.add(_address(gradient))  # one buffer of TE's for all layers and microbatches

    def put(self, layer: nn.Module, job: GatheringJob, parameters: list[Tensor]) -> None:
        """Take a job that a B leaves for its W."""
        key = self._owners[layer], _WARM_UP
        if torch.cuda.is_current_stream_capturing():
            assert self._running is not None
            key = self._running
            job.tensors = [self._own(each) for each in job.tensors]
            tensors = plain_tensors(job.tensors)
            self._kept[key] |= {_address(e): e.untyped_storage().nbytes() for e in tensors}
            self._read.update(self._kept[key])
            total = sum(sum(each.values()) for each in self._kept.values())
            self.most_kept = max(self.most_kept, total)
        self._jobs[key].append((job, parameters))

    def _own(self, value: Any) -> Any:
        """Return a copy of a static tensor: TE lends it to other microbatches once B has run."""
        if isinstance(value, list | tuple):
            return [self._own(each) for each in value]
        if not isinstance(value, Tensor) or hasattr(value, "get_data_tensors"):
            return value  # what is quantized, B has made itself
        if _address(value) not in self._static:
            return value
        self.copies += 1
        return value.clone()

    def _run(self, layer: nn.Module) -> None:
        """Compute the weight gradients that one B of the layer's owner has left."""
        key = self._owners[layer], _WARM_UP
        if torch.cuda.is_current_stream_capturing():
            key = key[0], self._turns[key[0]][self._weights_run[layer]]
            self._weights_run[layer] += 1
        jobs = self._jobs.pop(key, [])
        self._kept.pop(key, None)
        if jobs:
            self.parameters[key[0]] = [each for _, own in jobs for each in own]
        with torch.no_grad():
            while jobs:
                job, _ = jobs.pop(0)  # whose tensors may go once it has run
                job.begin()
                if jobs:
                    jobs[0][0].begin()
                job()

    def check(self, memory: GraphMemory) -> None:
        """Raise StoreError if a captured W reads memory that another replay may write to."""
        others = sum(not memory.owns(each) for each in self._read)
        if others:
            raise StoreError(
                f"{others} tensors that captured weight gradients read are not in the memory of "
                "CUDA graphs, and may be overwritten before W: add --pipeline-split-graphs off"
            )


def _trained(layers: Collection[nn.Module]) -> list[nn.Parameter]:
    return [p for each in layers for p in each.parameters(recurse=False) if p.requires_grad]


def _leaves_jobs(layer: nn.Module) -> bool:
    """Return whether a linear layer's B leaves its weight gradient to a store of ours."""
    return bool(_trained([layer])) and isinstance(getattr(layer, "wgrad_store", None), JobStore)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def replayed(state: StepState, graph: Any, parameters: Sequence[Tensor]) -> Callable[..., Any]:
    """Return the graphed callable, whose B leaves its W to the schedule's W pass."""

    def run(*args: Any, **options: Any) -> Any:
        made = graph(*args, **options)
        outputs = (made,) if isinstance(made, Tensor) else made
        nodes = (each.grad_fn for each in outputs if isinstance(each, Tensor))
        node = next((each for each in nodes if each is not None), None)
        if node is not None:
            node.register_hook(after_backward)
        return made

    def after_backward(*unused: Any) -> None:
        if is_open():
            state.defer(GatheringJob(graph.backward_dw, [], []), parameters)
        else:
            graph.backward_dw()

    run.backward_dw, run.reset = graph.backward_dw, graph.reset  # type: ignore[attr-defined]
    return run


@contextmanager
def capturing(helper: Any, capture: Capture | None, state: StepState) -> Iterator[None]:
    """Run the capture of Megatron's `helper` inside, of F, B and W if there is a `capture`."""
    original = cuda_graphs.make_graphed_callables
    make = original if capture is None else partial(capture.make, original)
    with Replaced() as replaced, ExitStack() as stack:
        make = partial(make, **_savings(helper, original))
        replaced.put(cuda_graphs, "make_graphed_callables", make)
        if capture is not None:
            stack.enter_context(capture.active(state))
        yield
    state.graph_memory.look()
    if capture is None:
        return
    capture.check(state.graph_memory)
    layer: Any
    for layer, own in capture.parameters.items():
        layer.cuda_graphs = [replayed(state, each, own) for each in layer.cuda_graphs]
    logger.info(
        "CUDA graphs of W: %d layers, at most %.0f MiB wait between B and W, %d copies",
        len(capture.parameters),
        capture.most_kept / 2**20,
        capture.copies,
    )


def _savings(helper: Any, original: Callable[..., Any]) -> dict[str, Any]:
    """Return options of TE's make_graphed_callables that save memory and time, if it has them."""
    # What the warm-up leaves in the allocator's cache cannot be released during captures.
    options: dict[str, Any] = {"post_warmup_hook": torch.cuda.empty_cache}
    # By default a replayed B clones every gradient that it returns. With fused accumulation those
    # of weights are dummies, and Megatron's DDP adds the others to main_grad at once, before
    # another replay can overwrite them.
    if helper.config.gradient_accumulation_fusion:
        if all(hasattr(chunk, "ddp_config") for chunk in helper.model):
            options["clone_param_grads_on_return"] = False
    known = inspect.signature(original).parameters
    return {name: value for name, value in options.items() if name in known}
