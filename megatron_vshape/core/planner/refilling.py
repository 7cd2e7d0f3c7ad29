"""Orders made from orders: idle time filled from later, and W dealt out anew as filler.

`fill` is the paper's step 4, compiled, at the costs of the problem. `refill` keeps the order of all
but W. Nothing waits for a W but memory, so where it runs follows from the rest: in idle time that
holds it, and before a forward that needs its memory.
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
"""So many eighths of its time a W may delay the pass behind it.

At d=8, m=24, 1/1.15/.85/.05, 16 chunks: 150.35, and 151.15 without.
"""

_fill = compiled_once(reordering.fill, *reordering.CALLED)


def fill(
    problem: Problem, row: np.ndarray, cool: int, num_microbatches: int = 0, delay: int = 0
) -> np.ndarray | None:
    """Return the order with its idle time filled; None if the rules get stuck in the memory.

    W waits until nothing else can run once a device has at most `cool` forwards left. What fills
    may delay what follows it by `delay` eighths of its own time. How many microbatches there are
    must be given of an order that lacks passes.
    """
    order, flat = _order_of(problem, row, num_microbatches)
    order = order._replace(delay=delay)
    made = np.empty(len(flat), np.int64)
    if _fill(order, new_run(order, _zeros), made, cool, NONE) < len(flat):
        return None
    return _rows(row, flat[made])


def refill(problem: Problem, row: np.ndarray, num_microbatches: int = 0) -> np.ndarray | None:
    """Return the order with its W dealt out anew; None if the memory does not suffice.

    How many microbatches there are must be given of an order that lacks passes.
    """
    order, flat = _order_of(problem, row, num_microbatches)
    made, queue = np.empty(len(flat), np.int64), np.empty(len(flat), np.int64)
    if not _deal(order, new_run(order, _zeros), problem.weight_of, queue, made):
        return None
    return _rows(row, flat[made])


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, np.int64)


def _rows(like: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Return the passes of all lanes in rows as long as those of `like`."""
    rows = np.full(like.shape, NONE, np.int64)
    rows[like != NONE] = flat
    return rows


def _order_of(problem: Problem, row: np.ndarray, num_microbatches: int) -> tuple[Order, np.ndarray]:
    """Return the order for step 4, and the passes that its places stand for."""
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
        lag=problem.send,
        num_microbatches=m,
        slices=problem.slices,
        strict=True,
    )
    return order, flat


@compiled
def _next_start(order: Order, run: Refill, weight_of: np.ndarray, lane: int) -> int:
    """Return when the next pass but W can start; LATE if its input or its room is missing."""
    first, end = run.first[lane], order.begin[lane + 1]
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
    """Let the lanes run in the order of their next starts; return False if they get stuck.

    A lane's part of `queue` holds its W whose B have run, of which so many are `taken`.
    """
    lanes = len(order.limit)
    taken, listed = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    starts = np.asarray(run.start)
    begin_run(order, run)
    for _ in range(len(made)):
        for lane in range(lanes):
            if run.stale[lane]:
                run.stale[lane] = 0
                run.start[lane] = _next_start(order, run, weight_of, lane)
                if taken[lane] < listed[lane]:
                    weight = queue[order.begin[lane] + taken[lane]]
                    _prefer_weight(order, run, lane, weight)
        lane = int(np.argmin(starts))
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
