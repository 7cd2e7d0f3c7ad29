"""Orders as the compiled loops have them: rows of numbers, of passes of which each has one.

A sort is len(kinds) * stage + the place of a kind among `kinds`, and a pass has the number
sort * num_microbatches + microbatch. Rows are as long as the longest, filled up with NONE.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass, turned
from megatron_vshape.core.planner.improve import NONE

Order = tuple[tuple[Pass, ...], ...]


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
        """Return the number of a pass."""
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

    def rows(self, order: Iterable[Sequence[Pass]]) -> np.ndarray:
        """Return an order in numbers; a pass that does others as these, one behind the other."""
        return padded(
            [self.number(work._replace(kind=part)) for work in row for part in work.kind.does]
            for row in order
        )

    def order(
        self, rows: np.ndarray, steps: Mapping[Pass, tuple[Pass, ...]] | None = None
    ) -> Order:
        """Return the order of rows; a pass in `steps` stands for what is there."""
        stands_for = steps or {}
        works = [[self.work(each) for each in row if each != NONE] for row in rows.tolist()]
        return tuple(
            tuple(each for work in row for each in stands_for.get(work, (work,))) for row in works
        )


def padded(rows: Iterable[Sequence[int]]) -> np.ndarray:
    """Return rows of numbers in one array."""
    made = list(rows)
    array = np.full((len(made), max(map(len, made))), NONE, np.int64)
    for row, own in zip(array, made, strict=True):
        row[: len(own)] = own
    return array
