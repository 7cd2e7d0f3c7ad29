"""The adaptive scheduler: what it returns fits, runs, is judged right and is never bad."""

import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vshape.core.check import bounds
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, ScheduleError
from megatron_vshape.core.model.pieces import regroup
from megatron_vshape.core.model.placement import default_placements, linear, looping, v_shape
from megatron_vshape.core.model.schedule import Objective, Plan
from megatron_vshape.core.plan import frontier
from megatron_vshape.core.planner import search
from megatron_vshape.core.planner.search import plan
from megatron_vshape.core.request import AUTO, PlanRequest

REAL = (1.0, 1.15, 0.85, 0.05)
STEPS = 3000


def check(made: Plan, costs: Costs, limits: tuple[float, ...]) -> None:
    """Raise unless the plan is complete, fits, and says of itself what the simulator says."""
    verify(made.schedule)
    costs = regroup(costs, made.schedule.num_stages, "the plan")
    value = made.objective.of(simulate(made.schedule, costs))
    assert made.value == pytest.approx(value, rel=1e-9)
    peaks = peak_held(made.schedule, costs)
    assert made.peak == pytest.approx(peaks)
    assert all(held <= limit * (1 + 1e-9) for held, limit in zip(peaks, limits, strict=True))
    # the plan's own bound is cut off at its value; the proof must not need that
    schedule, spans = made.schedule, made.objective is Objective.SPAN
    sizes = schedule.placement, schedule.num_devices, schedule.num_microbatches
    assert bounds.lower_bound(costs, *sizes, limits, spans) <= value * (1 + 1e-9)
    assert made.gap >= 0


@st.composite
def problems(draw: st.DrawFn) -> tuple[Costs, int, int, tuple[float, ...], Objective]:
    """Return costs of unequal stages in bytes, counts, limits per device and an objective."""
    devices, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    stages = devices * draw(st.sampled_from([1, 2, 2, 3, 4]))

    def each(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=stages, max_size=stages)))

    times = st.sampled_from([0.5, 1.0, 1.15, 2.0, 3.7])
    held = each(st.sampled_from([1e9, 2e9 + 7, 3.5e9]))
    kept = draw(st.sampled_from([0.0, 0.4, 1.0, 1.2]))
    send = draw(st.sampled_from([0.0, 0.05, 0.4]))
    after = tuple(kept * value for value in held)
    costs = Costs(each(times), each(times), each(times), send, held, after)
    placement = default_placements(devices, stages)[0]
    own = regroup(costs, len(placement), "the plan")
    least = bounds.least_memory(own, placement, devices)
    limits = tuple(value * draw(st.sampled_from([1.0, 1.5, 4.0])) for value in least)
    return costs, devices, microbatches, limits, draw(st.sampled_from(list(Objective)))


@settings(max_examples=25)
@given(problems())
def test_plan_fits_and_runs(problem: tuple[Costs, int, int, tuple[float, ...], Objective]) -> None:
    costs, devices, microbatches, limits, objective = problem
    made = plan(costs, devices, microbatches, limits, objective, steps=STEPS)
    check(made, costs, limits)
    for stage in range(made.schedule.num_stages):
        for kind in PARTS:
            row = made.schedule.order[made.schedule.placement[stage]]
            order = [each.microbatch for each in row if each[:2] == (kind, stage)]
            assert order == sorted(order)


def test_same_inputs_and_steps_give_the_same_plan() -> None:
    costs = Costs.uniform(6, 12, *REAL)
    assert plan(costs, 6, 20, 8, steps=STEPS) == plan(costs, 6, 20, 8, steps=STEPS)


@pytest.mark.parametrize("steps", [STEPS, None])
def test_the_plan_is_the_same_on_any_number_of_cores(
    steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number of steps the turns are several; shorter ones show as much."""
    monkeypatch.setattr(search, "default_steps", lambda _problem: 20_000)
    costs = Costs.uniform(3, 12, *REAL)
    made = []
    for cores in (1, 2, 5):
        monkeypatch.setattr(search, "CORES", cores)
        made.append(plan(costs, 3, 6, 4, steps=steps))
    assert made[0] == made[1] == made[2]


def test_a_placement_whose_bound_is_above_the_best_order_is_left_alone() -> None:
    costs = Costs.uniform(8, 32)
    alone = plan(costs, 8, 24, 10, placements=[looping(8, 4)])
    assert alone.gap == pytest.approx(0)  # so the search ends, long before its budget
    assert plan(costs, 8, 24, 10).value == alone.value
    assert bounds.lower_bound(Costs.uniform(8, 16), v_shape(8), 8, 24, (10.0,) * 8) > alone.value


def test_costs_of_four_stages_per_device_find_the_placement_of_less_bubble() -> None:
    fine, coarse = Costs.uniform(4, 16, *REAL), Costs.uniform(4, 8, *REAL)
    made = plan(fine, 4, 12, 8, steps=STEPS)
    check(made, fine, (8.0,) * 4)
    assert made.schedule.num_stages == 16
    assert made.value < plan(coarse, 4, 12, 8, steps=STEPS).value
    # half a chunk more than a V of whole chunks can use
    assert max(plan(fine, 4, 12, 5.5, steps=STEPS).peak) == 5.5
    # less than a loop of four can be quick in
    assert plan(fine, 4, 12, 4, steps=STEPS).schedule.placement == v_shape(4)


def test_memory_below_the_least_says_the_least() -> None:
    with pytest.raises(ScheduleError, match="the minimum limit for all ranks is 2"):
        plan(Costs.uniform(4, 8), 4, 8, 1.5)


def test_the_least_that_is_said_is_that_of_the_placement_that_needs_least() -> None:
    held = (3.0, 1.0, 1.0, 3.0)  # on device 0 a V has both ends, a loop one
    costs = replace(Costs.uniform(2, 4), held_after_forward_bytes=held)
    with pytest.raises(bounds.LimitError, match="the minimum limit for all ranks is 4") as refused:
        plan(costs, 2, 4, 3.9)
    assert refused.value.least == 4
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    check(plan(costs, 2, 4, 4, steps=STEPS), costs, (4.0, 4.0))


def test_limits_and_stages_must_match_the_devices() -> None:
    with pytest.raises(ScheduleError, match="2 limits for 4 devices"):
        plan(Costs.uniform(4, 8), 4, 8, (4.0, 4.0))
    with pytest.raises(ScheduleError, match="7 stages cannot be distributed over 4 devices"):
        plan(Costs.uniform(4, 7), 4, 8, 4)
    with pytest.raises(ScheduleError, match="at least 1 of microbatches, not 0"):
        plan(Costs.uniform(4, 8), 4, 0, 4)
    for devices in (0, -2):
        with pytest.raises(
            ScheduleError, match=f"8 stages cannot be distributed over {devices} devices"
        ):
            plan(Costs.uniform(4, 8), devices, 8, 4)
    with pytest.raises(ScheduleError, match="'work'; choose makespan or span"):
        plan(Costs.uniform(4, 8), 4, 8, 4, "work")
    with pytest.raises(ScheduleError, match="a frontier needs a limit at least"):
        frontier(PlanRequest(AUTO, 4, 8, Costs.uniform(4, 8)), [])


@pytest.mark.parametrize("objective", list(Objective))
def test_an_infinite_limit_is_none_and_no_number_is_refused(objective: Objective) -> None:
    costs = Costs.uniform(4, 8, *REAL)
    ample = plan(costs, 4, 6, 48, objective, steps=STEPS)
    made = plan(costs, 4, 6, math.inf, objective, steps=STEPS)
    assert (made.schedule, made.value) == (ample.schedule, ample.value)
    check(plan(costs, 4, 6, (math.inf, 4, 4, 4), steps=STEPS), costs, (math.inf, 4, 4, 4))
    with pytest.raises(ScheduleError, match="limit of rank 0 is nan, and one microbatch"):
        plan(costs, 4, 6, math.nan, objective)


def test_the_least_memory_is_enough() -> None:
    costs = Costs.uniform(5, 10, *REAL)
    check(plan(costs, 5, 7, 2, steps=STEPS), costs, (2.0,) * 5)


@pytest.mark.parametrize(("devices", "limit", "overhead"), [(4, 8, 3), (8, 16, 7), (16, 32, 15)])
def test_unit_costs_at_the_memory_of_1f1b(devices: int, limit: int, overhead: int) -> None:
    costs = Costs.uniform(devices, 2 * devices)
    made = plan(costs, devices, 3 * devices, limit, steps=STEPS)
    assert made.overhead == pytest.approx(overhead)
    assert made.gap == pytest.approx(0)


@pytest.mark.parametrize("devices", [4, 7, 8])
def test_span_reaches_zero_bubble_at_the_memory_of_1f1b(devices: int) -> None:
    costs = Costs.uniform(devices, 2 * devices)
    made = plan(costs, devices, 4 * devices, 2 * devices, "span", steps=STEPS)
    assert made.bubble == pytest.approx(0)


def test_times_finer_than_ticks_leave_no_value_below_the_work() -> None:
    costs = Costs.uniform(2, 4, *(1.0000049,) * 3)
    made = plan(costs, 2, 8, 4, "span", steps=STEPS)
    check(made, costs, (4.0, 4.0))
    assert made.value >= made.busy * (1 - 1e-9)


def test_many_microbatches_cost_no_more_than_few_where_no_bubble_repeats() -> None:
    costs = Costs.uniform(8, 16, *REAL)
    only = [v_shape(8)]
    few = plan(costs, 8, 40, 12, placements=only, steps=60_000)
    many = plan(costs, 8, 400, 12, placements=only, steps=60_000)
    check(many, costs, (12.0,) * 8)
    assert many.overhead == pytest.approx(few.overhead, rel=0.05)


def test_real_costs_at_the_memory_of_v_half_beat_the_published_order() -> None:
    costs = Costs.uniform(8, 16, 1, 2, 1, 0.05)
    assert plan(costs, 8, 64, 10, steps=100_000).overhead < 60  # V-Half has 103.9


@pytest.mark.parametrize("placement", [linear(4), looping(4, 3), v_shape(4)])
def test_other_placements(placement: tuple[int, ...]) -> None:
    costs = Costs.uniform(4, len(placement), *REAL)
    made = plan(costs, 4, 9, 10, placements=[placement], steps=STEPS)
    assert made.schedule.placement == placement
    check(made, costs, (10.0,) * 4)


@pytest.mark.parametrize("limit", [4, 11])
def test_the_best_of_the_allowed_placements_is_returned(limit: float) -> None:
    costs = Costs.uniform(4, 8, *REAL)
    both = [v_shape(4), looping(4, 2)]  # the V holds less, the loop needs no turn
    values = [plan(costs, 4, 12, limit, placements=[each], steps=STEPS).value for each in both]
    made = plan(costs, 4, 12, limit, placements=both, steps=2 * STEPS)
    assert made.value < max(values)
    assert made.schedule.placement == both[values.index(min(values))]


def test_a_placement_that_does_not_fit_leaves_the_others() -> None:
    head = (0.0,) * 7 + (4.0,)  # of the last stage: beside stage 0 in a V, not in a loop
    held = tuple(1.0 + more for more in head)
    costs = replace(Costs.uniform(4, 8), held_after_forward_bytes=held)
    limits = (2.5, 2.5, 2.5, 6.5)
    made = plan(costs, 4, 6, limits, steps=STEPS)
    assert made.schedule.placement == looping(4, 2)
    check(made, costs, limits)


def test_ctrl_c_returns_the_best_so_far() -> None:
    def stop(_steps: int, _value: float, _bound: float) -> None:
        raise KeyboardInterrupt

    costs = Costs.uniform(6, 12, *REAL)
    check(plan(costs, 6, 20, 8, seconds=30, progress=stop), costs, (8.0,) * 6)


def test_a_longer_search_is_never_worse() -> None:
    costs = Costs.uniform(4, 8, *REAL)
    quick = plan(costs, 4, 8, 6, steps=STEPS)
    assert plan(costs, 4, 8, 6, steps=STEPS, seconds=1).value <= quick.value
