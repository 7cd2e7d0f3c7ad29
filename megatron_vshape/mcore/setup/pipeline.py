"""What is known of a run's schedule once its options have been checked, and does not change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron import core

from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.layer_split import Split
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.layout.stages import StageLayout
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import BESIDE, captures_graphs
from megatron_vshape.mcore.setup.checks import check_stages
from megatron_vshape.mcore.setup.choice import Choice
from megatron_vshape.mcore.setup.one_planner import OnePlanner
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.split import graphs


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule that this package runs: what is known once its options have been checked."""

    options: Options
    planner: Planner
    stage_map: StageMap
    layout: StageLayout
    overlaps_grad_reduce: bool
    by_layers: bool = False  # training passes run by Megatron's layer plans, some beside others
    recomputed_inputs: tuple[str, ...] = ()  # modules that B computes anew and W holds on to

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
    choice: Choice,
    split: Split,
    *,
    ties_ends: bool,
    kernels: bool,
    once: OnePlanner,
    overlaps_grad_reduce: bool = False,
    may_offload: bool = False,
) -> Pipeline:
    """Return the pipeline for a model with its layers split so; `once` plans for all ranks.

    `model` are Megatron's arguments or a library's config, which name alike what is read here.

    Raises as `check_stages` does.
    """
    by_layers = bool(getattr(model, BESIDE, False))
    stage_map = StageMap(choice.placement, split.layers, multi_token.num_predicting(model))
    check_stages(model, choice, stage_map, may_offload, core.__version__)
    choice = replace(
        choice,
        costs=split.costs,
        estimate=split.estimate,
        limit_of=split.limits or choice.limit_of,
        num_layers=model.num_layers,
        keeps_backward_whole=getattr(model, "recompute_granularity", None) == "full",
        # Where costs make the order they say how short those W are, and `lower` joins the rest.
        whole_stages=frozenset() if choice.plans_by_costs else _whole_stages(model, stage_map),
        hides=model.tensor_model_parallel_size > 1 and _is_local(model),
        ties_ends=ties_ends,
        kernels=kernels,
        may_offload=may_offload,
        may_join=by_layers,
    )
    if choice.plans_by_costs and options.profile_steps and captures_graphs(model):
        graphs.capture_late(model, options.checked_steps[1])
    return Pipeline(
        options,
        Planner(choice, once),
        stage_map,
        StageLayout(stage_map),
        overlaps_grad_reduce,
        by_layers,
        recomputed_inputs(model),
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
