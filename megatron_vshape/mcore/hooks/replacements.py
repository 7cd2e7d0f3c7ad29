"""Replacements of megatron.core attributes for any trainer; `registry` lists the targets."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import module as transformer_module

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.hook import Function, replaces
from megatron_vshape.mcore.hooks import router_replay
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.observe.megatrons_own import (
    count_backward,
    count_forward,
)
from megatron_vshape.mcore.refusals import (
    check_one_module,
    refused_model,
    refusing,
)
from megatron_vshape.mcore.setup.pipeline import Pipeline
from megatron_vshape.mcore.split import graph_weights
from megatron_vshape.mcore.split.graphs import capture_order, covered, passes_of
from megatron_vshape.mcore.split.local_layers import TorchFusedKernels, make_split_linear
from megatron_vshape.mcore.step.gradient_sync import overlaps_grad_reduce
from megatron_vshape.mcore.step.late_checks import can_wait

logger = logging.getLogger(__name__)

# The timer needs a pass, but for Megatron's schedules only durations count, not the pass.
_SOME_PASS = Pass(Kind.F, 0, 0)


@replaces
def select_pipeline_segment(
    session: Session,
    original: Function,
    main_pattern: str,
    pp_group: Any,
    vp_stage: int | None,
    *args: Any,
    **options: Any,
) -> Any:
    """Return the part of a hybrid model's layer pattern that belongs to the stage of a chunk."""
    if session.pipeline is None:
        return original(main_pattern, pp_group, vp_stage, *args, **options)
    stage_map = session.pipeline.stage_map
    stage = stage_map.stage(pp_group.rank(), vp_stage)
    # Cut by our stages: a library may give its model alone a pattern with others.
    given = hybrid.parts(main_pattern)
    if stage == 0 and len(given) > 1 and given != stage_map.layers:
        logger.info(
            "%s %.80s: its %d stages as the schedule's %d: layers per stage %s",
            *(hybrid.OPTION, main_pattern, len(given), len(stage_map.layers)),
            ",".join(map(str, stage_map.layers)),
        )
    segments = hybrid.cut(main_pattern, stage_map.layers).split(hybrid.BEGINS_STAGE)
    allocation: Any = inspect.getmodule(original)
    layers = allocation.validate_segment_layers(segments[stage])
    return layers, sum(map(len, segments[:stage]))


@replaces
def convert_schedule_table_to_order(
    session: Session, original: Function, num_warmup: int, num_chunks: int, table: Any
) -> list[int]:
    """Return this rank's pass order to Transformer Engine for CUDA graph capture."""
    if session.pipeline is None:
        return list(original(num_warmup, num_chunks, table))
    rank = parallel_state.get_pipeline_model_parallel_rank()
    # The helper of a vision encoder has one chunk, the first, and captures it separately.
    stages = session.pipeline.stage_map.stages(rank)[:num_chunks]
    program = session.pipeline.planner.training(len(table) // num_chunks).program
    # Replays must follow the captured order, so the step rejects any other program from now on.
    session.step.captured = program
    return capture_order(program, rank, stages)


@replaces
def create_cudagraphs(session: Session, original: Function, helper: Any) -> None:
    """Capture CUDA graphs while the transport is idle, and record their memory."""
    pipeline = session.pipeline
    if pipeline is None:
        original(helper)
        return
    session.own_runner(pipeline).rest()
    capture = _capture_of_weights(pipeline, helper) if pipeline.splits_graphs else None
    # So that `get_schedule_table` does not reject the call that the capture makes.
    session.captures = True
    try:
        with graph_weights.capturing(helper, capture, session.step):
            original(helper)
    finally:
        session.captures = False


def _capture_of_weights(pipeline: Pipeline, helper: Any) -> graph_weights.Capture:
    """Return a capture of weight gradients in the order of this rank's W passes."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = pipeline.stage_map.stages(rank)[: helper.num_model_chunks]
    program = pipeline.planner.training(get_num_microbatches()).program
    overlaps = pipeline.overlaps_grad_reduce or overlaps_grad_reduce(helper.model[0])
    return graph_weights.Capture(
        helper.callables_per_chunk,
        covered(helper.model),
        passes_of(program, rank, stages),
        splits_last=overlaps and not pipeline.choice.keeps_backward_whole,
    )


@replaces
def get_schedule_table(
    session: Session,
    original: Function,
    num_microbatches: int,
    num_model_chunks: int,
    *args: Any,
    **options: Any,
) -> Any:
    """Return the order in which the last step called the trainer's forward step on this rank.

    verl sorts the expert choices by it that it has recorded in that step, and then gathers those of
    all ranks.
    """
    # Transformer Engine's capture uses only the number of passes in the table.
    if session.pipeline is None or session.captures or num_model_chunks == 1:
        return original(num_microbatches, num_model_chunks, *args, **options)
    router_replay.gather_by_placement(session)
    return router_replay.schedule_table(session, num_microbatches, num_model_chunks)


@replaces
def validate_result(
    session: Session,
    original: Function,
    machine: Any,
    result: Any,
    rejection_func: Any,
    message: str,
    comparison_func: Any = None,
    *args: Any,
    **options: Any,
) -> None:
    """Check a loss after the passes of its step, to avoid a device synchronization per loss."""

    def check(value: Any) -> None:
        original(machine, value, rejection_func, message, comparison_func, *args, **options)

    checks = session.step.late_checks
    if checks is None:
        check(result)
    elif can_wait(machine, result, rejection_func, comparison_func):
        checks.add(check, result)
    else:
        checks.make()  # in order: Megatron acts on the first of several bad results
        check(result)


@replaces
def several_stacks_init(
    session: Session, original: Function, model: Any, *args: Any, **options: Any
) -> None:
    """Reject a model with several stacks of layers before any of them is built."""
    if session.pipeline is not None:
        with refusing():
            raise refused_model(session.pipeline.choice.name, type(model).__name__)
    original(model, *args, **options)


@replaces
def get_forward_backward_func(
    session: Session, original: Function, *args: Any, **options: Any
) -> Any:
    """Return this package's step function, or Megatron's with a meter if the user named it."""
    if session.pipeline is not None:
        with refusing():
            check_one_module(session.pipeline.choice.name, *args, *options.values())
        return session.own_function(original)
    # One of Megatron's own schedules runs. Metering it makes its log lines comparable with ours.
    function = original(*args, **options)
    if session.megatrons_own is None:
        return function
    return session.metered_runner(function, session.megatrons_own)


@replaces
def forward_step(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Measure a forward pass of Megatron's schedules, if measurement is enabled."""
    result = _timed(session, original, *args, **options)
    if session.step.census is not None and session.pipeline is None:
        # For our own schedules, the runner counts activation memory itself.
        chunk = inspect.signature(original).bind(*args, **options).arguments.get("vp_stage")
        count_forward(session.step.census, chunk, result[0])
    return result


@replaces
def backward_step(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Measure a backward pass of Megatron's schedules, if measurement is enabled."""
    result = _timed(session, original, *args, **options)
    if session.step.census is not None and session.pipeline is None:
        count_backward(session.step.census)
    return result


def _timed(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Record the duration of a pass of Megatron's schedules while a timer is active."""
    timer = session.step.timer
    if timer is None:
        return original(*args, **options)
    timer.begins(_SOME_PASS)
    result = original(*args, **options)
    timer.ends(_SOME_PASS)
    return result


@replaces
def is_pipeline_first_stage(
    session: Session, original: Function, ignore_virtual: bool = True, vp_stage: int | None = None
) -> bool:
    """Return whether the stage has the embedding."""
    return _is_end(session, original, 0, ignore_virtual, vp_stage)


@replaces
def is_pipeline_last_stage(
    session: Session, original: Function, ignore_virtual: bool = True, vp_stage: int | None = None
) -> bool:
    """Return whether the stage has the loss."""
    return _is_end(session, original, 1, ignore_virtual, vp_stage)


def has_end(session: Session, end: int) -> bool:
    """Return whether a chunk of this rank is the model's first (`end` 0) or last (1) stage."""
    assert session.pipeline is not None
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return bool(session.pipeline.stage_map.end_ranks[end] == rank)


def _is_end(
    session: Session, original: Function, end: int, ignore_virtual: bool, vp_stage: int | None
) -> bool:
    """Return whether a stage is the model's first (`end` 0) or last (`end` 1).

    The stage is that of `vp_stage` if given (and not ignored), else that of the running chunk. If
    no chunk runs, the result is about the rank. While models are built: whether any of its chunks
    is that stage. Afterwards: Megatron's result, its position in the pipeline, because the last
    rank gets the results of the loss (`pipeline_of`).
    """
    pipeline = session.pipeline
    # Every rank computes a part of the loss here, and counts as first and last.
    if session.step.has_logits:
        return True
    chunk = session.step.running_chunk if ignore_virtual else vp_stage
    # With one chunk per rank, callers pass no vp_stage; chunk 0 is the only candidate.
    if pipeline is not None and not ignore_virtual and pipeline.stage_map.num_chunks == 1:
        chunk = 0
    if chunk is None and session.is_building and pipeline is not None:
        return has_end(session, end)
    if pipeline is None or chunk is None:
        return bool(original(ignore_virtual=ignore_virtual, vp_stage=vp_stage))
    return pipeline.ends(parallel_state.get_pipeline_model_parallel_rank(), chunk)[end]


@replaces
def float16_module_forward(
    session: Session,
    original: Function,
    module: Any,
    *inputs: Any,
    fp32_output: bool = True,
    **options: Any,
) -> Any:
    """Convert inputs on the first stage and outputs on the last stage of any placement."""
    pipeline = session.pipeline
    if pipeline is None:
        return original(module, *inputs, fp32_output=fp32_output, **options)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    first, last = pipeline.ends(rank, module.vp_stage)
    if first:
        inputs = transformer_module.fp32_to_float16(inputs, module.float16_convertor)
    outputs = module.module(*inputs, **options)
    # If all ranks share the output layer, the last stage ends before the logits. While all ranks
    # compute logits (`has_logits`), each of them converts its own.
    makes_loss = session.step.has_logits or (last and not pipeline.choice.shares)
    return transformer_module.float16_to_fp32(outputs) if makes_loss and fp32_output else outputs


def linear_function(session: Session, original: type) -> type:
    """Return the linear function that can defer its weight gradient."""
    return make_split_linear(session.step, layers, original)


def fused_kernels(session: Session, original: Any) -> Any:
    """Return apex's kernels if installed, else torch's."""
    return original if layers._grad_accum_fusion_available else TorchFusedKernels


def fusion_available(session: Session, original: bool) -> bool:
    """Return True: apex's kernels are installed, or `fused_kernels` replaces them by torch's."""
    return True
