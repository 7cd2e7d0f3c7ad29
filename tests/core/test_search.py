"""The planner's results fit, are valid, have the simulated time, and are never bad."""

import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vshape import Costs, ScheduleError, peak_held, plan, simulate, verify
from megatron_vshape.core.check import bounds
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.model.kinds import PARTS
from megatron_vshape.core.model.pieces import regroup
from megatron_vshape.core.model.placement import (
    default_placements,
    looping,
    v_shape,
    zigzag,
)
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.plan import frontier
from megatron_vshape.core.planner import orders, search
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO

REAL = (1.0, 1.15, 0.85, 0.05)
STEPS = 3000


def check_plan(result: EvaluatedSchedule, costs: Costs, limits: tuple[float, ...]) -> None:
    """Fail unless the plan is complete, fits, and its figures equal the simulation."""
    verify(result.schedule)
    costs = regroup(costs, result.schedule.num_stages, "the plan")
    value = result.objective.of(simulate(result.schedule, costs))
    assert result.value == pytest.approx(value, rel=1e-9)
    peaks = peak_held(result.schedule, costs)
    assert result.peak == pytest.approx(peaks)
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, limits, strict=True))
    # The plan's bound is clipped at its value; the proof must not need that.
    schedule, is_span = result.schedule, result.objective is Objective.SPAN
    sizes = schedule.placement, schedule.num_devices, schedule.num_microbatches
    assert bounds.lower_bound(costs, *sizes, limits, is_span) <= value * (1 + 1e-9)
    assert result.gap >= 0


@st.composite
def problems(draw: st.DrawFn) -> tuple[Costs, int, int, tuple[float, ...], Objective]:
    """Return costs of unequal stages in bytes, counts, limits per device and an objective."""
    devices, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    stages = devices * draw(st.sampled_from([1, 2, 2, 3, 4]))

    def per_stage(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=stages, max_size=stages)))

    times = st.sampled_from([0.5, 1.0, 1.15, 2.0, 3.7])
    memory = per_stage(st.sampled_from([1e9, 2e9 + 7, 3.5e9]))
    retained_share = draw(st.sampled_from([0.0, 0.4, 1.0, 1.2]))
    send = draw(st.sampled_from([0.0, 0.05, 0.4]))
    retained = tuple(retained_share * value for value in memory)
    costs = Costs.of(per_stage(times), per_stage(times), per_stage(times), send, memory, retained)
    placement = default_placements(devices, stages)[0]
    stage_costs = regroup(costs, len(placement), "the plan")
    min_limits = bounds.min_memory(stage_costs, placement, devices)
    limits = tuple(value * draw(st.sampled_from([1.0, 1.5, 4.0])) for value in min_limits)
    return costs, devices, microbatches, limits, draw(st.sampled_from(list(Objective)))


@settings(max_examples=25)
@given(problems())
def test_plan_fits_and_runs(problem: tuple[Costs, int, int, tuple[float, ...], Objective]) -> None:
    costs, devices, microbatches, limits, objective = problem
    result = plan(costs, devices, microbatches, limits, objective, steps=STEPS)
    check_plan(result, costs, limits)
    for stage in range(result.schedule.num_stages):
        for kind in PARTS:
            row = result.schedule.order[result.schedule.placement[stage]]
            order = [work.microbatch for work in row if work[:2] == (kind, stage)]
            assert order == sorted(order)


@pytest.mark.parametrize("steps", [STEPS, None])
def test_plan_is_identical_for_any_number_of_cores(
    steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number of steps, the search has several rounds; short rounds suffice here."""
    monkeypatch.setattr(search, "default_steps", lambda _problem: 20_000)
    costs = Costs.uniform(3, 12, *REAL)
    plans = []
    for cores in (1, 2, 5):
        monkeypatch.setattr(search, "CORES", cores)
        plans.append(plan(costs, 3, 6, 4, steps=steps))
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize(("seconds", "steps"), [(60, 160_000), (0.5, 39_062)])
def test_annealing_ends_within_the_time_limit(
    seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 0.4 us per device; at 32 devices, a limit of 0.5 s took 4 s."""
    annealed: list[int] = []

    def find_steady_orders(*arguments: Any) -> list[Any]:
        annealed.append(arguments[4])
        return []

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(orders, "find_steady_orders", find_steady_orders)
    costs = Costs.uniform(32, 64, *REAL)
    plan(costs, 32, 32, 32, placements=[looping(32, 2)], seconds=seconds, progress=stop)
    assert annealed == [steps]


def test_placement_with_bound_above_the_best_value_is_skipped() -> None:
    costs = Costs.uniform(8, 32)
    looping_result = plan(costs, 8, 24, 10, placements=[looping(8, 4)])
    assert looping_result.gap == pytest.approx(0)  # so the search ends long before its budget
    assert plan(costs, 8, 24, 10).value == looping_result.value
    assert (
        bounds.lower_bound(Costs.uniform(8, 16), v_shape(8), 8, 24, (10.0,) * 8)
        > looping_result.value
    )


def test_zigzag_of_two_chunks_is_the_v() -> None:
    assert zigzag(3, 2) == v_shape(3) == (0, 1, 2, 2, 1, 0)
    assert zigzag(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)


def test_zigzag_shortens_the_ramps_within_the_memory_of_a_v() -> None:
    """Half as large chunks reach the last device in half the time; a loop needs more memory."""
    costs, limit = Costs.uniform(3, 12), 3.0
    idle = []
    for placement in (v_shape(3), looping(3, 4), zigzag(3, 4)):
        searched = plan(costs, 3, 33, limit, placements=[placement], steps=100_000)
        idle.append(searched.value - searched.busy)
    assert idle[2] == pytest.approx(5.5)  # its bound
    assert min(idle[:2]) > 6 * idle[2]


def test_orders_that_are_optimal_on_their_placement_leave_starts_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V-Min is optimal on the V and better than all starts on the zigzag, whose bound is lower."""
    monkeypatch.setattr(search, "STARTS", 1)
    placements = v_shape(9), zigzag(9, 3)
    costs = {placement: Costs.uniform(9, len(placement)) for placement in placements}
    searched = plan(costs, 9, 26, 8.9, steps=20_000)
    assert searched.steps > 0


def test_finer_costs_allow_a_placement_with_less_bubble() -> None:
    fine, coarse = Costs.uniform(4, 16, *REAL), Costs.uniform(4, 8, *REAL)
    result = plan(fine, 4, 12, 8, steps=STEPS)
    check_plan(result, fine, (8.0,) * 4)
    assert result.schedule.num_stages == 16
    assert result.value < plan(coarse, 4, 12, 8, steps=STEPS).value
    # half a chunk more than a V of full chunks can use
    assert max(plan(fine, 4, 12, 5.5, steps=STEPS).peak) == 5.5
    # too little for a fast looping plan of four stages per device
    assert plan(fine, 4, 12, 4, steps=STEPS).schedule.placement == v_shape(4)


def test_strategy_has_the_time_of_its_fastest_placement() -> None:
    result = plan(Costs.uniform(4, 16, *REAL), 4, 12, 8, steps=STEPS)
    (strategy,) = result.evaluated_strategies
    assert strategy.value == pytest.approx(result.value)


def test_error_names_the_minimum_over_placements() -> None:
    # Device 0 has both outer stages in a V, and one of them in a loop.
    memory = (3.0, 1.0, 1.0, 3.0)
    costs = Costs.uniform(2, 4).having(held_after_forward_bytes=memory)
    with pytest.raises(bounds.LimitError, match="the minimum limit for all ranks is 4") as error:
        plan(costs, 2, 4, 3.9)
    assert error.value.min_limit == 4
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    check_plan(plan(costs, 2, 4, 4, steps=STEPS), costs, (4.0, 4.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 8, (4.0, 4.0)), "2 limits for 4 devices"),
        ((3, 8, 4), "8 stages cannot be distributed over 3 devices"),
        ((0, 8, 4), "8 stages cannot be distributed over 0 devices"),
        ((4, 0, 4), "at least 1 of microbatches, not 0"),
        ((4, 8, 4, "work"), "'work'; choose makespan or span"),
        ((4, 10_000_000, 4), "more than the 20000000 passes"),
    ],
)
def test_sizes_that_do_not_match_are_rejected(arguments: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        plan(Costs.uniform(4, 8), *arguments)


def test_frontier_needs_a_limit() -> None:
    with pytest.raises(ScheduleError, match="a frontier needs a limit at least"):
        frontier(PlanRequest(AUTO, 4, 8, Costs.uniform(4, 8)), [])


@pytest.mark.parametrize("objective", list(Objective))
def test_infinite_limit_is_unlimited_and_nan_is_rejected(objective: Objective) -> None:
    costs = Costs.uniform(4, 8, *REAL)
    ample = plan(costs, 4, 6, 48, objective, steps=STEPS)
    unlimited = plan(costs, 4, 6, math.inf, objective, steps=STEPS)
    assert (unlimited.schedule, unlimited.value) == (ample.schedule, ample.value)
    check_plan(plan(costs, 4, 6, (math.inf, 4, 4, 4), steps=STEPS), costs, (math.inf, 4, 4, 4))
    with pytest.raises(ScheduleError, match="limit of rank 0 is nan, and one microbatch"):
        plan(costs, 4, 6, math.nan, objective)


def test_unit_costs_at_the_memory_of_1f1b() -> None:
    result = plan(Costs.uniform(8, 16), 8, 24, 16, steps=STEPS)
    assert result.overhead == pytest.approx(7)
    assert result.gap == pytest.approx(0)
    assert plan(Costs.uniform(7, 14), 7, 28, 14, "span", steps=STEPS).bubble == pytest.approx(0)


def test_rounded_times_give_no_value_below_the_work() -> None:
    costs = Costs.uniform(2, 4, *(1.0000049,) * 3)
    result = plan(costs, 2, 8, 4, "span", steps=STEPS)
    check_plan(result, costs, (4.0, 4.0))
    assert result.value >= result.busy * (1 - 1e-9)


def test_overhead_is_independent_of_microbatches_without_steady_bubble() -> None:
    costs = Costs.uniform(8, 16, *REAL)
    placements = [v_shape(8)]
    few = plan(costs, 8, 40, 12, placements=placements, steps=60_000)
    many = plan(costs, 8, 400, 12, placements=placements, steps=60_000)
    check_plan(many, costs, (12.0,) * 8)
    assert many.overhead == pytest.approx(few.overhead, rel=0.05)


def test_plan_at_v_half_memory_is_faster_than_v_half() -> None:
    costs = Costs.uniform(8, 16, 1, 2, 1, 0.05)
    assert plan(costs, 8, 64, 10, steps=100_000).overhead < 60  # V-Half: 103.9


@pytest.mark.parametrize("limit", [4, 11])
def test_best_allowed_placement_is_returned(limit: float) -> None:
    costs = Costs.uniform(4, 8, *REAL)
    # The V needs less memory, the loop no extra messages at its turn.
    placements = [v_shape(4), looping(4, 2)]
    values = [
        plan(costs, 4, 12, limit, placements=[placement], steps=STEPS).value
        for placement in placements
    ]
    result = plan(costs, 4, 12, limit, placements=placements, steps=2 * STEPS)
    assert result.value < max(values)
    assert result.schedule.placement == placements[values.index(min(values))]


def test_placement_that_does_not_fit_is_skipped() -> None:
    # The last stage is on the device of stage 0 in a V, but not in a loop.
    memory = (1.0,) * 7 + (5.0,)
    costs = Costs.uniform(4, 8).having(held_after_forward_bytes=memory)
    limits = (2.5, 2.5, 2.5, 6.5)
    result = plan(costs, 4, 6, limits, steps=STEPS)
    assert result.schedule.placement == looping(4, 2)
    check_plan(result, costs, limits)


def test_longer_search_is_not_worse() -> None:
    costs = Costs.uniform(4, 8, *REAL)
    quick = plan(costs, 4, 8, 6, steps=STEPS)
    assert plan(costs, 4, 8, 6, steps=STEPS, seconds=1).value <= quick.value
