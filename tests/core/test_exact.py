"""Optimality proofs of small plans."""

import math

import pytest

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.planner.search import plan

pytest.importorskip("ortools")
from exact import _make_model, prove
from ortools.sat.python import cp_model


def test_small_plan_is_proven_optimal() -> None:
    costs = Costs.uniform(2, 4, 1, 1.15, 0.85, 0.05)
    result = prove(plan(costs, 2, 3, 4, steps=2000), costs, 4, seconds=60)
    assert result.gap == pytest.approx(0, abs=1e-5)
    verify(result.schedule, 4, costs)


def test_slow_plan_is_replaced() -> None:
    costs = Costs.uniform(2, 4, 1, 2, 1, 0.05)
    slow = plan(costs, 2, 3, 2, steps=100)
    result = prove(slow, costs, 4, seconds=20)
    assert result.value < slow.value
    verify(result.schedule, 4, costs)


def test_plan_beyond_the_limits_is_rejected() -> None:
    costs = Costs.uniform(2, 4)
    with pytest.raises(ScheduleError, match="not 2 or less"):
        prove(plan(costs, 2, 4, 4, steps=100), costs, 2, seconds=1)


@pytest.mark.parametrize("objective", list(Objective))
def test_solver_accepts_the_initial_plan(objective: Objective) -> None:
    """With the objective span, device 3 starts late and may end after the length of the span."""
    costs = Costs.uniform(4, 8, 9, 9, 9, 0)
    result = plan(costs, 4, 6, 8, objective)
    model = cp_model.CpModel()
    built = _make_model(model, result, costs, (8.0,) * 4)
    timeline = simulate(result.schedule, costs)
    for device in range(4):
        for work, begin, _ in timeline.slots(device):
            model.add(built.start[work] == round(begin * built.per_us))
    assert cp_model.CpSolver().solve(model) == cp_model.OPTIMAL


@pytest.mark.parametrize("limit", [1e13, math.inf])
def test_limit_above_maximum_memory_has_no_effect(limit: float) -> None:
    costs = Costs.uniform(2, 4, 1, 2, 1, 0.05)
    ample = prove(plan(costs, 2, 2, 8, steps=100), costs, limit, seconds=20)
    assert ample.value == pytest.approx(ample.lower_bound)


def test_passes_of_zero_ticks_keep_their_order() -> None:
    costs = Costs.uniform(2, 4, 1e-6, 1, 1, 0)
    result = prove(plan(costs, 2, 3, 2, steps=1), costs, 4, seconds=5)
    verify(result.schedule, 4, costs)
