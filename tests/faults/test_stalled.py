"""A rank that stalls and recovers: training continues with equal results."""

from __future__ import annotations

import pytest
from faults.conftest import Inject, Tally
from faults.test_killed import AHEAD, FIVE, assert_same_end
from mcore.farm import Train

slow = pytest.mark.slow
EARLY = "a step begun before the last was validated"


@pytest.mark.parametrize(
    ("flags", "seconds", "faults", "what"),
    [
        (FIVE, 3, [(1, "F1.4", 2), (3, "B3.2", 4)], "two steps"),
        pytest.param(FIVE, 30, [(1, "F1.4", 2), (3, "B3.2", 4)], "two steps", marks=slow),
        pytest.param(AHEAD, 3, [(2, "F2.1", 4)], EARLY, marks=slow),
    ],
)
def test_a_stalled_rank_recovers(
    train: Train,
    inject: Inject,
    tally: Tally,
    flags: tuple[str, ...],
    seconds: float,
    faults: list[tuple[int, str, int]],
    what: str,
) -> None:
    tally(f"a rank stalls {seconds} s in {what}", len(faults))
    stalls = [
        {"what": "stall", "seconds": seconds, "rank": rank, "pass": work, "step": step}
        for rank, work, step in faults
    ]
    run = inject(stalls, *flags).check()
    assert ("post-validation: 2 steps made" in run.output[0]) == (flags is AHEAD)
    assert_same_end(run, train(4, *flags))
