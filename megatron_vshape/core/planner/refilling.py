"""Fillers: improve an order by filling idle time and by placing W again.

`fill` is step 4 of the paper, compiled, with the problem's costs. `refill` keeps the order of all
passes except W. A W only frees memory, so it can run in any sufficient idle time, or before a
forward that needs its memory.
"""

import numpy as np

from megatron_vshape.core.compiling import compiled, compiled_once
from megatron_vshape.core.model.numbering import NONE, WITHOUT
from megatron_vshape.core.paper import reordering
from megatron_vshape.core.paper.reordering import (
    EIGHTHS,
    LATE,
    Order,
    Refill,
    begin_run,
    finish,
    new_run,
    ready,
)
from megatron_vshape.core.planner.job_shop import Problem

DELAY = 4
"""Maximum delay of the next pass by a W, in eighths of the W's time.

At d=8, m=24, 1/1.15/.85/.05, 16 chunks: 150.35; without it 151.15.
"""

_fill = compiled_once(reordering.fill, *reordering.CALLED)


def fill(
    problem: Problem, row: np.ndarray, cool: int, num_microbatches: int = 0, delay: int = 0
) -> np.ndarray | None:
    """Return the order with its idle time filled; None if no pass fits in the memory.

    Args:
        problem: costs and limits.
        row: [lane, position] -> pass.
        cool: if a device has at most this many forwards left, W only run if nothing else can.
        num_microbatches: required for an order that lacks passes (default: by its length).
        delay: maximum delay of the next pass by a filler, in eighths of the filler's time.
    """
    order, flat = _order_of(problem, row, num_microbatches)
    order = order._replace(delay=delay)
    made = np.empty(len(flat), np.int64)
    if _fill(order, new_run(order, _zeros), made, cool, NONE) < len(flat):
        return None
    return _rows(row, flat[made])


def refill(problem: Problem, row: np.ndarray, num_microbatches: int = 0) -> np.ndarray | None:
    """Return the order with its W placed again as filler; None if the memory does not suffice.

    Args:
        problem: costs and limits.
        row: [lane, position] -> pass.
        num_microbatches: required for an order that lacks passes (default: by its length).
    """
    order, flat = _order_of(problem, row, num_microbatches)
    made, queue = np.empty(len(flat), np.int64), np.empty(len(flat), np.int64)
    if not _deal(order, new_run(order, _zeros), problem.weight_of, queue, made):
        return None
    return _rows(row, flat[made])


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, np.int64)


def _rows(like: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Return the passes of all lanes in rows of the shape of `like`."""
    rows = np.full(like.shape, NONE, np.int64)
    rows[like != NONE] = flat
    return rows


def _order_of(problem: Problem, row: np.ndarray, num_microbatches: int) -> tuple[Order, np.ndarray]:
    """Return the order as step 4 needs it, and the passes of its positions."""
    flat = row[row != NONE].astype(np.int64)
    sorts = problem.sorts
    m = num_microbatches or len(flat) // len(sorts.ticks)
    sort, microbatch = np.divmod(flat, m)
    place_of = np.full(len(sorts.ticks) * m, WITHOUT)
    place_of[flat] = np.arange(len(flat))
    order = Order(
        sorts=sorts,
        begin=np.append(0, np.cumsum(np.count_nonzero(row != NONE, axis=1))),
        sort=sort,
        microbatch=microbatch,
        place_of=place_of,
        limit=problem.room,
        num_microbatches=m,
        ranks=problem.turned(np.arange(m)),
        strict=True,
    )
    return order, flat


@compiled
def _next_start(order: Order, run: Refill, weight_of: np.ndarray, lane: int) -> int:
    """Return the start of the next pass except W; LATE if its input or memory is missing."""
    first, end = run.first[lane], order.begin[lane + 1]
    # W are not part of this sequence: they run as filler.
    while first < end and weight_of[order.sort[first]] == order.sort[first]:
        first += 1
    run.first[lane] = run.chosen[lane] = first
    if first == end:
        return LATE
    if run.held[lane] + order.sorts.most[order.sort[first]] > order.limit[lane]:
        return LATE
    return ready(order, run, first, run.clock[lane])


@compiled
def _deal(
    order: Order, run: Refill, weight_of: np.ndarray, queue: np.ndarray, made: np.ndarray
) -> bool:
    """Run the lanes in order of their next starts, with W as filler; return False on deadlock.

    A lane's part of `queue` contains the W whose B have run, oldest first.
    """
    lanes = len(order.limit)
    taken, listed = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    starts = np.asarray(run.start)
    begin_run(order, run)
    for _ in range(len(made)):
        for lane in range(lanes):
            # Only lanes whose input or memory has changed get a new start.
            if run.stale[lane]:
                run.stale[lane] = 0
                run.start[lane] = _next_start(order, run, weight_of, lane)
                # The oldest W first: it frees memory that the next forward may need.
                if taken[lane] < listed[lane]:
                    weight = queue[order.begin[lane] + taken[lane]]
                    _prefer_weight(order, run, lane, weight)
        lane = int(np.argmin(starts))
        # The earliest start is LATE, so every lane is blocked.
        if run.start[lane] == LATE:
            return False
        place = run.chosen[lane]
        made[order.begin[lane] + run.ran[lane]] = place
        finish(order, run, lane, place)
        sort = order.sort[place]
        if weight_of[sort] == sort:
            taken[lane] += 1
            continue
        run.first[lane] += 1
        # A B has run: its W is available as filler.
        if weight_of[sort] != NONE:
            weight = weight_of[sort] * order.num_microbatches + order.microbatch[place]
            queue[order.begin[lane] + listed[lane]] = order.place_of[weight]
            listed[lane] += 1
    return True


@compiled
def _prefer_weight(order: Order, run: Refill, lane: int, weight: int) -> None:
    """Choose the oldest W if it delays the next start by at most `DELAY`."""
    start, clock = run.start[lane], run.clock[lane]
    ticks = order.sorts.ticks[order.sort[weight]]
    if start > clock and clock + ticks <= start + DELAY * ticks // EIGHTHS:
        run.start[lane], run.chosen[lane] = clock, weight
