"""The least period of a V with one microbatch a period, exactly and in milliseconds.

At a trial period, all that the devices from e inward (e, ..., d - 1) demand of device e - 1 is
four numbers: how long after F0 and B1 enter, F1 and B0 may leave at the earliest. They are longest
paths, so a device is added by closing a graph of four nodes, and what asks for less in all four
is never worse. With every cyclic order of a device's six passes (120) and every count of
microbatches between them that the memory allows, the fronts of such demands stay small (some tens),
so dynamic programming from the turn outward decides whether the period can be kept.

This is exact as long as no front is cut, but for one choice: F1 leaves at most one period later
than it must, and so does B0. More was tried and changed nothing.
"""

from itertools import permutations
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.compiling import compiled
from megatron_vshape.core.planner.modulo_graph import Floats, Graph, Ints, Orders, data_lag

F0, F1, B1, B0, W1, W0 = range(6)
NONE = -(1 << 60)
WIDTH = 1024
"""Demands kept on all devices together; beyond, those that are least in sum.

Tight memory needs a few tens a device at most. With ample memory there are hundreds, but then any
of them do: at 32 devices, 24 a device gave the same periods as 256 at every memory tried.
"""

PATTERNS = np.array([(F0, *rest) for rest in permutations(range(1, 6))], np.int64)
"""The cyclic orders of a device's six passes."""


class Chain(NamedTuple):
    """The devices of a V, from outside to the turn."""

    nodes: Ints  # [device, 6] nodes of F0, F1, B1, B0, W1, W0
    work: Ints  # [device, 6]
    hops: Ints  # [4, device] lag of F0, F1, B1, B0 between a device and the next one inward
    outside: Ints  # least time from F1 to B1, as the path through the devices outside demands
    held: Floats  # [device, 4] after F of chunk 0 and 1, after B of chunk 0 and 1
    limit: Floats


class Front(NamedTuple):
    """Demands of the inner devices, none of them worse than another in all four numbers."""

    demand: Ints  # [width, 4] F0 -> F1, F0 -> B0, B1 -> F1, B1 -> B0
    origin: Ints  # [width, 5] demand further inside, pattern, periods F0 -> F1 -> B1 -> B0


def make_chain(graph: Graph) -> Chain:
    """Return the chain of a V placement's graph of one microbatch."""
    devices = len(graph.own)
    stages = 2 * devices
    nodes = np.zeros((devices, 6), np.int64)
    hops = np.zeros((4, devices), np.int64)
    outside = np.zeros(devices, np.int64)
    for device in range(devices):
        inner, outer = device, stages - 1 - device  # the device's stages
        nodes[device, [F0, F1]] = inner, outer
        nodes[device, [B0, B1]] = stages + inner, stages + outer
        nodes[device, [W0, W1]] = 2 * stages + inner, 2 * stages + outer
        outside[device] = graph.work[outer]
        if device > 0:
            outside[device] = hops[1, device - 1] + outside[device - 1] + hops[2, device - 1]
        if device + 1 < devices:
            hops[:, device] = [
                data_lag(graph, inner, inner + 1),
                data_lag(graph, outer - 1, outer),
                data_lag(graph, stages + outer, stages + outer - 1),
                data_lag(graph, stages + inner + 1, stages + inner),
            ]
    weights = nodes[:, [W0, W1]]
    held = np.hstack([graph.before[nodes[:, [F0, F1]]], -graph.after[weights]])
    return Chain(nodes, graph.work[nodes], hops, outside, held, graph.limit)


@compiled
def set_turns(place: Ints, counts: Ints, turn: Ints) -> None:
    """Set the turn of a device's passes; each W follows its B as soon as its place allows."""
    turn[F0] = 0
    turn[F1] = -counts[0]
    turn[B1] = turn[F1] - counts[1]
    turn[B0] = turn[B1] - counts[2]
    turn[W1] = turn[B1] - (place[W1] < place[B1])
    turn[W0] = turn[B0] - (place[W0] < place[B0])


@compiled
def peak_of(row: Ints, turn: Ints, held: Floats) -> float:
    """Return the most that a device holds which runs `row` for ever."""
    now = (turn[F0] - turn[B0]) * held[0] + (turn[B0] - turn[W0]) * held[2]
    now += (turn[F1] - turn[B1]) * held[1] + (turn[B1] - turn[W1]) * held[3]
    top: float = now
    for work in row:
        if work == F0:
            now += held[0]
        elif work == F1:
            now += held[1]
        top = max(top, now)
        if work == B1:
            now += held[3] - held[1]
        elif work == B0:
            now += held[2] - held[0]
        elif work == W1:
            now -= held[3]
        elif work == W0:
            now -= held[2]
    return top


@compiled
def close(paths: Ints) -> bool:
    """Make all longest paths between the four nodes; False if a cycle is positive."""
    for middle in range(4):
        for start in range(4):
            if paths[start, middle] == NONE:
                continue
            for end in range(4):
                if paths[middle, end] != NONE:
                    paths[start, end] = max(
                        paths[start, end], paths[start, middle] + paths[middle, end]
                    )
    return bool(max(paths[0, 0], paths[1, 1], paths[2, 2], paths[3, 3]) <= 0)


@compiled
def least_count(delay: int, start: int, end: int, total: int, period: int) -> int:
    """Return the fewest periods between two passes that start `delay` or more apart.

    `start` and `end` are their offsets within a device's `total` work, in its order.
    """
    wraps = 1 if end < start else 0
    back = start - end + (0 if wraps else total)  # from the later pass to the earlier one
    return int(max(0, -(-(delay + back) // period) - (0 if wraps else 1)))


@compiled
def ring_paths(offset: Ints, turn: Ints, total: int, period: int, paths: Ints) -> None:
    """Set the longest paths along a device's own order."""
    for start in range(4):
        for end in range(4):
            later = offset[end] - offset[start] + (turn[start] - turn[end]) * period
            wraps = offset[end] < offset[start]
            paths[start, end] = later + (total - period if wraps else 0)


@compiled
def no_worse(one: Ints, other: Ints) -> bool:
    """Return whether a demand asks for no more than another."""
    return bool(
        one[0] <= other[0] and one[1] <= other[1] and one[2] <= other[2] and one[3] <= other[3]
    )


@compiled
def add_to_front(front: Front, size: int, demand: Ints, origin: Ints) -> int:
    """Add a demand unless one that is kept is as good; return the size of the front."""
    kept = 0
    worst, most = -1, 0
    for index in range(size):
        other = front.demand[index]
        if no_worse(other, demand):
            return size
        if not no_worse(demand, other):
            if kept < index:
                front.demand[kept] = other
                front.origin[kept] = front.origin[index]
            total = other[0] + other[2] + other[3]
            if worst < 0 or total > most:
                worst, most = kept, total
            kept += 1
    if kept == len(front.demand):
        if demand[0] + demand[2] + demand[3] >= most:
            return kept
        front.demand[worst], front.origin[worst] = demand, origin
        return kept
    front.demand[kept], front.origin[kept] = demand, origin
    return kept + 1


@compiled
def pass_outward(chain: Chain, device: int, paths: Ints, demand: Ints) -> None:
    """Set what the devices from `device` inward demand of the one outside it."""
    lag = chain.hops[:, device - 1] if device > 0 else np.zeros(4, np.int64)
    demand[0] = lag[0] + paths[F0, F1] + lag[1]
    demand[1] = lag[0] + paths[F0, B0] + lag[3]
    demand[2] = lag[2] + paths[B1, F1] + lag[1]
    demand[3] = lag[2] + paths[B1, B0] + lag[3]


@compiled
def add_device(
    chain: Chain, device: int, patterns: Ints, period: int, inner: Front, size: int, front: Front
) -> int:
    """Fill `front` with the demands of `device` and all inside it; return its size.

    `inner` holds `size` demands of the devices inside.
    """
    place, offset, turn = np.zeros(6, np.int64), np.zeros(6, np.int64), np.zeros(6, np.int64)
    counts, least, paths = np.zeros(3, np.int64), np.zeros(3, np.int64), np.zeros((4, 4), np.int64)
    demand, origin = np.zeros(4, np.int64), np.zeros(5, np.int64)
    work, total = chain.work[device], chain.work[device].sum()
    found = 0
    for pattern in range(len(patterns)):
        clock = 0
        for index in range(6):
            here = patterns[pattern, index]
            place[here], offset[here] = index, clock
            clock += work[here]
        least[1] = least_count(chain.outside[device], offset[F1], offset[B1], total, period)
        for index in range(size):
            need = inner.demand[index]
            least[0] = least_count(need[0], offset[F0], offset[F1], total, period)
            least[2] = least_count(need[3], offset[B1], offset[B0], total, period)
            for extra in range(4):
                counts[0], counts[2] = least[0] + extra // 2, least[2] + extra % 2
                counts[1] = least[1]
                # every hop outside may wait for less than a period
                while counts[1] <= least[1] + 2 * device + 1:
                    set_turns(place, counts, turn)
                    if peak_of(patterns[pattern], turn, chain.held[device]) > chain.limit[device]:
                        break
                    ring_paths(offset, turn, total, period, paths)
                    paths[F0, F1] = max(paths[F0, F1], need[0])
                    paths[F0, B0] = max(paths[F0, B0], need[1])
                    paths[B1, F1] = max(paths[B1, F1], need[2])
                    paths[B1, B0] = max(paths[B1, B0], need[3])
                    paths[F1, B1] = max(paths[F1, B1], chain.outside[device])
                    if close(paths):
                        pass_outward(chain, device, paths, demand)
                        origin[0], origin[1], origin[2:] = index, pattern, counts
                        found = add_to_front(front, found, demand, origin)
                    counts[1] += 1
    return found


@compiled
def find_chains(
    chain: Chain, patterns: Ints, period: int, demands: Ints, origins: Ints, found: Ints
) -> int:
    """Return how many ways to keep the period are left at the outermost device; 0 if it cannot be.

    `found` receives (pattern, periods F0 -> F1 -> B1 -> B0) of every way's devices.
    """
    devices = len(chain.work)
    inner = Front(demands[devices], origins[devices])
    inner.demand[0] = NONE
    inner.demand[0, 0], inner.demand[0, 3] = chain.work[-1, F0], chain.work[-1, B1]
    size = 1
    for device in range(devices - 1, -1, -1):
        front = Front(demands[device], origins[device])
        size = add_device(chain, device, patterns, period, inner, size, front)
        inner = front
        if size == 0:
            return 0
    for way in range(min(size, len(found))):
        index = way
        for device in range(devices):
            origin = origins[device, index]
            found[way, device] = origin[1:]
            index = origin[0]
    return int(min(size, len(found)))


@compiled
def set_orders(chain: Chain, patterns: Ints, way: Ints, orders: Orders) -> None:
    """Set the orders that one way of `find_chains` stands for."""
    place, turn = np.zeros(6, np.int64), np.zeros(6, np.int64)
    for device in range(len(way)):
        row = patterns[way[device, 0]]
        for index in range(6):
            place[row[index]] = index
        set_turns(place, way[device, 1:], turn)
        for index in range(6):
            node = chain.nodes[device, row[index]]
            orders.seq[device, index] = node
            orders.at[node] = index
            orders.turn[node] = turn[row[index]]
