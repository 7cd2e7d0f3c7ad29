"""Megatron's local linear layers with the weight gradient put off from B to W.

Column- and RowParallelLinear and the output layer all compute through one autograd Function. A
subclass takes its place: where a bucket of weight jobs is open (a B whose W comes later) it
leaves a job there; everywhere else it is upstream's code that runs, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor, nn

from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.gathering_job import GatheringJob
from megatron_vshape.runtime.weight_jobs import (
    WeightGradKernel,
    accumulate_weight_grad,
    add_product,
    fused_kernel,
    is_open,
    run_beside,
)


def make_split_linear(state: StepState, layers: ModuleType, upstream: Any) -> type:
    """Return the Function that takes the place of `upstream` in Megatron's module `layers`."""
    # As upstream's: in the dtype of its autocast, where forward ran in one.
    backward_inputs = layers.custom_bwd(partial(_backward_inputs, state=state, layers=layers))

    class SplitLinear(upstream):  # type: ignore[misc]
        """Upstream's linear; inside a B, its weight gradient becomes a job."""

        @classmethod
        def apply(cls, *args: Any) -> Any:
            return super().apply(*args) if state.splits_backward else upstream.apply(*args)

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
    """Have upstream's backward leave no gradient of a weight that it has added to its sum already.

    Outside a pass it leaves one as large as the weight, for which DDP's overlap waits; in a step of
    passes DDP waits for none (`step.gradient_sync`). Of an output layer it is 1 GiB and more, kept
    for good.
    """
    has = hasattr(parameter, _ADDED) and not hasattr(parameter, "__fsdp_param__")
    if has:
        delattr(parameter, _ADDED)
    try:
        yield
    finally:
        if has:
            setattr(parameter, _ADDED, True)


GATHERED = "vshape_gathered_over"
"""On a weight: the group over which the gradient of its output comes gathered, each rank a part."""


def mark_gathered(model: nn.Module) -> None:
    """Mark the weights of row-parallel layers whose output is scattered over the sequence.

    The backward of that gathers the output's gradient before the layer sees it.
    """
    for layer in model.modules():
        if isinstance(layer, RowParallelLinear) and layer.sequence_parallel:
            if not layer.explicit_expert_comm and layer.tp_group.size() > 1:
                setattr(layer.weight, GATHERED, layer.tp_group)


def _backward_inputs(
    ctx: Any, grad_output: Tensor, *, state: StepState, layers: ModuleType
) -> tuple[Tensor | None, ...]:
    """Return upstream's gradients but that of the weight, for which a job is left.

    Upstream hides the sum over ranks behind that weight gradient; here one of an earlier B does,
    where the plan has it beside this B (see `program.hiding`).
    """
    input, weight = ctx.saved_tensors
    # From Megatron 0.20 on a layer may give its output in another dtype than it computes in.
    grad_output = grad_output.to(getattr(ctx, "input_dtype", grad_output.dtype))
    grad_input = grad_output.matmul(weight)
    under_way = None
    if ctx.allreduce_dgrad:
        under_way = dist.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
    if ctx.sequence_parallel:
        whole, grad_input = grad_input, torch.empty_like(input, requires_grad=False)
        reduce_scatter = layers.dist_reduce_scatter_func
        under_way = reduce_scatter(grad_input, whole, group=ctx.tp_group, async_op=True)
    # It can require grad itself: vocabulary-parallel cross entropy makes such gradients.
    grad_output = grad_output.detach()
    grad_bias = None
    if ctx.use_bias:
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
    parameter = ctx.parameter
    # The gathered input was a buffer that the next layer overwrites, or is large: W gathers anew.
    sources = (ctx.tp_group if ctx.sequence_parallel else None, getattr(parameter, GATHERED, None))
    if sources[1] is not None:  # only this rank's part waits for W; the rest can go now
        grad_output = grad_output.chunk(sources[1].size())[sources[1].rank()].clone()
    compute = partial(_weight_gradient, parameter, ctx.gradient_accumulation_fusion)
    device = input.device.type
    if torch.is_autocast_enabled(device):  # so that W computes in its dtype, too
        compute = torch.autocast(device, torch.get_autocast_dtype(device))(compute)
    job = GatheringJob(compute, [input, grad_output], sources)
    state.defer(job, [parameter])
    if under_way is not None:
        run_beside()
        under_way.wait()
    nothing = (None,) * (ctx.num_options - 1)
    return grad_input, None, grad_bias, *nothing


def _weight_gradient(parameter: Tensor, fused: bool, input: Tensor, grad_output: Tensor) -> None:
    """Add one weight gradient to the sum: what the job that B leaves for W computes."""
    kernel = WeightGradKernel.MATMUL_ADD
    if fused:
        total = getattr(parameter, "main_grad", parameter)
        kernel = fused_kernel(input.device.type, total.dtype, input.dtype)
    accumulate_weight_grad(parameter, grad_output, input, kernel)


class TorchFusedKernels:
    """What Megatron calls of apex's fused_weight_gradient_mlp_cuda, by torch's own GEMM."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add grad_output^T @ input to `main_grad`."""
        kernel = fused_kernel(input.device.type, main_grad.dtype, input.dtype)
        add_product(main_grad, grad_output, input, kernel)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
