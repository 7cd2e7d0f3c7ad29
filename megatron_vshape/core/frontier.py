"""Memory against time: the best plan at every limit, beside the published schedules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_vshape.core.bounds import least_limit
from megatron_vshape.core.catalogue import NAMES, make
from megatron_vshape.core.costs import Costs
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.core.schedule import Schedule
from megatron_vshape.core.search import Objective, Plan, default_placements, plan
from megatron_vshape.core.simulate import peak_held, simulate

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
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    limits: Sequence[float],
    objective: Objective = Objective.MAKESPAN,
    seconds: float | None = None,
    report: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """Return the best plan found at every limit, from the tightest on.

    What fits a limit fits every higher one, so that more memory never costs time here. Limits
    that nothing fits are left out.

    Raises:
        LimitError: nothing fits the highest limit; it says the least that does.
        ScheduleError: there is no limit, or the counts and the costs do not match.
    """
    points: list[Point] = []
    if not limits:
        raise ScheduleError("a frontier needs a limit at least; none is given")
    placements = default_placements(num_devices, costs.num_stages)
    least = least_limit(costs, num_devices, placements)
    fitting = [limit for limit in sorted(limits) if limit * _SAME >= least] or [max(limits)]
    for limit in fitting:
        made = plan(costs, num_devices, num_microbatches, limit, objective, seconds=seconds)
        point = Point(limit, max(made.peak), made.value, made.bubble, made.schedule, made)
        if points and points[-1].value < point.value:
            point = replace(points[-1], limit=limit, plan=_of_both(points[-1].plan, made))
        points.append(point)
        report(point)
    return points


def _of_both(before: Plan | None, made: Plan) -> Plan | None:
    """Return the plan of a tighter limit with a bound that holds for the one `made` is for."""
    if before is None:
        return None
    return replace(before, lower_bound=min(before.lower_bound, made.lower_bound))


def published(
    costs_for: Callable[[Schedule], Costs],
    num_devices: int,
    num_microbatches: int,
    objective: Objective = Objective.MAKESPAN,
) -> Iterator[Point]:
    """Yield the catalogue's schedules as points, with the costs that `costs_for` gives each."""
    for name in NAMES:
        try:
            schedule = make(name, num_devices, num_microbatches)
            costs = costs_for(schedule)
        except ScheduleError:  # not for this size, or these costs do not tell its stages
            continue
        timeline = simulate(schedule, costs)
        value = objective.of(timeline)
        peak = max(peak_held(schedule, costs))
        yield Point(peak, peak, value, 1 - timeline.busy / value, schedule)
