"""Lower bounds are never above an optimum, and tight for known optima."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vshape import Costs, Schedule, peak_held, simulate
from megatron_vshape.core.check.bounds import lower_bound, min_memory
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.core.model.schedule import Objective


@pytest.mark.parametrize(
    ("microbatches", "limit", "optimum"), [(4, 4, 35), (8, 4, 59), (8, 6, 53), (8, 8, 51)]
)
def test_bound_is_tight_at_proven_optima(microbatches: int, limit: float, optimum: float) -> None:
    costs = Costs.uniform(4, 8)
    bound = lower_bound(costs, v_shape(4), 4, microbatches, [limit] * 4)
    assert optimum - 1 <= bound <= optimum


@st.composite
def random_schedules(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """Draw a valid schedule with mixed microbatches, and unequal costs."""
    devices, chunks, microbatches = (draw(st.integers(1, maximum)) for maximum in (5, 4, 7))
    placement = looping(devices, chunks)
    if chunks == 2 and draw(st.booleans()):
        placement = v_shape(devices)
    stages = len(placement)
    rng = draw(st.randoms(use_true_random=False))
    times = [0.5, 1.0, 1.15, 3.7] if draw(st.booleans()) else [1.0]
    retained = tuple(rng.choice([1.0, 2.07] if len(times) > 1 else [1.0]) for _ in placement)
    retained_share = rng.choice([0.0, 0.4, 1.0, 1.2])
    costs = Costs.of(
        *(tuple(rng.choice(times) for _ in placement) for _ in PARTS),
        rng.choice([0.0, 0.4]),
        retained,
        tuple(retained_share * amount for amount in retained),
    )
    eager = rng.choice([0.0, 1.0, 4.0])  # preference for earlier microbatches
    priority = {
        Pass(kind, s, j): eager * j + rng.choice([0, 3]) * (kind is Kind.F) + rng.random()
        for j in range(microbatches)
        for s in range(stages)
        for kind in PARTS
    }
    rows: list[list[Pass]] = [[] for _ in range(devices)]
    finished: set[Pass] = set()
    while len(finished) < len(priority):
        ready = [p for p in priority if p not in finished and finished.issuperset(p.needs(stages))]
        work = min(ready, key=priority.__getitem__)
        rows[placement[work.stage]].append(work)
        finished.add(work)
    order = tuple(map(tuple, rows))
    return Schedule("random", devices, microbatches, placement, order), costs


@settings(max_examples=60)
@given(random_schedules())
def test_no_random_schedule_beats_the_bound_at_its_memory(drawn: tuple[Schedule, Costs]) -> None:
    """Published schedules are in test_prices.py, with full backwards and overheads."""
    schedule, costs = drawn
    timeline, peak = simulate(schedule, costs), peak_held(schedule, costs)
    sizes = schedule.placement, schedule.num_devices, schedule.num_microbatches
    for goal in Objective:
        span = goal is Objective.SPAN
        bound = lower_bound(costs, *sizes, peak, span=span)
        assert bound <= goal.of(timeline) * (1 + 1e-9)


def test_bound_of_looping_placement_at_v_half_memory_is_exact() -> None:
    costs = Costs.uniform(8, 32)
    # equal to the plan of `scripts/bench_search.py`
    assert lower_bound(costs, looping(8, 4), 8, 24, [10.0] * 8) == pytest.approx(153.5)


def test_bound_of_one_microbatch_is_its_critical_path() -> None:
    costs = Costs.uniform(3, 6, 1, 2, 1, 0.5)
    # 6 F, 6 B, the last W, and 4 messages in each direction
    assert lower_bound(costs, v_shape(3), 3, 1, [2.0] * 3) == 6 + 12 + 1 + 4


def test_small_memory_limit_bounds_throughput() -> None:
    costs = Costs.uniform(8, 16, 1, 2, 1, 0)
    # Device 0 stores its two chunks for 16 * 3 + 1 and 3 + 1 per microbatch; the limit is 4.
    assert lower_bound(costs, v_shape(8), 8, 100, [4.0] * 8) >= 100 * (49 + 4) / 4


def test_span_excludes_start_up() -> None:
    costs = Costs.uniform(4, 8)
    assert lower_bound(costs, v_shape(4), 4, 16, [8.0] * 4, span=True) == 96


@pytest.mark.parametrize("span", [False, True])
def test_memory_of_one_microbatch_bounds_the_time_of_the_next(span: bool) -> None:
    costs = Costs.uniform(2, 2, 1, 1, 1, 2)
    # One microbatch: passes of 2 (F F B B W) and two messages of 2.
    assert lower_bound(costs, linear(2), 2, 2, [2.5] * 2, span) == 2 * 14


def test_minimum_memory() -> None:
    costs = Costs.uniform(3, 6, 1, 1, 1, 0.25)
    assert min_memory(costs, v_shape(3), 3) == (2, 2, 2)
    assert min_memory(Costs.uniform(3, 3), linear(3), 3) == (2, 2, 2)
