"""A chunk's passes by Megatron's layer plans, of which an F can run beside a B of any other.

Megatron cuts a chunk's F and B into nodes that compute and nodes that exchange tokens with the
ranks of other experts, each kind on a stream of its own (`build_schedule_plan`). Its own order of
the nodes hides the exchanges of one pass behind what the other computes; those of a B that runs
alone behind its weight gradients. Which passes run together Megatron's schedules decide for
themselves: here the program does, and Megatron's `combined_forward_backward_step` runs them.

Weight gradients are jobs here too (see `runtime.weight_jobs`). Those of a B are left for its W;
those of a BW run where the plan has Megatron's own delayed ones, behind the B of their node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import combined_1f1b, utils
from torch import Tensor, nn

from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.runtime.weight_jobs import WeightJobs

LayerPlan = Any
"""Megatron's TransformerLayerSchedulePlan."""


class Forward(NamedTuple):
    """What Megatron asks for to run F of a microbatch."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: nn.Module
    num_microbatches: int
    received: Tensor | None  # [s, b, h], None on the first stage
    loss_store: list[Any]
    collect_non_loss_data: bool
    is_first: bool
    microbatch: int
    chunk: int | None  # None where the device has one
    context_parallel_size: int
    makes_loss: bool  # it ends with the loss


class Backward(NamedTuple):
    """What Megatron asks for to run B of a microbatch whose F has run by its plan."""

    model: nn.Module
    received: Tensor | None  # by its F
    output: Tensor  # of its F, which the plan hangs on
    gradient: Tensor | None  # of the output, None on the last stage
    whole: WeightJobs | None = None  # by which its W runs inside; None: its jobs are left


class Made(NamedTuple):
    """What the passes have made; None of the one that did not run."""

    output: Any  # a Tensor
    num_tokens: Any  # a Tensor
    gradient: Tensor | None  # of the input


def run_by_layers(config: Any, forward: Forward | None, backward: Backward | None) -> Made:
    """Run an F, a B, or both beside each other, of unlike microbatches.

    What they return may have been made on the stream of exchanges, and is there for this one.

    Raises:
        UnsupportedError: the batch has what the plans leave out.
    """
    _make_streams(config)
    if backward is not None and backward.whole is not None:
        for layer in _layers(backward.output.schedule_plan):  # type: ignore[attr-defined]
            for node in _nodes_with_weights(layer):
                _run_weights_in_place(node, backward.whole)
    f, b = forward, backward
    output, num_tokens, gradient = combined_1f1b.combined_forward_backward_step(
        None if f is None else partial(_planned, f.forward_step_func),
        None if f is None else f.data_iterator,
        None if f is None else f.model,
        None if f is None else f.num_microbatches,
        None if f is None else f.received,
        None if f is None else f.loss_store,
        None if b is None else b.model,
        None if b is None else b.received,
        None if b is None else b.output,
        None if b is None else b.gradient,
        config,
        f_model_chunk_id=None if f is None else f.chunk,
        collect_non_loss_data=f is not None and f.collect_non_loss_data,
        is_first_microbatch=f is not None and f.is_first,
        current_microbatch=None if f is None else f.microbatch,
    )
    for tensor in (output, gradient):
        if tensor is not None:
            tensor.record_stream(torch.cuda.current_stream())
    return Made(output, num_tokens, gradient)


def kept_by(output: Tensor) -> Iterator[Tensor]:
    """Yield what the plan that an F's output hangs on keeps, but for that output.

    The graphs behind these tensors keep more.
    """
    plan = getattr(output, "schedule_plan", None)
    if plan is None:
        return
    nodes = [plan.pre_process, plan.post_process, output.loss_func]  # type: ignore[attr-defined]
    for layer in _layers(plan):
        nodes += [each for each in vars(layer).values() if isinstance(each, utils.ScheduleNode)]
    left = output.untyped_storage().data_ptr()
    for node in nodes:
        for name in ("inputs", "output", "detached", "before_detached"):
            kept = getattr(node, name, None)
            for each in kept if isinstance(kept, list | tuple) else [kept]:
                if isinstance(each, Tensor) and each.untyped_storage().data_ptr() != left:
                    yield each


def _make_streams(config: Any) -> None:
    """Make the stream of exchanges, which Megatron does in its own schedules; once."""
    if getattr(config, "high_priority_a2a_comm_stream", False):
        utils.set_streams(high_priority=True)
    else:
        utils.set_streams()


def _planned(forward_step_func: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
    """Return the plan of a microbatch, and its loss function."""
    plan, loss_func = forward_step_func(*args, **options)
    for name in ("packed_seq_params", "padding_mask"):
        if getattr(getattr(plan, "state", None), name, None) is not None:
            raise UnsupportedError(
                f"--overlap-moe-expert-parallel-comm does not work with {name}, which Megatron's "
                "layer plans do not pass to every layer. Remove the option, or the data with it"
            )
    return plan, loss_func


def _layers(plan: Any) -> list[LayerPlan]:
    return [plan.get_layer(number) for number in range(plan.num_layers())]


def _nodes_with_weights(layer: LayerPlan) -> tuple[Any, Any]:
    """Return the nodes of which a plan runs the weight gradients by themselves."""
    # The first was named `attn` up to 0.18.
    return getattr(layer, "pre_dispatch_computation", None) or layer.attn, layer.mlp


def _run_weights_in_place(node: Any, jobs: WeightJobs) -> None:
    """Have the node's B leave its weight gradients as jobs, and its plan run them where it does.

    Neither method may hold on to the node, whose tensors have to go when its plan lets go of it.
    """
    key = object()

    def backward(*gradients: Any) -> Any:
        del node.backward  # which is this function, and has the node
        with jobs.collect(key):
            return node.backward(*gradients)

    node.backward, node.backward_dw = backward, partial(jobs.run, key)
