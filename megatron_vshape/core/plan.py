"""Plan a schedule: the fastest one for given costs within a memory limit.

The command line, the playground, the trainer and the sweep call `plan_request`, with a request in
the costs' units. Common rules: no plan is worse than an evaluated schedule that fits, and among
equal times, the plan with less memory is chosen.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import sub

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import ENOUGH, LimitError, bound_at, fits, room_in
from megatron_vshape.core.check.simulate import costs_of
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs, without_copies
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement, default_placements, stages_of
from megatron_vshape.core.model.schedule import Objective, Plan, Schedule
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.core.paper.catalogue import EVERY_NAME, NAMES
from megatron_vshape.core.planner.vocabulary import (
    WAITING,
    most_logits_bytes,
    share_vocabulary,
    without_shared,
)
from megatron_vshape.core.program.lowering import whole_backwards
from megatron_vshape.core.request import (
    AUTO,
    PLUS,
    PLUS_NAMES,
    SAME,
    BaselineSpec,
    EvaluatedSchedule,
    PlanRequest,
    PlanResult,
    baselines_of,
    evaluate_named,
    evaluate_schedule,
    find,
    limits_of,
    with_all_kinds,
    with_chunks,
)

WORTH = 0.002
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
        name = find(name)
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
        own = (with_chunks(name) or BaselineSpec(name))._replace(slices=slices)
        block = own.block(request.num_devices, request.num_microbatches)
        # F and B of a published pair overlap only in Megatron's layer plans.
        made = own.make(request.num_devices, request.num_microbatches).split_overlapped()
        # The name includes the chunks, to distinguish several schedules of one name.
        name = made if own.chunks is None else replace(made, name=name)
    costs = request.costs_of(name.placement, name.name)
    return PlanResult(with_all_kinds(name, costs), costs, block)


@lru_cache(maxsize=64)
def published_schedule(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    """Make a published schedule by its name, or load that of a file.

    Raises:
        ScheduleError: the schedule does not exist, or does not support these sizes.
    """
    find(name, EVERY_NAME)
    made = plan_request(PlanRequest(name, num_devices, num_microbatches)).schedule
    own = made.num_devices, made.whole_microbatches
    if own != (num_devices, num_microbatches):
        raise ScheduleError(
            f"{name} is for {own[0]} devices and {own[1]} microbatches, not for {num_devices} and "
            f"{num_microbatches}"
        )
    return made


def _plan_at_memory_of(baseline: BaselineSpec, request: PlanRequest, budget: Budget) -> PlanResult:
    """Plan with the memory and placement of a schedule; at worst, return that schedule."""
    known = evaluate_named(baseline, request)
    request = replace(
        request,
        costs=known.costs,
        limit=known.peak,
        placements=(known.schedule.placement,),
        baselines=(known,),
    )
    result = _plan_auto(request, budget)
    return replace(result, schedule=replace(result.schedule, name=baseline.name + PLUS))


def _plan_auto(request: PlanRequest, budget: Budget) -> PlanResult:
    """Search for the best schedule, or return a better evaluated schedule that fits.

    Evaluated schedules are those that could be better, and those in the request. Among equal times,
    the result with less memory is chosen; among equal ones, Megatron's.
    """
    limits, goal = limits_of(request), request.objective
    request = replace(request, limit=limits)
    whole = request.whole()
    placements = request.placements or default_placements(
        request.num_devices, whole.num_stages, whole.copies
    )
    found: list[PlanResult] = []
    rejected: ScheduleError | None = None
    bounds = {each: _bound(request, each) for each in placements}
    # With a layer split, each placement is searched alone, with a share of the time.
    searches = _by_costs(request, placements)
    for each in searches:
        value = min((one.plan.value for one in found), default=math.inf)
        least = min(map(bounds.__getitem__, each.placements or placements))
        if found and (budget.stopped() or least * (1 + ENOUGH) >= value):
            continue
        try:
            found.append(_search(each, budget))
            budget.found(partial(found.__getitem__, len(found) - 1))
        except LimitError as error:  # evaluated schedules may have other placements
            rejected = error
        except ScheduleError as error:  # no schedule was found for these costs
            if len(searches) == 1:
                raise
            rejected = rejected or error
    value = min((each.plan.value for each in found), default=math.inf)
    generated = _baselines(request, value, budget)
    baselines = [with_fused_backwards(each, goal) for each in (*request.baselines, *generated)]
    found += [_as_result(each, limits, goal) for each in baselines if fits(each.peak, limits)]
    if not found:
        raise rejected or ScheduleError("nothing fits")
    best = min(found, key=_rank)
    verify(best.schedule, limits, best.costs)
    bound = min(best.plan.value, best.plan.lower_bound, *bounds.values())
    return replace(best, baselines=tuple(baselines), searched_bound=bound)


def no_worse_than_published(request: PlanRequest, found: PlanResult | None) -> PlanResult | None:
    """Return the result of a stopped search, or the fastest published schedule if that is faster.

    It evaluates the published schedules that fit, which takes about a second.
    """
    limits, goal = limits_of(request), request.objective
    known = [with_fused_backwards(each, goal) for each in _baselines(request, math.inf, Budget())]
    fitting = [_as_result(each, limits, goal) for each in known if fits(each.peak, limits)]
    best = min(fitting, key=_rank, default=found)
    if found is None or best is None:
        return best
    return best if best.plan.value < found.plan.value * (1 - SAME) else found


def _by_costs(request: PlanRequest, placements: Sequence[Placement]) -> list[PlanRequest]:
    """Return the search requests: one for all placements with common costs."""
    if request.layers is None:
        return [request]
    return [_on(request, placement, 1 / len(placements)) for placement in placements]


def _on(request: PlanRequest, placement: Placement, share: float) -> PlanRequest:
    """Return the request for this placement only, with a share of its time."""
    costs = request.costs_of(placement, "a plan")
    seconds = None if request.seconds is None else share * request.seconds
    return replace(request, costs=costs, placements=(placement,), seconds=seconds)


def _rank(result: PlanResult) -> tuple[float, float, bool]:
    """Return the sort key of a result; values within rounding are equal."""
    value, peak = (float(f"{each:.9g}") for each in (result.plan.value, max(result.plan.peak)))
    return value, peak, not result.is_megatrons


def _search(request: PlanRequest, budget: Budget) -> PlanResult:
    """Search at the request's costs, with backwards split where that pays off."""
    # Imported here because numba needs a second to import, which names do not require.
    from megatron_vshape.core.planner import search

    costs, slices, limits = request.whole(), request.slice_counts(), limits_of(request)
    if costs.shards_output_layer:
        return _search_shared(replace(request, slices=slices), budget)
    placements = request.placements or default_placements(
        request.num_devices, costs.num_stages, costs.copies
    )
    chooses = max(saves(costs.sliced(each)) for each in slices) >= WORTH
    searched = partial(
        search.plan,
        {each: request.costs_of(each, "a plan") for each in placements},
        request.num_devices,
        request.num_microbatches,
        limits,
        request.objective,
        slices=slices,
        steps=request.steps,
        seconds=None if request.seconds is None else request.seconds / (1 + chooses),
        progress=budget.progress,
        trades=costs.copies,
        in_host=request.moved_limit,
    )

    def result_of(made: Plan) -> PlanResult:
        own = request.costs_of(made.schedule.placement, "the plan")
        return PlanResult(made.schedule, own, searched=made, limits=limits)

    made = searched(begun=lambda best: budget.found(lambda: result_of(best())))
    result = result_of(made)
    if result.costs.whole_us is None:
        return result
    # The best of three plans: all backwards split, adjacent B and W fused, none split.
    split = evaluate_schedule(made.schedule, result.costs)
    found = [with_fused_backwards(split, request.objective), split]
    if chooses:
        whole = whole_backwards(searched(whole=True).schedule)
        found.append(evaluate_schedule(whole, request.costs_of(whole.placement, "the plan")))
    found = [each for each in found if fits(each.peak, limits)]
    best = min(found, key=lambda each: request.objective.of(each.timeline))
    fused = _as_plan(best, limits, request.objective, made.source, made.steps)
    fused = replace(fused, tried=made.tried)
    return PlanResult(fused.schedule, best.costs, searched=fused, limits=limits)


def _search_shared(request: PlanRequest, budget: Budget) -> PlanResult:
    """Search for the best schedule with vocabulary parallelism.

    It searches every placement; with memory for the logits of few microbatches, if those of many
    are large; and without optional strategies, because the best schedule without vocabulary
    parallelism may not be the best with it.
    """
    whole, goal, limits = request.whole(), request.objective, limits_of(request)
    found: list[tuple[EvaluatedSchedule, Plan]] = []
    rejected = ScheduleError("nothing fits")
    large = most_logits_bytes(whole) > max(whole.held_after_forward_bytes)
    placements = request.placements or default_placements(
        request.num_devices, whole.num_stages, whole.copies
    )
    requests = [_on(request, each, 1 / len(placements)) for each in placements]
    if whole.copies:
        requests += [
            replace(each, costs=without_copies(each.whole()), cut=None) for each in requests
        ]
    for each in requests:
        fitting: list[tuple[EvaluatedSchedule, Plan]] = []
        for waiting in sorted(WAITING, reverse=True):
            if fitting and not large:
                break
            try:
                fitting.append(_search_with_logits(each, waiting, budget))
            except LimitError as error:
                rejected = error
        found += fitting
    if not found:
        raise rejected
    best, made = min(found, key=lambda each: goal.of(each[0].timeline))
    costs = request.costs_of(best.schedule.placement, "the plan")
    shared = _as_plan(best._replace(costs=costs), limits, goal, made.source, made.steps)
    return PlanResult(shared.schedule, costs, searched=shared, limits=limits)


def _search_with_logits(
    request: PlanRequest, waiting: int, budget: Budget
) -> tuple[EvaluatedSchedule, Plan]:
    """Plan with vocabulary parallelism and the logits of `waiting` microbatches in memory.

    Returns the schedule and the plan of its F, B and W. Their search has the memory that the logits
    leave; the vocabulary passes then use all memory that the plan leaves.
    """
    costs = request.whole()
    logits = most_logits_bytes(costs, waiting)
    room = tuple(limit - logits for limit in limits_of(request))
    bare = replace(request, costs=without_shared(costs), limit=room, cut=None, layers=None)
    try:
        made = _search(bare, budget).plan
    except LimitError as error:
        need, least = error.need + logits, error.least + logits
        raise LimitError(error.device, error.limit + logits, need, least) from None
    spare, counts = min(map(sub, room, made.peak)), [each for each in WAITING if each <= waiting]
    return evaluate_schedule(share_vocabulary(made.schedule, costs, spare, counts), costs), made


def _bound(request: PlanRequest, placement: Placement) -> float:
    costs, limits = request.costs_of(placement, "a plan"), limits_of(request)
    microbatches = request.num_microbatches
    return min(
        _least(costs.sliced(each), placement, microbatches, limits, request.objective)
        for each in request.slice_counts()
    )


_least = lru_cache(maxsize=256)(bound_at)
"""Bounds of placements, cached because they are required before and after a search."""


def _baselines(request: PlanRequest, value: float, budget: Budget) -> Iterator[EvaluatedSchedule]:
    """Yield the evaluated schedules that may be better than a plan of this value.

    Schedules that cannot be better or cannot fit are not generated.
    """
    limits, microbatches = limits_of(request), request.num_microbatches
    for baseline, block in _blocks(request):
        if value < math.inf and budget.stopped():
            return
        try:
            costs = request.costs_of(block.placement, str(baseline)).sliced(baseline.slices)
        except ScheduleError:  # the costs do not have its stages
            continue
        placement, alone = block.placement, without_copies(costs)
        if not request.allows(placement) or not may_fit(block, costs, microbatches, limits):
            continue
        least = _least(alone, placement, microbatches, limits, request.objective)
        if least <= value * (1 + SAME):
            yield evaluate_named(baseline, request)


def _blocks(request: PlanRequest) -> Iterator[tuple[BaselineSpec, BuildingBlock]]:
    """Yield the published schedules of these sizes with their blocks."""
    chunks, slices = request.chunk_counts(), request.slice_counts()
    return baselines_of(request.num_devices, request.num_microbatches, chunks, slices)


def may_fit(
    block: BuildingBlock, costs: Costs, num_microbatches: int, limits: Sequence[float]
) -> bool:
    """Return whether the block's schedule may fit; False if its steady phase exceeds the limits."""
    if num_microbatches * costs.slices < 2 * block.num_devices:  # it may have no steady phase
        return True
    held = list(map(min, costs.held_after_forward_bytes, costs.held_after_backward_bytes))
    rows = zip(block.peaks(), stages_of(block.placement, block.num_devices), strict=True)
    _, limits = room_in(costs, block.placement, limits)
    return fits([peak * min(held[stage] for stage in own) for peak, own in rows], limits)


def with_fused_backwards(known: EvaluatedSchedule, objective: Objective) -> EvaluatedSchedule:
    """Fuse B and W to BW where that is not slower, if BW has a separate cost.

    B sends its gradient before W has run, and W fills idle time. BW costs less if it hides a
    collective or saves launch overhead. So the better choice depends on the position: BW in the
    steady state, if no pass waits for B; B in warm-up and cool-down, where a chain of B is the
    critical path.
    """
    if known.costs.whole_us is None:
        return known
    # Imported here because numba needs a second to import.
    from megatron_vshape.core.fusing import fuse_backwards

    schedule = fuse_backwards(known.timeline, known.costs, objective)
    return evaluate_schedule(schedule, known.costs)._replace(baseline=known.baseline)


def saves(costs: Costs) -> float:
    """Return the share of all passes' time that full backwards save; at least 0."""
    split = [sum(costs.time_us(kind, at) for kind in PARTS) for at in range(costs.num_stages)]
    forward = [costs.time_us(Kind.F, stage) for stage in range(costs.num_stages)]
    whole = costs.whole_us
    if whole is None:
        return 0.0
    return max(0.0, 1 - (sum(forward) + sum(whole)) / sum(split))


def compare(
    request: PlanRequest, result: PlanResult, budget: Budget | None = None
) -> Iterator[EvaluatedSchedule]:
    """Yield Megatron's and the published schedules for a comparison with the result.

    Schedules with optional chunks that do not fit or cannot be faster are omitted unless Megatron
    runs them, because they are slow to generate. After the budget is used up, no schedule is
    generated.
    """
    made = {known.baseline: known for known in result.baselines}
    for baseline, _ in _blocks(request):
        own = baseline.is_megatrons(request.num_devices, request.num_microbatches)
        if baseline in made:
            yield made[baseline]
        elif baseline.chunks is None or own:
            if budget is not None and budget.stopped():
                continue
            try:
                known = evaluate_named(baseline, request)
            except ScheduleError:  # the costs do not have its stages
                continue
            yield with_fused_backwards(known, request.objective)


def _as_result(
    known: EvaluatedSchedule, limits: tuple[float, ...], objective: Objective
) -> PlanResult:
    """Convert an evaluated schedule to a result."""
    made = _as_plan(known, limits, objective, str(known.baseline or known.schedule.name))
    return PlanResult(
        made.schedule,
        known.costs,
        searched=made,
        limits=limits,
        baseline=known.baseline,
        is_megatrons=known.is_megatrons,
    )


def _as_plan(
    known: EvaluatedSchedule,
    limits: Sequence[float],
    objective: Objective,
    source: str,
    steps: int = 0,
) -> Plan:
    """Convert an evaluated schedule to the result of a search."""
    schedule, value = known.schedule, objective.of(known.timeline)
    microbatches = schedule.whole_microbatches
    costs = costs_of(schedule, known.costs)
    bound = bound_at(costs, schedule.placement, microbatches, limits, objective)
    return Plan(
        replace(schedule, name="plan"),
        objective,
        value,
        known.timeline.busy,
        min(bound, value),
        known.peak,
        source,
        steps,
    )


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule at a memory limit. `limit` and `peak` are in the unit of the costs' memory."""

    limit: float
    peak: float
    value: float
    bubble: float
    schedule: Schedule
    plan: Plan | None = None  # None for a published schedule


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
    best: Plan | None = None
    if not limits:
        raise ScheduleError("a frontier needs a limit at least; none is given")
    for limit in sorted(limits):
        if points and budget is not None and budget.stopped():
            break
        try:
            made = plan_request(replace(request, limit=limit), budget).plan
        except LimitError:
            if limit == max(limits):
                raise
            continue
        # For equal values, keep the plan with less memory, with a bound for this limit too.
        if best is not None and best.value <= made.value * (1 + SAME):
            made = replace(best, lower_bound=min(best.lower_bound, made.lower_bound))
        best = made
        points.append(Point(limit, max(made.peak), made.value, made.bubble, made.schedule, made))
        report(points[-1])
    return points


def published(request: PlanRequest) -> Iterator[Point]:
    """Yield the catalogue's schedules as points, with the request's costs for each."""
    for name in NAMES:
        try:
            known = evaluate_named(name, request)
        except ScheduleError:  # not for this size, or no costs for its stages
            continue
        peak, value = max(known.peak), request.objective.of(known.timeline)
        yield Point(peak, peak, value, 1 - known.timeline.busy / value, known.schedule)
