"""Step 1: the building block, the passes of one or a few microbatches at fixed slots.

A block specifies the start slot of every pass; repeated every `interval` slots, it forms a
pipeline. Its lifespans alone bound the activation memory (arXiv 2405.15362, section 2). The blocks
of the catalogue are in `blocks.py`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement


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
                other = taken.setdefault((device, slot % self.interval), each.work)
                if other != each.work:
                    raise ScheduleError(
                        f"the block {self.name} does not repeat: on device {device}, {other} and "
                        f"{each.work} meet in slot {slot % self.interval} of {self.interval}"
                    )
