"""From Megatron's arguments to the configuration of a run, and its checks.

`decide` changes nothing, and `apply` makes all changes of a decision in Megatron's arguments.

A library on top of Megatron-Core does not use Megatron's argument parser. Its schedule options come
from `register`, and the model options from a TransformerConfig (`pipeline_from_config`).
"""

from __future__ import annotations

import copy
import logging
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.paper.catalogue import JOINT_NAMES
from megatron_vshape.core.schedule_names import AUTO, BaselineSpec
from megatron_vshape.environment import is_first_rank
from megatron_vshape.mcore.layout import hybrid, multi_token
from megatron_vshape.mcore.layout.shared_vocabulary import SharedEnds, pad_vocabulary
from megatron_vshape.mcore.layout.stage_map import Split, StageMap, megatrons_text, split_layers
from megatron_vshape.mcore.options import Options, options_of, watchdog_seconds
from megatron_vshape.mcore.refusals import (
    OVERLAP_OPTION,
    UnsupportedError,
    captures_graphs,
    check_arguments,
    check_derived,
    check_library,
    check_split_graphs,
)
from megatron_vshape.mcore.setup.choice import (
    Check,
    check_batch_size,
    check_stages,
    resolve_schedule,
    translate_and_check,
)
from megatron_vshape.mcore.setup.megatron_schedules import (
    changing_counts,
    check_interleaved,
    check_sequence_length,
    choose_megatrons,
    fixed_counts,
    megatrons_own,
    set_megatrons_own,
)
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import RunConfig, ScheduleChoice, Settings
from megatron_vshape.mcore.setup.stage_plan import plan_stages
from megatron_vshape.mcore.setup.translate import log_translated
from megatron_vshape.mcore.split import graphs
from megatron_vshape.runtime.hosts import has_peers

logger = logging.getLogger(__name__)


class StageLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """Megatron's layer layout for any placement.

    Megatron's text form numbers stages by chunk, then rank, so it cannot describe the V placement.
    Megatron looks up layers by rank and chunk in `layout`, which works for every placement. Only
    the number of the first layer must be counted in model order.
    """

    def __init__(self, stage_map: StageMap) -> None:
        stages = [[LayerType.decoder] * count for count in stage_map.layers]
        stages[0].insert(0, LayerType.embedding)
        stages[-1] += [LayerType.mtp] * stage_map.predicting + [LayerType.loss]
        self.stage_map = stage_map
        self.stages = stages
        # Libraries write this into checkpoints and read it: the stages without their placement.
        self.input_data = megatrons_text(stage_map.layers, stage_map.predicting)
        self.pipeline_model_parallel_size = stage_map.num_ranks
        self.virtual_pipeline_model_parallel_size = stage_map.num_chunks
        # [rank][chunk]: what Megatron looks up to build a chunk, to count layers and to save them.
        self.layout = [
            [stages[stage] for stage in stage_map.stages(rank)]
            for rank in range(stage_map.num_ranks)
        ]
        self.flatten_layout = [layer for stage in stages for layer in stage]

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers of this type in all earlier stages."""
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        stage = self.stage_map.stage(pp_rank, vp_stage)
        return sum(layers.count(layer_type) for layers in self.stages[:stage])


class Decision(NamedTuple):
    """The schedule of a run, and the values that it sets in Megatron's arguments or a config."""

    config: RunConfig | None  # None: Megatron runs a schedule of its own
    changes: Mapping[str, Any]


def rank_zero_planner(args: Namespace) -> RankZeroPlanner:
    """Return the planner that runs on one rank for all, with the timeout of Megatron."""
    options = options_of(args)
    names = ("pipeline_model_parallel_size", "num_layers", "global_batch_size", "micro_batch_size")
    sizes = (getattr(args, name, None) for name in names)
    name = " ".join(
        map(str, (options.schedule, options.memory_limit_gib, options.layer_split, *sizes))
    )
    return RankZeroPlanner(name, watchdog_seconds(args))


def pipeline_from_args(
    args: Namespace, registered: Options | None = None, rank_zero: RankZeroPlanner | None = None
) -> RunConfig | None:
    """Decide the pipeline that the flags request, and apply the decision to the arguments.

    Called before Megatron validates its arguments. Without a schedule in the flags, the options of
    `register` apply. Raises as `decide`.
    """
    # Flags win over `register`, because the command line is the more specific.
    options = options_of(args)
    if options.schedule is None and registered is not None:
        options = registered
    # Options that are not given are no attributes of args.
    if options.schedule is not None or "pipeline_timeout" in args:
        _check_values(args, options)
    decision = decide(args, options, rank_zero or rank_zero_planner(args))
    apply(decision, args)
    return decision.config


def decide(args: Namespace, options: Options, rank_zero: RankZeroPlanner) -> Decision:
    """Decide between a schedule of this package and one of Megatron, and their stages.

    The arguments stay unchanged. `rank_zero` plans for all ranks.

    Raises:
        ScheduleError: The schedule does not exist or does not fit this run.
        UnsupportedError: The schedule does not support an option.
    """
    draft = copy.copy(args)
    return Decision(_configure(draft, options, rank_zero), _differences(args, draft))


def apply(decision: Decision, target: Any) -> None:
    """Set the values of a decision in Megatron's arguments or in a config."""
    for name, value in decision.changes.items():
        setattr(target, name, value)


def _differences(original: Any, draft: Any) -> dict[str, Any]:
    """Return the attributes of `draft` that `original` lacks or has with another value."""
    values = vars(original)
    return {
        name: value
        for name, value in vars(draft).items()
        if name not in values or values[name] is not value
    }


def _configure(draft: Namespace, options: Options, rank_zero: RankZeroPlanner) -> RunConfig | None:
    """Return the configuration of a run; None for Megatron's schedules. Set it in `draft`."""
    name, ranks = options.schedule, draft.pipeline_model_parallel_size
    # Before `build_config`, which resets options that Megatron's schedule needs.
    stages = plan_stages(draft, options, rank_zero) if name == AUTO else None
    if isinstance(stages, BaselineSpec):
        choose_megatrons(draft, stages)
        return None
    if name is None or options.asks_for_megatrons_own:
        set_megatrons_own(draft, options)
        return None
    if ranks == 1:  # nothing to schedule, but the options must be valid
        resolve_schedule(options, ranks)
        _warn_of_unused_flags(options)
        return None
    config = build_config(
        draft,
        options,
        check=check_arguments,
        ties_ends=not draft.untie_embeddings_and_output_weights,
        kernels=draft.distributed_backend == "nccl",
        choice=stages,
    )
    _set_stages(draft, config)
    return config


def _set_stages(args: Namespace, config: RunConfig) -> None:
    """Set the chunks per rank, or the stages of a hybrid pattern, in Megatron's arguments."""
    stage_map = config.stage_map
    # Before Megatron's validation, which computes further arguments from these.
    if config.choice.shards_output_layer:
        pad_vocabulary(args, stage_map.num_ranks)
    pattern = getattr(args, hybrid.OPTION, None)
    if pattern is None:
        # Also for one chunk: Megatron then uses the layer counts of the layout.
        args.num_virtual_stages_per_pipeline_rank = stage_map.num_chunks
    else:  # Megatron counts the layers and the chunks of a rank in this pattern
        args.hybrid_layer_pattern = hybrid.cut_pattern(pattern, stage_map.layers)
    if stage_map.num_chunks > 1:
        # Required by Megatron for chunks on two ranks; it does not affect our P2P messages.
        args.overlap_p2p_comm = True


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


def _warn_of_unused_flags(options: Options) -> None:
    """Log flags without effect in a run with one pipeline rank."""
    flags = [f"--pipeline-schedule {options.schedule}", *options.flags_for_ours()]
    if options.post_validates:
        flags.append("--optimizer-post-validation")
    if is_first_rank():
        logger.warning(
            "%s unused: one pipeline rank has nothing to schedule. Set "
            "--pipeline-model-parallel-size to 2 or more",
            ", ".join(flags),
        )


def build_config(
    model: Any,
    options: Options,
    *,
    check: Check,
    ties_ends: bool | None,
    kernels: bool,
    loss_last: bool = False,
    choice: ScheduleChoice | None = None,
) -> RunConfig:
    """Build the configuration of a run, and reject options that it does not support.

    Args:
        model: Megatron's arguments or a library's config. All names read here exist in both.
            Translated options are logged and reset in this object.
        options: The options of this package.
        check: Rejects unsupported options of `model`.
        ties_ends: Whether the embeddings are tied; None if only the built model knows.
        kernels: Whether P2P messages are GPU kernels (NCCL).
        loss_last: The last pipeline rank computes the loss, where libraries look for its results.
        choice: The schedule and the stages of auto's plan; None: not planned yet.

    Raises:
        ScheduleError: The schedule does not exist or does not fit this model.
        UnsupportedError: The schedule does not support an option.
    """
    # 1. The schedule, and with it the placement: the rank and the chunk of every stage.
    ranks = model.pipeline_model_parallel_size
    choice = choice or resolve_schedule(options, ranks, loss_last)
    # 2. Options for Megatron's stages are translated to layers per stage, others are rejected.
    choice, translated = translate_and_check(model, choice, options, check)
    log_translated(translated)
    keeps_order = options.keep_order or _counts_calls(model)
    options = replace(options, layer_split=translated.layer_split, keep_order=keeps_order)
    # 3. The layers of every stage, and the costs of such stages.
    limit_bytes = _limit_bytes(choice, options)
    ends = SharedEnds() if choice.shards_output_layer else None
    text, costs = options.layer_split, choice.costs
    split = split_layers(model, choice.placement, text, costs, limit_bytes, ends, options.encoder)
    stage_map = StageMap(choice.placement, split.layers, multi_token.num_predicting(model))
    check_stages(Settings(model, choice, options), stage_map, ties_ends is True)
    splits_graphs = _splits_graphs(model, options)
    choice = replace(
        _of_model(choice, model, split, stage_map, splits_graphs),
        # If unknown, assume tied embeddings: the restrictive case.
        ties_ends=ties_ends is not False,
        kernels=kernels,
    )
    # Megatron captures CUDA graphs after profiled steps, which can change the pass order.
    if choice.plans_by_costs and options.profile_steps and captures_graphs(model):
        graphs.capture_late(model, options.checked_steps[1])
    measures = choice.name == AUTO and options.profile_steps is not None
    return RunConfig(
        options,
        choice,
        stage_map,
        overlaps_grad_reduce=bool(getattr(model, "overlap_grad_reduce", False)),
        has_trial=measures and not captures_graphs(model),
        recomputed_inputs=recomputed_inputs(model),
        splits_graphs=splits_graphs,
    )


_COUNTS_CALLS = re.compile(r"logits_(save|load)_dir|use_(\w+_)?replay")
"""Options of Megatron and of libraries that store values in the order of forward calls."""


def _counts_calls(model: Any) -> bool:
    """Check for stored values that are paired with microbatches by call number.

    In another order, a microbatch would get the values of another one. Libraries store the choices
    of routers (use_routing_replay) and of indexers (use_indexer_replay) this way.
    """
    return any(
        _COUNTS_CALLS.fullmatch(name) and value not in (None, False)
        for name, value in vars(model).items()
    )


def _splits_graphs(model: Any, options: Options) -> bool:
    """Return whether CUDA graphs capture W separately; log the reason if not, on rank 0."""
    if not captures_graphs(model) or options.split_graphs != AUTO:
        return False
    try:
        check_split_graphs(model)
    except UnsupportedError as error:
        if is_first_rank():
            logger.warning("captured layers compute their weight gradients in B: %s", error)
        return False
    return True


def _limit_bytes(choice: ScheduleChoice, options: Options) -> float | None:
    """Return the memory limit for the layers of the stages, or None if it is unknown.

    It is unknown if the run measures its costs, or if the costs do not include the model states of
    layers and embeddings, which are part of the limit.
    """
    knows = (
        choice.costs is not None
        and STATE_BYTES in choice.costs.by_stage
        and not choice.shards_output_layer
    )
    if choice.name != AUTO or options.profile_steps is not None or not knows:
        return None
    return choice.limit_bytes


def _of_model(
    choice: ScheduleChoice, model: Any, split: Split, stage_map: StageMap, splits_graphs: bool
) -> ScheduleChoice:
    """Return the choice with the model's options and the layers of its stages."""
    # Graphs of full layers cover all stages but the last. If costs determine the schedule, they
    # include how short these W are, and `lower` fuses them with their B.
    fuses = not (choice.plans_by_costs or splits_graphs) and graphs.cover_whole_layers(model)
    return replace(
        choice,
        costs=split.costs,
        estimate=split.estimate,
        num_layers=sum(split.layers),
        layer_shares=split.shares,
        keeps_full_backward=getattr(model, "recompute_granularity", None) == "full",
        whole_stages=frozenset(range(stage_map.last_stage)) if fuses else frozenset(),
        # Only in Megatron's own layers: TE's wait inside TE's code, where no other job can run.
        fills_waits=model.tensor_model_parallel_size > 1
        and getattr(model, "transformer_impl", "transformer_engine") == "local",
        may_overlap=bool(getattr(model, OVERLAP_OPTION, False)),
    )


def recomputed_inputs(model: Any) -> tuple[str, ...]:
    """Return the modules whose recomputed results are inputs of linear layers.

    B recomputes these results, and W needs them too, so they are retained. Core attention is not
    included: no linear layer retains a result that only core attention recomputes.
    """
    if getattr(model, "recompute_granularity", None) != "selective":
        return ()
    modules = getattr(model, "recompute_modules", None) or ()
    return tuple(module for module in modules if module != "core_attn")


def check_and_plan_run(
    pipeline: RunConfig | None, planner: Planner | None, args: Namespace
) -> None:
    """Check the sizes that Megatron has validated, and plan the first step of the run.

    Raises:
        ScheduleError: A schedule file is for another number of microbatches.
        UnsupportedError: The schedule does not support a combination of options, or Megatron's
            interleaved 1F1B does not support the number of microbatches.
    """
    if pipeline is None or planner is None:
        if megatrons_own(args) is not None:
            check_interleaved(args, fixed_counts(args))
        return
    check_derived(args, pipeline.choice.name)
    check_sequence_length(args)
    chunks = pipeline.stage_map.num_chunks
    # Releases differ in how they derive it from the options that `_set_stages` has set.
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    check_batch_size(pipeline.choice, args)
    # With --step-batch-size-schedule, no step uses the default of --global-batch-size.
    varies = getattr(args, "step_batch_size_schedule", None) is not None
    # Make the schedule now: an error then stops the run before the model is built. The planner
    # keeps it for the steps. auto first needs the model's memory. An evaluation needs no schedule.
    trains = not getattr(args, "skip_train", False)
    if pipeline.choice.name != AUTO and not varies and trains:
        copies = args.data_parallel_size * (getattr(args, "gtp_weight_remat_size", None) or 1)
        microbatches = args.global_batch_size // (args.micro_batch_size * copies)
        planner.plan_step(max(microbatches, 1))


def check_changing(planner: Planner | None, args: Namespace) -> None:
    """Check all numbers of microbatches of a run that changes them, before its first step.

    Raises:
        ScheduleError: The schedule does not support one of the numbers.
        UnsupportedError: Megatron's interleaved 1F1B does not support one of the numbers.
    """
    if planner is None:
        check_interleaved(args, changing_counts(args))
    elif planner.choice.name in JOINT_NAMES:  # all others support any number
        for count in changing_counts(args):
            planner.plan_step(count.number)


def pipeline_from_config(config: Any, options: Options) -> RunConfig:
    """Choose the pipeline for a TransformerConfig, and set its stages on the config.

    Called before the config checks itself. Raises as `build_config`.
    """
    draft = copy.copy(config)
    run_config = build_config(
        draft,
        options,
        check=check_library,
        ties_ends=getattr(config, "share_embeddings_and_output_weights", None),
        kernels=_messages_are_kernels(),
        loss_last=True,
    )
    set_stages_in_config(draft, run_config.stage_map)
    apply(Decision(run_config, _differences(config, draft)), config)
    return run_config


def set_stages_in_config(config: Any, stage_map: StageMap) -> None:
    """Set the stages on a config; with a layout, Megatron does not compute layer counts itself."""
    config.pipeline_model_parallel_layout = StageLayout(stage_map)
    if stage_map.num_chunks > 1:
        config.virtual_pipeline_model_parallel_size = stage_map.num_chunks
        config.overlap_p2p_comm = True  # required by Megatron for chunks on two ranks


def with_backend_of_run(pipeline: RunConfig) -> RunConfig:
    """Return the configuration for the P2P backend of the run, known once process groups exist."""
    kernels = _messages_are_kernels()
    if kernels == pipeline.choice.kernels:
        return pipeline
    return replace(pipeline, choice=replace(pipeline.choice, kernels=kernels))


def _messages_are_kernels() -> bool:
    if dist.is_initialized():
        # A dry run has the programs of NCCL on any device.
        return "nccl" in str(dist.get_backend()) or not has_peers()
    return torch.cuda.is_available()
