"""Under auto, check before a model is built whether one of Megatron's schedules is the best."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from megatron_vshape.core.baselines import BaselineSpec, EvaluatedSchedule, evaluate_baseline
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import recut
from megatron_vshape.core.plan import plan
from megatron_vshape.core.request import AUTO, PlanRequest
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.layout.multi_token import num_predicting
from megatron_vshape.mcore.layout.sizes import options_of, sizes_of
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.setup.checks import fitted, in_evaluation, in_training
from megatron_vshape.mcore.setup.choice import choice_for
from megatron_vshape.mcore.setup.features import Settings, adapted_costs, features
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner

MOST_CHUNKS = 12
"""Maximum number of virtual stages per rank to try."""


def megatrons_if_best(
    args: Namespace, options: Options, once: RankZeroPlanner
) -> BaselineSpec | None:
    """Return the best of Megatron's schedules if no plan for the model is faster, else None.

    A model is built for one placement, so this comparison runs before. It requires costs, and a
    limit that does not depend on the memory of the model, which does not exist yet. None if the run
    uses features of this package or defines its layer split.

    Raises:
        ScheduleError: Costs, limit and number of ranks do not fit each other.
    """
    ranks, costs = args.pipeline_model_parallel_size, options.costs_file
    limit = options.memory_limit_gib
    mine = options.profile_steps or options.layer_split is not None
    mine = mine or any(feature.requires_ours(options) for feature in features())
    if options.schedule != AUTO or ranks == 1 or costs is None or isinstance(limit, float):
        return None
    microbatches = None if mine or _lies_its_own_way(args) else in_training(args)
    if microbatches is None:
        return None
    choice = fitted(Settings(args, choice_for(options, ranks), options))
    assert choice.costs is not None
    measured = adapted_costs(choice, choice.costs, choice.costs.num_stages)
    assert measured is not None
    sizes = sizes_of(options_of(args), 0)
    layers = sizes.num_layers

    def cut(num_stages: int, name: str) -> Costs:
        return recut(measured, num_stages, ranks, name, layers, sizes.shares)

    question = PlanRequest(
        AUTO,
        ranks,
        microbatches,
        measured,
        cut,
        choice.limit_of,
        choice.in_host_bytes,
        placements=(choice.placement,),
        slices=choice.slices,
    )
    overlaps = getattr(args, "overlap_p2p_comm", False)

    evaluation = in_evaluation(args)

    def evaluates(baseline: BaselineSpec) -> bool:
        return evaluation is None or baseline.is_megatrons(ranks, evaluation)

    def compare() -> BaselineSpec | None:
        own = _megatrons(question, layers, overlaps)
        known = tuple(
            each for each in own if each.baseline is not None and evaluates(each.baseline)
        )
        answer = plan(replace(question, baselines=known))
        best = answer.baseline if answer.is_megatrons else None
        return best if best is not None and evaluates(best) else None

    return once(compare)


def _megatrons(
    question: PlanRequest, num_layers: int, overlaps: bool
) -> Iterator[EvaluatedSchedule]:
    """Yield Megatron's schedules for this model with equally many layers in every stage."""
    ranks, microbatches = question.num_devices, question.num_microbatches
    # On two ranks, Megatron supports several chunks only with overlap_p2p_comm.
    most = MOST_CHUNKS if ranks > 2 or overlaps else 1
    for chunks in range(1, most + 1):
        baseline = BaselineSpec("1f1b") if chunks == 1 else BaselineSpec("interleaved-1f1b", chunks)
        if num_layers % (ranks * chunks) or not baseline.is_megatrons(ranks, microbatches):
            continue
        try:
            yield evaluate_baseline(baseline, ranks, microbatches, question.costs_of)
        except ScheduleError:  # the costs cannot be cut into these stages
            continue


def _lies_its_own_way(args: Namespace) -> bool:
    """Return whether the run defines its layer split, or counts embedding or loss as layers."""
    names = (
        "pipeline_model_parallel_layout",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    )
    given = any(getattr(args, name, None) for name in names)
    return given or hybrid.marks_stages(args) or num_predicting(args) > 0
