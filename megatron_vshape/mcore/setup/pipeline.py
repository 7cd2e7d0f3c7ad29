"""What is known of a run's schedule once its options have been checked, and does not change."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

from megatron_vshape.core.ask import AUTO, Question
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.layer_split import Split, split_layers
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.layout.stages import StageLayout
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import (
    BESIDE,
    UnsupportedError,
    captures_graphs,
    check_split_graphs,
)
from megatron_vshape.mcore.setup.checks import Check, check_stages, take_options
from megatron_vshape.mcore.setup.choice import Choice, choice_for
from megatron_vshape.mcore.setup.one_planner import OnePlanner
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.translate import tell
from megatron_vshape.mcore.split import graphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule that this package runs: what is known once its options have been checked."""

    options: Options
    planner: Planner
    stage_map: StageMap
    layout: StageLayout
    overlaps_grad_reduce: bool
    by_layers: bool = False  # training passes run by Megatron's layer plans, some beside others
    tries: bool = False  # its plan beside others, for some steps each, once costs are measured
    recomputed_inputs: tuple[str, ...] = ()  # modules that B computes anew and W holds on to
    splits_graphs: bool = False  # CUDA graphs are captured of F, B and W, not of F and BW

    @property
    def choice(self) -> Choice:
        """Return what the planner plans."""
        return self.planner.choice

    def ends(self, rank: int, chunk: int | None) -> tuple[bool, bool]:
        """Return whether a rank's chunk is the model's first stage, and whether its last."""
        stage = self.stage_map.stage(rank, chunk)
        return stage == 0, stage == self.stage_map.last_stage


def pipeline_of(
    model: Any,
    options: Options,
    once: OnePlanner,
    *,
    check: Check,
    ties_ends: bool | None,
    kernels: bool,
    microbatches: int | None = None,
    loss_last: bool = False,
) -> Pipeline:
    """Return the pipeline that a run asks for, once all has been checked that can be by now.

    `model` are Megatron's arguments or a library's config, each with a `check` of its own, which
    name alike what is read here; what an option becomes is told, and cleared in them. `ties_ends`
    is None where only the built model knows whether its embeddings are tied. `microbatches` of a
    step, where they are known, let auto choose the layers with the order. `once` plans for all
    ranks.

    The last pipeline rank makes the loss with `loss_last`, which libraries need: there they look
    for all that comes of it, by number, by `is_pipeline_last_stage`, by
    `get_pipeline_model_parallel_last_rank` and in what their own functions have collected.

    Raises:
        ScheduleError: there is no such schedule, or it does not fit this model.
        UnsupportedError: an option does not go with it.
    """
    choice = choice_for(options, model.pipeline_model_parallel_size, loss_last)
    choice, translated = take_options(model, choice, options, check)
    tell(translated)
    keeps_order = options.keep_order or _counts_losses(model)
    options = replace(options, layer_split=translated.layer_split, keep_order=keeps_order)
    may_offload = translated.may_offload
    split = _split(model, choice, options, microbatches, once)
    stage_map = StageMap(choice.placement, split.layers, multi_token.num_predicting(model))
    check_stages(model, choice, stage_map, may_offload, ties_ends is True)
    splits_graphs = _splits_graphs(model, options)
    choice = replace(
        _of_model(choice, model, split, stage_map, splits_graphs),
        ties_ends=ties_ends is not False,
        kernels=kernels,
        may_offload=may_offload,
    )
    if choice.plans_by_costs and options.profile_steps and captures_graphs(model):
        graphs.capture_late(model, options.checked_steps[1])
    return Pipeline(
        options,
        Planner(choice, once),
        stage_map,
        StageLayout(stage_map),
        bool(getattr(model, "overlap_grad_reduce", False)),
        choice.may_join,
        choice.name == AUTO and options.profile_steps is not None and not captures_graphs(model),
        recomputed_inputs(model),
        splits_graphs,
    )


def _counts_losses(model: Any) -> bool:
    """Check for losses that are paired with stored logits by the number of calls, one a microbatch.

    In another order of microbatches each would get the logits of another one.
    """
    names = "logits_save_dir", "logits_load_dir"
    return any(getattr(model, name, None) is not None for name in names)


def _splits_graphs(model: Any, options: Options) -> bool:
    """Return whether CUDA graphs are captured of W apart; log why not, once for all ranks."""
    if not captures_graphs(model) or options.split_graphs != AUTO:
        return False
    try:
        check_split_graphs(model)
    except UnsupportedError as error:
        if os.environ.get("RANK", "0") == "0":
            logger.warning("captured layers compute their weight gradients in B: %s", error)
        return False
    return True


def _split(
    model: Any,
    choice: Choice,
    options: Options,
    microbatches: int | None,
    once: OnePlanner,
) -> Split:
    """Return the layers of every stage, and what such stages cost."""
    text, asked = options.layer_split, _question(choice, options, microbatches)
    return split_layers(model, choice.placement, text, choice.costs, asked, choice.shares, once)


def _question(choice: Choice, options: Options, microbatches: int | None) -> Question | None:
    """Return what auto will ask, where that is known before a model is built.

    It is not where costs are measured anew, and with a limit in GiB if the costs do not know the
    state of layers and ends, of which it is too.
    """
    total, costs = choice.limit_bytes, choice.costs
    knows = costs is not None and costs.knows_all and not choice.shares
    later = options.profile_steps is not None or (total is not None and not knows)
    if choice.name != AUTO or later or microbatches is None:
        return None
    return Question(
        AUTO,
        choice.num_devices,
        microbatches,
        limit=choice.limit_of if total is None else total,
        in_host=choice.in_host_bytes,
        placements=(choice.placement,),
        slices=choice.slices,
    )


def _of_model(
    choice: Choice, model: Any, split: Split, stage_map: StageMap, splits_graphs: bool
) -> Choice:
    """Return the choice with what the model's options and the layers of its stages say."""
    return replace(
        choice,
        costs=split.costs,
        estimate=split.estimate,
        limit_of=split.limits or choice.limit_of,
        num_layers=sum(split.layers),
        layer_shares=split.shares,
        keeps_backward_whole=getattr(model, "recompute_granularity", None) == "full",
        # Where costs make the order they say how short those W are, and `lower` joins the rest.
        whole_stages=(
            frozenset()
            if choice.plans_by_costs or splits_graphs
            else _whole_stages(model, stage_map)
        ),
        hides=model.tensor_model_parallel_size > 1 and _is_local(model),
        may_join=bool(getattr(model, BESIDE, False)),
    )


def _whole_stages(model: Any, stage_map: StageMap) -> frozenset[int]:
    """Return the stages that CUDA graphs cover: all but the one with the output layer, or none."""
    covers = graphs.cover_whole_layers(model)
    return frozenset(range(stage_map.last_stage)) if covers else frozenset()


def _is_local(model: Any) -> bool:
    """Return whether the layers are Megatron's own.

    Transformer Engine's wait inside TE's own code, where nothing else can run.
    """
    return getattr(model, "transformer_impl", "transformer_engine") == "local"


def recomputed_inputs(model: Any) -> tuple[str, ...]:
    """Return the modules whose recomputed results are inputs of linear layers.

    B computes them anew, and W needs them too. Attention's core has no linear layer after it
    that would keep what only it recomputes.
    """
    if getattr(model, "recompute_granularity", None) != "selective":
        return ()
    modules = getattr(model, "recompute_modules", None) or ()
    return tuple(module for module in modules if module != "core_attn")
