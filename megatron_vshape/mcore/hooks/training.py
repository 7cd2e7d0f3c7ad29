"""Replaced functions of Megatron-LM's trainer: flags, config, model, training loop and log.

Libraries may use megatron.core without the trainer; then nothing imports this module.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args
from megatron.training.utils import print_rank_0

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.features.post_validation.early_step import early_start_of
from megatron_vshape.mcore.hook import Function, Hook, Replaced, replaces, replaces_always
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.observe.iteration_log import IterationLog, size_layer_losses
from megatron_vshape.mcore.observe.report import write_allocated
from megatron_vshape.mcore.options import add_arguments
from megatron_vshape.mcore.refusals import RefusedError, check_one_module, refusing
from megatron_vshape.mcore.setup import configure
from megatron_vshape.mcore.setup.configure import StageLayout
from megatron_vshape.mcore.setup.judgements import warn_of_unjudged
from megatron_vshape.mcore.setup.megatron_schedules import megatrons_own
from megatron_vshape.mcore.setup.run_config import RunConfig
from megatron_vshape.runtime.failures import last_words

logger = logging.getLogger(__name__)


@replaces_always
def add_megatron_arguments(
    session: Session, original: Function, parser: ArgumentParser
) -> ArgumentParser:
    """Add this package's flags after Megatron's, whose defaults the session records."""

    def record(name: str) -> str:
        session.process.names_schedule = True
        return name

    # A library's parser may have its own arguments before and after this call.
    former_names = {action.dest for action in parser._actions}
    parser = original(parser)
    session.process.megatron_defaults = {
        action.dest: action.default for action in parser._actions if action.dest not in former_names
    }
    return add_arguments(parser, record)


@replaces_always
def validate_args(
    session: Session, original: Function, args: Namespace, *positional: Any, **options: Any
) -> Any:
    """Configure the pipeline before Megatron's checks, and complete it with their results."""
    with refusing():
        # Used by searches only. It meets at the rendezvous store, because process groups do not
        # exist yet.
        rank_zero = configure.rank_zero_planner(args)
        # Before Megatron's checks, which reject chunks and layer counts that the schedule sets.
        pipeline = configure.pipeline_from_args(args, session.process.registered, rank_zero)
        # From here on the hooks act. None for both: Megatron runs as without this package.
        session.choose(pipeline, megatrons_own(args), rank_zero)
        session.process.chosen_by_flags = True
    if pipeline is not None:
        # Before the original, which changes arguments.
        warn_of_unjudged(args, session.process.megatron_defaults)
        # Before the original: Megatron's checks initialize CUDA, which reads the environment.
        session.process.environment.set_variables(args, pipeline)
    validated = original(args, *positional, **options)
    session.arguments = args
    # After them: the number of microbatches and some sizes are known only now.
    with refusing():
        configure.check_and_plan_run(session.pipeline, session.planner, args)
    return validated


@replaces_always
def core_transformer_config_from_args(
    session: Session, original: Function, *positional: Any, **options: Any
) -> Any:
    """Set the stage layout on every TransformerConfig created from the arguments.

    The config checks layer counts in its constructor, so the arguments contain the layout during
    this call. They must not keep it: Megatron writes the arguments into checkpoints.
    """
    args = inspect.signature(original).bind(*positional, **options).arguments["args"]
    if not session.process.chosen_by_flags and session.process.registered is None:
        _reject_unvalidated_schedule(args)
    with Replaced() as replaced:
        if session.pipeline is not None:
            layout = StageLayout(session.pipeline.stage_map)
            replaced.put(args, "pipeline_model_parallel_layout", layout)
        return original(*positional, **options)


@replaces_always
def pretrain(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Build the chunks of a model_provider as their stages; free all state after the run."""
    bound = inspect.signature(original).bind(*args, **options)
    provider = bound.arguments.get("model_provider")
    if provider is not None:
        # Without one, Megatron builds chunks through `build_virtual_pipeline_stages`.
        bound.arguments["model_provider"] = _model_provider(session, provider)
    # Still None in 0.17, where `pretrain` itself parses the arguments. Each step checks again.
    if session.pipeline is not None:
        communicators = (
            bound.arguments.get(name) for name in ("pg_collection", "p2p_communicator")
        )
        with refusing():
            check_one_module(session.pipeline.choice.name, *communicators)
    try:
        return original(*bound.args, **bound.kwargs)
    finally:
        # Data loaders end with their last reference, and a restarted run must plan again.
        has_run = session.training.runner is not None
        session.end_run(has_run and getattr(get_args(), "inprocess_restart", False))


def _model_provider(session: Session, provider: Function) -> Function:
    """Wrap a provider so that it builds stages; `get_model` calls it once per chunk.

    Megatron derives `pre_process` and `post_process` from the rank, which is wrong for a V
    placement. Three hooks set them for the stage, because releases build models differently:

    * this one, if `pretrain` gets a provider: always in 0.17 and 0.18, optional since 0.19
    * `build_virtual_pipeline_stages`, if it gets a model config (since 0.19; 0.18 has the function
      for libraries)
    * `core_hooks.model_init`, for every constructor of GPTModel and HybridModel

    `model_init` is not enough: a provider may build another class, and may use both values itself,
    for example to choose the layers of a stage.
    """
    takes = inspect.signature(provider).parameters
    # A model_provider without vp_stage is fine with one chunk per rank.
    takes_chunks = "vp_stage" in takes or any(
        parameter.kind == parameter.VAR_KEYWORD for parameter in takes.values()
    )

    def provide(
        pipeline: RunConfig,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        **options: Any,
    ) -> Any:
        rank = parallel_state.get_pipeline_model_parallel_rank()
        if takes_chunks:
            options["vp_stage"] = vp_stage
        elif vp_stage is not None:
            raise RefusedError(
                f"schedule {pipeline.choice.name} has several chunks per rank, and the script's "
                "model_provider takes no vp_stage: choose a schedule with one, such as zb-h1"
            )
        with session.build.setting(provided_chunk=vp_stage):
            return provider(*pipeline.ends(rank, vp_stage), **options)

    @functools.wraps(provider)
    def provide_if_chosen(*args: Any, **options: Any) -> Any:
        if session.pipeline is None:
            return provider(*args, **options)
        return provide(session.pipeline, *args, **options)

    return provide_if_chosen


@replaces
def build_virtual_pipeline_stages(
    session: Session,
    original: Function,
    build_model_func: Function,
    pg_collection: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Build every chunk with the embedding or the output layer if its stage has them."""
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
        # Megatron derived its values from the rank, as if the last stage were on the last rank. In
        # a V it is on rank 0, in chunk 1.
        first, last = pipeline.ends(rank, vp_stage)
        with session.build.setting(provided_chunk=vp_stage):
            return build_model_func(groups, pre_process=first, post_process=last, vp_stage=vp_stage)

    return original(build_stage, pg_collection, *args, **options)


@replaces_always
def train(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Print the schedule before training, and the measured results after it."""
    pipeline = session.pipeline
    arguments: Mapping[str, Any] = {}
    if not session.is_idle:
        arguments = inspect.signature(original).bind(*args, **options).arguments
        if get_args().do_valid or get_args().do_test:
            _check_evaluation(session, arguments)
        with refusing():
            configure.check_changing(session.planner, get_args())
    if pipeline is not None:
        with refusing():
            tokens = get_args().seq_length * get_args().micro_batch_size
            # With a memory limit, the optimizer's state counts as static memory.
            session.build.optimizer = arguments["optimizer"]
            # Creating communicators is collective and slow: not in the first iteration, whose time
            # is logged.
            print_rank_0(
                session.connect(pipeline, arguments["model"], tokens, get_num_microbatches())
            )
            early_start = early_start_of(session)
            if early_start is not None:
                _print_line(early_start.begin_training(arguments["optimizer"], get_args()))
    elif session.megatrons_own is None:
        _reject_unvalidated_schedule(get_args())
    if pipeline is not None or session.megatrons_own is not None:
        session.training.iteration_log = IterationLog()
    try:
        result = _log_failure(session, lambda: original(*args, **options))
    # RefusedError is a SystemExit, too, but a rejected run has no results to print.
    except RefusedError:
        raise
    except SystemExit:  # --exit-interval and similar: all ranks exit after a barrier
        _print_results(session)
        raise
    _print_results(session)
    return result


@replaces
def evaluate_and_print_results(
    session: Session, original: Function, *args: Any, **options: Any
) -> Any:
    """Evaluate each validation set with the iterators of all chunks.

    Megatron reads the list of chunks as the list of validation sets. The options are checked here
    too, for an evaluation without training (--skip-train).
    """
    bound = inspect.signature(original).bind(*args, **options)
    _check_evaluation(session, bound.arguments)
    settings = get_args()
    has_chunks = getattr(settings, "virtual_pipeline_model_parallel_size", None) is not None
    if has_chunks and getattr(settings, "multiple_validation_sets", False):
        # From [chunk][validation set] to [validation set][chunk].
        rows = zip(*bound.arguments["data_iterator"], strict=True)
        bound.arguments["data_iterator"] = list(map(list, rows))
    return original(*bound.args, **bound.kwargs)


@replaces
def build_train_valid_test_data_iterators(
    session: Session, original: Function, *args: Any, **options: Any
) -> Any:
    """Keep the lengths of several validation sets if a chunk reads no data.

    Megatron calls this function for each chunk. A chunk in the middle of the model overwrites the
    lengths with None, which the broadcast of rank 0's lengths before an evaluation cannot send.
    """
    settings = get_args()
    lengths = settings.eval_iters
    iterators = original(*args, **options)
    if isinstance(settings.eval_iters, list) and None in settings.eval_iters:
        has_lengths = isinstance(lengths, list)
        settings.eval_iters = lengths if has_lengths else [0] * len(settings.eval_iters)
    return iterators


@replaces
def dummy_train_step(session: Session, original: Function, data_iterator: Any) -> None:
    """Skip the microbatches of a training step in the data iterators of all chunks.

    Megatron supports one iterator only, and fails on ranks that read no data.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    unique = {id(iterator): iterator for iterator in iterators if iterator is not None}
    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(data_iterator):
        for iterator in unique.values():
            for _ in range(get_num_microbatches()):
                next(iterator)


def _check_evaluation(session: Session, arguments: Mapping[str, Any]) -> None:
    """Raise RefusedError for an evaluation that would fail or hang after the training steps."""
    settings = get_args()
    if getattr(settings, "multiple_validation_sets", False) and settings.do_test:
        raise RefusedError(
            "--multiple-validation-sets does not work with a test set: Megatron reads the test "
            "set as a list of validation sets. Remove --test-data-path, or the test data of "
            "--per-split-data-args-path"
        )
    name = session.megatrons_own if session.pipeline is None else session.pipeline.choice.name
    is_alone = arguments.get("non_loss_data_func") is None
    if name is not None and is_alone and arguments.get("process_non_loss_data_func") is not None:
        raise RefusedError(
            f"--pipeline-schedule {name} does not work with process_non_loss_data_func alone: "
            "after an evaluation, Megatron runs one more forward step to collect its data on the "
            "last rank only, which waits for the other pipeline ranks forever. Give pretrain a "
            "non_loss_data_func as well; Megatron calls it on all ranks, so it can run "
            "forward_backward_func with collect_non_loss_data=True"
        )


def _reject_unvalidated_schedule(args: Namespace) -> None:
    """Raise RefusedError for a schedule in arguments that `validate_args` has not processed."""
    schedule = getattr(args, "pipeline_schedule", None)
    if schedule is not None and args.pipeline_model_parallel_size > 1:
        raise RefusedError(
            f"--pipeline-schedule {schedule} came with arguments that Megatron does not validate "
            "here, as those of --yaml-cfg or of another process: give all of them on the command "
            "line, or the schedule to register"
        )


def _log_failure(session: Session, train: Callable[[], Any]) -> Any:
    """Run `train`; on an exception or SIGTERM, log the iteration and the pass of this rank."""
    if session.pipeline is None:
        return train()
    with last_words(lambda: _position(session)):
        try:
            return train()
        except Exception as error:
            where = _position(session)
            # Log now: the launcher may kill this process before Python prints the traceback.
            logger.critical("%s: %s", where, type(error).__name__)
            error.add_note(where)
            raise


def _position(session: Session) -> str:
    """Describe the current iteration of this rank and the pass or receive it is in."""
    iteration = f"in iteration {getattr(get_args(), 'curr_iteration', 0) + 1}"
    if session.training.runner is not None:
        return f"{session.training.runner.describe_position()}, {iteration}"
    return f"rank {os.environ.get('RANK', '0')}, {iteration}"


@replaces
def training_log(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Provide this package's metrics while Megatron logs an iteration."""
    if session.training.iteration_log is None:
        return original(*args, **options)
    meter = None
    if session.training.runner is not None:
        size_layer_losses(get_args())
        meter = session.training.runner.meter
    number = inspect.signature(original).bind(*args, **options).arguments["iteration"]
    log, trainer = session.training.iteration_log, sys.modules[original.__module__]
    print_line = trainer.print_rank_last
    with log.iteration(meter, number), Replaced() as replaced:
        # The metrics are appended to Megatron's line, and sent to TensorBoard and W&B with it.
        replaced.put(trainer, "print_rank_last", lambda line: print_line(log.complete(line)))
        if session.pipeline is not None:  # the estimate does not support this package's schedules
            replaced.put(trainer, "report_theoretical_memory", lambda *_, **__: None)
        return original(*args, **options)


def _print_line(line: str | None) -> None:
    if line is not None:
        print_rank_0(line)


def _print_results(session: Session) -> None:
    if session.is_idle:
        return
    group = parallel_state.get_pipeline_model_parallel_group()
    if session.training.runner is None:  # a schedule of Megatron
        write_allocated(torch.cuda.max_memory_allocated(), group)
        return
    early_start = early_start_of(session)
    if early_start is not None:
        _print_line(early_start.end_training())
    copies = parallel_state.get_data_parallel_world_size()
    try:
        closing_line = session.training.runner.report.closing_line(group, copies)
        if closing_line is not None:
            print_rank_0(closing_line)
    except ScheduleError as error:  # Megatron saves the last checkpoint after this report
        logger.warning("no closing report: %s", error)


_TRAINER = "megatron.training"
_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"

HOOKS = (
    Hook(
        _ARGUMENTS,
        "add_megatron_arguments",
        ("parser",),
        "adds --pipeline-schedule and its companions to Megatron's parser",
        add_megatron_arguments,
    ),
    Hook(
        _ARGUMENTS,
        "validate_args",
        ("args", "defaults"),
        "sets the number of chunks per rank, rejects unsupported options",
        validate_args,
        everywhere=True,
    ),
    Hook(
        "megatron.training.argument_utils",
        "core_transformer_config_from_args",
        ("args",),
        "puts the layers of every stage on the config, where Megatron asks for them",
        core_transformer_config_from_args,
        since=(0, 18),
        former_module=_ARGUMENTS,
        everywhere=True,
    ),
    Hook(
        _TRAINING,
        "pretrain",
        ("forward_step_func", "model_provider"),
        "model chunks of the right stages from a provider; no data is kept after the run",
        pretrain,
        everywhere=True,
    ),
    Hook(
        _TRAINING,
        "train",
        ("forward_step_func", "model", "config"),
        "shows the schedule before the first step, speed and memory after the last",
        train,
    ),
    Hook(
        _TRAINING,
        "evaluate_and_print_results",
        ("data_iterator", "process_non_loss_data_func", "non_loss_data_func"),
        "reads each validation set by the iterators of all chunks; rejects data that only the last "
        "rank would collect, which would hang the pipeline",
        evaluate_and_print_results,
    ),
    Hook(
        _TRAINING,
        "build_train_valid_test_data_iterators",
        ("build_train_valid_test_datasets_provider",),
        "keeps the lengths of several validation sets, which a chunk without data overwrites",
        build_train_valid_test_data_iterators,
    ),
    Hook(
        _TRAINING,
        "dummy_train_step",
        ("data_iterator",),
        "skips the microbatches of all chunks in an iteration of --iterations-to-skip",
        dummy_train_step,
    ),
    Hook(
        _TRAINING,
        "training_log",
        ("iteration",),
        "adds the bubble of an iteration to its line, to TensorBoard and to W&B",
        training_log,
    ),
    Hook(
        "megatron.training.models.dist_utils",
        "build_virtual_pipeline_stages",
        ("build_model_func", "pg_collection", "vp_size"),
        "embedding and loss where the first and the last stage are, in models of any class",
        build_virtual_pipeline_stages,
        since=(0, 18),
    ),
)
"""The functions of the trainer."""
