"""Orders made from orders: idle time filled from later, and W dealt out anew as filler.

`fill` is `reordering.reorder` for the inner loops: the same rules, but memory counts in any unit.
`refill` keeps the order of F and B alone. Nothing waits for a W but memory, so where it runs
follows from the rest: in idle time that holds it, and before a forward that needs its memory.
"""

from typing import NamedTuple

import numpy as np

from megatron_vshape.core.planner.compiling import compiled
from megatron_vshape.core.planner.improve import NONE, Shop

LATE = 1 << 62
"""A start that is never."""


class Filling(NamedTuple):
    """A half-made order, changed in place."""

    row: np.ndarray  # [device, place] -> pass, the order to fill
    place: np.ndarray
    done: np.ndarray
    head: np.ndarray
    first: np.ndarray  # of a device: the place of the first pass left
    clock: np.ndarray
    held: np.ndarray
    waiting: np.ndarray  # [device, sort of the device] -> first pass left, NONE if there is none
    left: np.ndarray  # of a device: forwards still to run, of all its stages


@compiled
def _ready(shop: Shop, filling: Filling, work: int) -> int:
    """Return when what the pass reads is there; LATE while it has not run."""
    need = shop.before[work]
    if need < 0:
        return 0
    return filling.head[need] + shop.lag[work] if filling.done[need] else LATE


@compiled
def _fits(shop: Shop, filling: Filling, device: int, place: int) -> bool:
    """Return whether the pass at `place` can run now, and those left before it still after it."""
    room = shop.limit[device]
    held = filling.held[device] + shop.delta[shop.sort[filling.row[device, place]]]
    for at in range(filling.first[device], place):
        if held > room:
            return False
        work = filling.row[device, at]
        if not filling.done[work]:
            held += shop.delta[shop.sort[work]]
    return held <= room


@compiled
def _only_weights_before(shop: Shop, filling: Filling, device: int, place: int) -> bool:
    for at in range(filling.first[device], place):
        work = filling.row[device, at]
        if not filling.done[work] and shop.sort[work] % 3 != 2:
            return False
    return True


@compiled
def _rank(shop: Shop, filling: Filling, work: int, start: int, leads: int, cooling: bool) -> int:
    """Return how the pass stands among those of its start, low first; NONE if it must wait."""
    device, place = shop.device[work], filling.place[work]
    kind = shop.sort[work] % 3
    if cooling and kind == 2:
        return 3
    if place == filling.first[device]:
        return 0
    if cooling and _only_weights_before(shop, filling, device, place):
        return 0
    if start + shop.ticks[work] <= leads:
        return 1 if kind == 1 else 2
    return NONE


@compiled
def _choose(shop: Shop, filling: Filling, device: int, cooling: bool) -> tuple[int, int]:
    """Return the start and the place of what the device runs next; LATE and NONE if nothing."""
    first, clock = filling.first[device], filling.clock[device]
    if first == filling.row.shape[1]:
        return LATE, NONE
    leader = filling.row[device, first]
    leads = max(_ready(shop, filling, leader), clock)
    if filling.held[device] + shop.delta[shop.sort[leader]] > shop.limit[device]:
        leads = LATE
    if leads == clock and not (cooling and shop.sort[leader] % 3 == 2):
        return clock, first
    best_start, best_rank, best = LATE, 9, NONE
    for at in range(filling.waiting.shape[1]):
        work = filling.waiting[device, at]
        if work < 0:
            continue
        place = filling.place[work]
        start = max(_ready(shop, filling, work), clock)
        if start > best_start or start == LATE or not _fits(shop, filling, device, place):
            continue
        rank = _rank(shop, filling, work, start, leads, cooling)
        better = start < best_start or rank < best_rank or (rank == best_rank and place < best)
        if rank != NONE and better:
            best_start, best_rank, best = start, rank, place
    return best_start, best


@compiled
def _take(shop: Shop, filling: Filling, device: int, place: int, start: int, each: int) -> int:
    """Run the pass at `place`; return it."""
    work = filling.row[device, place]
    sort = shop.sort[work]
    filling.done[work] = True
    filling.clock[device] = start + shop.ticks[work]
    filling.head[work] = filling.clock[device]
    filling.held[device] += shop.delta[sort]
    if sort % 3 == 0:
        filling.left[device] -= 1
    for at in range(filling.waiting.shape[1]):
        if filling.waiting[device, at] == work:
            filling.waiting[device, at] = work + 1 if (work + 1) // each == sort else NONE
    first = filling.first[device]
    while first < filling.row.shape[1] and filling.done[filling.row[device, first]]:
        first += 1
    filling.first[device] = first
    return work


@compiled
def _run(shop: Shop, filling: Filling, made: np.ndarray, each: int, cool: int) -> bool:
    """Let the devices run in the order of their next starts; return False if they get stuck."""
    devices, length = made.shape
    starts = np.empty(devices, np.int64)
    places = np.empty(devices, np.int64)
    stale = np.ones(devices, np.bool_)
    count = np.zeros(devices, np.int64)
    for _ in range(devices * length):
        for device in range(devices):
            if stale[device]:
                cooling = filling.left[device] <= cool
                starts[device], places[device] = _choose(shop, filling, device, cooling)
                stale[device] = False
        device = int(np.argmin(starts))
        if starts[device] == LATE:
            return False
        work = _take(shop, filling, device, places[device], starts[device], each)
        made[device, count[device]] = work
        count[device] += 1
        stale[device] = True
        reader = shop.after[work]
        if reader >= 0:
            stale[shop.device[reader]] = True
    return True


def fill(shop: Shop, row: np.ndarray, cool: int) -> np.ndarray | None:
    """Return the order with its idle time filled; None if the rules get stuck in the memory.

    W waits until nothing else can run once a device has at most `cool` forwards left.
    """
    filling = _start(shop, row)
    made = np.empty(row.shape, np.int64)
    each = row.size // len(shop.delta)
    return made if _run(shop, filling, made, each, cool) else None


def _start(shop: Shop, row: np.ndarray) -> Filling:
    devices, length = row.shape
    each = row.size // len(shop.delta)
    place = np.empty(row.size, np.int64)
    for own in row:
        place[own] = np.arange(length)
    sorts = [np.unique(shop.sort[own]) for own in row]
    return Filling(
        row=np.array(row, dtype=np.int64, order="C"),
        place=place,
        done=np.zeros(row.size, np.bool_),
        head=np.zeros(row.size, np.int64),
        first=np.zeros(devices, np.int64),
        clock=np.zeros(devices, np.int64),
        held=np.zeros(devices, np.int64),
        waiting=np.array([own * each for own in sorts], dtype=np.int64),
        left=np.array([each * np.count_nonzero(own % 3 == 0) for own in sorts]),
    )


EIGHTHS = 8
"""What a W may delay is counted in eighths of its own time."""


@compiled
def _next_start(shop: Shop, filling: Filling, device: int) -> int:
    """Return when the device's next F or B can start; LATE if its input or its room is missing."""
    first = filling.first[device]
    if first == filling.row.shape[1] or filling.row[device, first] < 0:
        return LATE
    work = filling.row[device, first]
    if filling.held[device] + shop.delta[shop.sort[work]] > shop.limit[device]:
        return LATE
    return max(_ready(shop, filling, work), filling.clock[device])


@compiled
def _prefers_weight(
    shop: Shop, filling: Filling, device: int, start: int, weight: int, delay: int
) -> bool:
    """Return whether the oldest W runs in the idle time before `start`, not much longer than it."""
    clock = filling.clock[device]
    ticks = shop.ticks[weight]
    return start > clock and clock + ticks <= start + delay * ticks // EIGHTHS


@compiled
def _deal(shop: Shop, filling: Filling, queue: np.ndarray, made: np.ndarray, delay: int) -> bool:
    """Let the devices run in the order of their next starts; return False if they get stuck."""
    devices, length = made.shape
    starts, chosen = np.empty(devices, np.int64), np.empty(devices, np.int64)
    stale = np.ones(devices, np.bool_)
    taken, listed, count = (
        np.zeros(devices, np.int64),
        np.zeros(devices, np.int64),
        np.zeros(devices, np.int64),
    )
    for _ in range(devices * length):
        for device in range(devices):
            if not stale[device]:
                continue
            stale[device] = False
            starts[device] = _next_start(shop, filling, device)
            chosen[device] = NONE
            if listed[device] > taken[device]:
                weight = queue[device, taken[device]]
                if _prefers_weight(shop, filling, device, starts[device], weight, delay):
                    starts[device], chosen[device] = filling.clock[device], weight
        device = int(np.argmin(starts))
        if starts[device] == LATE:
            return False
        work = chosen[device]
        if work == NONE:
            work = filling.row[device, filling.first[device]]
            filling.first[device] += 1
            if shop.sort[work] % 3 == 1:
                queue[device, listed[device]] = shop.weight[work]
                listed[device] += 1
        else:
            taken[device] += 1
        _finish(shop, filling, device, work, starts[device])
        made[device, count[device]] = work
        count[device] += 1
        stale[device] = True
        reader = shop.after[work]
        if reader >= 0:
            stale[shop.device[reader]] = True
    return True


@compiled
def _finish(shop: Shop, filling: Filling, device: int, work: int, start: int) -> None:
    filling.done[work] = True
    filling.clock[device] = start + shop.ticks[work]
    filling.head[work] = filling.clock[device]
    filling.held[device] += shop.delta[shop.sort[work]]


def refill(shop: Shop, row: np.ndarray, delay: int) -> np.ndarray | None:
    """Return the order with its W dealt out anew; None if the memory does not suffice.

    A W may delay what follows it by `delay` eighths of its own time.
    """
    filling = _start(shop, row)
    filling.row[:] = NONE
    for device, own in enumerate(row):
        others = own[shop.sort[own] % 3 != 2]
        filling.row[device, : len(others)] = others
    made = np.empty(row.shape, np.int64)
    return made if _deal(shop, filling, np.empty_like(made), made, delay) else None
