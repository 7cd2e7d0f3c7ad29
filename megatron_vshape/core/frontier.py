"""Memory-time frontier: the best plan at every limit, next to the published schedules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_vshape.core.baselines import evaluate
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import least_limit
from megatron_vshape.core.model.costs import without_copies
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import default_placements
from megatron_vshape.core.model.schedule import Plan, Schedule
from megatron_vshape.core.paper.catalogue import NAMES
from megatron_vshape.core.plan import plan
from megatron_vshape.core.planner.vocabulary import WAITING, most_logits_bytes
from megatron_vshape.core.request import PlanRequest

_SAME = 1 + 1e-9


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
    if not limits:
        raise ScheduleError("a frontier needs a limit at least; none is given")
    costs = request.whole()
    placements = default_placements(request.num_devices, costs.num_stages)
    least = least_limit(costs, request.num_devices, placements) + most_logits_bytes(
        costs, min(WAITING)
    )
    for limit in [each for each in sorted(limits) if each * _SAME >= least] or [max(limits)]:
        if points and budget is not None and budget.stopped():
            break
        made = plan(replace(request, limit=limit), budget).plan
        point = Point(limit, max(made.peak), made.value, made.bubble, made.schedule, made)
        # For equal values, keep the plan with less memory.
        if points and points[-1].value <= point.value * _SAME:
            point = replace(points[-1], limit=limit, plan=_of_both(points[-1].plan, made))
        points.append(point)
        report(point)
    return points


def families(request: PlanRequest) -> dict[str, PlanRequest]:
    """Return requests with fewer strategies to save memory, by name.

    The first request has all strategies of the costs; it is the only one if the costs have none.
    """
    costs = request.whole()
    if not costs.copies:
        return {"all": request}
    return {"all": request, "order alone": request.changed(without_copies)}


def _of_both(before: Plan | None, made: Plan) -> Plan | None:
    """Return the plan of a lower limit, with a bound that is valid for the limit of `made` too."""
    if before is None:
        return None
    return replace(before, lower_bound=min(before.lower_bound, made.lower_bound))


def published(request: PlanRequest) -> Iterator[Point]:
    """Yield the catalogue's schedules as points, with the request's costs for each."""
    for name in NAMES:
        try:
            result = plan(replace(request, name=name, slices=1))
        except ScheduleError:  # not for this size, or no costs for its stages
            continue
        known = evaluate(result.schedule, result.costs)
        peak, value = max(known.peak), request.objective.of(known.timeline)
        yield Point(peak, peak, value, 1 - known.timeline.busy / value, known.schedule)
