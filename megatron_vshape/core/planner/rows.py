"""Orders as the compiled loops have them: rows of numbers, of passes of which each has one.

A sort is len(kinds) * stage + the place of a kind among `kinds`, and a pass has the number
sort * num_microbatches + microbatch. Rows are as long as the longest, filled up with NONE.
"""

from collections.abc import Iterable, Sequence
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

    def order(self, rows: Iterable[Iterable[int]]) -> Order:
        """Return the passes of rows of numbers."""
        return tuple(tuple(self.work(n) for n in row if n != NONE) for row in rows)


def padded(rows: Iterable[Sequence[int]], length: int = 0) -> np.ndarray:
    """Return rows of numbers in one array, as long as the longest or so long."""
    made = list(rows)
    array = np.full((len(made), max(length, *map(len, made))), NONE, np.int64)
    for row, own in zip(array, made, strict=True):
        row[: len(own)] = own
    return array
