"""The proof of small plans."""

import pytest

from megatron_vshape.core.costs import Costs
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.core.search import plan
from megatron_vshape.core.verify import verify

pytest.importorskip("ortools")
from megatron_vshape.core.exact import prove


def test_a_small_plan_is_proven_best() -> None:
    costs = Costs.uniform(2, 4, 1, 1.15, 0.85, 0.05)
    made = prove(plan(costs, 2, 3, 4, steps=2000), costs, 4, seconds=60)
    assert made.gap == pytest.approx(0, abs=1e-5)
    verify(made.schedule, 4, costs)


def test_a_bad_plan_is_replaced() -> None:
    costs = Costs.uniform(2, 4, 1, 2, 1, 0.05)
    bad = plan(costs, 2, 3, 2, steps=100)
    made = prove(bad, costs, 4, seconds=20)
    assert made.value < bad.value
    verify(made.schedule, 4, costs)


def test_a_plan_beyond_the_limits_is_refused() -> None:
    costs = Costs.uniform(2, 4)
    with pytest.raises(ScheduleError, match="not 2 or less"):
        prove(plan(costs, 2, 4, 4, steps=100), costs, 2, seconds=1)
