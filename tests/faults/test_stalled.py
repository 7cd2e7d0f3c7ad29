"""A rank that stalls and recovers: training continues with equal results."""

from __future__ import annotations

import pytest
import torch
from faults.conftest import Inject, Tally
from faults.test_killed import AHEAD, FIVE
from mcore.farm import Farm, Train


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_stalled_rank_recovers(
    train: Train, inject: Inject, tally: Tally, seconds: float
) -> None:
    tally(f"a rank stalls {seconds} s", 2)
    stall = {"what": "stall", "seconds": seconds, "step": 2}
    faults = [stall | {"rank": 1, "pass": "F1.4"}, stall | {"rank": 3, "pass": "B3.2", "step": 4}]
    run = inject(faults, *FIVE).check()
    complete_run = train(4, *FIVE)
    assert run.ended_s[0] > 0
    for key in ("losses", "grad_norms"):
        assert run.record[key] == complete_run.record[key]
    stalled, complete = run.merged("parameters"), complete_run.merged("parameters")
    assert all(torch.equal(stalled[name], complete[name]) for name in complete)


@pytest.mark.slow
def test_rank_that_stalls_in_a_step_started_early_recovers(
    farm: Farm, inject: Inject, tally: Tally
) -> None:
    tally("a rank stalls 3 s in a step begun before the last was validated")
    stall = {"what": "stall", "seconds": 3, "step": 4, "rank": 2, "pass": "F2.1"}
    run, complete_run = inject([stall], *AHEAD).check(), farm.run(4, *AHEAD).check()
    assert "post-validation: 2 steps made" in run.output[0]
    for key in ("losses", "grad_norms"):
        assert run.record[key] == complete_run.record[key]
    stalled, complete = run.merged("parameters"), complete_run.merged("parameters")
    assert all(torch.equal(stalled[name], complete[name]) for name in complete)
