"""Event graph of a steady phase: its memory, its minimum period, and its annealing.

The nodes are the passes of one period. Arcs are the data dependencies and every device's cyclic
order; an arc that leads into a later period has a height. The minimum period is the largest ratio
of time to height over all cycles. All arithmetic is on integers, so results are the same on every
machine; the functions are compiled if numba is installed.

Annealing starts from random orders and makes random moves, with exact memory and period. A step
needs about a microsecond at 8 devices: a move changes the potentials only around its device, and
most moves are rejected by memory or by the first cycle that is too slow.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_vshape.core.compiling import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER = 1 << 60
"""A period longer than that of any order."""


class Graph(NamedTuple):
    """The passes of one period and their data arcs; a node is (part * stages + stage, class).

    The microbatches of a period are its classes. Arrays are indexed by node.
    """

    work: Ints  # time of the pass
    part: Ints  # index in PARTS
    home: Ints  # device
    feeds: Ints  # [node, 2] nodes that read its result, -1 for none
    lag: Ints  # [node, 2] time from its start until they may start
    before: Floats  # memory allocated at its start
    after: Floats  # memory allocated at its end; negative if freed
    limit: Floats  # by device
    own: Ints  # [device, n] its nodes, the same kinds at the same positions on every device
    chunk: Ints  # by stage
    classes: int  # microbatches per period


class Orders(NamedTuple):
    """The devices' orders, changed in place, with potentials.

    In iteration k a node runs block k + turn, `classes` microbatches being a block.
    """

    seq: Ints  # [device, n] nodes
    at: Ints  # position of every node in its row
    turn: Ints
    x: Ints  # start of block 0, in a solution for the current period


class Scratch(NamedTuple):
    """Working memory of the kernels."""

    queue: Ints
    queued: npt.NDArray[np.bool_]
    raised: Ints  # how often each node was raised
    parent: Ints
    ring: npt.NDArray[np.bool_]  # whether the arc from the parent is one of a device's order
    cycle: Ints  # the last positive cycle: its length, then 2 * node + ring, backwards
    critical: Ints  # the cycle that sets the current period
    saved: Ints
    random: npt.NDArray[np.uint64]


def empty_orders(graph: Graph) -> Orders:
    """Return orders of the graph's size, to be filled in."""
    size = len(graph.work)
    return Orders(np.zeros_like(graph.own), *(np.zeros(size, np.int64) for _ in range(3)))


def make_scratch(graph: Graph, seed: int) -> Scratch:
    """Return working memory of the graph's size; `seed` begins its random numbers."""
    size = len(graph.work)

    def ints(extra: int = 0) -> Ints:
        return np.zeros(size + extra, np.int64)

    def flags() -> npt.NDArray[np.bool_]:
        return np.zeros(size, np.bool_)

    state = (seed * 0x9E3779B97F4A7C15 + 0x1234567887654321) % (1 << 64) or 1
    random = np.array([state], np.uint64)
    return Scratch(ints(1), flags(), ints(), ints(), flags(), ints(1), ints(1), ints(), random)


@compiled
def is_after(orders: Orders, one: int, other: int, blocks: int) -> bool:
    """Return whether a device runs `one` of a block after `other` of the block `blocks` later."""
    # A node runs a given block in iteration block - turn: a larger turn is earlier.
    early, late = orders.turn[one], orders.turn[other] - blocks
    return bool(early < late or (early == late and orders.at[one] > orders.at[other]))


@compiled
def find_peak(graph: Graph, orders: Orders, device: int) -> float:
    """Return the peak memory of the device; infinite if its order violates its own dependencies.

    Microbatches stay in order within a stage, as P2P messages require.
    """
    row = orders.seq[device]
    third, classes = len(graph.work) // 3, graph.classes
    held = 0.0
    for node in row:
        # Nodes are grouped by part, so `node + third` is B after F, and W after B.
        if graph.part[node] < 2 and is_after(orders, node, node + third, 0):
            return np.inf
        if classes > 1:
            last = node % classes == classes - 1
            # The last class of a block is followed by the first of the next block.
            follower = node + 1 - classes * last
            if is_after(orders, node, follower, 1 if last else 0):
                return np.inf
        # summed over F, B and W of a stage: memory in use when an iteration starts
        held += orders.turn[node] * (graph.before[node] + graph.after[node])
    top = held
    for node in row:
        held += graph.before[node]
        top = max(top, held)
        held += graph.after[node]
    return top


@compiled
def find_ancestor(parent: Ints, node: int, wanted: int) -> int:
    """Return `wanted`, or another node on a cycle, if it is an ancestor of `node`; else -1."""
    for _ in range(len(parent)):
        if node < 0 or node == wanted:
            break
        node = parent[node]
    return int(node)


@compiled
def settle(graph: Graph, orders: Orders, scratch: Scratch, period: int, tail: int) -> int:
    """Raise the potentials until they fit the period; -1, or a node of a positive cycle.

    The first `tail` entries of the queue are the nodes whose arcs may be violated.
    """
    queue, queued, raised, parent, ring = scratch[:5]
    x, seq, at, turn = orders.x, orders.seq, orders.at, orders.turn
    # A ring buffer: a node is queued once at a time, so nodes + 1 entries are enough.
    nodes, length, head, room = len(x), seq.shape[1], 0, len(queue)
    for node in range(nodes):
        raised[node] = 0
        parent[node] = -1
    while head != tail:
        node = queue[head]
        head = head + 1 if head + 1 < room else 0
        queued[node] = False
        for way in range(3):
            if way < 2:
                other = graph.feeds[node, way]
                if other < 0:
                    continue
                start = x[node] + graph.lag[node, way]
            else:
                place = at[node] + 1
                wraps = 1 if place == length else 0
                other = seq[graph.home[node], 0 if wraps else place]
                # In one iteration, `other` runs a block that is turn[other] - turn[node] blocks
                # after that of `node`; at the end of the row it runs in the next iteration.
                start = x[node] + graph.work[node] + (turn[node] - turn[other] - wraps) * period
            if start <= x[other]:
                continue
            x[other], parent[other], ring[other] = start, node, way == 2
            raised[other] += 1
            # every cycle contains an arc of some device's order; a node that is its own ancestor
            # has been raised around a positive cycle
            if way == 2 and raised[other] > 2:
                forebear = find_ancestor(parent, node, other)
                if forebear >= 0:
                    queued[:] = False
                    return forebear
            if not queued[other]:
                queued[other] = True
                queue[tail] = other
                tail = tail + 1 if tail + 1 < room else 0
    return -1


@compiled
def data_lag(graph: Graph, source: int, target: int) -> int:
    """Return the lag of a data arc."""
    way = 0 if graph.feeds[source, 0] == target else 1
    return int(graph.lag[source, way])


@compiled
def ring_height(orders: Orders, source: int, target: int) -> int:
    """Return how many periods lie on the arc from a pass to the next of its device."""
    return int(orders.turn[target] - orders.turn[source] + (orders.at[target] == 0))


@compiled
def find_ratio(graph: Graph, orders: Orders, scratch: Scratch, node: int) -> int:
    """Return the least period at which the positive cycle through `node` is not positive."""
    cycle = scratch.cycle
    time, height, length = 0, 0, 0
    target = node
    while True:
        source = scratch.parent[target]
        if scratch.ring[target]:
            time += graph.work[source]
            height += ring_height(orders, source, target)
        else:
            time += data_lag(graph, source, target)
        length += 1
        cycle[length] = 2 * target + scratch.ring[target]
        target = source
        if target == node:
            break
    cycle[0] = length
    # Rounded up. Without height, the cycle waits for itself at any period.
    return NEVER if height <= 0 else (time + height - 1) // height


@compiled
def still_critical(graph: Graph, orders: Orders, scratch: Scratch, period: int) -> bool:
    """Return whether the critical cycle is still there and as slow as the period."""
    cycle, seq = scratch.critical, orders.seq
    length, time, height = cycle[0], 0, 0
    for k in range(1, length + 1):
        target, source = cycle[k] >> 1, cycle[k + 1 if k < length else 1] >> 1
        if cycle[k] & 1:
            # Index -1 is the end of the row, which the first pass follows.
            if seq[graph.home[target], orders.at[target] - 1] != source:
                return False
            time += graph.work[source]
            height += ring_height(orders, source, target)
        else:
            time += data_lag(graph, source, target)
    # Its ratio, rounded up, is not below the period.
    return bool(length > 0 and time > height * (period - 1))


@compiled
def find_period(graph: Graph, orders: Orders, scratch: Scratch, trial: int, most: int) -> int:
    """Return the least period that is at least `trial`, or NEVER if it is above `most`.

    Newton's iteration from below: the ratio of a positive cycle is the next trial. The
    potentials fit the period returned, and are as before for NEVER.
    """
    nodes = len(orders.x)
    # A failed trial leaves potentials that are too high; each trial starts from these.
    scratch.saved[:] = orders.x
    while True:
        for node in range(nodes):
            scratch.queue[node] = node
            scratch.queued[node] = True
        cycle = settle(graph, orders, scratch, trial, nodes)
        if cycle < 0:
            return trial
        trial = find_ratio(graph, orders, scratch, cycle)
        scratch.critical[:] = scratch.cycle
        orders.x[:] = scratch.saved
        if trial > most:
            return NEVER


@compiled
def find_latency(graph: Graph, orders: Orders, scratch: Scratch, period: int) -> int:
    """Return the time from a block's first start to its last end, with the earliest starts."""
    nodes = len(orders.x)
    # Only the first pass of a block has a start; all others follow from it.
    orders.x[:] = -NEVER
    for index in range(graph.classes):
        orders.x[index] = 0
        scratch.queue[index] = index
        scratch.queued[index] = True
    settle(graph, orders, scratch, period, graph.classes)
    last = 0
    for node in range(nodes):
        last = max(last, orders.x[node] + graph.work[node])
    return int(last)


@compiled
def slide(orders: Orders, device: int, place: int, distance: int) -> int:
    """Move a pass by `distance` positions in its device's cyclic order; return its new position."""
    seq, at, turn = orders.seq, orders.at, orders.turn
    length = seq.shape[1]
    for _ in range(abs(distance)):
        if distance > 0:
            # Neighbors are exchanged one by one; `mine` is whether the pass is the right one of the
            # two.
            left, mine = place, 0
        else:
            left, mine = (place - 1 if place > 0 else length - 1), 1
        right = left + 1 if left + 1 < length else 0
        first, second = seq[device, left], seq[device, right]
        seq[device, left], seq[device, right] = second, first
        at[second], at[first] = left, right
        if right == 0:  # the iteration ends between the two, so each now runs in the other's
            turn[second] += 1
            turn[first] -= 1
        place = left if mine else right
    return int(place)


@compiled
def copy_orders(source: Orders, target: Orders) -> None:
    """Make `target` equal to `source`."""
    target.seq[:] = source.seq
    target.at[:] = source.at
    target.turn[:] = source.turn
    target.x[:] = source.x


@compiled
def lay(graph: Graph, orders: Orders, times: Ints, period: int) -> None:
    """Set the orders to those of blocks that start at `times` and repeat every `period`."""
    for device in range(len(graph.own)):
        row = orders.seq[device]
        for place in range(len(row)):
            node = graph.own[device, place]
            phase = times[node] % period
            # Insertion sort by the phase within a period.
            while place > 0 and times[row[place - 1]] % period > phase:
                row[place] = row[place - 1]
                place -= 1
            row[place] = node
            # A start in period p means that iteration k runs block k - p.
            orders.turn[node] = -(times[node] // period)
        for place in range(len(row)):
            orders.at[row[place]] = place


@compiled
def all_fit(graph: Graph, orders: Orders) -> bool:
    """Return whether every device is within its limit."""
    for device in range(len(orders.seq)):
        if not find_peak(graph, orders, device) <= graph.limit[device]:
            return False
    return True


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
        # The period may have become shorter: search again from its lower bound.
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
    periods: Ints, intervals: Ints, times: Ints,
) -> None:  # fmt: skip
    """Fill `periods`, `intervals` and `times` with the best of `tries` random blocks.

    The interval between blocks grows until their orders fit the memory; the period is then the
    minimum for these orders. All kept periods differ.
    """
    block = np.zeros(len(orders.x), np.int64)
    last = len(periods) - 1
    for attempt in range(tries):
        draw_block(graph, scratch.random, busy, block, attempt == 0)
        interval = busy + draw(scratch.random, busy // 8)
        lay(graph, orders, block, interval)
        # an interval longer than the block has one microbatch at a time: the minimum memory
        while not all_fit(graph, orders) and interval <= block.max():
            interval += interval // 24
            lay(graph, orders, block, interval)
        if not all_fit(graph, orders):
            continue
        orders.x[:] = block
        # Only periods below the worst kept one are of interest.
        period = find_period(graph, orders, scratch, busy, periods[last] - 1)
        if period == NEVER or (periods == period).any():
            continue
        place = last
        while place > 0 and periods[place - 1] > period:
            periods[place], intervals[place] = periods[place - 1], intervals[place - 1]
            times[place] = times[place - 1]
            place -= 1
        periods[place], intervals[place] = period, interval
        times[place] = block
