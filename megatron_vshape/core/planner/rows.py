"""Orders as the compiled loops have them: rows of numbers, of passes of which each has one.

A sort is len(kinds) * stage + the place of a kind among `kinds`, and a pass has the number
sort * num_microbatches + microbatch. A step, which is one pass or several that run as one, has the
number of its first. Rows are as long as the longest, filled up with NONE.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.model.kinds import KINDS, PARTS, Kind
from megatron_vshape.core.model.passes import Pass, turned
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.planner.improve import NONE

Order = tuple[tuple[Pass, ...], ...]

Steps = Mapping[int, Sequence[int]]
"""By the number of its first pass, the numbers of all passes of a step of several."""


class Codec(NamedTuple):
    """Passes of simple kinds by number, and back.

    Of `slices` of a microbatch B and W descend. Passes of a sort keep their order, so theirs have
    the number of their turn, as if all ascended.
    """

    num_microbatches: int
    kinds: tuple[Kind, ...] = PARTS
    slices: int = 1

    def sort(self, kind: Kind, stage: int) -> int:
        """Return the sort of such passes."""
        return len(self.kinds) * stage + self.kinds.index(kind)

    def number(self, work: Pass) -> int:
        """Return the number of a simple pass."""
        own = self._turned(work.kind, work.microbatch)
        return self.sort(work.kind, work.stage) * self.num_microbatches + own

    def _turned(self, kind: Kind, number: int) -> int:
        return turned(number, self.slices) if self.slices > 1 and kind.by_rank else number

    def work(self, number: int) -> Pass:
        """Return the pass of a number."""
        sort, microbatch = divmod(number, self.num_microbatches)
        stage, place = divmod(sort, len(self.kinds))
        kind = self.kinds[place]
        return Pass(kind, stage, self._turned(kind, microbatch))

    def steps(self, schedule: Schedule) -> Iterator[list[tuple[int, ...]]]:
        """Yield the steps of every device as the numbers of what they do."""
        for device in range(schedule.num_devices):
            yield list(map(self.step_of, schedule.steps(device)))

    def step_of(self, step: Sequence[Pass]) -> tuple[int, ...]:
        """Return the numbers of what a step does."""
        return tuple(self.number(w._replace(kind=part)) for w in step for part in w.kind.does)

    def step(self, numbers: Sequence[int]) -> tuple[Pass, ...]:
        """Return the passes of a step: two of one where a kind does both."""
        made: list[Pass] = []
        for work in map(self.work, numbers):
            of_both = _OF_BOTH.get((made[-1].kind, work.kind)) if made else None
            if of_both and made[-1][1:] == work[1:]:
                made[-1] = work._replace(kind=of_both)
            else:
                made.append(work)
        return tuple(made)

    def order(
        self, rows: Iterable[Iterable[int]], steps: Steps | None = None
    ) -> tuple[Order, frozenset[Pass]]:
        """Return the order of rows of steps, and the first pass of each that is joint."""
        known = steps or {}
        order = [[self.step(known.get(n, (n,))) for n in row if n != NONE] for row in rows]
        joint = frozenset(step[0] for row in order for step in row if len(step) > 1)
        return tuple(tuple(chain.from_iterable(row)) for row in order), joint


_OF_BOTH = {kind.does: kind for kind in KINDS if len(kind.does) > 1}


def padded(rows: Iterable[Sequence[int]], length: int = 0) -> np.ndarray:
    """Return rows of numbers in one array, as long as the longest or so long."""
    made = list(rows)
    array = np.full((len(made), max(length, *map(len, made))), NONE, np.int64)
    for row, own in zip(array, made, strict=True):
        row[: len(own)] = own
    return array
