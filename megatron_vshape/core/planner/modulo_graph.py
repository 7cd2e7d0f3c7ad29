"""Event graph of a steady phase: memory, minimum period and latency of a cyclic order.

The nodes are the passes of one period. Arcs are the data dependencies and every device's cyclic
order; an arc that leads into a later period has a height. The minimum period is the largest ratio
of time to height over all cycles: at a trial period this is a longest-path problem, and the ratio
of a positive cycle, which is above the trial, becomes the next trial.

All arithmetic is on integers, so results are the same on every machine; the functions are compiled
if numba is installed.
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
    device: Ints
    readers: Ints  # [node, 2] nodes that read its result, -1 for none
    lag: Ints  # [node, 2] time from its start until they may start
    start_change: Floats  # memory allocated at its start
    end_change: Floats  # memory allocated at its end; negative if freed
    limit: Floats  # by device
    device_nodes: Ints  # [device, n] the same kinds at the same positions on every device
    chunk: Ints  # by stage
    classes: int  # microbatches per period


class Orders(NamedTuple):
    """The devices' orders, changed in place, with potentials.

    In iteration k a node runs block k + turn, `classes` microbatches being a block.
    """

    rows: Ints  # [device, n] nodes
    position: Ints  # position of every node in its row
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
    return Orders(np.zeros_like(graph.device_nodes), *(np.zeros(size, np.int64) for _ in range(3)))


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
def _is_after(orders: Orders, node: int, follower: int, blocks: int) -> bool:
    """Return whether `node` of a block runs after `follower` of the block `blocks` later."""
    # A node runs a given block in iteration block - turn: a larger turn is earlier.
    node_turn, follower_turn = orders.turn[node], orders.turn[follower] - blocks
    return bool(
        node_turn < follower_turn
        or (node_turn == follower_turn and orders.position[node] > orders.position[follower])
    )


@compiled
def find_peak(graph: Graph, orders: Orders, device: int) -> float:
    """Return the peak memory of the device; infinite if its order violates its own dependencies.

    Microbatches stay in order within a stage, as P2P messages require.
    """
    row = orders.rows[device]
    third, classes = len(graph.work) // 3, graph.classes
    memory = 0.0
    for node in row:
        # Nodes are grouped by part, so `node + third` is B after F, and W after B.
        if graph.part[node] < 2 and _is_after(orders, node, node + third, 0):
            return np.inf
        if classes > 1:
            is_last = node % classes == classes - 1
            # The last class of a block is followed by the first of the next block.
            follower = node + 1 - classes * is_last
            if _is_after(orders, node, follower, 1 if is_last else 0):
                return np.inf
        # Summed over F, B and W of a stage: memory in use when an iteration starts.
        memory += orders.turn[node] * (graph.start_change[node] + graph.end_change[node])
    top = memory
    for node in row:
        memory += graph.start_change[node]
        top = max(top, memory)
        memory += graph.end_change[node]
    return top


@compiled
def _find_ancestor(parent: Ints, node: int, target: int) -> int:
    """Return `target`, or another node on a cycle, if it is an ancestor of `node`; else -1."""
    for _ in range(len(parent)):
        if node < 0 or node == target:
            break
        node = parent[node]
    return int(node)


@compiled
def settle(graph: Graph, orders: Orders, scratch: Scratch, period: int, tail: int) -> int:
    """Raise the potentials until they fit the period; -1, or a node of a positive cycle.

    The first `tail` entries of the queue are the nodes whose arcs may be violated.
    """
    queue, queued, raised, parent, ring = scratch[:5]
    x, rows, position, turn = orders.x, orders.rows, orders.position, orders.turn
    # A ring buffer: a node is queued once at a time, so nodes + 1 entries are enough.
    nodes, length, head, capacity = len(x), rows.shape[1], 0, len(queue)
    for node in range(nodes):
        raised[node] = 0
        parent[node] = -1
    while head != tail:
        node = queue[head]
        head = head + 1 if head + 1 < capacity else 0
        queued[node] = False
        for arc in range(3):
            if arc < 2:
                reader = graph.readers[node, arc]
                if reader < 0:
                    continue
                start = x[node] + graph.lag[node, arc]
            else:
                next_position = position[node] + 1
                wraps = 1 if next_position == length else 0
                reader = rows[graph.device[node], 0 if wraps else next_position]
                # In one iteration, `reader` runs a block that is turn[reader] - turn[node] blocks
                # after that of `node`; at the end of the row it runs in the next iteration.
                start = x[node] + graph.work[node] + (turn[node] - turn[reader] - wraps) * period
            if start <= x[reader]:
                continue
            x[reader], parent[reader], ring[reader] = start, node, arc == 2
            raised[reader] += 1
            # Every cycle contains an arc of some device's order; a node that is its own ancestor
            # has been raised around a positive cycle
            if arc == 2 and raised[reader] > 2:
                ancestor = _find_ancestor(parent, node, reader)
                if ancestor >= 0:
                    queued[:] = False
                    return ancestor
            if not queued[reader]:
                queued[reader] = True
                queue[tail] = reader
                tail = tail + 1 if tail + 1 < capacity else 0
    return -1


@compiled
def data_lag(graph: Graph, source: int, target: int) -> int:
    """Return the lag of a data arc."""
    arc = 0 if graph.readers[source, 0] == target else 1
    return int(graph.lag[source, arc])


@compiled
def _ring_height(orders: Orders, source: int, target: int) -> int:
    """Return how many periods lie on the arc from a pass to the next of its device."""
    return int(orders.turn[target] - orders.turn[source] + (orders.position[target] == 0))


@compiled
def _find_ratio(graph: Graph, orders: Orders, scratch: Scratch, node: int) -> int:
    """Return the least period at which the positive cycle through `node` is not positive."""
    cycle = scratch.cycle
    time, height, length = 0, 0, 0
    target = node
    while True:
        source = scratch.parent[target]
        if scratch.ring[target]:
            time += graph.work[source]
            height += _ring_height(orders, source, target)
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
def _is_still_critical(graph: Graph, orders: Orders, scratch: Scratch, period: int) -> bool:
    """Return whether the critical cycle is still there and as slow as the period."""
    cycle, rows = scratch.critical, orders.rows
    length, time, height = cycle[0], 0, 0
    for k in range(1, length + 1):
        target, source = cycle[k] >> 1, cycle[k + 1 if k < length else 1] >> 1
        if cycle[k] & 1:
            # Index -1 is the end of the row, which the first pass follows.
            if rows[graph.device[target], orders.position[target] - 1] != source:
                return False
            time += graph.work[source]
            height += _ring_height(orders, source, target)
        else:
            time += data_lag(graph, source, target)
    # Its ratio, rounded up, is not below the period.
    return bool(length > 0 and time > height * (period - 1))


@compiled
def find_period(graph: Graph, orders: Orders, scratch: Scratch, trial: int, max_period: int) -> int:
    """Compute the minimum period (maximum cycle ratio), at least `trial`.

    NEVER if it is above `max_period`.

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
        trial = _find_ratio(graph, orders, scratch, cycle)
        scratch.critical[:] = scratch.cycle
        orders.x[:] = scratch.saved
        if trial > max_period:
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
def find_period_after_moves(
    graph: Graph, orders: Orders, scratch: Scratch, moves: Ints, num_moved: int,
    period_before: int, max_period: int, busy: int, backup: tuple[Ints, Ints],
) -> int:  # fmt: skip
    """Return the minimum period after moves; NEVER if it is above `max_period`.

    It was `period_before` before the moves. If it is NEVER, potentials and critical cycle are
    restored.
    """
    potentials, critical = backup
    potentials[:] = orders.x
    tail = 0
    for index in range(num_moved):
        for node in orders.rows[moves[index, 0]]:
            scratch.queue[tail] = node
            scratch.queued[node] = True
            tail += 1
    # Only arcs of the changed devices can be violated, so the queue starts with their passes.
    cycle = settle(graph, orders, scratch, period_before, tail)
    if cycle < 0:
        # The period cannot be shorter while the cycle that determines it exists.
        if _is_still_critical(graph, orders, scratch, period_before):
            return period_before
        scratch.critical[0] = 0
        # The period may have become shorter: search again from its lower bound.
        return find_period(graph, orders, scratch, busy, NEVER)
    period = _find_ratio(graph, orders, scratch, cycle)
    orders.x[:] = potentials
    if period > max_period:
        return NEVER
    critical[:] = scratch.critical
    scratch.critical[:] = scratch.cycle
    period = find_period(graph, orders, scratch, period, max_period)
    if period > max_period:
        scratch.critical[:] = critical
    return period
