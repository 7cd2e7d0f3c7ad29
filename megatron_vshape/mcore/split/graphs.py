"""CUDA graphs of Transformer Engine: the modules that they cover, their order, and those of W.

TE captures the F and the B of every layer and microbatch once, in execution order, and replays
them. A replayed B also computes weight gradients, unless `Capture` makes TE capture these
separately, in graphs that the schedule's W passes replay.

Transformer Engine can capture the W of a callable separately from its B, but always for the latest
B of the callable. So every pair of layer and microbatch becomes a chunk: its only B is then the
latest, and its W can follow at any time. Graphs share one memory pool in the order of capture.
Therefore this order must equal the order of the run, including the last W.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.transformer import cuda_graphs
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.program.instructions import Program, Run
from megatron_vshape.environment import is_first_rank
from megatron_vshape.mcore.hook import Replaced
from megatron_vshape.mcore.refusals import captures_graphs, graph_scope, num_experts
from megatron_vshape.mcore.split.te_layers import JobStore, StoreError
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.graph_memory import GraphMemory
from megatron_vshape.runtime.weight_jobs import GatheringJob, is_open, plain_tensors

logger = logging.getLogger(__name__)


def cover_whole_layers(options: Any) -> bool:
    """Return whether the graphs cover every linear layer of the model."""
    if not captures_graphs(options):
        return False
    scope = graph_scope(options)
    if not scope:
        return True
    experts = num_experts(options)
    all_have_experts = getattr(options, "moe_layer_freq", None) in (None, 1)
    required_scope = {"attn"} | ({"moe"} if experts else set())
    if not experts or not all_have_experts:
        required_scope.add("mlp")
    return required_scope <= scope and getattr(options, "hybrid_layer_pattern", None) is None


def covered(chunks: Iterable[nn.Module]) -> set[nn.Module]:
    """Return all modules of the chunks whose passes are replayed, according to Megatron."""
    modules: set[nn.Module] = set()
    layer: Any
    for chunk in chunks:
        for layer in chunk.modules():
            config = getattr(layer, "config", None)
            if not hasattr(layer, "layer_number"):
                continue  # a block of layers; only inference captures these
            if captures_graphs(config) and cuda_graphs._layer_is_graphable(layer, config):
                for module in layer._get_submodules_under_cudagraphs():
                    modules.update(module.modules())
    return modules


class ChunkPass(NamedTuple):
    """A pass of a rank: pass type, index of the chunk on the rank, and microbatch."""

    kind: Kind
    chunk: int
    microbatch: int


def passes_of(program: Program, rank: int, stages: Sequence[int]) -> list[ChunkPass]:
    """List the passes of a rank's `stages` in program order."""
    chunk_of = {stage: index for index, stage in enumerate(stages)}
    return [
        ChunkPass(work.kind, chunk_of[work.stage], work.microbatch)
        for instruction in program.instructions[rank]
        for work in (instruction.passes if isinstance(instruction, Run) else ())
        if work.stage in chunk_of
    ]


def with_last_split(passes: Sequence[ChunkPass]) -> list[ChunkPass]:
    """Split the last full backward of each chunk into B and W, as with --overlap-grad-reduce."""
    last = {work.chunk: index for index, work in enumerate(passes) if Kind.W in work.kind.does}
    return [
        part
        for index, work in enumerate(passes)
        for part in (
            (work._replace(kind=Kind.B), work._replace(kind=Kind.W))
            if work.kind is Kind.BW and last[work.chunk] == index
            else (work,)
        )
    ]


def capture_order(program: Program, rank: int, stages: Sequence[int]) -> list[int]:
    """List a rank's passes in Megatron's format for TE: chunk number for F, negative number for B.

    Chunks are the rank's `stages`, counted from 1. The microbatches of a chunk run in ascending
    order, so the position of a number identifies the microbatch. W is omitted; a full backward
    counts as B.
    """
    order = []
    for work in passes_of(program, rank, stages):
        does, number = work.kind.does, work.chunk + 1
        order += [number] * (Kind.F in does) + [-number] * (Kind.B in does)
    return order


def capture_late(options: Any, planned_by: int) -> None:
    """Delay TE's graph capture until the pass order is final, after `planned_by` steps."""
    if options.cuda_graph_warmup_steps >= planned_by:
        return
    if is_first_rank():
        logger.info(
            "cuda_graph_warmup_steps %d: raised to %d, because graphs are captured in the final "
            "order of passes. Passes are measured before that, launches from Python included",
            options.cuda_graph_warmup_steps,
            planned_by,
        )
    options.cuda_graph_warmup_steps = planned_by


_Job = tuple[GatheringJob, list[Tensor]]  # the job and the parameters of its gradients
_WARM_UP = -1  # microbatch of the B that TE runs before the capture; its W follows immediately


def layer_order(
    passes: Sequence[ChunkPass],
    chunks: Sequence[Sequence[bool]],
    microbatches: int,
) -> list[float]:
    """List a rank's passes per layer as TE's `_order`: n for F, -n for B, -n - 0.5 for W.

    n starts at 1 and counts by chunk, microbatch and layer, as Megatron numbers its graphs.
    `chunks` has one flag per layer: whether the layer has weight gradients. A full backward runs B
    and W layer by layer.
    """
    starts = [microbatches * sum(map(len, chunks[:chunk])) for chunk in range(len(chunks))]
    order: list[float] = []
    for kind, chunk, microbatch in passes:
        first = starts[chunk] + microbatch * len(chunks[chunk]) + 1
        layers = [*enumerate(chunks[chunk], first)]
        has_b, has_w = Kind.B in kind.does, Kind.W in kind.does
        if Kind.F in kind.does:
            order += [number for number, _ in layers]
        for number, has_weights in reversed(layers):
            order += [-number] * has_b + [-number - 0.5] * (has_w and has_weights)
    return order


class Capture:
    """The weight jobs of captured layers during TE's warm-up and capture.

    TE runs the linear layers of a W in the order of a set, which differs between ranks, while some
    jobs gather over ranks. So the first layer that TE calls runs all jobs in the order of B.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[nn.Module]],
        covered: Collection[nn.Module],
        passes: Sequence[ChunkPass],
    ) -> None:
        """Set up the capture.

        Args:
            chunks: The captured layers of each chunk.
            covered: All modules that CUDA graphs cover.
            passes: The passes of this rank, as they are replayed.
        """
        self._chunks, self.passes = chunks, passes
        self._owners: dict[nn.Module, nn.Module] = {}  # linear layer -> captured layer
        self._weight_order: dict[nn.Module, list[int]] = {}  # microbatches in the order of W
        for index, layers in enumerate(chunks):
            microbatches = [
                microbatch
                for kind, chunk, microbatch in passes
                if chunk == index and Kind.W in kind.does
            ]
            for layer in layers:
                self._weight_order[layer] = microbatches
                # Linear layers whose B defers the weight gradient to a JobStore.
                linear_layers = (
                    module
                    for module in layer.modules()
                    if module in covered
                    and _trained([module])
                    and isinstance(getattr(module, "wgrad_store", None), JobStore)
                )
                self._owners.update(dict.fromkeys(linear_layers, layer))
        self._jobs: dict[tuple[nn.Module, int], list[_Job]] = defaultdict(list)
        self._forwards: dict[nn.Module, int] = defaultdict(int)
        self._weights_run: dict[nn.Module, int] = defaultdict(int)
        self._running: tuple[nn.Module, int] | None = None  # layer and microbatch of its B
        self._static: set[int] = set()  # addresses of its tensors that TE reuses for other B's
        self._read: set[int] = set()  # addresses that captured jobs read
        self._retained: dict[tuple[nn.Module, int], dict[int, int]] = defaultdict(dict)
        self.parameters: dict[nn.Module, list[Tensor]] = {}
        self.copies = self.peak_retained_bytes = 0  # number of copies; peak bytes between B and W

    def splits(self, layer: nn.Module) -> bool:
        """Return whether the W of the layer is captured separately from its B."""
        return layer in self._owners

    @contextmanager
    def active(self, state: StepState) -> Iterator[None]:
        """Collect the jobs of the linear layers in this capture."""
        with Replaced() as replaced, state.setting(capture=self):
            for linear_layer in self._owners:
                replaced.put(linear_layer, "backward_dw", partial(self._run, linear_layer))
            for layer in self._weight_order:
                # TE captures Megatron's layers through this method, not through forward.
                has_own = hasattr(layer, "_te_cuda_graph_capture")
                name = "_te_cuda_graph_capture" if has_own else "forward"
                replaced.put(layer, name, partial(self._forward, layer, getattr(layer, name)))
            yield

    def make(
        self, original: Callable[..., Any], callables: Any, sample_args: Any, **options: Any
    ) -> Any:
        """Call `original`, TE's make_graphed_callables, to capture F, B and W."""
        if not all(hasattr(parameter, "main_grad") for parameter in _trained(self._owners)):
            raise StoreError(
                "CUDA graphs of weight gradients need the main_grad of Megatron's "
                "DistributedDataParallel, and a parameter has none: add --pipeline-split-graphs off"
            )
        num_microbatches, enabled = len(sample_args) // len(callables), options.get("fp8_enabled")
        # TE captures a W only for the latest B of a callable. One entry per layer and microbatch
        # makes every B the latest one.
        repeated = tuple(layer for layers in self._chunks for layer in [*layers] * num_microbatches)
        if isinstance(enabled, tuple):
            enabled_by_layer = dict(zip(callables, enabled, strict=True))
            options["fp8_enabled"] = tuple(enabled_by_layer[layer] for layer in repeated)
        owners = set(self._owners.values())
        weights = [[layer in owners for layer in layers] for layers in self._chunks]
        options["_order"] = layer_order(self.passes, weights, num_microbatches)
        options["_num_layers_per_chunk"] = [1] * len(repeated)
        return original(repeated, sample_args, **options)

    def _forward(
        self, layer: nn.Module, original: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Run the F of a layer. Hooks on its outputs record the microbatch when its B starts."""
        outputs = original(*args, **options)
        if torch.cuda.is_current_stream_capturing():
            input_addresses = {
                _address(e) for e in tree_leaves((args, options)) if isinstance(e, Tensor)
            }
            note_backward = partial(
                self._begin_backward, (layer, self._forwards[layer]), input_addresses
            )
            self._forwards[layer] += 1
            # The first gradient that reaches an output marks the start of this B.
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.grad_fn is not None:
                    output.register_hook(note_backward)
        return outputs

    def _begin_backward(
        self, running: tuple[nn.Module, int], input_addresses: set[int], gradient: Tensor
    ) -> None:
        if running != self._running:
            self._running, self._static = running, set(input_addresses)
        self._static.add(_address(gradient))  # TE has one buffer for all layers and microbatches

    def put(self, layer: nn.Module, job: GatheringJob, parameters: list[Tensor]) -> None:
        """Store a job that a B defers to its W."""
        key = self._owners[layer], _WARM_UP
        if torch.cuda.is_current_stream_capturing():
            assert self._running is not None
            key = self._running
            # W is replayed after other B's have run, so the job must not read buffers that TE
            # reuses.
            job.tensors = [self._own(tensor) for tensor in job.tensors]
            tensors = plain_tensors(job.tensors)
            self._retained[key] |= {_address(e): e.untyped_storage().nbytes() for e in tensors}
            self._read.update(self._retained[key])
            total = sum(sum(sizes.values()) for sizes in self._retained.values())
            self.peak_retained_bytes = max(self.peak_retained_bytes, total)
        self._jobs[key].append((job, parameters))

    def _own(self, value: Any) -> Any:
        """Copy a static tensor; TE reuses its memory for other microbatches after B."""
        if isinstance(value, list | tuple):
            return [self._own(part) for part in value]
        if not isinstance(value, Tensor) or hasattr(value, "get_data_tensors"):
            return value  # B allocates quantized tensors itself
        if _address(value) not in self._static:
            return value
        self.copies += 1
        return value.clone()

    def _run(self, layer: nn.Module) -> None:
        """Compute the weight gradients that one B of the captured layer has deferred."""
        key = self._owners[layer], _WARM_UP
        if torch.cuda.is_current_stream_capturing():
            key = key[0], self._weight_order[key[0]][self._weights_run[layer]]
            self._weights_run[layer] += 1
        jobs = self._jobs.pop(key, [])
        self._retained.pop(key, None)
        if jobs:
            self.parameters[key[0]] = [
                parameter for _, parameters in jobs for parameter in parameters
            ]
        with torch.no_grad():
            while jobs:
                job, _ = jobs.pop(0)  # its tensors can be freed once it has run
                job.begin()
                # Start the next all-gather now, so that it overlaps with this GEMM.
                if jobs:
                    jobs[0][0].begin()
                job()

    def check(self, memory: GraphMemory) -> None:
        """Raise StoreError if a captured W reads memory that another replay may overwrite."""
        num_overwritable = sum(not memory.owns(address) for address in self._read)
        if num_overwritable:
            raise StoreError(
                f"{num_overwritable} tensors that captured weight gradients read are not in the "
                "memory of CUDA graphs, and may be overwritten before W: add "
                "--pipeline-split-graphs off"
            )


def _trained(layers: Collection[nn.Module]) -> list[nn.Parameter]:
    return [p for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def replayed(state: StepState, graph: Any, parameters: Sequence[Tensor]) -> Callable[..., Any]:
    """Wrap a graphed callable so that its B defers W to the schedule's W pass."""

    def run(*args: Any, **options: Any) -> Any:
        result = graph(*args, **options)
        outputs = (result,) if isinstance(result, Tensor) else result
        nodes = (output.grad_fn for output in outputs if isinstance(output, Tensor))
        node = next((node for node in nodes if node is not None), None)
        if node is not None:
            node.register_hook(after_backward)
        return result

    def after_backward(*unused: Any) -> None:
        # An open bucket means a B whose W comes later; in a full backward, W is replayed
        # immediately.
        if is_open():
            state.defer(GatheringJob(graph.backward_dw, [], []), parameters)
        else:
            graph.backward_dw()

    run.backward_dw, run.reset = graph.backward_dw, graph.reset  # type: ignore[attr-defined]
    return run


@contextmanager
def capturing(helper: Any, capture: Capture | None, state: StepState) -> Iterator[None]:
    """Context for the capture by Megatron's `helper`: F and B, and with a `capture` also W."""
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
    for layer, parameters in capture.parameters.items():
        layer.cuda_graphs = [replayed(state, graph, parameters) for graph in layer.cuda_graphs]
    logger.info(
        "CUDA graphs of W: %d layers, at most %.0f MiB wait between B and W, %d copies",
        len(capture.parameters),
        capture.peak_retained_bytes / 2**20,
        capture.copies,
    )


def _savings(helper: Any, original: Callable[..., Any]) -> dict[str, Any]:
    """Return the make_graphed_callables options that save memory and time, if this TE has them."""
    # The allocator cannot release blocks that the warm-up has cached during captures.
    options: dict[str, Any] = {"post_warmup_hook": torch.cuda.empty_cache}
    # By default, a replayed B clones every gradient that it returns. With fused accumulation the
    # weight gradients are dummies. Megatron's DDP adds the other gradients to main_grad
    # immediately, before another replay can overwrite them.
    if helper.config.gradient_accumulation_fusion:
        if all(hasattr(chunk, "ddp_config") for chunk in helper.model):
            options["clone_param_grads_on_return"] = False
    supported = inspect.signature(original).parameters
    return {name: value for name, value in options.items() if name in supported}
