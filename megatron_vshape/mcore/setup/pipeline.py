"""The configuration of a run's schedule after all option checks; it does not change later."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

from megatron_vshape.core.request import AUTO
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.layer_split import Split, split_layers
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.layout.stages import StageLayout
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import (
    OVERLAP_OPTION,
    UnsupportedError,
    captures_graphs,
    check_split_graphs,
)
from megatron_vshape.mcore.setup.checks import Check, check_stages, take_options
from megatron_vshape.mcore.setup.choice import ScheduleConfig, choice_for
from megatron_vshape.mcore.setup.features import Settings, features
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.translate import tell
from megatron_vshape.mcore.split import graphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule of this package with everything known after the option checks."""

    options: Options
    planner: Planner
    stage_map: StageMap
    layout: StageLayout
    overlaps_grad_reduce: bool
    by_layers: bool = False  # training passes run by Megatron's layer plans, some overlapped
    tries: bool = False  # once costs are measured, compare the plan with a named schedule
    recomputed_inputs: tuple[str, ...] = ()  # modules whose results B recomputes and W retains
    splits_graphs: bool = False  # capture CUDA graphs of F, B and W instead of F and BW

    @property
    def choice(self) -> ScheduleConfig:
        """Return the planner's choice."""
        return self.planner.choice

    def ends(self, rank: int, chunk: int | None) -> tuple[bool, bool]:
        """Return whether a rank's chunk is the model's first stage, and whether it is the last."""
        stage = self.stage_map.stage(rank, chunk)
        return stage == 0, stage == self.stage_map.last_stage


def pipeline_of(
    model: Any,
    options: Options,
    once: RankZeroPlanner,
    *,
    check: Check,
    ties_ends: bool | None,
    kernels: bool,
    loss_last: bool = False,
) -> Pipeline:
    """Check a run's options and return its pipeline.

    Args:
        model: Megatron's arguments or a library's config. All names read here exist in both.
            Translated options are logged and reset in this object.
        options: The options of this package.
        once: Plans on one rank for all.
        check: Rejects unsupported options of `model`.
        ties_ends: Whether the embeddings are tied; None if only the built model knows.
        kernels: Whether P2P messages are GPU kernels (NCCL).
        loss_last: The last pipeline rank computes the loss, where libraries look for its results.

    Raises:
        ScheduleError: The schedule does not exist or does not fit this model.
        UnsupportedError: The schedule does not support an option.
    """
    choice = choice_for(options, model.pipeline_model_parallel_size, loss_last)
    choice, translated = take_options(model, choice, options, check)
    tell(translated)
    # Data paired by call number would be paired wrongly in another order of microbatches.
    keeps_order = options.keep_order or _counts_calls(model)
    options = replace(options, layer_split=translated.layer_split, keep_order=keeps_order)
    may_offload = translated.may_offload
    split = _split(model, choice, options)
    stage_map = StageMap(choice.placement, split.layers, multi_token.num_predicting(model))
    # After the split, which defines the stages.
    settings = Settings(model, choice, options, may_offload)
    check_stages(settings, stage_map, ties_ends is True)
    splits_graphs = _splits_graphs(model, options)
    choice = replace(
        _of_model(choice, model, split, stage_map, splits_graphs),
        # If unknown, assume tied embeddings: the restrictive case.
        ties_ends=ties_ends is not False,
        kernels=kernels,
        may_offload=may_offload,
    )
    # Profiled steps can change the schedule, and graphs can replay only the order of their capture.
    if choice.plans_by_costs and options.profile_steps and captures_graphs(model):
        graphs.capture_late(model, options.checked_steps[1])
    return Pipeline(
        options,
        Planner(choice, once),
        stage_map,
        StageLayout(stage_map),
        bool(getattr(model, "overlap_grad_reduce", False)),
        choice.may_overlap,
        choice.name == AUTO and options.profile_steps is not None and not captures_graphs(model),
        recomputed_inputs(model),
        splits_graphs,
    )


def _counts_calls(model: Any) -> bool:
    """Check for stored logits or expert choices that are paired with microbatches by call number.

    In another order of microbatches each would get those of another one. slime and miles store
    expert choices so (use_routing_replay).
    """
    names = "logits_save_dir", "logits_load_dir", "use_routing_replay"
    return any(getattr(model, name, None) not in (None, False) for name in names)


def _splits_graphs(model: Any, options: Options) -> bool:
    """Return whether CUDA graphs capture W separately; log the reason if not, on rank 0."""
    if not captures_graphs(model) or options.split_graphs != AUTO:
        return False
    try:
        check_split_graphs(model)
    except UnsupportedError as error:
        if os.environ.get("RANK", "0") == "0":
            logger.warning("captured layers compute their weight gradients in B: %s", error)
        return False
    return True


def _split(model: Any, choice: ScheduleConfig, options: Options) -> Split:
    """Return the layers of every stage, and the costs of these stages."""
    text, limit_bytes = options.layer_split, _limit_bytes(choice, options)
    ends = next(filter(None, (feature.ends(choice) for feature in features())), None)
    return split_layers(model, choice.placement, text, choice.costs, limit_bytes, ends)


def _limit_bytes(choice: ScheduleConfig, options: Options) -> float | None:
    """Return the memory limit for the layers of the stages, or None if it is unknown.

    It is unknown if the run measures its costs, or if the costs do not include the model states of
    layers and embeddings, which are part of the limit.
    """
    knows = choice.costs is not None and choice.costs.state_bytes is not None and not choice.shares
    if choice.name != AUTO or options.profile_steps is not None or not knows:
        return None
    return choice.limit_bytes


def _of_model(
    choice: ScheduleConfig, model: Any, split: Split, stage_map: StageMap, splits_graphs: bool
) -> ScheduleConfig:
    """Return the choice with the model's options and the layers of its stages."""
    return replace(
        choice,
        costs=split.costs,
        estimate=split.estimate,
        num_layers=sum(split.layers),
        layer_shares=split.shares,
        keeps_backward_whole=getattr(model, "recompute_granularity", None) == "full",
        # If costs determine the schedule, they include how short these W are, and `lower` fuses
        # them with their B.
        whole_stages=(
            frozenset()
            if choice.plans_by_costs or splits_graphs
            else _whole_stages(model, stage_map)
        ),
        hides=model.tensor_model_parallel_size > 1 and _is_local(model),
        may_overlap=bool(getattr(model, OVERLAP_OPTION, False)),
    )


def _whole_stages(model: Any, stage_map: StageMap) -> frozenset[int]:
    """Return the stages covered by CUDA graphs: all but the one with the output layer, or none."""
    covers = graphs.cover_whole_layers(model)
    return frozenset(range(stage_map.last_stage)) if covers else frozenset()


def _is_local(model: Any) -> bool:
    """Return whether the layers are Megatron's own.

    Transformer Engine's layers wait inside TE's code, where no other job can run.
    """
    return getattr(model, "transformer_impl", "transformer_engine") == "local"


def recomputed_inputs(model: Any) -> tuple[str, ...]:
    """Return the modules whose recomputed results are inputs of linear layers.

    B recomputes these results, and W needs them too, so they are retained. Core attention is not
    included: no linear layer retains a result that only core attention recomputes.
    """
    if getattr(model, "recompute_granularity", None) != "selective":
        return ()
    modules = getattr(model, "recompute_modules", None) or ()
    return tuple(module for module in modules if module != "core_attn")
