"""Run a chunk's passes by Megatron's layer plans, which can overlap an F with a B.

Megatron splits a chunk's F and B into compute nodes and expert communication nodes (all-to-all),
each type on its own stream (`build_schedule_plan`). Its node order overlaps the communication of
one pass with the compute of the other; if a B runs alone, its communication overlaps with its
weight gradients. Megatron's schedules choose the pairs of passes themselves. Here the program
chooses them, and Megatron's `combined_forward_backward_step` runs them.

Weight gradients are jobs, as elsewhere (see `runtime.weight_jobs`). Those of a B are deferred to
its W. Those of a BW run where the plan runs Megatron's delayed weight gradients: after the B of
their node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import combined_1f1b, utils
from torch import Tensor

from megatron_vshape.mcore.features.overlap import check_script
from megatron_vshape.mcore.refusals import UnsupportedError, refusing
from megatron_vshape.mcore.step.stage import (
    Backward,
    Forward,
    PassResults,
    PassRunner,
    StepContext,
    StepFeature,
    StepRequest,
)
from megatron_vshape.runtime.weight_jobs import WeightJobs

_LayerPlan = Any
"""Megatron's TransformerLayerSchedulePlan."""


def _run_by_layers(config: Any, forward: Forward | None, backward: Backward | None) -> PassResults:
    """Run an F, a B, or both overlapped (of different microbatches).

    The results may be allocated on the communication stream; they are safe to use on the current
    stream.

    Raises:
        UnsupportedError: The batch has data that layer plans drop.
    """
    # Megatron's schedules create the communication stream in this way; later calls do nothing.
    if getattr(config, "high_priority_a2a_comm_stream", False):
        utils.set_streams(high_priority=True)
    else:
        utils.set_streams()
    if backward is not None and backward.whole is not None:
        for layer in _layers(backward.output.schedule_plan):  # type: ignore[attr-defined]
            # A plan runs the weight gradients of these nodes separately. `attn` is the name up to
            # 0.18.
            attention = getattr(layer, "pre_dispatch_computation", None) or layer.attn
            for node in (attention, layer.mlp):
                _run_weights_in_place(node, backward.whole)
    f, b = forward, backward
    output, num_tokens, gradient = combined_1f1b.combined_forward_backward_step(
        None if f is None else partial(_build_plan, f.forward_step),
        None if f is None else f.step.data.iterators[f.chunk],
        None if f is None else f.step.chunks[f.chunk],
        None if f is None else f.step.num_microbatches,
        None if f is None else f.received,
        None if f is None else f.step.loss_store,
        None if b is None else b.model,
        None if b is None else b.received,
        None if b is None else b.output,
        None if b is None else b.gradient,
        config,
        f_model_chunk_id=None if f is None else f.vp_stage,
        collect_non_loss_data=f is not None and f.step.call.collect_non_loss_data,
        is_first_microbatch=f is not None and f.is_first,
        current_microbatch=None if f is None else f.microbatch,
    )
    # Plans may allocate these on the communication stream; the allocator must know of their use
    # here.
    for tensor in (output, gradient):
        if tensor is not None:
            tensor.record_stream(torch.cuda.current_stream())
    return PassResults(output, num_tokens, gradient)


def _retained_tensors(output: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that the plan of an F's output retains, except that output.

    The autograd graphs of these tensors retain more.
    """
    plan = getattr(output, "schedule_plan", None)
    if plan is None:
        return
    nodes = [plan.pre_process, plan.post_process, output.loss_func]  # type: ignore[attr-defined]
    for layer in _layers(plan):
        nodes += [node for node in vars(layer).values() if isinstance(node, utils.ScheduleNode)]
    output_pointer = output.untyped_storage().data_ptr()
    for node in nodes:
        for name in ("inputs", "output", "detached", "before_detached"):
            tensors = getattr(node, name, None)
            for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
                if (
                    isinstance(tensor, Tensor)
                    and tensor.untyped_storage().data_ptr() != output_pointer
                ):
                    yield tensor


class OverlappedSteps(StepFeature):
    """Runs training steps by layer plans, if the run uses them."""

    def prepare(self, request: StepRequest) -> StepRequest:
        """Reject a script whose forward step cannot return a layer plan."""
        if not request.call.forward_only:
            with refusing():
                check_script(request.call.forward_step_func)
        return request

    def begin(self, context: StepContext) -> None:
        """Set the runner of the passes; evaluation runs them alone."""
        if not context.forward_only:
            context.pass_runner = PassRunner(_run_by_layers, _retained_tensors)


def _build_plan(
    forward_step_func: Callable[..., Any], *args: Any, **options: Any
) -> tuple[Any, Any]:
    """Return the plan of a microbatch and its loss function."""
    plan, loss_func = forward_step_func(*args, **options)
    for name in ("packed_seq_params", "padding_mask"):
        if getattr(getattr(plan, "state", None), name, None) is not None:
            raise UnsupportedError(
                f"--overlap-moe-expert-parallel-comm does not work with {name}, which Megatron's "
                "layer plans do not pass to every layer. Remove the option, or the data with it"
            )
    return plan, loss_func


def _layers(plan: Any) -> list[_LayerPlan]:
    return [plan.get_layer(number) for number in range(plan.num_layers())]


def _run_weights_in_place(node: Any, jobs: WeightJobs) -> None:
    """Make the B of a node defer its weight gradients as jobs, which the plan runs afterwards.

    Neither function may reference the node: its tensors must be freed with the plan.
    """
    key = object()

    def backward(*gradients: Any) -> Any:
        del node.backward  # this function, which references the node
        with jobs.collect(key):
            return node.backward(*gradients)

    node.backward, node.backward_dw = backward, partial(jobs.run, key)
