"""Defer the weight gradients of linear layers from B to W.

ColumnParallelLinear, RowParallelLinear and the output layer of Megatron compute through one
autograd Function. A subclass replaces it. If a bucket of weight jobs is open (a B whose W runs
later), the subclass adds a job to the bucket. Otherwise it runs upstream's forward and backward.

Transformer Engine's layers follow in `te_layers`. Layers whose weight gradients stay in B are
logged once per model, with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch import Tensor, nn

from megatron_vshape.mcore.split import graphs, te_layers
from megatron_vshape.mcore.split.te_layers import BY_DESIGN
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.weight_jobs import (
    GatheringJob,
    WeightGradKernel,
    accumulate_weight_grad,
    fused_kernel,
    is_open,
    name_weights,
    run_beside,
)

logger = logging.getLogger(__name__)


def defer_weight_gradients(
    state: StepState, chunks: Sequence[nn.Module], splits_graphs: bool
) -> None:
    """Make the linear layers of unwrapped chunks defer their weight gradients.

    B stores a weight job, which W runs; the layers of Transformer Engine get a `JobStore` that
    makes a job of the product that they delay. Layers that CUDA graphs cover compute their weight
    gradients in B, unless the graphs are split too. Megatron's local layers need no preparation: a
    hook has replaced their autograd function.

    Raises:
        StoreError: Transformer Engine's layers do not match the adapter.
    """
    graphed = graphs.covered(chunks)
    # With split graphs, covered TE layers get a store too: their W is captured separately.
    if splits_graphs:
        graphed = {module for module in graphed if not te_layers.is_splittable(module)}
    te_layers.use_job_stores(state, chunks, graphed)
    for chunk in chunks:
        mark_gathered(chunk)
        name_weights(chunk)  # in traces
    replicas = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    # Tensor- and data-parallel replicas have the same layers, so one of them logs.
    if replicas == (0, 0):
        log_unsplit_layers(chunks, graphed)


def make_split_linear(state: StepState, layers: ModuleType, upstream: Any) -> type:
    """Return the Function that replaces `upstream` in Megatron's module `layers`."""
    # As upstream does: if forward ran under autocast, backward uses the same dtype.
    backward_inputs = layers.custom_bwd(partial(_backward_inputs, state=state, layers=layers))

    class SplitLinear(upstream):  # type: ignore[misc]
        """Upstream's linear function; inside a B, its weight gradient becomes a job."""

        @classmethod
        def apply(cls, *args: Any) -> Any:
            return super().apply(*args) if state.has_own_schedule else upstream.apply(*args)

        @staticmethod
        def forward(ctx: Any, input: Tensor, weight: Tensor, *options: Any) -> Any:
            # Under recompute ctx.saved_tensors returns another object, without main_grad.
            ctx.parameter = weight
            ctx.num_options = len(options)
            return upstream.forward(ctx, input, weight, *options)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Any:
            if is_open():
                return backward_inputs(ctx, grad_output)
            adds = ctx.gradient_accumulation_fusion and state.running_chunk is not None
            with _no_dummy(ctx.parameter) if adds else nullcontext():
                return upstream.backward(ctx, grad_output)

    return SplitLinear


_ADDED = "grad_added_to_main_grad"


@contextmanager
def _no_dummy(parameter: Tensor) -> Iterator[None]:
    """Prevent upstream's backward from returning a dummy gradient for a fused weight.

    After it has added the gradient to main_grad, upstream returns a dummy as large as the weight,
    for which DDP's overlap waits. During a pipeline step DDP waits for no gradient
    (`step.gradient_sync`). For an output layer the dummy is 1 GiB or more, and it is never freed.
    """
    had_flag = hasattr(parameter, _ADDED) and not hasattr(parameter, "__fsdp_param__")
    if had_flag:
        delattr(parameter, _ADDED)
    try:
        yield
    finally:
        if had_flag:
            setattr(parameter, _ADDED, True)


_GATHERED = "vshape_gathered_over"
"""Weight attribute: group over which the gradient of the layer's output is gathered in backward."""


def mark_gathered(model: nn.Module) -> None:
    """Mark the weights of row-parallel layers whose output is scattered over the sequence.

    The backward of the scatter gathers the output gradient before the layer receives it.
    """
    for layer in model.modules():
        if isinstance(layer, RowParallelLinear) and layer.sequence_parallel:
            if not layer.explicit_expert_comm and layer.tp_group.size() > 1:
                setattr(layer.weight, _GATHERED, layer.tp_group)


def _backward_inputs(
    ctx: Any, grad_output: Tensor, *, state: StepState, layers: ModuleType
) -> tuple[Tensor | None, ...]:
    """Compute upstream's gradients except the weight gradient, and defer that as a job.

    Upstream overlaps the tensor-parallel collective with this weight gradient. Here, the collective
    overlaps with a weight gradient of an earlier B if the plan schedules one (see
    `program.lowering`).
    """
    input, weight = ctx.saved_tensors
    # Since Megatron 0.20 the output dtype of a layer may differ from its compute dtype.
    grad_output = grad_output.to(getattr(ctx, "input_dtype", grad_output.dtype))
    # The product that the previous layer waits for comes first, as upstream.
    grad_input = grad_output.matmul(weight)
    collective = None
    if ctx.allreduce_dgrad:
        collective = dist.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
    if ctx.sequence_parallel:
        full_gradient, grad_input = grad_input, torch.empty_like(input, requires_grad=False)
        reduce_scatter = layers.dist_reduce_scatter_func
        collective = reduce_scatter(grad_input, full_gradient, group=ctx.tp_group, async_op=True)
    # The gradient of a loss can require grad.
    grad_output = grad_output.detach()
    grad_bias = None
    if ctx.use_bias:
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
    parameter = ctx.parameter
    # W gathers the input again: the next layer overwrites the gathered buffer, or it is large.
    sources = (ctx.tp_group if ctx.sequence_parallel else None, getattr(parameter, _GATHERED, None))
    if sources[1] is not None:  # retain only the shard of this rank until W
        grad_output = grad_output.chunk(sources[1].size())[sources[1].rank()].clone()
    compute = partial(_weight_gradient, parameter, ctx.gradient_accumulation_fusion)
    device = input.device.type
    if torch.is_autocast_enabled(device):  # W must compute in the same dtype
        compute = torch.autocast(device, torch.get_autocast_dtype(device))(compute)
    job = GatheringJob(compute, [input, grad_output], sources)
    # Into the bucket that this B has opened. The job counts as pending for the data-parallel
    # reduction of the weight's bucket.
    state.defer(job, [parameter])
    if collective is not None:
        run_beside()
        collective.wait()
    no_gradients = (None,) * (ctx.num_options - 1)
    return grad_input, None, grad_bias, *no_gradients


def _weight_gradient(parameter: Tensor, fused: bool, input: Tensor, grad_output: Tensor) -> None:
    """Compute one weight gradient in W and accumulate it."""
    kernel = WeightGradKernel.MATMUL_ADD
    if fused:
        total = getattr(parameter, "main_grad", parameter)
        kernel = fused_kernel(input.device.type, total.dtype, input.dtype)
    accumulate_weight_grad(parameter, grad_output, input, kernel)


_MAX_SHOWN = 3
"""Maximum number of layers named per reason; the log line counts the others."""


def _unsplit_layers(
    chunks: Iterable[nn.Module], graphed: Set[nn.Module] = frozenset()
) -> dict[tuple[str, str], list[str]]:
    """Return the names of layers whose weight gradients run in B, by (class name, reason).

    `graphed` are the layers that CUDA graphs cover. Only layers with a weight matrix count: the
    gradients of norms and biases are sums, and cheap.
    """
    unsplit: dict[tuple[str, str], list[str]] = {}
    for number, chunk in enumerate(chunks):
        # Layers whose parameters TE's fused operations use; those of a dense MLP have no store.
        owners = (module for module in chunk.modules() if hasattr(module, "_fused_impl"))
        fused = {layer for owner in owners for layer in owner.modules()}
        for name, layer in chunk.named_modules():
            reason = None
            if layer not in graphed:
                reason = _why_unsplit(layer, layer in fused)
            elif _has_matrix(layer):
                reason = f"{BY_DESIGN}: a CUDA graph replays them with B"
            if reason is not None:
                key = (type(layer).__name__, reason)
                unsplit.setdefault(key, []).append(f"chunk {number} {name}".rstrip())
    return unsplit


def log_unsplit_layers(chunks: Iterable[nn.Module], graphed: Set[nn.Module] = frozenset()) -> None:
    """Log which linear layers are not split and why; a warning if that is not by design."""
    for (kind, reason), names in _unsplit_layers(chunks, graphed).items():
        shown = ", ".join(names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")
        level = logging.INFO if reason.startswith(BY_DESIGN) else logging.WARNING
        logger.log(
            level,
            "the weight gradients of %d %s stay in B, %s: %s",
            len(names),
            kind,
            reason,
            shown,
        )


def _why_unsplit(layer: nn.Module, is_fused: bool) -> str | None:
    """Return the reason why the layer's weight gradients stay in B, or None if W computes them."""
    if is_fused and _has_matrix(layer):
        return f"{BY_DESIGN}: fused operations of Transformer Engine compute them"
    if not _has_matrix(layer) or isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        return None
    if te_layers.is_te_layer(layer):
        return te_layers.why_unsplit(layer)
    if isinstance(layer, VocabParallelEmbedding | nn.Embedding):
        return f"{BY_DESIGN}: a lookup has no product to put off"
    if "Router" in type(layer).__name__:
        return f"{BY_DESIGN}: a router's product is small"
    return "because it is not computed by one of Megatron's or Transformer Engine's linear layers"


def _has_matrix(layer: nn.Module) -> bool:
    parameters = layer.parameters(recurse=False)
    return any(parameter.requires_grad and parameter.dim() > 1 for parameter in parameters)
