"""Compare the plan with the best named schedule in the training run itself.

The plan depends on costs from a few measured steps, and other programs may have disturbed these
steps. A schedule does not change the result of a step, so a run can try both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from statistics import median

import torch.distributed as dist

from megatron_vshape.mcore.setup.plans import PlannedStep, Planner

logger = logging.getLogger(__name__)

TURN = 2
"""Consecutive steps per schedule. The number is small so that a disturbance affects both
schedules."""

TURNS = 6
"""Turns of each schedule."""

PLAN, NAMED = range(2)

RUNS = tuple(
    each
    for turn in range(TURNS)
    for each in ((PLAN, NAMED) if turn % 2 == 0 else (NAMED, PLAN))
    for _ in range(TURN)
)
"""Schedule of every step of a trial; the order alternates because machines drift."""


def typical(values: Iterable[float]) -> float:
    """Return the median of the lower half, because disturbances only make a step longer.

    The first step of a schedule is also longer, because it allocates memory.
    """
    known = sorted(values)
    return median(known[: (len(known) + 1) // 2])


class Trial:
    """Alternates two schedules for some steps; all ranks call it for the same steps.

    The times of rank 0 decide for all ranks.
    """

    def __init__(self, planner: Planner, plan: PlannedStep, named: PlannedStep) -> None:
        """Start with the plan in the next step."""
        self._planner = planner
        self._schedules = plan, named
        self._times_s: tuple[list[float], list[float]] = [], []
        self._steps = 0
        planner.run(plan)

    def end_step(self, previous_s: float | None, num_microbatches: int) -> int | None:
        """Count a step and choose the schedule of the next one.

        `previous_s` is the duration of the previous step, None if unknown. Returns PLAN or NAMED at
        the end of the trial, and None before. A step with another number of microbatches ends the
        trial in favor of the plan.
        """
        if num_microbatches != self._schedules[PLAN].schedule.num_microbatches:
            return self._keep(PLAN)
        before = self._steps - 1
        if previous_s is not None and before >= 0:
            self._times_s[RUNS[before]].append(previous_s)
        self._steps += 1
        if self._steps < len(RUNS):
            self._planner.run(self._schedules[RUNS[self._steps]])
            return None
        once = self._planner.once
        return self._keep(self._faster() if once is None else once(self._faster))

    def _faster(self) -> int:
        """Compare the measured steps; the plan wins if evaluations left nothing to compare."""
        if not all(self._times_s):
            return PLAN
        times_s = [typical(each) for each in self._times_s]
        faster = NAMED if times_s[NAMED] < times_s[PLAN] else PLAN
        names = [each.schedule.name for each in self._schedules]
        steps = (f"{name} {1e3 * time:.2f} ms" for name, time in zip(names, times_s, strict=True))
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("measured steps: %s; keeping %s", ", ".join(steps), names[faster])
        return faster

    def _keep(self, winner: int) -> int:
        self._planner.run(self._schedules[winner])
        return winner
