"""Building blocks (arXiv 2405.15362): their slots and memory, and the blocks of the catalogue.

A block specifies the start slot of every pass of one or a few microbatches; repeated every
`interval` slots, it forms a pipeline. Its lifespans alone bound the activation memory (section 2).

`_loop_block` makes the blocks whose devices all run the stages in the same direction (1F1B,
interleaved 1F1B, ZB-H1 and ZB-H2). `_v_block` makes the V-shaped ones. d is the number of devices.
The V blocks are from arXiv 2405.15362, ZB-H1 and ZB-H2 from 2401.10241, interleaved 1F1B from
2104.04473, GPipe from 1811.06965.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, linear, looping, v_shape
from megatron_vshape.core.model.schedule import Schedule, Timeline, reversed_slice

WORK = 3
"""Slots of one stage per microbatch: F, B and W."""


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
        for block_pass in self.passes:
            key = block_pass.work[1:]
            start, end = lives.get(key, (block_pass.start, block_pass.end))
            lives[key] = (min(start, block_pass.start), max(end, block_pass.end))
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
        initial = sum((-1 - start) // interval - (-1 - end) // interval for start, end in lives)
        return max(accumulate((change[slot] for slot in sorted(change)), initial=initial))

    def _lives_by_device(self) -> list[list[tuple[int, int]]]:
        lives_by_device: list[list[tuple[int, int]]] = [[] for _ in range(self.num_devices)]
        for (stage, _), life in self.lives().items():
            lives_by_device[self.placement[stage]].append(life)
        return lives_by_device

    def __post_init__(self) -> None:
        """Raise ScheduleError if two repeated passes of a device would overlap."""
        pass_in_slot: dict[tuple[int, int], Pass] = {}
        for block_pass in self.passes:
            device = self.placement[block_pass.work.stage]
            for slot in range(block_pass.start, block_pass.end):
                # Copies of a pass use the same slot modulo the interval, so one interval proves
                # all.
                earlier = pass_in_slot.setdefault((device, slot % self.interval), block_pass.work)
                if earlier != block_pass.work:
                    raise ScheduleError(
                        f"the block {self.name} does not repeat: on device {device}, {earlier} and "
                        f"{block_pass.work} meet in slot {slot % self.interval} of {self.interval}"
                    )


_Item = TypeVar("_Item")


def repeat(block: BuildingBlock, num_microbatches: int) -> Timeline:
    """Step 2: repeat the block for `num_microbatches`, counting slices; times are in slots.

    Copies of a block cannot collide: `BuildingBlock` rejects such a block. So in every interval a
    device runs one copy of each of its passes, always in the same order.
    """
    passes_by_device: list[list[BlockPass]] = [[] for _ in range(block.num_devices)]
    for block_pass in block.passes:
        passes_by_device[block.placement[block_pass.work.stage]].append(block_pass)
    for passes in passes_by_device:
        passes.sort(key=lambda block_pass: block_pass.start % block.interval)
    rows = [_row(passes, block, num_microbatches) for passes in passes_by_device]
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
    first_rounds = [block_pass.start // block.interval for block_pass in passes]
    copies: list[list[Pass]] = []
    starts: list[list[float]] = []
    ends: list[list[float]] = []
    for (kind, stage, within), start, length in passes:
        # The last copy of a block may be incomplete.
        microbatches = range(within, num_microbatches, block.num_microbatches)
        works = zip(itertools.repeat(kind), itertools.repeat(stage), microbatches, strict=False)
        # Faster than a Python call per pass.
        copies.append(list(map(partial(tuple.__new__, Pass), works)))
        first_start, interval = float(start), float(block.interval)
        starts.append([first_start + copy * interval for copy in range(len(microbatches))])
        ends.append([start + length for start in starts[-1]])
    return (
        _interleave(copies, first_rounds),
        _interleave(starts, first_rounds),
        _interleave(ends, first_rounds),
    )


def _interleave(
    columns: Iterable[Sequence[_Item]], first_rounds: Sequence[int]
) -> tuple[_Item, ...]:
    """Interleave the columns round by round; `first_rounds` has the first round of each column."""
    first_round = min(first_rounds, default=0)
    padded_columns = [
        itertools.chain(itertools.repeat(None, rounds - first_round), column)
        for column, rounds in zip(columns, first_rounds, strict=True)
    ]
    items = itertools.chain.from_iterable(itertools.zip_longest(*padded_columns))
    return tuple(item for item in items if item is not None)


def sliced(block: BuildingBlock, slices: int) -> BuildingBlock:
    """Split every microbatch of the block into slices along the sequence.

    A slice runs in the slot of a microbatch: F of the slices in order, B and W in reverse order and
    later, after all F of the microbatch.
    """
    if slices == 1:
        return block
    # The n-th B runs in the slot of the B that is `slices` - 1 later: modulo the interval, no slot
    # changes, and a lifespan of l slots becomes l + (slices - 1) T on average.
    by_number = _with_slices(block, slices, slices - 1, 0)
    # A smaller delay of all B and W is possible if each kind has one slot modulo WORK, because then
    # a delay by a multiple of WORK moves no pass into the slot of another kind.
    slots = {(block_pass.work.kind, block_pass.start % WORK) for block_pass in block.passes}
    if len(slots) > len({kind for kind, _ in slots}):
        return by_number
    overlap_slots = max(_max_overlap(_with_slices(block, slices, 0, 0)), 0)
    in_same_interval = _with_slices(block, slices, 0, -(-overlap_slots // WORK) * WORK)
    return min(by_number, in_same_interval, key=lambda block: max(block.peaks()))


def _max_overlap(block: BuildingBlock) -> int:
    """Return the maximum slots by which a B of the last stage starts before the end of its F."""
    last = len(block.placement) - 1
    last_passes = [block_pass for block_pass in block.passes if block_pass.work.stage == last]
    ends = {
        block_pass.work.microbatch: block_pass.end
        for block_pass in last_passes
        if block_pass.work.kind is Kind.F
    }
    return max(
        ends[block_pass.work.microbatch] - block_pass.start
        for block_pass in last_passes
        if Kind.B in block_pass.work.kind.does
    )


def _with_slices(
    block: BuildingBlock, slices: int, delay_numbers: int, delay_slots: int
) -> BuildingBlock:
    """Return the block of slices, with B and W delayed by `delay_numbers` and `delay_slots`."""
    passes, within = [], block.num_microbatches
    for (kind, stage, first), start, length in block.passes:
        number_delay, slot_delay = (0, 0) if kind is Kind.F else (delay_numbers, delay_slots)
        # `rank` counts slices in execution order. It uses slot `first` of the block, of the copy
        # that is (rank + number_delay) // within intervals later.
        for rank in range((first - number_delay) % within, within * slices, within):
            slot = start + slot_delay + (rank + number_delay) // within * block.interval
            number = reversed_slice(rank, slices) if kind.is_execution_numbered else rank
            passes.append(BlockPass(Pass(kind, stage, number), slot, length))
    return replace(
        block,
        interval=slices * block.interval,
        passes=tuple(passes),
        num_microbatches=within * slices,
        slices=slices,
    )


def gpipe(num_devices: int, num_microbatches: int) -> BuildingBlock:
    """GPipe: all forwards, then all backwards; the block is the complete schedule.

    Lifespans grow with the batch, so a block of fewer microbatches cannot repeat.
    """
    d, m = num_devices, num_microbatches
    passes = []
    for stage, microbatch in itertools.product(range(d), range(m)):
        # The last F ends in slot m + d - 1; a full backward has two slots, and so has its hop.
        backward = m + d - 1 + 2 * (d - 1 - stage) + 2 * microbatch
        passes.append(BlockPass(Pass(Kind.F, stage, microbatch), stage + microbatch))
        passes.append(BlockPass(Pass(Kind.BW, stage, microbatch), backward, 2))
    return BuildingBlock("gpipe", d, linear(d), WORK * (m + d - 1), tuple(passes), m)


def one_f_one_b(num_devices: int) -> BuildingBlock:
    """1F1B: hops of one slot forward and two backward, with full backwards."""
    return _loop_block("1f1b", num_devices, forward_hop=1, split=False)


def eager_one_f_one_b(num_devices: int) -> BuildingBlock:
    """Eager 1F1B: forwards move ahead, so that every message has at least one slot to arrive."""
    return _loop_block("eager-1f1b", num_devices, forward_hop=3, backward_hop=3, split=False)


def interleaved(num_devices: int, num_chunks: int) -> BuildingBlock:
    """Interleaved 1F1B: d microbatches pass a chunk before the next chunk."""
    return _loop_block(
        "interleaved-1f1b",
        num_devices,
        num_chunks,
        group=num_devices,
        forward_hop=3,
        backward_hop=3,
        split=False,
    )


def grouped_interleaved(num_devices: int, num_chunks: int, group_size: int) -> BuildingBlock:
    """Interleaved 1F1B with less memory: groups of `group_size` microbatches, hops as in 1F1B.

    With 2 chunks, its peak is d + `group_size` stage activations; interleaved 1F1B has 3 d - 1.
    """
    return _loop_block("grouped-interleaved-1f1b", num_devices, num_chunks, group_size, split=True)


def zb_h1(num_devices: int) -> BuildingBlock:
    """ZB-H1: 1F1B with split backwards."""
    return _loop_block("zb-h1", num_devices, split=True)


def zb_h2(num_devices: int) -> BuildingBlock:
    """ZB-H2: longer hops and twice the memory of 1F1B, idle only in warm-up and cool-down."""
    return _loop_block("zb-h2", num_devices, forward_hop=3, backward_hop=3, split=True)


def _loop_block(
    name: str,
    num_devices: int,
    num_chunks: int = 1,
    group: int = 1,
    *,
    forward_hop: int = 1,
    backward_hop: int = 2,
    split: bool,
) -> BuildingBlock:
    """Return the block of `group` microbatches that loop over the devices `num_chunks` times.

    Each device starts a forward every 3 slots and a backward right after it, so that it is never
    idle. The hops are the slots from one device to the next. They must add up to a multiple of 3,
    or passes of two microbatches would overlap.
    """
    d, v = num_devices, num_chunks
    interval = WORK * v * group
    forward, backward, lap = _laps(d, v, group, forward_hop, backward_hop)
    # From F of stage 0 to B of the last stage, right after its F.
    turn = (v - 1) * lap + forward[-1] + 1
    passes = []
    for chunk, device, microbatch in itertools.product(range(v), range(d), range(group)):
        stage = chunk * d + device
        begin = WORK * microbatch
        ahead = begin + chunk * lap + forward[device]
        # B visits chunks and devices in reverse order.
        back = begin + (v - 1 - chunk) * lap + turn + backward[d - 1 - device]
        passes.append(BlockPass(Pass(Kind.F, stage, microbatch), ahead))
        if split:
            passes.append(BlockPass(Pass(Kind.B, stage, microbatch), back))
            passes.append(BlockPass(Pass(Kind.W, stage, microbatch), back + 1))
        else:
            passes.append(BlockPass(Pass(Kind.BW, stage, microbatch), back, 2))
    return BuildingBlock(name, d, looping(d, v), interval, tuple(passes), group)


def _laps(
    num_devices: int, num_chunks: int, group: int, forward_hop: int, backward_hop: int
) -> tuple[list[int], list[int], int]:
    """Return the slots of F after i hops, of B after i hops, and from one chunk to the next.

    A lap is the time of the group's passes of one chunk. Small groups require longer laps, by
    complete intervals. Before that, hops of B are shortened, and the same number of hops of F
    lengthened.
    """
    hops, round_trip_hop = num_devices - 1, forward_hop + backward_hop
    lap = WORK * group
    if num_chunks > 1:
        # A group starts its next chunk on device 0 one lap later, after F of this chunk on the last
        # device: F's hops must add up to less than a lap, and B's too. Slots can move from one sum
        # to the other (`shifted`), so both together must be less than two laps.
        while round_trip_hop * hops > 2 * (lap - 1):
            lap += WORK * num_chunks * group
    shifted = max(0, backward_hop * hops - (lap - 1)) if num_chunks > 1 else 0
    forward = [min(hop, shifted) + forward_hop * hop for hop in range(num_devices)]
    last = forward[-1]
    # A hop of F and the same hop of B add up to `round_trip_hop`, a multiple of WORK, so that on
    # every device F and B keep their distance modulo WORK.
    backward = [round_trip_hop * hop - (last - forward[hops - hop]) for hop in range(num_devices)]
    return forward, backward, lap


def two_thirds(num_devices: int) -> BuildingBlock:
    """V-2/3: 2/3 of 1F1B's memory; hops of 1 in both directions, with split backwards.

    One microbatch alone would collide with its copies. A second one, 2 slots later, makes an
    interval of 6 in which forwards use even slots after their device's first, and backwards odd
    ones.
    """
    d = num_devices
    forward_delay, backward_delay = (3, 3) if d == 1 else (2, 4 if d % 3 == 0 else 2)
    starts = [
        BlockPass(Pass(kind, stage, microbatch), slot + delay * microbatch)
        for stage, microbatch in itertools.product(range(d), range(2))
        for kind, slot, delay in (
            (Kind.F, stage, forward_delay),
            (Kind.B, 2 * d - 1 - stage, backward_delay),
        )
    ]
    return _with_weight_passes(
        "v-two-thirds", linear(d), starts, interval=2 * WORK, num_microbatches=2
    )


def one_f_one_b_v(num_devices: int) -> BuildingBlock:
    """1F1B-V: full backwards at 2/3 of 1F1B's memory; forward hops of 1.

    With any constant hop, two full backwards collide on some device. So two of three hops are 3
    slots longer, alternately one of chunk 1 and one of chunk 0: 2, 2, 5 and 2, 5, 2.
    """
    turns = {0: (3, 1, 3), 1: (1, 1, 2), 2: (5, 1, 4)}[num_devices % 3]
    hops = ((1,), (1,), (2, 2, 5), (2, 5, 2))
    return _v_block("1f1b-v", num_devices, hops, turns, split=False)


def v_min(num_devices: int) -> BuildingBlock:
    """V-Min: about a third of 1F1B's activation memory; hops of 1."""
    middle = 3 if num_devices % 3 == 0 else 1
    return _v_block("v-min", num_devices, hops=((1,), (1,), (1,), (1,)), turns=(1, middle, 1))


def v_half(num_devices: int) -> BuildingBlock:
    """V-Half: about half of 1F1B's activation memory; hops of 2 and 1."""
    middle = 4 if num_devices % 2 == 0 else 1
    return _v_block("v-half", num_devices, hops=((2,), (1,), (2,), (1,)), turns=(2, middle, 1))


def v_zb(num_devices: int) -> BuildingBlock:
    """V-ZB: zero bubble at 1F1B's activation memory; hops of 4 and 2."""
    return _v_block("v-zb", num_devices, hops=((4,), (2,), (4,), (2,)), turns=(1, 1, 1))


def dualpipev(num_devices: int, num_microbatches: int) -> BuildingBlock:
    """DualPipeV: hops of an overlapped F&B pair, an F with a full backward.

    In slots, the two passes of a pair follow each other, and both results are sent at the end.

    Raises:
        ScheduleError: there are fewer than 2 * num_devices microbatches.
    """
    if num_microbatches < 2 * num_devices:
        raise ScheduleError(
            f"dualpipev requires at least 2 x ranks microbatches, {2 * num_devices} "
            f"on {num_devices}, not {num_microbatches}"
        )
    hops = ((WORK,),) * 4
    return _v_block("dualpipev", num_devices, hops, (WORK, WORK + 1, WORK), split=False)


def overlapped_interleaved(num_devices: int, num_chunks: int) -> BuildingBlock:
    """Interleaved 1F1B with overlapped expert-parallel communication, as in Megatron.

    Its additional warm-up forward is not part of the block.
    """
    block = interleaved(num_devices, num_chunks)
    return replace(block, name="overlapped-interleaved-1f1b")


def _v_block(
    name: str,
    num_devices: int,
    hops: Sequence[Sequence[int]],
    turns: Sequence[int],
    *,
    split: bool = True,
) -> BuildingBlock:
    """Return the V block with these offsets (arXiv 2405.15362, section 3).

    Args:
        name: name of the block.
        num_devices: number of devices.
        hops: slots from one device to the next for F of chunk 0, F of chunk 1, B of chunk 1 and B
            of chunk 0; each a cycle that starts between devices 0 and 1.
        turns: slots from F0 to F1 on the last device, from F1 to B1 on device 0, and from B1 to B0
            on the last device.
        split: each W is in the first free slot for both chunks; otherwise it is part of its
            backward.
    """
    d = num_devices
    backward, length = (Kind.B, 1) if split else (Kind.BW, 2)
    legs = (
        (Kind.F, range(d), 1),
        (Kind.F, range(d, 2 * d), 1),
        (backward, range(2 * d - 1, d - 1, -1), length),
        (backward, range(d - 1, -1, -1), length),
    )
    placement = v_shape(d)
    starts: list[BlockPass] = []
    slot = 0
    for (kind, stages, length), cycle, turn in zip(legs, hops, (*turns, 0), strict=True):
        for stage in stages:
            starts.append(BlockPass(Pass(kind, stage, 0), slot, length))
            if stage != stages[-1]:
                # In both directions, a hop has the number of its lower device.
                slot += cycle[min(placement[stage], placement[stage + stages.step]) % len(cycle)]
        slot += turn
    if not split:
        return BuildingBlock(name, d, placement, 2 * WORK, tuple(starts))
    return _with_weight_passes(name, placement, starts, interval=2 * WORK)


def _with_weight_passes(
    name: str,
    placement: Placement,
    starts: Sequence[BlockPass],
    interval: int,
    num_microbatches: int = 1,
) -> BuildingBlock:
    """Add the W of each device to its free slots, assigned for the lowest peak."""
    num_devices = max(placement) + 1
    # Raises for passes that meet.
    block = BuildingBlock(name, num_devices, placement, interval, tuple(starts), num_microbatches)
    passes = list(starts)
    for device in range(num_devices):
        device_passes = [
            block_pass for block_pass in starts if placement[block_pass.work.stage] == device
        ]
        passes.extend(_weight_passes(device_passes, interval))
    return replace(block, passes=tuple(passes))


def _weight_passes(device_passes: Sequence[BlockPass], interval: int) -> Iterator[BlockPass]:
    """Yield the W of one device with the other passes `device_passes`, in the best free slots."""
    free = set(range(interval)) - {block_pass.start % interval for block_pass in device_passes}
    forwards = {
        block_pass.work[1:]: block_pass.start
        for block_pass in device_passes
        if block_pass.work.kind is Kind.F
    }
    ready = {
        block_pass.work[1:]: block_pass.end
        for block_pass in device_passes
        if block_pass.work.kind is Kind.B
    }

    def starts(slots: Sequence[int]) -> list[int]:
        # The first slot from the end of B on that is `slot` modulo the interval.
        return [
            ready_slot + (slot - ready_slot) % interval
            for ready_slot, slot in zip(ready.values(), slots, strict=True)
        ]

    def cost(slots: Sequence[int]) -> tuple[int, int]:
        spans = [start + 1 - forwards[key] for key, start in zip(ready, starts(slots), strict=True)]
        # First the bound of peak memory (section 2 of the paper), then the mean.
        return sum(math.ceil(span / interval) for span in spans), sum(spans)

    # A device has few W per interval, so trying all assignments is cheap.
    best = min(itertools.permutations(sorted(free)), key=cost)
    for key, start in zip(ready, starts(best), strict=True):
        yield BlockPass(Pass(Kind.W, *key), start)
