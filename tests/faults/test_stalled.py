"""A rank that stands still and comes back: training goes on, and computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from faults.conftest import Inject, Tally
from faults.test_killed import FIVE
from mcore.farm import Ended


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_stalled_rank_recovers(
    train: Callable[..., Ended], inject: Inject, tally: Tally, seconds: float
) -> None:
    tally(f"a rank stalls {seconds} s", 2)
    stall = {"what": "stall", "seconds": seconds, "step": 2}
    faults = [stall | {"rank": 1, "pass": "F1.4"}, stall | {"rank": 3, "pass": "B3.2", "step": 4}]
    run = inject(faults, *FIVE).check()
    whole = train(4, *FIVE)
    assert run.ended_s[0] > 0
    for key in ("losses", "grad_norms"):
        assert run.record[key] == whole.record[key]
    mine, theirs = run.merged("parameters"), whole.merged("parameters")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
