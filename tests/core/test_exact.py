"""Optimality proofs of small plans."""

import pytest

from megatron_vshape import Costs, plan, simulate, verify
from megatron_vshape.core.model.schedule import Objective

pytest.importorskip("ortools")
from exact import _make_model, prove
from ortools.sat.python import cp_model


def test_small_plan_is_proven_optimal() -> None:
    costs = Costs.uniform(2, 4, 1, 1.15, 0.85, 0.05)
    result = prove(plan(costs, 2, 3, 4, steps=2000), costs, 4, seconds=60)
    assert result.gap == pytest.approx(0, abs=1e-5)
    verify(result.schedule, 4, costs)


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
