"""Steps 2 and 3: repeat the building block at every interval, and squeeze the result."""

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.building_block import BlockPass, BuildingBlock

_Item = TypeVar("_Item")


def repeat(block: BuildingBlock, num_microbatches: int) -> Timeline:
    """Repeat the block for `num_microbatches`, counting slices; times are in slots.

    Copies of a block cannot collide: `BuildingBlock` rejects such a block. So in every interval a
    device runs one copy of each of its passes, always in the same order.
    """
    own: list[list[BlockPass]] = [[] for _ in range(block.num_devices)]
    for each in block.passes:
        own[block.placement[each.work.stage]].append(each)
    for passes in own:
        passes.sort(key=lambda each: each.start % block.interval)
    rows = [_row(passes, block, num_microbatches) for passes in own]
    order, starts, ends = zip(*rows, strict=True)
    schedule = Schedule(
        block.name,
        block.num_devices,
        num_microbatches,
        block.placement,
        order,
        slices=block.slices,
    )
    return Timeline(schedule, starts, ends)


def squeeze(timeline: Timeline) -> Schedule:
    """Step 3 (squeeze): remove idle time, by dropping the times and keeping the pass order.

    In a schedule without times, every pass starts as early as it can, for any costs; `simulate`
    computes the times.
    """
    return timeline.schedule


def _row(
    passes: Sequence[BlockPass], block: BuildingBlock, num_microbatches: int
) -> tuple[tuple[Pass, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the copies of a device's passes in order, with their start and end times."""
    late = [each.start // block.interval for each in passes]
    copies: list[list[Pass]] = []
    starts: list[list[float]] = []
    ends: list[list[float]] = []
    for (kind, stage, within), start, length in passes:
        microbatches = range(within, num_microbatches, block.num_microbatches)
        works = zip(itertools.repeat(kind), itertools.repeat(stage), microbatches, strict=False)
        # Faster than a Python call per pass.
        copies.append(list(map(partial(tuple.__new__, Pass), works)))
        begin, interval = float(start), float(block.interval)
        starts.append([begin + copy * interval for copy in range(len(microbatches))])
        ends.append([each + length for each in starts[-1]])
    return _in_turn(copies, late), _in_turn(starts, late), _in_turn(ends, late)


def _in_turn(columns: Iterable[Sequence[_Item]], late: Sequence[int]) -> tuple[_Item, ...]:
    """Interleave the columns round by round; `late` is the first round of each column."""
    first = min(late, default=0)
    moved = [
        itertools.chain(itertools.repeat(None, rounds - first), column)
        for column, rounds in zip(columns, late, strict=True)
    ]
    items = itertools.chain.from_iterable(itertools.zip_longest(*moved))
    return tuple(item for item in items if item is not None)
