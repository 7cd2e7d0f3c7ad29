"""A trial in the run: several plans get steps in turn, rank 0 judges, and all ranks go on alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from megatron_vshape.mcore.observe.report import Foretold
from megatron_vshape.mcore.observe.trial import Round, Trial, worth_trying
from megatron_vshape.mcore.setup.plans import PlannedStep, Planner

logger = logging.getLogger(__name__)


class Contest:
    """Runs the steps of a trial; all ranks of the world call it for the same steps."""

    def __init__(
        self, planner: Planner, plans: Sequence[PlannedStep], predicted: Sequence[Foretold]
    ):
        """Take the plan and what else may run, with the step that is predicted of each."""
        chosen = worth_trying([each.step_us / 1e6 for each in predicted])
        self._planner = planner
        self._plans = [plans[at] for at in chosen]
        self.predicted = [predicted[at] for at in chosen]
        names = [each.schedule.name for each in self._plans]
        self._trial = Trial(names, [each.step_us / 1e6 for each in self.predicted])
        self._planner.run(self._plans[0])

    @property
    def names(self) -> Sequence[str]:
        """Return what runs in turn, the plan first."""
        return self._trial.names

    def ends_step(self, seconds_before: float | None, num_microbatches: int) -> int | None:
        """Count a step, before which one took so long; return who has won, once that is known.

        A step of another number of microbatches ends the trial: the plan stays.
        """
        if num_microbatches != self._plans[0].schedule.num_microbatches:
            return self._settled(0)
        if self._trial.ran(seconds_before):
            judged = self._trial.judged
            once = self._planner.once
            decided: Round = judged() if once is None else once(judged)
            self._trial.go_on(decided)
            if decided.table:
                if dist.get_rank() == 0:
                    logger.warning("orders tried in turn:\n%s", decided.table)
                return self._settled(decided.left[0])
        self._planner.run(self._plans[self._trial.running])
        return None

    def _settled(self, winner: int) -> int:
        self._planner.run(self._plans[winner])
        return winner
