"""Guarantees of the planner, independent of its implementation."""

import time
from dataclasses import replace

import pytest

from megatron_vshape import Costs, ScheduleError, make, peak_held, plan, simulate, verify
from megatron_vshape.core import plan as planning
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import MAX_GAP
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.plan import frontier, plan_request
from megatron_vshape.core.planner import search
from megatron_vshape.core.planner.orders import Candidate, PlacementSearch, Run
from megatron_vshape.core.request import PlanRequest, PlanResult
from megatron_vshape.core.schedule_names import AUTO, MEMORY_NAMES, PLUS

REAL = (1.0, 1.15, 0.85, 0.05)


def uniform_costs(devices: int, cost: tuple[float, ...]) -> Costs:
    return Costs.uniform(devices, 2 * devices, *cost)


def test_more_memory_never_costs_time() -> None:
    costs = uniform_costs(4, REAL)
    points = frontier(PlanRequest(AUTO, 4, 8, costs, steps=20_000), range(1, 9))
    assert [point.limit for point in points] == list(range(2, 9))
    bubbles = [point.plan.bubble for point in points]
    assert bubbles == sorted(bubbles, reverse=True)
    for point in points:
        verify(point.plan.schedule, point.limit, costs)


def test_plan_reused_at_a_higher_limit_has_a_bound_of_that_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = uniform_costs(3, (1, 2, 1, 0.05))
    tight, ample = (plan(costs, 3, 4, limit, steps=20_000) for limit in (3, 6))
    assert tight.lower_bound > ample.lower_bound
    worse = replace(tight, lower_bound=ample.lower_bound)

    def answered(request: PlanRequest, _: object) -> PlanResult:
        result = tight if request.limit == 3 else worse
        return PlanResult.of_plan(result, ())

    monkeypatch.setattr("megatron_vshape.core.plan.plan_request", answered)
    first, second = frontier(PlanRequest(AUTO, 3, 4, costs), (3, 6))
    assert second.plan.schedule is first.plan.schedule
    assert first.plan == tight
    assert second.plan == replace(tight, lower_bound=ample.lower_bound)


def test_interrupted_search_returns_the_best_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original_begin, started_searches = PlacementSearch.start_orders, []

    def interrupted(self: PlacementSearch, budget: int, run: Run) -> list[Candidate]:
        started_searches.append(self)
        if len(started_searches) == 2:
            raise KeyboardInterrupt
        return original_begin(self, budget, run)

    monkeypatch.setattr(PlacementSearch, "start_orders", interrupted)
    result = plan(Costs.uniform(4, 16, *REAL), 4, 8, 8, seconds=60)
    assert len(started_searches) == 2
    verify(result.schedule, 8, Costs.uniform(4, result.schedule.num_stages, *REAL))


@pytest.mark.parametrize("limit", [1e15, (1e15, 2.0)])
def test_excessive_limit_reports_true_memory(limit: float | tuple[float, float]) -> None:
    costs = uniform_costs(2, REAL)
    result = plan(costs, 2, 4, limit, steps=20_000)
    limits = limit if isinstance(limit, tuple) else (16, 16)
    assert result.peak == pytest.approx(tuple(peak_held(result.schedule, costs)))
    assert all(peak <= limit for peak, limit in zip(result.peak, limits, strict=True))
    assert plan(costs, 2, 4, 16, steps=20_000).value <= result.value


def test_plus_name_accepts_costs_of_finer_stages() -> None:
    fine, coarse = Costs.uniform(2, 8, *REAL), Costs.uniform(2, 4, *REAL)
    schedules = [
        plan_request(PlanRequest("v-half+", 2, 4, costs, steps=20_000)).schedule
        for costs in (fine, coarse)
    ]
    assert schedules[0] == schedules[1]


def test_plan_exceeding_its_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, ample = uniform_costs(4, REAL), plan(uniform_costs(4, REAL), 4, 8, 8, steps=20_000)
    monkeypatch.setattr(search, "plan", lambda *_, **__: ample)
    with pytest.raises(ScheduleError, match="more than the limit of 6"):
        plan_request(PlanRequest(AUTO, 4, 8, costs, limit=(8, 8, 8, 6)))


@pytest.mark.parametrize("name", MEMORY_NAMES)
def test_plus_name_plans_at_the_memory_of_its_schedule(name: str) -> None:
    costs = uniform_costs(4, (1, 2, 1, 0.05))
    schedule, base = (
        plan_request(PlanRequest(name + PLUS, 4, 8, costs, steps=20_000)).schedule,
        make(name, 4, 8),
    )
    assert schedule.name == name + PLUS
    assert max(peak_held(schedule, costs)) <= max(peak_held(base, costs))
    assert simulate(schedule, costs).makespan <= simulate(base, costs).makespan


def test_search_stops_near_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched, search_one = [], planning._search

    def counted(request: PlanRequest, budget: Budget) -> PlanResult:
        searched.append(request.placements)
        return search_one(request, budget)

    monkeypatch.setattr(planning, "_search", counted)
    layer = StageCosts.of(1.0, 1.0, 1.0, 1.0, 0.5)
    pieces = Pieces(layer, layer.times(0), layer.times(0), 0.0)
    start, costs = time.monotonic(), pieces.costs((1,) * 8)
    request = PlanRequest(AUTO, 4, 64, costs, 1e9, layers=(pieces, 8), seconds=60)
    result = plan_request(request).plan
    assert result.value <= result.lower_bound * (1 + MAX_GAP)
    assert len(searched) == 1
    assert time.monotonic() - start < 30
