"""The plan of auto before the model is built: Megatron's schedule, or the placement of the stages.

A model is built for one placement. The numbers of chunks per rank and the placements are therefore
compared at start, as by the command `plan`. The passes are planned once the memory of the model is
known (`plans.Planner`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.evaluation import evaluate_named
from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.pieces import recut
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import BaselineSpec
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.layout.multi_token import num_predicting
from megatron_vshape.mcore.layout.sizes import option_reader, sizes_of
from megatron_vshape.mcore.layout.stage_map import StageMap, specified_layers
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.choice import (
    MOST_CHUNKS,
    check_features,
    check_stages,
    resolve_schedule,
)
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.setup.megatron_schedules import in_evaluation, in_training
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.plans import adapted_costs
from megatron_vshape.mcore.setup.run_config import ScheduleChoice, Settings

StageCut = Callable[[Costs, int, str], Costs]
"""Converts costs to another number of stages; the text names their user."""


_Best = BaselineSpec | Placement | None
"""The fastest schedule of Megatron, or the placement of a faster plan."""


def plan_stages(
    args: Namespace, options: Options, rank_zero: RankZeroPlanner
) -> BaselineSpec | ScheduleChoice | None:
    """Under auto, return Megatron's schedule if no plan is faster, else the stages of the plan.

    The result has the placement and the costs of the planned stages.

    None if the stages cannot be planned before the model is built: without costs, if the number of
    microbatches changes, if the memory limit includes a model state of unknown size, or if options
    of Megatron define the layers of the stages.

    Raises:
        ScheduleError: Costs, limit and number of ranks do not fit each other.
    """
    ranks, costs = args.pipeline_model_parallel_size, options.costs()
    limits_state = isinstance(options.memory_limit_gib, float)
    if ranks == 1 or costs is None or (limits_state and STATE_BYTES not in costs.by_stage):
        return None
    microbatches = None if _defines_layers(args) else in_training(args)
    if microbatches is None:
        return None
    choice = resolve_schedule(options, ranks)
    try:
        settings = Settings(args, check_features(Settings(args, choice, options)), options)
    except (ScheduleError, UnsupportedError):
        return None  # unless a translated option is the reason, the checks of the run raise it
    sizes = sizes_of(option_reader(args), 0)

    def cut_stages(stage_costs: Costs, num_stages: int, name: str) -> Costs:
        return recut(stage_costs, num_stages, ranks, name, sizes.num_layers, sizes.shares)

    def compare() -> _Best:
        try:
            return _best_stages(settings, microbatches, cut_stages)
        except LimitError:
            if not limits_state:
                raise
            return None  # the planner reports the need of every rank

    best = rank_zero(compare)
    if best is None or isinstance(best, BaselineSpec):
        return best
    return replace(choice, planned=best, costs=cut_stages(costs, len(best), "the plan"))


def _best_stages(settings: Settings, num_microbatches: int, cut_stages: StageCut) -> _Best:
    """Plan for all placements that the model supports, and compare with Megatron's schedules."""
    choice, ranks = settings.choice, settings.choice.num_devices
    assert choice.costs is not None
    chunks = choice.costs.num_stages // ranks
    costs = adapted_costs(choice, choice.costs, chunks * ranks)
    assert costs is not None
    request = replace(
        choice.request(num_microbatches),
        costs=costs,
        stage_cost_function=partial(cut_stages, costs),
        limit=choice.limit_of if choice.limit_bytes is None else choice.limit_bytes,
        # A layer split is for the stages of the costs.
        chunks=(chunks,) if settings.options.layer_split else tuple(range(1, MOST_CHUNKS + 1)),
    )
    placements = tuple(
        placement for placement in request.searched_placements() if _supports(settings, placement)
    )
    if not placements:  # the checks of the run name the reason
        return None
    request = replace(request, placements=placements)
    baselines = tuple(_megatrons(request, settings))
    result = plan_request(replace(request, baselines=baselines))
    # A schedule of Megatron that its trainer rejects can still be the plan.
    if result.plan.is_megatrons and result.plan.baseline in [
        schedule.baseline for schedule in baselines
    ]:
        return result.plan.baseline
    return result.schedule.placement


def _supports(settings: Settings, placement: Placement) -> bool:
    """Return whether the layers of the model and the features support the placement."""
    args, options = settings.model, settings.options
    ties_ends = not getattr(args, "untie_embeddings_and_output_weights", True)
    settings = replace(settings, choice=replace(settings.choice, planned=placement))
    try:
        check_features(settings)
        layers, _ = specified_layers(args, placement, options.layer_split, settings.choice.costs)
        if layers is not None:  # else they are balanced later, for the chosen placement
            check_stages(settings, StageMap(placement, layers), ties_ends)
    except (ScheduleError, UnsupportedError):
        return False
    return True


def _megatrons(request: PlanRequest, settings: Settings) -> Iterator[EvaluatedSchedule]:
    """Yield Megatron's schedules for this model with equally many layers in every stage.

    None if the run uses features of this package or defines its stages.
    """
    args, options, ranks = settings.model, settings.options, request.num_devices
    if options.profile_steps or options.layer_split or settings.choice.limit_bytes is not None:
        return
    if any(getattr(args, name, None) for name in _CHUNK_OPTIONS):
        return
    if any(feature.label(settings) for feature in features()):
        return
    num_layers = sizes_of(option_reader(args), 0).num_layers
    counts = [request.num_microbatches, in_evaluation(args) or request.num_microbatches]
    # On two ranks, Megatron supports several chunks only with overlap_p2p_comm.
    max_chunks = MOST_CHUNKS if ranks > 2 or getattr(args, "overlap_p2p_comm", False) else 1
    for chunks in range(1, max_chunks + 1):
        baseline = BaselineSpec("1f1b") if chunks == 1 else BaselineSpec("interleaved-1f1b", chunks)
        is_supported = all(baseline.is_megatrons(ranks, count) for count in counts)
        if num_layers % (ranks * chunks) or not is_supported:
            continue
        try:
            yield evaluate_named(baseline, request)
        except ScheduleError:  # the costs cannot be cut into these stages
            continue


_CHUNK_OPTIONS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def _defines_layers(args: Namespace) -> bool:
    """Return whether the run defines its layer split, or counts embedding or loss as layers."""
    names = (
        "pipeline_model_parallel_layout",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    )
    has_option = any(getattr(args, name, None) for name in names)
    return has_option or hybrid.marks_stages(args) or num_predicting(args) > 0
