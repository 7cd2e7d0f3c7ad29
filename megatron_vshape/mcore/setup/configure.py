"""From Megatron's arguments to the pipeline of a run: configuration, checks and layer setup.

A library on top of Megatron-Core does not use Megatron's argument parser. Its schedule options come
from `register`, and the model options from a TransformerConfig (`prepare_config`).
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_vshape.core.baselines import BaselineSpec
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import check_layers
from megatron_vshape.core.model.placement import looping
from megatron_vshape.core.paper.catalogue import JOINT_NAMES
from megatron_vshape.core.request import AUTO, with_chunks
from megatron_vshape.mcore.layout import hybrid, multi_token, stages
from megatron_vshape.mcore.layout.layer_split import split_layers
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.layout.stages import StageLayout
from megatron_vshape.mcore.options import (
    Options,
    options_of,
    watchdog_seconds,
)
from megatron_vshape.mcore.refusals import (
    UnsupportedError,
    check_arguments,
    check_derived,
    check_library,
)
from megatron_vshape.mcore.setup.against_megatron import megatrons_if_best
from megatron_vshape.mcore.setup.checks import (
    changing_counts,
    check_batch_size,
    check_interleaved,
    fixed_counts,
)
from megatron_vshape.mcore.setup.choice import ScheduleConfig, choice_for
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.pipeline import Pipeline, pipeline_of
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.translate import check_splits_nothing_else
from megatron_vshape.mcore.split import graphs, te_layers, unsplit
from megatron_vshape.mcore.split.local_layers import mark_gathered
from megatron_vshape.mcore.step_state import StepState, unwrapped
from megatron_vshape.runtime.weight_jobs import name_weights

logger = logging.getLogger(__name__)

INTERLEAVED_CHUNKS = 2
"""Chunks per rank of interleaved-1f1b if the user gives no number."""


def one_planner(args: Namespace) -> RankZeroPlanner:
    """Return the planner that runs on one rank for all, with the timeout of Megatron."""
    asked = options_of(args)
    names = ("pipeline_model_parallel_size", "num_layers", "global_batch_size", "micro_batch_size")
    sizes = (getattr(args, name, None) for name in names)
    name = " ".join(map(str, (asked.schedule, asked.memory_limit_gib, asked.layer_split, *sizes)))
    return RankZeroPlanner(name, watchdog_seconds(args))


def prepare(
    args: Namespace, registered: Options | None = None, once: RankZeroPlanner | None = None
) -> Pipeline | None:
    """Return the pipeline that the flags request, or None if Megatron runs its own schedule.

    Called before Megatron validates its arguments; sets the number of chunks per rank in them.
    Without a schedule in the flags, the options of `register` apply. `once` plans on one rank for
    all.

    Raises:
        ScheduleError: The schedule does not exist or does not fit this run.
        UnsupportedError: The schedule does not support an option.
    """
    options = options_of(args)
    if options.schedule is None and registered is not None:
        options = registered
    if options.schedule is not None or "pipeline_timeout" in args:
        _check_values(args, options)
    name, ranks = options.schedule, args.pipeline_model_parallel_size
    once = once or one_planner(args)
    # Before `pipeline_of`, which resets options that Megatron's schedule needs.
    baseline = megatrons_if_best(args, options, once)
    if baseline is not None:
        _run_megatrons(args, baseline)
        return None
    if name is None or options.asks_for_megatrons_own:
        if options.post_validates and ranks > 1:
            raise UnsupportedError(
                "--optimizer-post-validation needs a schedule of this package: add "
                "--pipeline-schedule, v-zb for example"
            )
        _refuse_what_only_ours_have(options, ranks)
        _prepare_megatrons_own(args, name)
        _split_megatrons_own(args, options)
        return None
    if ranks == 1:  # nothing to schedule, but the options must be valid
        choice_for(options, ranks)
        _tell_what_does_nothing(options)
        return None
    pipeline = pipeline_of(
        args,
        options,
        once,
        check=check_arguments,
        ties_ends=not args.untie_embeddings_and_output_weights,
        kernels=args.distributed_backend == "nccl",
    )
    _tell_megatron(args, pipeline)
    return pipeline


def _tell_megatron(args: Namespace, pipeline: Pipeline) -> None:
    """Set the stages in Megatron's arguments."""
    stage_map = pipeline.stage_map
    for feature in features():
        feature.prepare_arguments(args, pipeline)
    pattern = getattr(args, hybrid.OPTION, None)
    if pattern is None:
        # Also for one chunk: Megatron then uses the layer counts of the layout.
        args.num_virtual_stages_per_pipeline_rank = stage_map.num_chunks
    else:  # Megatron counts the layers and the chunks of a rank in this pattern
        args.hybrid_layer_pattern = hybrid.cut(pattern, stage_map.layers)
    if stage_map.num_chunks > 1:
        # Required by Megatron for chunks on two ranks; it does not affect our P2P messages.
        args.overlap_p2p_comm = True


def _run_megatrons(args: Namespace, baseline: BaselineSpec) -> None:
    """Run Megatron's schedule as if the user had named it."""
    args.pipeline_schedule, args.pipeline_costs = baseline.name, None
    args.pipeline_memory_limit, args.pipeline_host_memory_limit = None, None
    args.num_virtual_stages_per_pipeline_rank = baseline.chunks
    if getattr(args, hybrid.OPTION, None) is not None:
        _split_megatrons_own_hybrid(args, Options(schedule=baseline.name))
    if os.environ.get("RANK", "0") == "0":
        logger.info(
            "no plan within the limit is faster than Megatron's %s, which runs with %d %s per rank",
            baseline.name,
            baseline.chunks or 1,
            "virtual stages" if baseline.chunks else "stage",
        )


def _check_values(args: Namespace, options: Options) -> None:
    """Raise UnsupportedError for an invalid value, and warn of a timeout that is too long."""
    options.check()
    if options.timeout_seconds >= watchdog_seconds(args):
        logger.warning(
            "--pipeline-timeout %g is not below --distributed-timeout-minutes %g: Megatron's own "
            "watchdogs may end a stalled run first, without naming the cause",
            options.timeout_seconds,
            watchdog_seconds(args) / 60,
        )


def _refuse_what_only_ours_have(options: Options, ranks: int) -> None:
    """Raise UnsupportedError for the first flag without effect, if there is a pipeline."""
    splits = options.layer_split is not None
    for flag in options.flags_for_ours():
        if ranks > 1 and not (flag == "--pipeline-costs" and splits):
            what = "Megatron's own schedule" if options.schedule is None else options.schedule
            raise UnsupportedError(
                f"{flag} has no effect with {what}: remove it, or set --pipeline-schedule to a "
                "schedule of this package, such as v-half"
            )


def _tell_what_does_nothing(options: Options) -> None:
    """Log flags without effect in a run with one pipeline rank."""
    flags = options.flags_for_ours()
    if options.post_validates:
        flags.append("--optimizer-post-validation")
    if flags and int(os.environ.get("RANK", "0")) == 0:
        logger.warning("one pipeline rank has nothing to schedule: %s unused", ", ".join(flags))


def megatrons_own(args: Namespace) -> str | None:
    """Return Megatron's schedule if the flags name one for a pipeline, else None."""
    options, ranks = options_of(args), args.pipeline_model_parallel_size
    return options.schedule if options.asks_for_megatrons_own and ranks > 1 else None


def _prepare_megatrons_own(args: Namespace, name: str | None) -> None:
    has_chunks = (
        args.num_virtual_stages_per_pipeline_rank is not None
        or args.num_layers_per_virtual_pipeline_stage is not None
    )
    if name == "1f1b" and has_chunks:
        raise UnsupportedError(
            "--pipeline-schedule 1f1b has one chunk per rank: remove Megatron's option for virtual "
            "stages, or use interleaved-1f1b"
        )
    own = with_chunks(name or "")
    if own is not None and has_chunks:
        raise UnsupportedError(
            f"--pipeline-schedule {name} contains the number of virtual stages per rank: remove "
            "it, "
            "or Megatron's option for virtual stages"
        )
    alone = args.pipeline_model_parallel_size == 1
    if (name == "interleaved-1f1b" or own is not None) and not has_chunks and not alone:
        chunks = INTERLEAVED_CHUNKS if own is None else own.chunks
        args.num_virtual_stages_per_pipeline_rank = chunks


def _split_megatrons_own(args: Namespace, options: Options) -> None:
    """Pass a layer split to Megatron in its own form."""
    text, ranks = options.layer_split, args.pipeline_model_parallel_size
    if ranks > 1 and options.schedule and getattr(args, hybrid.OPTION, None) is not None:
        _split_megatrons_own_hybrid(args, options)
        return
    if text is None or ranks == 1:
        return
    if options.schedule is None:
        raise UnsupportedError(
            f"--pipeline-layer-split {text:.80} needs --pipeline-schedule, such as 1f1b or v-half"
        )
    check_splits_nothing_else(args, options.schedule)
    chunks = args.num_virtual_stages_per_pipeline_rank or 1
    split = split_layers(args, looping(ranks, chunks), text, options.costs())
    args.pipeline_model_parallel_layout = stages.megatrons_text(
        split.layers, multi_token.num_predicting(args)
    )
    args.num_virtual_stages_per_pipeline_rank = None  # the layout text defines the number


def _split_megatrons_own_hybrid(args: Namespace, options: Options) -> None:
    """Mark the stages in the pattern of layers, where Megatron reads them.

    Raises:
        ScheduleError: the pattern marks another number of stages than the schedule has.
    """
    pattern, ranks = args.hybrid_layer_pattern, args.pipeline_model_parallel_size
    chunks = args.num_virtual_stages_per_pipeline_rank or 1
    args.num_virtual_stages_per_pipeline_rank = None  # the pattern defines the number
    if not hybrid.marks_stages(args):
        split = split_layers(args, looping(ranks, chunks), options.layer_split, options.costs())
        args.hybrid_layer_pattern = hybrid.cut(pattern, split.layers)
        return
    given = f"{hybrid.FLAG} {pattern:.80}"
    if options.layer_split is not None:
        raise UnsupportedError(
            f"{given} defines the layers of each stage with {hybrid.BEGINS_STAGE}, as "
            f"--pipeline-layer-split does: remove one of them"
        )
    parts = hybrid.parts(pattern)
    if len(parts) == ranks * chunks:
        check_layers(given, parts)
        return
    others = {ranks * each: f"interleaved-1f1b:{each}" for each in range(2, len(parts) + 1)}
    fits = (others | {ranks: "1f1b"}).get(len(parts))
    raise ScheduleError(
        f"{given} has {len(parts)} stages, and --pipeline-schedule {options.schedule} has "
        f"{ranks * chunks} on {ranks} pipeline ranks: {f'use {fits}, or ' if fits else ''}remove "
        f"every {hybrid.BEGINS_STAGE} from the pattern"
    )


def complete(pipeline: Pipeline | None, args: Namespace) -> None:
    """Make the schedule, and run the checks that require Megatron's validated arguments.

    Raises:
        ScheduleError: A schedule file is for another number of microbatches.
        UnsupportedError: The schedule does not support a combination of options, or Megatron's
            interleaved 1F1B does not support the number of microbatches.
    """
    if pipeline is None:
        if megatrons_own(args) is not None:
            check_interleaved(args, fixed_counts(args))
        return
    check_derived(args, pipeline.choice.name)
    chunks = pipeline.stage_map.num_chunks
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    check_batch_size(pipeline.choice, args)
    # With --step-batch-size-schedule, no step uses the default of --global-batch-size.
    varies = getattr(args, "step_batch_size_schedule", None) is not None
    # Make the schedule now: an error then stops the run before the model is built. The planner
    # keeps it for the steps. auto first needs the model's memory.
    if pipeline.choice.name != AUTO and not varies:
        pipeline.planner.training(_num_microbatches(args))


def check_changing(pipeline: Pipeline | None, args: Namespace) -> None:
    """Check all numbers of microbatches of a run that changes them, before its first step.

    Raises:
        ScheduleError: The schedule does not support one of the numbers.
        UnsupportedError: Megatron's interleaved 1F1B does not support one of the numbers.
    """
    if pipeline is None:
        check_interleaved(args, changing_counts(args))
    elif pipeline.choice.name in JOINT_NAMES:  # all others support any number
        for count in changing_counts(args):
            pipeline.planner.training(count.number)


def _num_microbatches(args: Namespace) -> int:
    copies = args.data_parallel_size * (getattr(args, "gtp_weight_remat_size", None) or 1)
    microbatches: int = args.global_batch_size // (args.micro_batch_size * copies)
    return max(microbatches, 1)


def prepare_layers(
    state: StepState,
    chunks: Sequence[nn.Module],
    choice: ScheduleConfig | None = None,
    splits_graphs: bool = False,
) -> None:
    """Make the chunks' linear layers defer their weight gradients, and name them in traces.

    With a choice, features change layers too. Layers that CUDA graphs cover compute their weight
    gradients in B, unless the graphs are split too.

    Raises:
        StoreError: Transformer Engine's layers do not match the adapter.
        UnsupportedError: A feature does not support a layer.
    """
    chunks = [unwrapped(chunk) for chunk in chunks]  # module names without wrapper prefixes
    if choice is not None:
        for feature in features():
            feature.prepare_layers(state, chunks, choice)
    whole = graphs.covered(chunks)
    # With split graphs, covered TE layers get a store too: their W is captured separately.
    if splits_graphs:
        whole = {each for each in whole if not te_layers.is_splittable(each)}
    te_layers.install(state, chunks, whole)
    for chunk in chunks:
        mark_gathered(chunk)
        name_weights(chunk)
    replicas = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    # Tensor- and data-parallel replicas have the same layers, so one of them logs.
    if replicas == (0, 0):
        unsplit.tell(chunks, whole)


def prepare_config(config: Any, options: Options) -> Pipeline:
    """Return the pipeline for a TransformerConfig, and set its stages on the config.

    Called before the config checks itself. Raises as `pipeline_of`.
    """
    pipeline = pipeline_of(
        config,
        options,
        RankZeroPlanner(str(options.schedule), options.timeout_seconds),
        check=check_library,
        ties_ends=getattr(config, "share_embeddings_and_output_weights", None),
        kernels=_messages_are_kernels(),
        loss_last=True,
    )
    tell_config(config, pipeline.stage_map)
    return pipeline


def tell_config(config: Any, stage_map: StageMap) -> None:
    """Set the stages on a config; with a layout, Megatron does not compute layer counts itself."""
    config.pipeline_model_parallel_layout = StageLayout(stage_map)
    if stage_map.num_chunks > 1:
        config.virtual_pipeline_model_parallel_size = stage_map.num_chunks
        config.overlap_p2p_comm = True  # required by Megatron for chunks on two ranks


def with_messages_of_this_run(pipeline: Pipeline) -> Pipeline:
    """Update the pipeline for the P2P backend of the run, known once process groups exist."""
    choice = replace(pipeline.choice, kernels=_messages_are_kernels())
    return (
        pipeline
        if choice == pipeline.choice
        else replace(pipeline, planner=Planner(choice, pipeline.planner.once))
    )


def _messages_are_kernels() -> bool:
    if dist.is_initialized():
        return "nccl" in str(dist.get_backend())
    return torch.cuda.is_available()
