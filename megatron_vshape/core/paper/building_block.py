"""Steps 1 to 3 of arXiv 2405.15362: the building block, repeated and squeezed into a schedule.

A block specifies the start slot of every pass of one or a few microbatches; repeated every
`interval` slots, it forms a pipeline. Its lifespans alone bound the activation memory (section 2).
The blocks of the catalogue are in `blocks.py`.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule, Timeline


class BlockPass(NamedTuple):
    """A pass of the block; `work.microbatch` counts within the block. Times are in slots."""

    work: Pass
    start: int
    length: int = 1

    @property
    def end(self) -> int:
        """Slot after the last slot of the pass."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """Passes of `num_microbatches` microbatches, repeated every `interval` slots.

    A slot is one F, B or W of one stage; a full backward needs two. With `slices`, microbatches are
    numbered as in a `Schedule` with slices.
    """

    name: str
    num_devices: int
    placement: Placement
    interval: int
    passes: tuple[BlockPass, ...]
    num_microbatches: int = 1
    slices: int = 1

    def lives(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return the lifespan of activations by stage and microbatch: first slot, and slot after
        the end.
        """
        lives: dict[tuple[int, int], tuple[int, int]] = {}
        for each in self.passes:
            key = each.work[1:]
            start, end = lives.get(key, (each.start, each.end))
            lives[key] = (min(start, each.start), max(end, each.end))
        return lives

    def peak_bounds(self) -> tuple[int, ...]:
        """Return an upper bound of each device's activation memory, sum of ceil(l / T), in stages.

        The activations of one microbatch and stage count 1, whatever the stage's share of the
        model.
        """
        return tuple(
            sum(math.ceil((end - start) / self.interval) for start, end in lives)
            for lives in self._lives_by_device()
        )

    def peaks(self) -> tuple[int, ...]:
        """Return the peak activation memory of each device in the steady phase, in stage
        activations.

        At most `peak_bounds`, which adds up the peaks of all lifespans as if they coincided.
        """
        return tuple(map(self._peak, self._lives_by_device()))

    def _peak(self, lives: Sequence[tuple[int, int]]) -> int:
        """Return the peak number of overlapping lifespans, including those of repeated blocks."""
        interval, change = self.interval, Counter[int]()
        for start, end in lives:
            change[start % interval] += 1
            change[end % interval] -= 1
        # Copies in memory just before slot 0: started by slot -1, minus ended by slot -1.
        before = sum((-1 - start) // interval - (-1 - end) // interval for start, end in lives)
        return max(accumulate((change[slot] for slot in sorted(change)), initial=before))

    def _lives_by_device(self) -> list[list[tuple[int, int]]]:
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.num_devices)]
        for (stage, _), life in self.lives().items():
            held[self.placement[stage]].append(life)
        return held

    def __post_init__(self) -> None:
        """Raise ScheduleError if two repeated passes of a device would overlap."""
        taken: dict[tuple[int, int], Pass] = {}
        for each in self.passes:
            device = self.placement[each.work.stage]
            for slot in range(each.start, each.end):
                # Copies of a pass use the same slot modulo the interval, so one interval proves
                # all.
                other = taken.setdefault((device, slot % self.interval), each.work)
                if other != each.work:
                    raise ScheduleError(
                        f"the block {self.name} does not repeat: on device {device}, {other} and "
                        f"{each.work} meet in slot {slot % self.interval} of {self.interval}"
                    )


_Item = TypeVar("_Item")


def repeat(block: BuildingBlock, num_microbatches: int) -> Timeline:
    """Step 2: repeat the block for `num_microbatches`, counting slices; times are in slots.

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
    """Step 3: remove idle time, by dropping the times and keeping the pass order.

    In a schedule without times, every pass starts as early as it can, for any costs; `simulate`
    computes the times.
    """
    return timeline.schedule


def _row(
    passes: Sequence[BlockPass], block: BuildingBlock, num_microbatches: int
) -> tuple[tuple[Pass, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the copies of a device's passes in order, with their start and end times."""
    # Interval of the first copy: passes of a later interval join the row in later rounds.
    late = [each.start // block.interval for each in passes]
    copies: list[list[Pass]] = []
    starts: list[list[float]] = []
    ends: list[list[float]] = []
    for (kind, stage, within), start, length in passes:
        # The last copy of a block may be incomplete.
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
