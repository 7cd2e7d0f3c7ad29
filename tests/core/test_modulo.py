"""Steady orders: the guarantees of the search, checked by simulation."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vshape import Costs, Schedule, ScheduleError, peak_held, simulate, verify
from megatron_vshape.core.check.bounds import min_memory
from megatron_vshape.core.model.kinds import PARTS
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.core.planner.modulo import SteadyOrder, find_steady_orders
from megatron_vshape.core.planner.orders import cyclic_order_of_steady

REAL = (1.0, 1.15, 0.85, 0.05)
STEPS = 20_000


def v_costs(num_devices: int, values: tuple[float, float, float, float] = REAL) -> Costs:
    return Costs.uniform(num_devices, 2 * num_devices, *values)


def unroll(order: SteadyOrder, num_microbatches: int) -> Schedule:
    """Return the schedule that runs the order for `num_microbatches` microbatches."""
    m = num_microbatches
    rows = cyclic_order_of_steady(order, "steady").unroll(m).tolist()
    passes = tuple(
        tuple(Pass(PARTS[work // m % 3], work // m // 3, work % m) for work in row) for row in rows
    )
    return Schedule("steady", len(passes), m, order.placement, passes)


@pytest.mark.parametrize("limit", [2, 4, 5, 6, 8, 16])
def test_orders_fit_every_limit_and_have_the_period_of_a_long_run(limit: int) -> None:
    costs = v_costs(4)
    orders = find_steady_orders(costs, v_shape(4), 4, [limit] * 4, STEPS)
    assert orders
    for order in orders:
        verify(unroll(order, 9), max_held=limit, costs=costs)
    periods = [order.period_us / order.microbatches for order in orders]
    assert all(period <= next_period + 1e-6 for period, next_period in pairwise(periods))
    for order, period in zip(orders, periods, strict=True):
        spans = [simulate(unroll(order, m), costs).makespan for m in (120, 160)]
        assert (spans[1] - spans[0]) / 40 == pytest.approx(period, rel=1e-5)


@pytest.mark.parametrize("devices", [4, 6, 8])
def test_no_bubble_at_the_memory_of_v_min_or_v_half(devices: int) -> None:
    for values, limit in (((1, 1, 1, 0), 2 * ((devices + 4) // 3)), (REAL, devices + 2)):
        costs = v_costs(devices, values)
        best = find_steady_orders(costs, v_shape(devices), devices, [limit] * devices, STEPS)[0]
        busy_us = costs.busy_us(v_shape(devices), devices, 1)
        assert best.period_us == pytest.approx(busy_us)


@pytest.mark.parametrize("placement", [linear(4), looping(4, 2), looping(4, 3)])
def test_linear_and_looping_placements(placement: tuple[int, ...]) -> None:
    costs = Costs.uniform(4, len(placement), *REAL)
    best = find_steady_orders(costs, placement, 4, [16] * 4, STEPS)[0]
    verify(unroll(best, 8), max_held=16, costs=costs)
    assert best.period_us == pytest.approx(best.microbatches * costs.busy_us(placement, 4, 1))


@settings(max_examples=15)
@given(st.data())
def test_unequal_stages_and_limits(data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 4))
    stages = 2 * devices

    def values(minimum: float) -> tuple[float, ...]:
        value = st.floats(minimum, 4).map(lambda number: round(number, 2))
        return tuple(data.draw(st.lists(value, min_size=stages, max_size=stages)))

    costs = Costs.of(values(0.2), values(0.2), values(0.2), 0.1, values(0), values(0))
    minimum_limits = min_memory(costs, v_shape(devices), devices)
    limits = [value * data.draw(st.floats(1, 3)) for value in minimum_limits]
    orders = find_steady_orders(costs, v_shape(devices), devices, limits, 2_000)
    assert orders
    for order in orders:
        schedule = unroll(order, 5)
        verify(schedule)
        for peak, limit in zip(peak_held(schedule, costs), limits, strict=True):
            assert peak <= limit * (1 + 1e-8) + 1e-12


def test_limits_and_costs_must_match_the_placement() -> None:
    with pytest.raises(ScheduleError, match="3 limits for 4 devices"):
        find_steady_orders(v_costs(4), v_shape(4), 4, [8] * 3, STEPS)
    with pytest.raises(ScheduleError, match="for 6 stages, the placement has 8"):
        find_steady_orders(v_costs(3), v_shape(4), 4, [8] * 4, STEPS)
