"""Orders made for joint passes: blocks in which partners travel together, dealt out for any batch.

A joint pass hands its results over at its end, so each hop of a microbatch that goes by joint
passes is as long as one. Neighbours of a finished order cannot simply be joined: V-Half's and
V-Min's then wait for each other for ever, and V-ZB's gets slower. In the V, F of chunk 0 and B of
chunk 1 go down the devices, F of chunk 1 and B of chunk 0 up: each of these two is a pair.

    block         | joint     | slots of a microbatch | chunks held
    all           | both      | 6                     | 2 d + 1
    two thirds    | both      | 6 (12 of two)         | about 4/3 d, and more for few devices
    half          | the first | 6                     | d + 3

`all` is DualPipeV's steady state with each W right behind its pair; the others take less memory, as
their W are elsewhere. A slot is one F, B or W. With fewer joint passes than `half` has, there is
nothing to make: those orders are V-Half's kind, which the search finds.

In a loop F and B go opposite ways, and a pair's partners change from device to device: there is no
block, and the order is Megatron's own, again with each W right behind its pair.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, looping, v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.paper.joint import dualpipev

_MEGATRONS = "overlapped-interleaved-1f1b"

PAIR = 2
"""Slots of an F and a B, joint."""


class _Cycle(NamedTuple):
    """What a device runs in a period: at which slots F0, F1, B1 and B0 start, and W's may."""

    legs: tuple[tuple[int, ...], ...]
    free: tuple[int, ...]


class _Block(NamedTuple):
    """A block of `microbatches`: by device its cycle, by leg the slots until the next device."""

    name: str
    period: int
    microbatches: int
    hops: tuple[int, int, int, int]
    cycles: tuple[_Cycle, ...]


def joint_orders(
    num_devices: int, num_microbatches: int, placement: Placement | None = None
) -> Iterator[Schedule]:
    """Yield orders with joint passes, every W by itself, those that hold most first.

    They are of the V if nothing is said; there are some of a V and of a loop alone.
    """
    placement = placement or v_shape(num_devices)
    chunks = len(placement) // num_devices
    if chunks > 1 and placement == looping(num_devices, chunks):
        # Where the microbatches do not go into whole groups, it may hang.
        with suppress(ScheduleError):
            yield _apart(make(_MEGATRONS, num_devices, num_microbatches, num_chunks=chunks))
    if placement != v_shape(num_devices):
        return
    if num_microbatches >= 2 * num_devices:
        yield dualpipev(num_devices, num_microbatches, apart=True)
    for block in _blocks(num_devices):
        yield _unrolled(block, num_devices, num_microbatches)


def _apart(schedule: Schedule) -> Schedule:
    """Return the order with B and W in place of each BW."""
    rows = [[w._replace(kind=part) for w in row for part in w.kind.does] for row in schedule.order]
    return replace(schedule, order=tuple(map(tuple, rows)))


def _blocks(num_devices: int) -> Iterator[_Block]:
    devices = range(num_devices)
    yield _Block("all", 6, 1, (3, 3, 3, 3), tuple(map(_all, devices)))
    for turn in range(len(_TURNS)):
        cycles = tuple(_two_thirds(device, turn) for device in devices)
        yield _Block("two-thirds", 12, 2, (PAIR,) * 4, cycles)
    for turn in range(2):
        cycles = tuple(_half(device, turn) for device in devices)
        yield _Block("half", 6, 1, (PAIR, 1, PAIR, 1), cycles)


def _all(device: int) -> _Cycle:
    """Return a pair and a W, and again: what a hop takes is all three."""
    down, up = (3 * device,), (3 * device + 3,)
    return _Cycle((down, up, down, up), (down[0] + PAIR, up[0] + PAIR))


_TURNS = ((2, 6), (6, 10), (10, 2))
"""Where the pairs that go up start, after the first one that goes down; device by device."""


def _two_thirds(device: int, turn: int) -> _Cycle:
    first = PAIR * device
    down = first, first + 4
    up = tuple(first + slot for slot in _TURNS[(turn - device) % len(_TURNS)])
    taken = {(start + at) % 12 for start in (*down, *up) for at in range(PAIR)}
    return _Cycle((down, up, down, up), tuple(slot for slot in range(12) if slot not in taken))


def _half(device: int, turn: int) -> _Cycle:
    """Return one pair; F of chunk 1 and B of chunk 0 are right behind and before it, or swapped."""
    first = PAIR * device
    behind, before = (first + PAIR,), (first - 1,)
    if (device + turn) % 2:
        behind, before = before, behind
    return _Cycle(((first,), behind, (first,), before), (first + 3, first + 4))


class _Starts:
    """The slots of a cycle in which something may start, each taken once."""

    def __init__(self, slots: Sequence[int], period: int) -> None:
        self._slots = sorted(slot % period for slot in slots)
        self._period = period
        self._taken: set[int] = set()

    def take(self, earliest: int) -> int:
        """Return the first slot from `earliest` on that is not taken, and take it."""
        begin = earliest - earliest % self._period
        while True:
            for slot in self._slots:
                start = begin + slot
                if start >= earliest and start not in self._taken:
                    self._taken.add(start)
                    return start
            begin += self._period


def _unrolled(block: _Block, num_devices: int, num_microbatches: int) -> Schedule:
    """Return the block's order: each pass in the first slot of its own that it can have."""
    placement, last = v_shape(num_devices), 2 * num_devices - 1
    starts = [[_Starts(leg, block.period) for leg in cycle.legs] for cycle in block.cycles]
    legs = (
        (Kind.F, range(num_devices)),
        (Kind.F, range(num_devices, last + 1)),
        (Kind.B, range(last, num_devices - 1, -1)),
        (Kind.B, range(num_devices - 1, -1, -1)),
    )
    rows: list[list[tuple[int, Pass]]] = [[] for _ in range(num_devices)]
    for microbatch in range(num_microbatches):
        slot = microbatch // block.microbatches * block.period
        for at, (kind, stages) in enumerate(legs):
            for stage in stages:
                device = placement[stage]
                start = starts[device][at].take(slot)
                rows[device].append((start, Pass(kind, stage, microbatch)))
                slot = start + block.hops[at]
    order, joint = [], set[Pass]()
    for row, cycle in zip(rows, block.cycles, strict=True):
        row.sort(key=lambda each: (each[0], each[1].kind is not Kind.F))
        pairs = [(one, other) for one, other in pairwise(row) if one[0] == other[0]]
        joint.update(work for (_, work), _ in pairs)
        ends = {work: start + PAIR for _, (start, work) in pairs}
        free = _Starts(cycle.free, block.period)
        for start, work in [each for each in row if each[1].kind is Kind.B]:
            late = free.take(ends.get(work, start + 1))
            row.append((late, work._replace(kind=Kind.W)))
        row.sort(key=lambda each: each[0])  # stable: an F stays before the B beside it
        order.append(tuple(work for _, work in row))
    sizes = num_devices, num_microbatches, placement
    return Schedule(block.name, *sizes, tuple(order), joint=frozenset(joint))
