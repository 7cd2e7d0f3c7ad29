"""Memory against step time: plans for several limits, and the published schedules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.evaluation import evaluate_named
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.paper.catalogue import NAMES
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import SAME, PlanRequest


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
