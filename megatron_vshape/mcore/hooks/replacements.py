"""What stands in for attributes of megatron.core under any trainer; `registry` lists the targets.

What `replaces` marks takes the session, the original and a call's arguments. While no schedule has
been asked for, the original alone is called, with what it was given; what `replaces_always` marks
is called even then, to learn of a schedule, or because it comes before the choice.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import module as transformer_module

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.observe.megatrons_own import (
    count_backward,
    count_forward,
)
from megatron_vshape.mcore.refusals import (
    UnsupportedError,
    check_one_module,
    refused_model,
    refusing,
)
from megatron_vshape.mcore.setup.pipeline import Pipeline
from megatron_vshape.mcore.split import graph_weights
from megatron_vshape.mcore.split.graphs import capture_order, covered, passes_of
from megatron_vshape.mcore.split.local_layers import TorchFusedKernels, make_split_linear
from megatron_vshape.mcore.split.sliced_tokens import TokensOfSlice
from megatron_vshape.mcore.step.gradient_sync import overlaps_grad_reduce
from megatron_vshape.mcore.step.late_checks import can_wait

Function = Callable[..., Any]

_SOME_PASS = Pass(Kind.F, 0, 0)


def replaces_always(stand_in: Function) -> Function:
    """Return what makes a replacement of a session and an original: `stand_in`, given these two."""

    @functools.wraps(stand_in)
    def make(session: Session, original: Function) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **options: Any) -> Any:
            return stand_in(session, original, *args, **options)

        return replacement

    return make


def replaces(stand_in: Function) -> Function:
    """Return the same of a `stand_in` that is called once a schedule has been asked for."""

    @functools.wraps(stand_in)
    def unless_idle(session: Session, original: Function, *args: Any, **options: Any) -> Any:
        if session.is_idle:
            return original(*args, **options)
        return stand_in(session, original, *args, **options)

    return replaces_always(unless_idle)


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
    """Give a chunk the part of a hybrid model's pattern that is its stage's."""
    if session.pipeline is None:
        return original(main_pattern, pp_group, vp_stage, *args, **options)
    stage_map = session.pipeline.stage_map
    stage = stage_map.stage(pp_group.rank(), vp_stage)
    # A library's own stages, if it marks any, are not ours.
    segments = hybrid.cut(main_pattern, stage_map.layers).split(hybrid.BEGINS_STAGE)
    allocation: Any = inspect.getmodule(original)
    layers = allocation.validate_segment_layers(segments[stage])
    return layers, sum(map(len, segments[:stage]))


@replaces
def convert_schedule_table_to_order(
    session: Session, original: Function, num_warmup: int, num_chunks: int, table: Any
) -> list[int]:
    """Give Transformer Engine the order of this rank's passes, to capture CUDA graphs in."""
    if session.pipeline is None:
        return list(original(num_warmup, num_chunks, table))
    rank = parallel_state.get_pipeline_model_parallel_rank()
    # A vision encoder's are captured apart, as those of one chunk, the first.
    stages = session.pipeline.stage_map.stages(rank)[:num_chunks]
    program = session.pipeline.planner.training(len(table) // num_chunks).program
    session.step.captured = program
    return capture_order(program, rank, stages)


@replaces
def create_cudagraphs(session: Session, original: Function, helper: Any) -> None:
    """Capture while nothing else asks the device, and find out which memory graphs have."""
    pipeline = session.pipeline
    if pipeline is None:
        original(helper)
        return
    session.own_runner(pipeline).rest()
    capture = _capture_of_weights(pipeline, helper) if pipeline.splits_graphs else None
    session.captures = True
    try:
        with graph_weights.capturing(helper, capture, session.step):
            original(helper)
    finally:
        session.captures = False


def _capture_of_weights(pipeline: Pipeline, helper: Any) -> graph_weights.Capture:
    """Return what has the helper capture weight gradients where the rank's passes run them."""
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
    """Reject a library that sorts by the order of Megatron's interleaved schedule.

    verl sorts the expert choices that it has recorded in a forward pass so, and joins those of all
    ranks as if chunks were placed as Megatron places them.
    """
    # Transformer Engine's capture only takes the number of passes from the table.
    if session.pipeline is None or session.captures or num_model_chunks == 1:
        return original(num_microbatches, num_model_chunks, *args, **options)
    raise UnsupportedError(
        f"schedule {session.pipeline.choice.name} does not work with recorded router replay (R2 of "
        "verl): it sorts recorded expert choices by get_schedule_table, the pass order of "
        "Megatron's interleaved schedule, and layers would get the choices of others. Set the mode "
        "of router replay to R3 or disabled, or choose a schedule with one chunk, such as zb-h1"
    )


@replaces
def optimizer_step(
    session: Session, original: Function, optimizer: Any, *args: Any, **options: Any
) -> Any:
    """Step without a barrier where the run asks for that."""
    if session.post_validation is None:
        return original(optimizer, *args, **options)
    return session.post_validation.step(optimizer, original)


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
    """Check a loss after the passes of its step, and not where the host would wait for it."""

    def check(value: Any) -> None:
        original(machine, value, rejection_func, message, comparison_func, *args, **options)

    checks = session.step.late_checks
    if checks is None:
        check(result)
    elif can_wait(machine, result, rejection_func, comparison_func):
        checks.add(check, result)
    else:
        checks.make()  # first: of several bad results Megatron acts on the first
        check(result)


@replaces
def several_stacks_init(
    session: Session, original: Function, model: Any, *args: Any, **options: Any
) -> None:
    """Refuse a model that is not one stack of layers before any of it is built."""
    if session.pipeline is not None:
        with refusing():
            raise refused_model(session.pipeline.choice.name, type(model).__name__)
    original(model, *args, **options)


@replaces
def get_forward_backward_func(
    session: Session, original: Function, *args: Any, **options: Any
) -> Any:
    """Hand out this package's function, or Megatron's with a meter where the user named one."""
    if session.pipeline is not None:
        with refusing():
            check_one_module(session.pipeline.choice.name, *args, *options.values())
        return session.own_function(original)
    function = original(*args, **options)
    if session.megatrons_own is None:
        return function
    return session.metered_runner(function, session.megatrons_own)


@replaces
def forward_step(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Measure a forward pass of Megatron's own schedules, where that is asked for."""
    result = _timed(session, original, *args, **options)
    if session.step.census is not None and session.pipeline is None:
        chunk = inspect.signature(original).bind(*args, **options).arguments.get("vp_stage")
        count_forward(session.step.census, chunk, result[0])
    return result


@replaces
def backward_step(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Measure a backward pass of Megatron's own schedules, where that is asked for."""
    result = _timed(session, original, *args, **options)
    if session.step.census is not None and session.pipeline is None:
        count_backward(session.step.census)
    return result


def _timed(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Stamp a pass of Megatron's own schedules, while they are timed; only how long it takes."""
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
    """Answer for the stage with the embedding."""
    return _is_end(session, original, 0, ignore_virtual, vp_stage)


@replaces
def is_pipeline_last_stage(
    session: Session, original: Function, ignore_virtual: bool = True, vp_stage: int | None = None
) -> bool:
    """Answer for the stage with the loss."""
    return _is_end(session, original, 1, ignore_virtual, vp_stage)


def tensor_parallel_world_size(session: Session, original: Function) -> Function:
    """Have a trainer's own loss of logits know how many ranks share the vocabulary."""

    @functools.wraps(original)
    def size() -> Any:
        ranks = session.step.tensor_ranks
        return original() if ranks is None else ranks.number_for(sys._getframe(1).f_code)

    return size


def has_end(session: Session, end: int) -> bool:
    """Check whether a chunk of this rank is the model's first (`end` 0) or last (`end` 1) stage."""
    assert session.pipeline is not None
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return bool(session.pipeline.stage_map.end_ranks[end] == rank)


def _is_end(
    session: Session, original: Function, end: int, ignore_virtual: bool, vp_stage: int | None
) -> bool:
    """Return the answer to "is this the first (or last) stage?", about a chunk where one is meant.

    Asked without a chunk, it is about the one that runs. If none runs, it is about the rank: while
    models are built, whether any of its chunks is that stage; later Megatron's own answer, its
    place in the pipeline, since the last rank gets the results of the loss (`pipeline_of`).
    """
    pipeline = session.pipeline
    if session.step.has_logits:
        return True
    chunk = session.step.running_chunk if ignore_virtual else vp_stage
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
    """Convert inputs on the first stage and outputs on the last, wherever those are."""
    pipeline = session.pipeline
    if pipeline is None:
        return original(module, *inputs, fp32_output=fp32_output, **options)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    first, last = pipeline.ends(rank, module.vp_stage)
    if first:
        inputs = transformer_module.fp32_to_float16(inputs, module.float16_convertor)
    outputs = module.module(*inputs, **options)
    # With a shared vocabulary the last stage ends where logits would begin, or all ranks have some.
    makes_loss = session.step.has_logits or (last and not pipeline.choice.shares)
    return transformer_module.float16_to_fp32(outputs) if makes_loss and fp32_output else outputs


def linear_function(session: Session, original: type) -> type:
    """Return the linear that can put its weight gradient off."""
    return make_split_linear(session.step, layers, original)


def fused_kernels(session: Session, original: Any) -> Any:
    """Return apex's kernels where they are installed, else torch's."""
    return original if layers._grad_accum_fusion_available else TorchFusedKernels


def fusion_available(session: Session, original: bool) -> bool:
    """Return that there are kernels: apex's, or torch's by `fused_kernels`."""
    return True


@replaces
def roll_tensor(
    session: Session, original: Function, tensor: Any, *args: Any, **options: Any
) -> Any:
    """Take what comes behind the end of a slice from its microbatch, and count all of that."""
    if not isinstance(tensor, TokensOfSlice):
        return original(tensor, *args, **options)
    rolled, *counted = original(tensor.whole, *args, **options)
    return TokensOfSlice.cut(rolled, tensor.part), *counted
