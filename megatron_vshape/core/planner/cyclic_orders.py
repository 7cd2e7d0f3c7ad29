"""Cyclic orders as arrays: unrolled for any number of microbatches, and extended in the middle.

In the steady phase a device repeats one period. A schedule of few microbatches that contains a
whole period represents any number of microbatches, because further periods can be spliced in. Only
warm-up and cool-down have to be searched.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

import numpy as np

from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import turned
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.paper.building_block import BuildingBlock
from megatron_vshape.core.planner.modulo import SteadyOrder
from megatron_vshape.core.planner.rows import Codec

_sort = Codec(1).sort


@dataclass(frozen=True, slots=True)
class CyclicOrder:
    """In period p, a device runs pass (sort, offset) of microbatch p * k + offset.

    `rows[device]` is (sorts, offsets) in order of time; module `rows` defines sorts.
    """

    name: str
    microbatches: int  # k
    rows: tuple[tuple[np.ndarray, np.ndarray], ...]

    def reach(self) -> tuple[int, int]:
        """Return the minimum and the maximum offset."""
        offsets = np.concatenate([row[1] for row in self.rows])
        return int(offsets.min()), int(offsets.max())

    def unroll(self, num_microbatches: int) -> np.ndarray:
        """Return each device's passes, as numbers sort * num_microbatches + microbatch.

        Passes of one sort are renumbered in microbatch order, which changes neither times nor
        memory.
        """
        least, most = self.reach()
        periods = np.arange(-(most // self.microbatches) - 1, self._end(num_microbatches))
        rows = []
        for row in self.rows:
            passes, _ = self._passes(row, periods, num_microbatches)
            by_sort = np.argsort(passes // num_microbatches, kind="stable")
            passes[by_sort] = np.sort(passes)
            rows.append(passes)
        return np.stack(rows)

    def window(self, num_microbatches: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return start and end of the middle full period on each device; None if there is none."""
        least, most = self.reach()
        first = -(least // self.microbatches)
        last = (num_microbatches - 1 - most) // self.microbatches
        if last - first < 2:
            return None
        middle = (first + last) // 2
        periods = np.arange(-(most // self.microbatches) - 1, self._end(num_microbatches))
        found = [self._passes(row, periods, num_microbatches)[1] for row in self.rows]
        low = [int(np.searchsorted(each, middle)) for each in found]
        high = [int(np.searchsorted(each, middle + 1)) for each in found]
        return np.array(low), np.array(high)

    def _end(self, num_microbatches: int) -> int:
        return (num_microbatches - self.reach()[0]) // self.microbatches + 1

    def _passes(
        self, row: tuple[np.ndarray, np.ndarray], periods: np.ndarray, num_microbatches: int
    ) -> tuple[np.ndarray, np.ndarray]:
        sorts, offsets = row
        microbatch = periods[:, None] * self.microbatches + offsets
        inside = (microbatch >= 0) & (microbatch < num_microbatches)
        passes = (sorts * num_microbatches + microbatch)[inside]
        return passes, np.broadcast_to(periods[:, None], microbatch.shape)[inside]


def cyclic_order_of_block(block: BuildingBlock) -> CyclicOrder:
    """Return the steady order of a building block; a full backward becomes B, then W.

    With slices, the period is the shortest that has whole microbatches.
    """
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(block.num_devices)]
    share = gcd(block.num_microbatches // block.slices, block.slices)
    numbers, interval = block.num_microbatches // share, block.interval // share
    for (kind, stage, within), start, _ in block.passes:
        period, slot = divmod(start, interval)
        parts = (Kind.B, Kind.W) if kind is Kind.BW else (kind,)
        for at, part in enumerate(parts):
            sort = _sort(part, stage)
            own = turned(within, block.slices) if part.by_rank else within
            if own < numbers:
                entry = (slot, at, sort, own - period * numbers)
                rows[block.placement[stage]].append(entry)
    return _cyclic_order(block.name, numbers, rows)


def _cyclic_order(
    name: str, k: int, rows: Iterable[list[tuple[int, int, int, int]]]
) -> CyclicOrder:
    arrays = []
    for row in rows:
        ordered = sorted(row)
        sorts = np.array([entry[2] for entry in ordered])
        arrays.append((sorts, np.array([entry[3] for entry in ordered])))
    return CyclicOrder(name, k, tuple(arrays))


def sequential(placement: Placement, num_devices: int, slices: int = 1) -> CyclicOrder:
    """Return the order of one microbatch after the other, which needs the minimum memory."""
    rows: list[list[tuple[int, int, int, int]]] = []
    for stages in stages_of(placement, num_devices):
        passes = [(0, _sort(Kind.F, s), own) for s in stages for own in range(slices)]
        passes += [
            (1, _sort(kind, s), own)
            for s in reversed(stages)
            for own in range(slices)
            for kind in Kind.BW.does
        ]
        rows.append([(slot, at, sort, own) for at, (slot, sort, own) in enumerate(passes)])
    return _cyclic_order("sequential", slices, rows)


def cyclic_order_of_steady(order: SteadyOrder, name: str) -> CyclicOrder:
    """Return a steady order as arrays."""
    rows = []
    for row in order.rows:
        sorts = np.array([_sort(kind, stage) for kind, stage, _ in row])
        rows.append((sorts, np.array([offset for _, _, offset in row])))
    return CyclicOrder(name, order.microbatches, tuple(rows))


def of_slices(order: CyclicOrder, slices: int) -> CyclicOrder:
    """Convert an order of microbatches to slices, each scheduled like a microbatch.

    B and W start `slices` - 1 slices later, after all F of their microbatch. A period has whole
    microbatches.
    """
    times = slices // gcd(order.microbatches, slices)
    rows = []
    for sorts, offsets in order.rows:
        ranked = np.array([PARTS[sort % len(PARTS)].by_rank for sort in sorts])
        own = offsets - (slices - 1) * ranked
        each = np.arange(times)[:, None] * order.microbatches
        rows.append((np.tile(sorts, times), (own + each).ravel()))
    return CyclicOrder(order.name, times * order.microbatches, tuple(rows))


def is_period(
    row: np.ndarray, low: np.ndarray, high: np.ndarray, num_microbatches: int, period: int
) -> bool:
    """Return whether each device runs `period` microbatches of every sort within [low, high)."""
    for own, begin, end in zip(row, low, high, strict=True):
        sort, microbatch = np.divmod(own[begin:end], num_microbatches)
        for each in np.unique(own // num_microbatches):
            mine = microbatch[sort == each]
            before = np.count_nonzero(own[:begin] // num_microbatches == each)
            if not np.array_equal(mine, np.arange(before, before + period)):
                return False
    return True


def splice(
    row: np.ndarray, low: np.ndarray, high: np.ndarray, period: int, short: int, full: int
) -> np.ndarray:
    """Extend an order from `short` to `full` microbatches by repeating [low, high)."""
    more = (full - short) // period
    rows = []
    for own, begin, end in zip(row, low, high, strict=True):
        sort, microbatch = np.divmod(own, short)
        copies = np.arange(more + 1)[:, None] * period
        sorts = (sort[:begin], np.tile(sort[begin:end], more + 1), sort[end:])
        micro = (
            microbatch[:begin],
            (microbatch[begin:end] + copies).ravel(),
            microbatch[end:] + more * period,
        )
        rows.append(np.concatenate(sorts) * full + np.concatenate(micro))
    return np.stack(rows).astype(np.int32)
