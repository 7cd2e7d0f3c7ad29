"""The adaptive scheduler from outside: what it promises, whatever is inside."""

import time
from dataclasses import replace

import pytest

from megatron_vshape.core import plan as planning
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import ENOUGH, lower_bound
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.pieces import Piece, Pieces
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.plan import frontier, plan_request, published
from megatron_vshape.core.planner import search
from megatron_vshape.core.planner.orders import Candidate, PlacementSearch, Run
from megatron_vshape.core.planner.search import plan
from megatron_vshape.core.request import AUTO, MEMORY_NAMES, PLUS, PlanRequest, PlanResult

REAL = (1.0, 1.15, 0.85, 0.05)


def uniform(devices: int, cost: tuple[float, ...]) -> Costs:
    return Costs.uniform(devices, 2 * devices, *cost)


@pytest.mark.parametrize("cost", [(1, 1, 1, 0), REAL, (1, 2, 1, 0.05), (1, 1.7, 0.6, 0.2)])
@pytest.mark.parametrize(("devices", "microbatches"), [(3, 7), (5, 4), (6, 18)])
def test_a_plan_is_proved_and_not_slower_than_what_is_published(
    devices: int, microbatches: int, cost: tuple[float, ...]
) -> None:
    costs = uniform(devices, cost)
    for name in MEMORY_NAMES:
        known = make(name, devices, microbatches)
        limit = max(peak_held(known, costs))
        made = plan(costs, devices, microbatches, limit, steps=100_000)
        verify(made.schedule, limit, costs)
        timeline = simulate(made.schedule, costs)
        assert timeline.makespan == pytest.approx(made.value)
        assert max(peak_held(made.schedule, costs)) == pytest.approx(max(made.peak))
        assert made.value <= simulate(known, costs).makespan * (1 + 1e-9)
        sizes = made.schedule.placement, devices, microbatches
        bound = lower_bound(costs, *sizes, (limit,) * devices)
        assert bound <= timeline.makespan * (1 + 1e-9)


@pytest.mark.slow
def test_repeating_bubbles_are_gone_at_half_the_memory() -> None:
    costs = uniform(8, REAL)
    few, many = (plan(costs, 8, m, 10, steps=300_000).overhead for m in (24, 64))
    assert many <= few + 1  # 40 microbatches more cost less than one pass
    assert many < simulate(make("v-half", 8, 64), costs).overhead


def test_more_memory_never_costs_time() -> None:
    costs = uniform(4, REAL)
    points = frontier(PlanRequest(AUTO, 4, 8, costs, steps=20_000), range(1, 9))
    assert [point.limit for point in points] == list(range(2, 9))
    bubbles = [point.bubble for point in points]
    assert bubbles == sorted(bubbles, reverse=True)
    for point in points:
        verify(point.schedule, point.limit, costs)


def test_a_plan_carried_to_a_higher_limit_has_a_bound_that_holds_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = uniform(3, (1, 2, 1, 0.05))
    tight, ample = (plan(costs, 3, 4, limit, steps=20_000) for limit in (3, 6))
    assert tight.lower_bound > ample.lower_bound
    worse = replace(ample, value=2 * tight.value)

    def answered(question: PlanRequest, _: object) -> PlanResult:
        made = tight if question.limit == 3 else worse
        return PlanResult(made.schedule, costs, searched=made)

    monkeypatch.setattr(planning, "plan_request", answered)
    first, second = frontier(PlanRequest(AUTO, 3, 4, costs), (3, 6))
    assert second.schedule is first.schedule
    assert first.plan == tight
    assert second.plan == replace(tight, lower_bound=ample.lower_bound)


def test_an_interrupt_before_all_placements_have_an_order_keeps_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, begun = PlacementSearch.begin, []

    def interrupted(self: PlacementSearch, budget: int, run: Run) -> list[Candidate]:
        begun.append(self)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return begin(self, budget, run)

    monkeypatch.setattr(PlacementSearch, "begin", interrupted)
    made = plan(Costs.uniform(4, 16, *REAL), 4, 8, 8, seconds=60)
    assert len(begun) == 2
    verify(made.schedule, 8, Costs.uniform(4, made.schedule.num_stages, *REAL))


@pytest.mark.parametrize("limit", [1e15, (1e15, 2.0)])
def test_a_limit_without_measure_hides_no_memory(limit: float | tuple[float, float]) -> None:
    costs = uniform(2, REAL)
    made = plan(costs, 2, 4, limit, steps=20_000)
    limits = limit if isinstance(limit, tuple) else (16, 16)
    assert made.peak == pytest.approx(tuple(peak_held(made.schedule, costs)))
    assert all(peak <= most for peak, most in zip(made.peak, limits, strict=True))
    assert plan(costs, 2, 4, 16, steps=20_000).value <= made.value


def test_what_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ScheduleError, match="more than the 20000000 passes"):
        plan(uniform(64, REAL), 64, 200_000, 64)
    with pytest.raises(ScheduleError, match="more than the 20000000 passes"):
        make("v-half", 4096, 1_000_000)


def test_a_name_with_a_plus_takes_costs_of_a_finer_cut() -> None:
    fine, coarse = Costs.uniform(2, 8, *REAL), Costs.uniform(2, 4, *REAL)
    made = [
        plan_request(PlanRequest("v-half+", 2, 4, each, steps=20_000)).schedule
        for each in (fine, coarse)
    ]
    assert made[0] == made[1]


def test_published_schedules_are_points() -> None:
    points = {
        point.schedule.name: point for point in published(PlanRequest(AUTO, 4, 8, uniform(4, REAL)))
    }
    assert {"1f1b", "v-half", "zb-h2"} <= points.keys()
    assert points["v-half"].peak == pytest.approx(6)
    assert all(point.plan is None for point in points.values())


def test_an_order_within_a_limit_is_proved_to_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, ample = uniform(4, REAL), plan(uniform(4, REAL), 4, 8, 8, steps=20_000)
    monkeypatch.setattr(search, "plan", lambda *_, **__: ample)
    with pytest.raises(ScheduleError, match="more than the limit of 6"):
        plan_request(PlanRequest(AUTO, 4, 8, costs, limit=(8, 8, 8, 6)))


@pytest.mark.parametrize("name", MEMORY_NAMES)
def test_a_name_with_a_plus_is_a_plan_at_its_memory(name: str) -> None:
    costs = uniform(4, (1, 2, 1, 0.05))
    made, base = (
        plan_request(PlanRequest(name + PLUS, 4, 8, costs, steps=20_000)).schedule,
        make(name, 4, 8),
    )
    assert made.name == name + PLUS
    assert max(peak_held(made, costs)) <= max(peak_held(base, costs))
    assert simulate(made, costs).makespan <= simulate(base, costs).makespan


def test_a_search_ends_near_its_bound_and_skips_placements_that_gain_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched, search_one = [], planning._search

    def counted(question: PlanRequest, budget: Budget) -> PlanResult:
        searched.append(question.placements)
        return search_one(question, budget)

    monkeypatch.setattr(planning, "_search", counted)
    layer = Piece(1.0, 1.0, 1.0, 1.0, 0.5)
    pieces = Pieces(layer, layer.times(0), layer.times(0), 0.0)
    begun, costs = time.monotonic(), pieces.costs((1,) * 8)
    request = PlanRequest(AUTO, 4, 64, costs, 1e9, layers=(pieces, 8), seconds=60)
    made = plan_request(request).plan
    assert made.value <= made.lower_bound * (1 + ENOUGH)
    assert len(searched) == 1
    assert time.monotonic() - begun < 30
