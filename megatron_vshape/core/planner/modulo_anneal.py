"""Annealing of steady orders: random starting points, random moves, exact memory and period.

A step needs about a microsecond at 8 devices: a move changes the potentials only around its device,
and most moves are rejected by memory or by the first cycle that is too slow.
"""

import numpy as np
import numpy.typing as npt

from megatron_vshape.core.compiling import compiled
from megatron_vshape.core.planner.modulo_graph import (
    NEVER,
    Graph,
    Ints,
    Orders,
    Scratch,
    all_fit,
    copy_orders,
    data_lag,
    find_peak,
    find_period,
    find_ratio,
    lay,
    settle,
    slide,
    still_critical,
)


@compiled
def draw(random: npt.NDArray[np.uint64], bound: int) -> int:
    """Return a random whole number in [0, bound), by xorshift."""
    state = random[0]
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    random[0] = state
    return np.int64((state >> np.uint64(33)) % np.uint64(bound))  # type: ignore[return-value]


@compiled
def propose(graph: Graph, orders: Orders, scratch: Scratch, moves: Ints) -> int:
    """Make a random move; return the number of changed devices, negative if it does not fit.

    The move is one pass anywhere, one on the critical cycle, or the same pass on neighboring
    devices. `moves` receives (device, new position, distance) of every moved pass.
    """
    random, seq = scratch.random, orders.seq
    devices, length = seq.shape
    style = draw(random, 4)
    distance = draw(random, 2) * 2 - 1
    if style < 3 and draw(random, 2):
        distance *= 1 + draw(random, length - 1)
    run = 1
    if 0 < style < 3 and scratch.critical[0] > 0:
        node = scratch.critical[1 + draw(random, scratch.critical[0])] >> 1
        first, which = graph.home[node], 0
    else:
        first, which = draw(random, devices), draw(random, length)
        node = graph.own[first, which]
        if style == 3:
            run = min(devices - first, 1 + draw(random, min(devices, 8)))
    for index in range(run):
        device = first + index
        if index > 0:
            node = graph.own[device, which]
        moves[index, 0], moves[index, 2] = device, distance
        moves[index, 1] = slide(orders, device, orders.at[node], distance)
        # Memory is tested before the period because it is cheaper.
        if not find_peak(graph, orders, device) <= graph.limit[device]:
            return -(index + 1)
    return int(run)


@compiled
def evaluate(
    graph: Graph, orders: Orders, scratch: Scratch, moves: Ints, run: int, now: int, most: int,
    busy: int, kept: tuple[Ints, Ints],
) -> int:  # fmt: skip
    """Return the period after a move from one of period `now`; NEVER if it is above `most`.

    If it is NEVER, potentials and critical cycle are restored.
    """
    potentials, critical = kept
    potentials[:] = orders.x
    tail = 0
    for index in range(run):
        for node in orders.seq[moves[index, 0]]:
            scratch.queue[tail] = node
            scratch.queued[node] = True
            tail += 1
    # Only arcs of the changed devices can be violated, so the queue starts with their passes.
    cycle = settle(graph, orders, scratch, now, tail)
    if cycle < 0:
        # The period cannot be shorter while the cycle that determines it exists.
        if still_critical(graph, orders, scratch, now):
            return now
        scratch.critical[0] = 0
        return find_period(graph, orders, scratch, busy, NEVER)
    period = find_ratio(graph, orders, scratch, cycle)
    orders.x[:] = potentials
    if period > most:
        return NEVER
    critical[:] = scratch.critical
    scratch.critical[:] = scratch.cycle
    period = find_period(graph, orders, scratch, period, most)
    if period > most:
        scratch.critical[:] = critical
    return period


@compiled
def anneal(
    graph: Graph, orders: Orders, scratch: Scratch, busy: int, steps: int, heat: int, best: Orders
) -> int:
    """Anneal the orders with decreasing temperature and return the shortest period found.

    `best` receives its orders. `heat` is the maximum increase of the period in the first step.
    """
    moves = np.zeros((len(orders.seq), 3), np.int64)
    kept = (np.zeros_like(orders.x), np.zeros_like(scratch.critical))
    scratch.critical[0] = 0
    now = find_period(graph, orders, scratch, busy, NEVER)
    least = now
    copy_orders(orders, best)
    for step in range(steps):
        if now == busy:
            break
        # The accepted increase is random, mostly small, and its maximum decreases linearly to 0.
        chance = draw(scratch.random, 1 << 20)
        rise = (heat * (steps - step) // steps * chance >> 20) * chance >> 20
        run = propose(graph, orders, scratch, moves)
        period = NEVER
        if run > 0:
            period = evaluate(graph, orders, scratch, moves, run, now, now + rise, busy, kept)
        if period < NEVER:
            now = period
            if now < least:
                least = now
                copy_orders(orders, best)
        else:
            # Undo the moves in reverse order.
            for index in range(abs(run) - 1, -1, -1):
                slide(orders, moves[index, 0], moves[index, 1], -moves[index, 2])
    return int(least)


@compiled
def draw_block(
    graph: Graph, random: npt.NDArray[np.uint64], busy: int, times: Ints, serial: bool
) -> None:
    """Set `times` to a random block with equal hops between all devices.

    Passes follow each other without delay except for random pauses: one per chunk and direction at
    every hop, one at every turn from chunk to chunk, one before W. A serial block has no pauses.
    """
    stages = len(graph.chunk)
    chunks = 0
    for chunk in graph.chunk:
        chunks = max(chunks, chunk + 1)
    pauses = np.zeros((5, chunks), np.int64)
    for line in range(5):
        for chunk in range(chunks):
            style = 0 if serial else draw(random, 3)
            if style > 0:
                pauses[line, chunk] = draw(random, busy // (2 if style == 1 else 6))
    clock = 0
    for stage in range(stages):
        if stage > 0:
            turns = graph.chunk[stage] != graph.chunk[stage - 1]
            clock += data_lag(graph, stage - 1, stage)
            clock += pauses[1 if turns else 0, graph.chunk[stage - 1]]
        times[stage] = clock
    clock += graph.work[stages - 1] + pauses[1, chunks - 1]
    for stage in range(stages - 1, -1, -1):
        if stage < stages - 1:
            turns = graph.chunk[stage] != graph.chunk[stage + 1]
            clock += data_lag(graph, stages + stage + 1, stages + stage)
            clock += pauses[3 if turns else 2, graph.chunk[stage + 1]]
        times[stages + stage] = clock
        # W precedes another B that might start when this one ends, because it frees memory
        done = clock + graph.work[stages + stage] - 1
        times[2 * stages + stage] = done + pauses[4, graph.chunk[stage]]


@compiled
def sample(
    graph: Graph, orders: Orders, scratch: Scratch, busy: int, tries: int,
    periods: Ints, slices: Ints, times: Ints,
) -> None:  # fmt: skip
    """Fill `periods`, `slices` and `times` with the best of `tries` random blocks.

    The interval between blocks grows until their orders fit the memory; the period is then the
    minimum for these orders. All kept periods differ.
    """
    block = np.zeros(len(orders.x), np.int64)
    last = len(periods) - 1
    for attempt in range(tries):
        draw_block(graph, scratch.random, busy, block, attempt == 0)
        slice_ = busy + draw(scratch.random, busy // 8)
        lay(graph, orders, block, slice_)
        # an interval longer than the block has one microbatch at a time: the minimum memory
        while not all_fit(graph, orders) and slice_ <= block.max():
            slice_ += slice_ // 24
            lay(graph, orders, block, slice_)
        if not all_fit(graph, orders):
            continue
        orders.x[:] = block
        period = find_period(graph, orders, scratch, busy, periods[last] - 1)
        if period == NEVER or (periods == period).any():
            continue
        place = last
        while place > 0 and periods[place - 1] > period:
            periods[place], slices[place] = periods[place - 1], slices[place - 1]
            times[place] = times[place - 1]
            place -= 1
        periods[place], slices[place] = period, slice_
        times[place] = block
