"""Which of several orders is the fastest in the run itself: each runs some steps in turn.

What a plan was made by was measured in a few steps, which something may have disturbed; a schedule
changes no result, so a run can try.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

TURN = 2
"""Steps that a candidate runs at a time: few, so that what disturbs the machine for a while
disturbs several. The very first one of a candidate does not count: it allocates what it needs."""

OF_STEPS = 200
SHARE = 0.01
"""A trial may cost this share of so many steps, which is also how long it may last."""

NOISE = 3.0
"""Standard errors of the difference of two candidates that are noise."""

LEAST_COUNTED = 7
"""Steps by which a candidate is judged at the earliest: of four turns."""

FIRST_STEPS = 8
"""Steps in which a candidate has run as many as it takes to judge it."""

MOST = 4
"""Candidates of a trial."""


def usual(values: Iterable[float]) -> float:
    """Return the median of the lesser half: what disturbs a step only makes it longer."""
    known = sorted(values)
    return median(known[: (len(known) + 1) // 2])


class Round(NamedTuple):
    """What rank 0 has decided for all: who goes on, and how the steps are told."""

    left: tuple[int, ...]  # candidates by number; one alone has won
    table: str = ""  # once the trial is over


def worth_trying(predicted_s: Sequence[float]) -> list[int]:
    """Return which of these to try, by the step each is predicted to take; always the first.

    No more than `MOST`, and no more than a trial may cost until it can judge, by the prediction.
    """
    least, tried = min(predicted_s), [0]
    room = SHARE * OF_STEPS * least / FIRST_STEPS
    for at in sorted(range(1, len(predicted_s)), key=lambda each: predicted_s[each]):
        more = predicted_s[at] - least
        if len(tried) < MOST and more <= room:
            tried.append(at)
            room -= more
    return tried


@dataclass(eq=False)
class Trial:
    """The steps of several candidates; the first is the plan, and all are alike on all ranks.

    Every rank counts the same steps, and rank 0's times and verdict count.
    """

    names: Sequence[str]
    predicted_s: Sequence[float]
    left: list[int] = field(init=False)
    taken_s: list[list[float]] = field(init=False)
    _spent_s: list[list[float]] = field(init=False)  # of all steps, also those that do not count
    _rounds: int = 0
    _steps: int = 0
    _turns: list[tuple[int, bool]] = field(init=False)  # that are to run: whose, and if it counts
    _ran: list[tuple[int, bool]] = field(default_factory=list)  # whose time is not known yet

    def __post_init__(self) -> None:
        self.left = list(range(len(self.names)))
        self.taken_s, self._spent_s = [[] for _ in self.names], [[] for _ in self.names]
        self._turns = self._round()

    @property
    def running(self) -> int:
        """Return the candidate that runs the next step."""
        return self._turns[0][0]

    def _round(self) -> list[tuple[int, bool]]:
        """Return the steps of a round; every other begins with the last, as machines drift."""
        order = self.left[:: -1 if self._rounds % 2 else 1]
        return [(each, at > 0 or self._rounds > 0) for each in order for at in range(TURN)]

    def ran(self, seconds_before: float | None) -> bool:
        """Count a step, and what the step before it took; None where that is not known.

        Returns whether a round is over: `judged` of rank 0 then goes to `go_on` of all.
        """
        self._steps += 1
        if self._ran:
            whose, counts = self._ran.pop()
            if seconds_before is not None:
                self._spent_s[whose].append(seconds_before)
                if counts:
                    self.taken_s[whose].append(seconds_before)
        self._ran.append(self._turns.pop(0))
        is_over = not self._turns
        if is_over:
            self._rounds += 1
            self._turns = self._round()
        return is_over

    def judged(self) -> Round:
        """Return who goes on by the steps so far, on the rank whose times count."""
        middles = {at: usual(self.taken_s[at]) for at in self.left if self.taken_s[at]}
        if len(middles) < len(self.left):  # evaluations or checkpoints came between
            return Round(tuple(self.left)) if self._steps < OF_STEPS else self._ended(self.left[0])
        best = min(middles, key=lambda at: (middles[at], at))
        left = [at for at in self.left if not self._is_slower(at, best)]
        known = {at: usual(taken) for at, taken in enumerate(self.taken_s) if taken}
        cost_s = sum(
            max(0.0, middle - middles[best]) * len(self._spent_s[at])
            for at, middle in known.items()
        )
        coming_s = sum(TURN * (middles[at] - middles[best]) for at in left)
        is_spent = cost_s + coming_s > SHARE * OF_STEPS * middles[best]
        if len(left) == 1 or is_spent or self._steps + TURN * len(left) > OF_STEPS:
            return self._ended(best)
        return Round(tuple(left))

    def _ended(self, best: int) -> Round:
        return Round((best,), self.table(best))

    def _is_slower(self, at: int, best: int) -> bool:
        """Return whether a candidate is slower than the best beyond the noise of both."""
        if at == best or min(len(self.taken_s[each]) for each in (at, best)) < LEAST_COUNTED:
            return False
        apart = usual(self.taken_s[at]) - usual(self.taken_s[best])
        return apart > NOISE * math.hypot(self._error_s(at), self._error_s(best))

    def _error_s(self, at: int) -> float:
        """Return the standard error of a candidate's step; all have the machine's own noise."""
        known = [taken for taken in self.taken_s if taken]
        apart = [abs(each / usual(taken) - 1) for taken in known for each in taken]
        taken = self.taken_s[at]
        # As of a median whose distances from it are normal.
        spread = 1.4826 * usual(apart) * usual(taken)
        return 1.2533 * spread / math.sqrt(len(taken))

    def go_on(self, decided: Round) -> None:
        """Take what rank 0 has decided."""
        self.left = list(decided.left)
        self._turns = self._round()

    def table(self, best: int) -> str:
        """Return a line for every candidate: predicted and measured step, and how sure that is."""
        lines = [f"{'order':34}{'predicted':>11}{'step, ms':>11}{'+-':>8}{'steps':>7}"]
        for at, name in enumerate(self.names):
            taken = self.taken_s[at]
            measured = (
                f"{1e3 * usual(taken):11.2f}{1e3 * self._error_s(at):8.2f}{len(taken):7}"
                if taken
                else f"{'-':>11}{'-':>8}{0:7}"
            )
            kept = "  stays" if at == best else ""
            lines.append(f"{name:34}{1e3 * self.predicted_s[at]:11.2f}{measured}{kept}")
        return "\n".join(lines)
