"""Plan schedules: the fastest for given costs within a memory limit, or within several limits.

The command line, the playground, the trainer and the sweep call `plan_request`, with a request in
the costs' units. Common rules: no plan is worse than an evaluated schedule that fits, and among
equal times, the plan with less memory is chosen.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import sub
from typing import NamedTuple

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import MAX_GAP, LimitError, fits
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.evaluation import (
    as_plan,
    cached_bound,
    check_sizes,
    evaluate_named,
    evaluate_schedule,
    find_schedule,
    fitting_results,
    limits_of,
    possible_baselines,
    result_rank,
    with_fused_backwards,
)
from megatron_vshape.core.model.costs import Costs, without_copies
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import EVERY_NAME, NAMES
from megatron_vshape.core.planner.vocabulary import (
    PENDING_LOGITS,
    most_logits_bytes,
    share_vocabulary,
    with_vocabulary_passes,
    without_shared,
)
from megatron_vshape.core.program.lowering import with_full_backwards
from megatron_vshape.core.request import SAME, PlanRequest, PlanResult
from megatron_vshape.core.schedule_names import AUTO, PLUS, PLUS_NAMES, BaselineSpec, with_chunks

_MIN_SAVING = 0.002
"""Minimum share of the work that full backwards must save to be planned; smaller
savings are only used where fusing delays no pass."""


def plan_request(request: PlanRequest, budget: Budget | None = None) -> PlanResult:
    """Make the requested schedule: by name, or for AUTO and names with a plus by a search.

    Args:
        request: name or AUTO, sizes, costs and limits.
        budget: time limit and Ctrl-C; the search then ends early, with the best result so far.

    Raises:
        LimitError: the limit is infeasible.
        ScheduleError: the schedule does not exist or does not support these sizes, its file is
            unreadable or infeasible, or the costs are for other stages.
    """
    budget, name = budget or Budget(), request.name
    if isinstance(name, str):
        name = find_schedule(name)
    if name == AUTO:
        return _plan_auto(request, budget)
    slices = request.slices
    if not isinstance(slices, int):
        raise ScheduleError(
            f"only {AUTO} chooses from several numbers of slices; {name} supports one, not "
            f"{', '.join(map(str, slices))}"
        )
    if name in PLUS_NAMES:
        baseline = BaselineSpec(str(name).removesuffix(PLUS), slices=slices)
        return _plan_at_memory_of(baseline, request, budget)
    block = None
    if isinstance(name, str):
        spec = (with_chunks(name) or BaselineSpec(name))._replace(slices=slices)
        block = spec.block(request.num_devices, request.num_microbatches)
        # F and B of a published pair overlap only in Megatron's layer plans.
        schedule = spec.make(request.num_devices, request.num_microbatches).split_overlapped()
        # The name includes the chunks, to distinguish several schedules of one name.
        name = schedule if spec.chunks is None else replace(schedule, name=name)
    costs = request.costs_of(name.placement, name.name)
    return PlanResult(with_vocabulary_passes(name, costs), costs, block)


@lru_cache(maxsize=64)
def published_schedule(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    """Make a published schedule by its name, or load that of a file.

    Raises:
        ScheduleError: the schedule does not exist, or does not support these sizes.
    """
    find_schedule(name, EVERY_NAME)
    schedule = plan_request(PlanRequest(name, num_devices, num_microbatches)).schedule
    check_sizes(schedule, name, num_devices, num_microbatches)
    return schedule


def _plan_at_memory_of(baseline: BaselineSpec, request: PlanRequest, budget: Budget) -> PlanResult:
    """Plan with the memory and placement of a schedule; at worst, return that schedule."""
    evaluated = evaluate_named(baseline, request)
    request = replace(
        request,
        costs=evaluated.costs,
        limit=evaluated.peak,
        placements=(evaluated.schedule.placement,),
        baselines=(evaluated,),
    )
    result = _plan_auto(request, budget)
    return replace(result, schedule=replace(result.schedule, name=baseline.name + PLUS))


def _plan_auto(request: PlanRequest, budget: Budget) -> PlanResult:
    """Search for the best schedule, or return a better evaluated schedule that fits.

    Evaluated schedules are those that could be better, and those in the request. Among equal times,
    the result with less memory is chosen; among equal ones, Megatron's.
    """
    limits = limits_of(request)
    request = replace(request, limit=limits)
    placements = request.searched_placements()
    results: list[PlanResult] = []
    rejected: ScheduleError | None = None
    bounds = {placement: _bound(request, placement) for placement in placements}
    # With a layer split, each placement is searched alone, with a share of the time.
    searches = [request]
    if request.layers is not None:
        share = 1 / len(placements)
        searches = [_for_placement(request, placement, share) for placement in placements]
    for search_request in searches:
        best_value = min((previous.plan.value for previous in results), default=math.inf)
        bound_of_request = min(map(bounds.__getitem__, search_request.placements or placements))
        if results and (budget.stopped() or bound_of_request * (1 + MAX_GAP) >= best_value):
            continue
        try:
            results.append(_search(search_request, budget))
            budget.register_result(partial(results.__getitem__, len(results) - 1))
        except LimitError as error:  # evaluated schedules may have other placements
            rejected = error
        except ScheduleError as error:  # no schedule was found for these costs
            if len(searches) == 1:
                raise
            rejected = rejected or error
    best_value = min((result.plan.value for result in results), default=math.inf)
    generated = possible_baselines(request, best_value, budget)
    baselines = [with_fused_backwards(evaluated) for evaluated in (*request.baselines, *generated)]
    results += fitting_results(baselines, limits)
    if not results:
        raise rejected or ScheduleError("nothing fits")
    best = min(results, key=result_rank)
    verify(best.schedule, limits, best.costs)
    bound = min(best.plan.value, best.plan.lower_bound, *bounds.values())
    return replace(best, baselines=tuple(baselines), searched_bound=bound)


def _for_placement(request: PlanRequest, placement: Placement, share: float) -> PlanRequest:
    """Return the request for this placement only, with a share of its time."""
    costs = request.costs_of(placement, "a plan")
    seconds = None if request.seconds is None else share * request.seconds
    return replace(request, costs=costs, placements=(placement,), seconds=seconds)


def _search(request: PlanRequest, budget: Budget) -> PlanResult:
    """Search at the request's costs, with backwards split where that pays off."""
    # Imported here because numba needs a second to import, which names do not require.
    from megatron_vshape.core.planner import search

    costs, slices, limits = request.full_costs(), request.slice_counts(), limits_of(request)
    if costs.shards_output_layer:
        return _search_shared(replace(request, slices=slices), budget)
    placements = request.searched_placements()
    may_use_full = (
        max(full_backward_saving(costs.sliced(num_slices)) for num_slices in slices) >= _MIN_SAVING
    )
    search_orders = partial(
        search.plan,
        {placement: request.costs_of(placement, "a plan") for placement in placements},
        request.num_devices,
        request.num_microbatches,
        limits,
        request.objective,
        slices=slices,
        steps=request.steps,
        seconds=None if request.seconds is None else request.seconds / (1 + may_use_full),
        progress=budget.progress,
        trades=costs.copies,
        in_host=request.moved_limit,
    )

    def result_of(plan: EvaluatedSchedule) -> PlanResult:
        costs_of_plan = request.costs_of(plan.schedule.placement, "the plan")
        return PlanResult.of_plan(replace(plan, costs=costs_of_plan), limits)

    plan = search_orders(begun=lambda best: budget.register_result(lambda: result_of(best())))
    result = result_of(plan)
    if result.costs.full_us is None:
        return result
    # The best of three plans: all backwards split, adjacent B and W fused, none split.
    split = evaluate_schedule(plan.schedule, result.costs, request.objective)
    candidates = [with_fused_backwards(split), split]
    if may_use_full:
        schedule = with_full_backwards(search_orders(whole=True).schedule)
        costs_of_schedule = request.costs_of(schedule.placement, "the plan")
        candidates.append(evaluate_schedule(schedule, costs_of_schedule, request.objective))
    candidates = [candidate for candidate in candidates if fits(candidate.peak, limits)]
    best = as_plan(min(candidates, key=lambda candidate: candidate.value), limits, plan)
    best = replace(best, evaluated_strategies=plan.evaluated_strategies)
    return PlanResult.of_plan(best, limits)


def _search_shared(request: PlanRequest, budget: Budget) -> PlanResult:
    """Search for the best schedule with vocabulary parallelism.

    It searches every placement; with memory for the logits of few microbatches, if those of many
    are large; and without optional strategies, because the best schedule without vocabulary
    parallelism may not be the best with it.
    """
    costs_of_request, limits = request.full_costs(), limits_of(request)
    candidates: list[tuple[EvaluatedSchedule, EvaluatedSchedule]] = []
    rejected = ScheduleError("nothing fits")
    has_large_logits = most_logits_bytes(costs_of_request) > max(
        costs_of_request.held_after_forward_bytes
    )
    placements = request.searched_placements()
    requests = [_for_placement(request, placement, 1 / len(placements)) for placement in placements]
    if costs_of_request.copies:
        requests += [
            replace(single, costs=without_copies(single.full_costs()), stage_cost_function=None)
            for single in requests
        ]
    for placement_request in requests:
        fitting: list[tuple[EvaluatedSchedule, EvaluatedSchedule]] = []
        for num_pending in sorted(PENDING_LOGITS, reverse=True):
            if fitting and not has_large_logits:
                break
            try:
                fitting.append(_search_with_logits(placement_request, num_pending, budget))
            except LimitError as error:
                rejected = error
        candidates += fitting
    if not candidates:
        raise rejected
    best, plan = min(candidates, key=lambda candidate: candidate[0].value)
    costs = request.costs_of(best.schedule.placement, "the plan")
    return PlanResult.of_plan(as_plan(replace(best, costs=costs), limits, plan), limits)


def _search_with_logits(
    request: PlanRequest, num_pending: int, budget: Budget
) -> tuple[EvaluatedSchedule, EvaluatedSchedule]:
    """Plan with vocabulary parallelism and the logits of `num_pending` microbatches in memory.

    Returns the schedule and the plan of its F, B and W. Their search has the memory that the logits
    leave; the vocabulary passes then use all memory that the plan leaves.
    """
    costs = request.full_costs()
    logits = most_logits_bytes(costs, num_pending)
    limits = tuple(limit - logits for limit in limits_of(request))
    request_without_logits = replace(
        request, costs=without_shared(costs), limit=limits, stage_cost_function=None, layers=None
    )
    try:
        plan = _search(request_without_logits, budget).plan
    except LimitError as error:
        required, minimum = error.required + logits, error.min_limit + logits
        raise LimitError(error.device, error.limit + logits, required, minimum) from None
    spare = min(map(sub, limits, plan.peak))
    counts = [count for count in PENDING_LOGITS if count <= num_pending]
    schedule = share_vocabulary(plan.schedule, costs, spare, counts)
    return evaluate_schedule(schedule, costs, request.objective), plan


def _bound(request: PlanRequest, placement: Placement) -> float:
    costs, limits = request.costs_of(placement, "a plan"), limits_of(request)
    microbatches = request.num_microbatches
    return min(
        cached_bound(costs.sliced(num_slices), placement, microbatches, limits, request.objective)
        for num_slices in request.slice_counts()
    )


def full_backward_saving(costs: Costs) -> float:
    """Return the share of all passes' time that full backwards save; at least 0."""
    split_us = [
        sum(costs.time_us(kind, stage_index) for kind in PARTS)
        for stage_index in range(costs.num_stages)
    ]
    forward_us = [costs.time_us(Kind.F, stage) for stage in range(costs.num_stages)]
    full_backward_us = costs.full_us
    if full_backward_us is None:
        return 0.0
    return max(0.0, 1 - (sum(forward_us) + sum(full_backward_us)) / sum(split_us))


class Point(NamedTuple):
    """A plan at a memory limit, in the unit of the costs' memory."""

    limit: float
    plan: EvaluatedSchedule


def frontier(
    request: PlanRequest,
    limits: Sequence[float],
    report: Callable[[Point], None] = lambda point: None,
    budget: Budget | None = None,
) -> list[Point]:
    """Plan for every limit, from the lowest on.

    A plan for a limit is also valid for every higher one, so that more memory never costs time
    here. Infeasible limits are omitted. The limit in the request is ignored.

    Raises:
        LimitError: the highest limit is infeasible; it contains the minimum limit.
        ScheduleError: there is no limit, or the counts and the costs do not match.
    """
    points: list[Point] = []
    best: EvaluatedSchedule | None = None
    if not limits:
        raise ScheduleError("a frontier needs a limit at least; none is given")
    for limit in sorted(limits):
        if points and budget is not None and budget.stopped():
            break
        try:
            plan = plan_request(replace(request, limit=limit), budget).plan
        except LimitError:
            if limit == max(limits):
                raise
            continue
        # For equal values, keep the plan with less memory, with a bound for this limit too.
        if best is not None and best.value <= plan.value * (1 + SAME):
            plan = replace(best, lower_bound=min(best.lower_bound, plan.lower_bound))
        best = plan
        points.append(Point(limit, plan))
        report(points[-1])
    return points


def published_schedules(request: PlanRequest) -> Iterator[EvaluatedSchedule]:
    """Yield the catalogue's schedules, with the request's costs for each."""
    for name in NAMES:
        try:
            yield evaluate_named(name, request)
        except ScheduleError:  # not for this size, or no costs for its stages
            continue
