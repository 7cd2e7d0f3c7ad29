"""Step 1: the building block, the passes of one microbatch, and the catalogue's blocks.

A block says in which slot every pass starts; repeated every `interval` slots it is a pipeline.
Its lifespans alone bound the activation memory (paper, section 2).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_vshape.core.passes import Kind, Pass, ScheduleError
from megatron_vshape.core.placement import Placement, linear, stages_of, v_shape


class BlockPass(NamedTuple):
    """A pass of the block; `work.microbatch` counts within the block. Times are slots."""

    work: Pass
    start: int
    length: int = 1

    @property
    def end(self) -> int:
        """Return the slot after the pass's last."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """The passes of `num_microbatches` microbatches, repeated every `interval` slots.

    A slot is one F, B or W of one stage; a whole backward takes two.
    """

    name: str
    num_devices: int
    placement: Placement
    interval: int
    passes: tuple[BlockPass, ...]
    num_microbatches: int = 1

    def __post_init__(self) -> None:
        self._check()

    def lifespan(self, stage: int, microbatch: int = 0) -> int:
        """Return the slots from the start of F to the end of the last backward pass."""
        mine = [each for each in self.passes if each.work[1:] == (stage, microbatch)]
        start = min(each.start for each in mine if each.work.kind is Kind.F)
        return max(each.end for each in mine) - start

    def peak_bound(self, device: int) -> int:
        """Return the most stage activations the device can hold: the sum of ceil(l / T).

        A stage's activations of one microbatch count 1, whatever share of the model it is.
        """
        stages = stages_of(self.placement, self.num_devices)[device]
        return sum(
            math.ceil(self.lifespan(stage, microbatch) / self.interval)
            for stage in stages
            for microbatch in range(self.num_microbatches)
        )

    def _check(self) -> None:
        """Raise ScheduleError if two repeated passes of a device would run at once."""
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


def one_f_one_b(num_devices: int) -> BuildingBlock:
    """Return 1F1B's block: hops of one slot forward, two backward, the backward whole."""
    d = num_devices
    passes = []
    for stage in range(d):
        passes.append(BlockPass(Pass(Kind.F, stage, 0), stage))
        passes.append(BlockPass(Pass(Kind.BW, stage, 0), d + 2 * (d - 1 - stage), 2))
    return BuildingBlock("1f1b", d, linear(d), 3, tuple(passes))


def v_min(num_devices: int) -> BuildingBlock:
    """Return the block that needs about a third of 1F1B's activation memory: hops of 1."""
    middle = 3 if num_devices % 3 == 0 else 1
    return v_block("v-min", num_devices, hops=(1, 1, 1, 1), turns=(1, middle, 1))


def v_half(num_devices: int) -> BuildingBlock:
    """Return the block that needs about half of 1F1B's activation memory: hops of 2 and 1."""
    middle = 4 if num_devices % 2 == 0 else 1
    return v_block("v-half", num_devices, hops=(2, 1, 2, 1), turns=(2, middle, 1))


def v_zb(num_devices: int) -> BuildingBlock:
    """Return the zero-bubble block, at 1F1B's activation memory: hops of 4 and 2."""
    return v_block("v-zb", num_devices, hops=(4, 2, 4, 2), turns=(1, 1, 1))


def v_block(
    name: str, num_devices: int, hops: Sequence[int], turns: Sequence[int]
) -> BuildingBlock:
    """Return the V block with these offsets (paper, section 3).

    `hops`: slots from one device to the next for F of chunk 0, F of chunk 1, B of chunk 1 and
    B of chunk 0; `turns`: slots from F0 to F1 on the last device, from F1 to B1 on device 0 and
    from B1 to B0 on the last device. Each W goes where a slot is free soonest for both chunks.
    """
    d = num_devices
    starts: list[BlockPass] = []
    slot = 0
    legs = (
        (Kind.F, range(d)),
        (Kind.F, range(d, 2 * d)),
        (Kind.B, range(2 * d - 1, d - 1, -1)),
        (Kind.B, range(d - 1, -1, -1)),
    )
    for (kind, stages), hop, turn in zip(legs, hops, (*turns, 0), strict=True):
        for stage in stages:
            starts.append(BlockPass(Pass(kind, stage, 0), slot))
            slot += hop
        slot += turn - hop
    placement = v_shape(d)
    weights = _place_weights(starts, placement, d, interval=6)
    return BuildingBlock(name, d, placement, 6, (*starts, *weights))


def _place_weights(
    passes: Sequence[BlockPass], placement: Placement, num_devices: int, interval: int
) -> Iterable[BlockPass]:
    """Yield each device's two W in its two free slots, dealt out for the least peak."""
    for first, second in stages_of(placement, num_devices):
        mine = {each.work[:2]: each.start for each in passes if each.work.stage in (first, second)}
        taken = {start % interval for start in mine.values()}
        one, other = sorted(set(range(interval)) - taken)

        def after(stage: int, slot: int, mine: dict[tuple[Kind, int], int] = mine) -> int:
            ready = mine[Kind.B, stage] + 1
            return ready + (slot - ready) % interval

        deals = [
            {first: after(first, a), second: after(second, b)}
            for a, b in ((one, other), (other, one))
        ]

        def cost(deal: dict[int, int], mine: dict[tuple[Kind, int], int] = mine) -> tuple[int, int]:
            spans = [start + 1 - mine[Kind.F, stage] for stage, start in deal.items()]
            return sum(math.ceil(span / interval) for span in spans), sum(spans)

        for stage, start in min(deals, key=cost).items():
            yield BlockPass(Pass(Kind.W, stage, 0), start)
