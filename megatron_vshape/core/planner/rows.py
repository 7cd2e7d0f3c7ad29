"""Orders for compiled functions: rows of numbers, one number per pass.

A sort is len(kinds) * stage + the index of a kind in `kinds`. A pass has the number sort *
num_microbatches + microbatch. Rows are padded to the longest with NONE.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass, turned
from megatron_vshape.core.planner.improve import NONE

Order = tuple[tuple[Pass, ...], ...]


class Codec(NamedTuple):
    """Converts passes of simple kinds to numbers and back.

    With `slices` per microbatch, B and W run the slices in descending order. Passes of a sort stay
    in order, so these are numbered by their turn, as if all were ascending.
    """

    num_microbatches: int
    kinds: tuple[Kind, ...] = PARTS
    slices: int = 1

    def sort(self, kind: Kind, stage: int) -> int:
        """Return the sort of a kind of pass on a stage."""
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
    """Return rows of numbers in one array, padded to the longest or to `length`."""
    made = list(rows)
    array = np.full((len(made), max(length, *map(len, made))), NONE, np.int64)
    for row, own in zip(array, made, strict=True):
        row[: len(own)] = own
    return array
