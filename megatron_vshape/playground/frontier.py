"""Memory-time frontier: a point per published schedule, and per plan within a limit."""

from collections.abc import Iterator

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import least_limit
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import default_placements
from megatron_vshape.core.paper.catalogue import NAMES
from megatron_vshape.core.plan import Point, frontier
from megatron_vshape.core.request import AUTO, PlanRequest, evaluate_named
from megatron_vshape.playground.request import MOST_CHUNKS, FieldError, Request
from megatron_vshape.playground.schedules import Report
from megatron_vshape.playground.stage_costs import Pricing
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import GIB

STEPS = 11
"""Number of limits from the minimum to the peak of 1F1B."""


def points(request: Request, pricing: Pricing, report: Report) -> Iterator[dict[str, object]]:
    """Yield a point per published schedule and, if requested, per improved plan."""
    asked = PlanRequest(
        AUTO, request.devices, request.microbatches, cut=pricing.cut(request.devices)
    )
    for at, name in enumerate(NAMES):
        try:
            known = evaluate_named(name, asked)
        except ScheduleError as error:
            report({"doing": f"{name} has no point here: {error}"})
            continue
        point: dict[str, object] = {"source": "name", "name": name, "title": display_name(name)}
        point |= {"peak": max(known.peak), "makespan": known.timeline.makespan}
        report({"doing": f"made {name}", "done": at + 1, "of": len(NAMES), "point": point})
        yield point
    if request.plans:
        yield from _planned_points(request, pricing, report)


def _planned_points(request: Request, pricing: Pricing, report: Report) -> list[dict[str, object]]:
    unit = GIB if pricing.in_bytes else 1.0
    question = pricing.question(request.devices, request.microbatches, MOST_CHUNKS)
    limits = list(_limits(request, pricing, question.whole()))
    found: dict[float, dict[str, object]] = {}
    asked = 0

    def searched(_steps: int, value: float, bound: float) -> None:
        stand = {"done": asked, "of": len(limits), "value": value, "bound": bound}
        report({"doing": "planning", **stand})

    def told(each: Point) -> None:
        nonlocal asked
        asked += 1
        known: dict[str, object] = {"doing": "planning", "done": asked, "of": len(limits)}
        if each.value not in found:  # an equal value means that more memory did not help
            point: dict[str, object] = {"source": "plan", "peak": each.peak, "makespan": each.value}
            point |= {"limit": each.limit / unit, "limit_in_gib": pricing.in_bytes}
            found[each.value] = known["point"] = point
        report(known)

    report({"doing": "planning", "done": 0, "of": len(limits)})
    try:
        frontier(question, limits, told, Budget(report=searched))
    except ScheduleError as error:
        raise FieldError("plans", str(error)) from None
    return list(found.values())


def _limits(request: Request, pricing: Pricing, costs: Costs) -> Iterator[float]:
    """Yield up to twelve limits, from the minimum for one microbatch to the peak of 1F1B."""
    devices = request.devices
    least = least_limit(costs, devices, default_placements(devices, costs.num_stages))
    most = max(pricing.base_peak(devices) or least, least)
    steps = STEPS if pricing.in_bytes else min(STEPS, max(round(most - least), 1))
    seen = set()
    for step in range(steps + 1):
        limit = least + (most - least) * step / steps
        limit = limit if pricing.in_bytes else float(round(limit))
        if limit >= least and limit not in seen:
            seen.add(limit)
            yield limit
