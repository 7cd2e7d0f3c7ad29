"""What stands in for each hooked attribute of Megatron; `hooks` lists targets and reasons.

What `replaces` marks takes the session, the original and a call's arguments, and does what the
original does while the session has no pipeline. The kernels of gradient accumulation fusion are
the exception: where apex is missing they are torch's under any schedule, Megatron's own included,
so that all schedules can be compared with the same flags.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import module as transformer_module
from megatron.training import get_args
from megatron.training.utils import print_rank_0

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.early.post_validation import why_no_gain
from megatron_vshape.mcore.hooks.checkpoints import repair_tracker
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout import hybrid, stages
from megatron_vshape.mcore.observe.iteration_log import why_no_mfu
from megatron_vshape.mcore.observe.megatrons_own import (
    count_backward,
    count_forward,
)
from megatron_vshape.mcore.refusals import (
    RefusedError,
    check_one_module,
    refused_model,
    refusing,
)
from megatron_vshape.mcore.replaced import Replaced
from megatron_vshape.mcore.setup import arguments, configure
from megatron_vshape.mcore.split.local_layers import TorchFusedKernels, make_split_linear
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.late_checks import can_wait
from megatron_vshape.runtime.last_words import last_words

logger = logging.getLogger(__name__)

Function = Callable[..., Any]

_SOME_PASS = Pass(Kind.F, 0, 0)


def replaces(stand_in: Function) -> Function:
    """Return what makes a replacement of a session and an original: `stand_in`, given these two."""

    @functools.wraps(stand_in)
    def make(session: Session, original: Function) -> Function:
        @functools.wraps(original)
        def replacement(*args: Any, **options: Any) -> Any:
            return stand_in(session, original, *args, **options)

        return replacement

    return make


@replaces
def add_megatron_arguments(
    session: Session, original: Function, parser: ArgumentParser
) -> ArgumentParser:
    """Add this package's flags after Megatron's."""
    return arguments.add_arguments(original(parser))


@replaces
def validate_args(
    session: Session, original: Function, args: Namespace, *rest: Any, **options: Any
) -> Any:
    """Set the pipeline up before Megatron's checks, and check what only they make known."""
    with refusing():
        session.choose(configure.prepare(args), configure.megatrons_own(args))
        session.chosen_by_flags = True
        session.tries_again = getattr(args, "inprocess_restart", False)
    validated = original(args, *rest, **options)
    with refusing():
        configure.complete(session.pipeline, args)
    return validated


@replaces
def core_transformer_config_from_args(
    session: Session, original: Function, args: Namespace, *rest: Any, **options: Any
) -> Any:
    """Put the layout of the stages on every TransformerConfig made from the arguments.

    The config checks numbers of layers when it is made, so the arguments have the layout
    meanwhile, and only meanwhile: they are written into checkpoints.
    """
    with Replaced() as replaced:
        if session.pipeline is not None:
            replaced.put(args, "pipeline_model_parallel_layout", session.pipeline.layout)
        return original(args, *rest, **options)


@replaces
def pretrain(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Pass Megatron the embedding group and, before 0.19, model chunks of the right stages."""
    bound = inspect.signature(original).bind(*args, **options)
    users = bound.arguments.get("get_embedding_ranks")
    bound.arguments["get_embedding_ranks"] = _embedding_ranks(session, users)
    provider = bound.arguments.get("model_provider")
    if provider is not None:
        bound.arguments["model_provider"] = _model_provider(session, provider)
    if session.pipeline is not None:
        given = (bound.arguments.get(name) for name in ("pg_collection", "p2p_communicator"))
        with refusing():
            check_one_module(session.pipeline.choice.name, *given)
    try:
        return original(*bound.args, **bound.kwargs)
    finally:
        session.forget()


def _embedding_ranks(session: Session, users: Function | None) -> Function:
    def ranks(pipeline_ranks: Sequence[int], *args: Any) -> list[int]:
        if session.pipeline is not None:
            return stages.embedding_ranks(session.pipeline.stage_map, pipeline_ranks)
        chosen = parallel_state.default_embedding_ranks if users is None else users
        ranks_of_ends: list[int] = chosen(pipeline_ranks, *args)
        return ranks_of_ends

    return ranks


def _model_provider(session: Session, provider: Function) -> Function:
    """Return a provider that builds stages; 0.18 and before call it once per chunk."""
    built: list[Any] = []
    takes = inspect.signature(provider).parameters
    takes_chunks = "vp_stage" in takes or any(
        each.kind == each.VAR_KEYWORD for each in takes.values()
    )

    @functools.wraps(provider)
    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        **options: Any,
    ) -> Any:
        if session.pipeline is None:
            if vp_stage is not None:
                options["vp_stage"] = vp_stage
            return provider(pre_process, post_process, **options)
        if not vp_stage:
            built.clear()
        rank = parallel_state.get_pipeline_model_parallel_rank()
        first, last = session.pipeline.ends(rank, vp_stage)
        if takes_chunks:
            options["vp_stage"] = vp_stage
        elif vp_stage is not None:
            raise RefusedError(
                f"schedule {session.pipeline.choice.name} has several chunks per rank, and the "
                "script's model_provider takes no vp_stage: choose a schedule with one, such as "
                "zb-h1"
            )
        built.append(provider(first, last, **options))
        if len(built) == session.pipeline.stage_map.num_chunks:
            configure.finish_model(session.pipeline, session.step, rank, built)
            session.ready.add(built[0])
        return built[-1]

    return provide


@replaces
def build_virtual_pipeline_stages(
    session: Session,
    original: Function,
    build_model_func: Function,
    pg_collection: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Build every chunk as the stage that it is."""
    pipeline = session.pipeline
    if pipeline is None:
        return original(build_model_func, pg_collection, *args, **options)
    rank = pg_collection.pp.rank()

    def build_stage(
        groups: Any,
        pre_process: Any = None,
        post_process: Any = None,
        vp_stage: int | None = None,
    ) -> Any:
        first, last = pipeline.ends(rank, vp_stage)
        return build_model_func(groups, pre_process=first, post_process=last, vp_stage=vp_stage)

    chunks = original(build_stage, pg_collection, *args, **options)
    configure.finish_model(pipeline, session.step, rank, chunks)
    session.ready.add(chunks[0])
    return chunks


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
    stage = session.pipeline.stage_map.stage(pp_group.rank(), vp_stage)
    segments = main_pattern.split(hybrid.BEGINS_STAGE)
    allocation: Any = inspect.getmodule(original)
    layers = allocation.validate_segment_layers(segments[stage])
    return layers, sum(map(len, segments[:stage]))


@replaces
def train(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Show the schedule first, and what the run has measured last."""
    pipeline = session.pipeline
    if pipeline is not None:
        given = inspect.signature(original).bind(*args, **options).arguments
        with refusing():
            tokens = get_args().seq_length * get_args().micro_batch_size
            session.optimizer = given["optimizer"]
            print_rank_0(session.opening(pipeline, given["model"], tokens, get_num_microbatches()))
            if pipeline.options.post_validates:
                session.validate_late(pipeline, given["optimizer"])
                _print_if_any(why_no_gain(get_args()))
    elif session.megatrons_own is None:
        _refuse_what_was_not_seen(get_args())
    if pipeline is not None or session.megatrons_own is not None:
        session.begin_log()
        _print_if_any(why_no_mfu())
    try:
        result = _told_at_failure(session, lambda: original(*args, **options))
    except RefusedError:
        raise
    except SystemExit:  # by --exit-interval and the like, on all ranks after a barrier
        _tell_end(session)
        raise
    _tell_end(session)
    return result


def _refuse_what_was_not_seen(args: Namespace) -> None:
    """Raise RefusedError for a schedule that the checks of the arguments have not seen."""
    schedule = getattr(args, "pipeline_schedule", None)
    if schedule is not None and args.pipeline_model_parallel_size > 1:
        raise RefusedError(
            f"--pipeline-schedule {schedule} came with arguments that Megatron does not validate, "
            "as those of --yaml-cfg: give all of them on the command line"
        )


def _told_at_failure(session: Session, train: Callable[[], Any]) -> Any:
    """Return what `train` returns; if it fails, or SIGTERM ends it, say where this rank stood."""
    if session.pipeline is None:
        return train()
    with last_words(lambda: _whereabouts(session)):
        try:
            return train()
        except Exception as error:
            where = _whereabouts(session)
            # At once: a launcher may end this process before Python has printed the traceback.
            logger.critical("%s: %s", where, type(error).__name__)
            error.add_note(where)
            raise


def _whereabouts(session: Session) -> str:
    """Return in which iteration this rank is, and what it does there or waits for."""
    iteration = f"in iteration {getattr(get_args(), 'curr_iteration', 0) + 1}"
    if isinstance(session.runner, PipelineRunner):
        return f"{session.runner.tell()}, {iteration}"
    return f"rank {os.environ.get('RANK', '0')}, {iteration}"


@replaces
def training_log(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Have this package's figures ready while Megatron logs an iteration."""
    if session.iteration_log is None or session.runner is None:
        return original(*args, **options)
    if isinstance(session.runner, PipelineRunner):
        hybrid.size_expert_losses(get_args())
    number = inspect.signature(original).bind(*args, **options).arguments["iteration"]
    with session.iteration_log.iteration(session.runner.meter, number):
        return original(*args, **options)


@replaces
def print_rank_last(session: Session, original: Function, message: Any) -> Any:
    """Complete the line of an iteration, and TensorBoard and W&B, by this package's figures."""
    if session.iteration_log is not None:
        message = session.iteration_log.complete(message)
    return original(message)


def _tell_end(session: Session) -> None:
    _print_if_any(session.end_validation())
    if session.runner is not None:
        group = parallel_state.get_pipeline_model_parallel_group()
        copies = parallel_state.get_data_parallel_world_size()
        _print_if_any(session.runner.report.closing_line(group, copies))


def _print_if_any(line: str | None) -> None:
    if line is not None:
        print_rank_0(line)


@replaces
def read_metadata(session: Session, original: Function, tracker_filename: str) -> Any:
    """Read which checkpoint is the last, once a tracker that was cut off has been made good."""
    # Also before the flags are validated, where --use-checkpoint-args reads it. Every rank
    # repairs: they would all write the same, and need not wait for each other.
    repair_tracker(Path(tracker_filename))
    return original(tracker_filename)


@replaces
def optimizer_step(
    session: Session, original: Function, optimizer: Any, *args: Any, **options: Any
) -> Any:
    """Step without a barrier where the run asks for that."""
    if session.post_validation is None:
        return original(optimizer, *args, **options)
    return session.post_validation.step(optimizer, original)


@replaces
def logical_and_across_model_parallel_group(
    session: Session, original: Function, input: bool, *args: Any, **options: Any
) -> bool:
    """Do not ask the other ranks what all know from the validated step."""
    if session.post_validation is None or not input:
        return bool(original(input, *args, **options))
    return True


@replaces
def reduce_max_stat_across_model_parallel_group(
    session: Session, original: Function, stat: Any, *args: Any, **options: Any
) -> Any:
    """Do not ask the other ranks what all know from the validated step; round as asking does."""
    if session.post_validation is None or stat is None:
        return original(stat, *args, **options)
    return torch.tensor([stat], dtype=torch.float32).item()


@replaces
def save_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Save no trace of a step that has begun early: random numbers, microbatches read."""
    if isinstance(session.runner, PipelineRunner):
        session.runner.drop_ahead()
    return original(*args, **options)


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


def _is_end(
    session: Session, original: Function, end: int, ignore_virtual: bool, vp_stage: int | None
) -> bool:
    """Return the answer to "is this the first (or last) stage?", about a chunk where one is meant.

    Asked without a chunk, it is about the one that runs, and where none runs about the rank's
    place in the pipeline: that is how Megatron-LM's trainer finds out who prints. A library then
    means the rank on which the end is: what its closures have collected of losses lies there.
    """
    pipeline = session.pipeline
    chunk = session.step.running_chunk if ignore_virtual else vp_stage
    if pipeline is not None and chunk is None and ignore_virtual and session.is_librarys:
        rank: int = parallel_state.get_pipeline_model_parallel_rank()
        return rank == pipeline.stage_map.end_ranks[end]
    if pipeline is not None and not ignore_virtual and pipeline.stage_map.num_chunks == 1:
        chunk = 0
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
    return transformer_module.float16_to_fp32(outputs) if last and fp32_output else outputs


def linear_function(session: Session, original: type) -> type:
    """Return the linear that can put its weight gradient off."""
    return make_split_linear(session.step, layers, original)


def fused_kernels(session: Session, original: Any) -> Any:
    """Return apex's kernels where they are installed, else torch's."""
    return original if layers._grad_accum_fusion_available else TorchFusedKernels


def fusion_available(session: Session, original: bool) -> bool:
    """Return that there are kernels: apex's, or torch's by `fused_kernels`."""
    return True
