"""The lower bounds: never above an optimum, and tight where it is known."""

import pytest

from megatron_vshape.core.check.bounds import least_memory, lower_bound
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.placement import linear, v_shape


@pytest.mark.parametrize(
    ("microbatches", "limit", "optimum"), [(4, 4, 35), (8, 4, 59), (8, 6, 53), (8, 8, 51)]
)
def test_below_the_optima_that_a_solver_has_proven(
    microbatches: int, limit: float, optimum: float
) -> None:
    costs = Costs.uniform(4, 8)
    found = lower_bound(costs, v_shape(4), 4, microbatches, [limit] * 4)
    assert 6 * microbatches + 3 <= found <= optimum


def test_one_microbatch_takes_its_whole_way() -> None:
    costs = Costs.uniform(3, 6, 1, 2, 1, 0.5)
    # 6 F, 6 B, the last W, and 4 hops each way
    assert lower_bound(costs, v_shape(3), 3, 1, [2.0] * 3) == 6 + 12 + 1 + 4


def test_little_memory_bounds_the_rate() -> None:
    costs = Costs.uniform(8, 16, 1, 2, 1, 0)
    # device 0 holds its two chunks for 16 * 3 + 1 and 3 + 1 per microbatch, and may hold 4
    assert lower_bound(costs, v_shape(8), 8, 100, [4.0] * 8) >= 100 * (49 + 4) / 4


def test_the_span_leaves_out_the_start_up() -> None:
    costs = Costs.uniform(4, 8)
    assert lower_bound(costs, v_shape(4), 4, 16, [8.0] * 4, span=True) == 96


def test_least_memory() -> None:
    costs = Costs.uniform(3, 6, 1, 1, 1, 0.25)
    assert least_memory(costs, v_shape(3), 3) == (2, 2, 2)
    assert least_memory(Costs.uniform(3, 3), linear(3), 3) == (2, 2, 2)
