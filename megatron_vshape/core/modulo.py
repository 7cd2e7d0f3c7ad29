"""The steady phase for real costs: modulo scheduling under an exact memory limit.

Once warm, every device repeats one cyclic order of its passes, one or two microbatches a period.
That order alone decides both figures that matter:

* Memory. What a device holds is a running sum over its own order: exact, without any times.
* Period. It is the largest ratio of time to periods over the cycles of the event graph, whose
  arcs are the data dependencies and each device's order. At a trial period that is a longest-path
  problem; a cycle that stays positive has a ratio above the trial, which is the next trial.

So the search anneals the orders themselves: memory is a hard constraint, checked first because it
is cheap, and the period follows from potentials that a move disturbs only around its device. One
step takes about a microsecond. Published blocks move in unit slots and repeat bubbles when
F, B and W differ (paper, section 5); nothing here is tied to slots.

Times are whole numbers inside (the busiest device's work is 2 ** 22 units), and so are the random
numbers: the same inputs give the same orders on every machine, with numba or, slower, without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from megatron_vshape.core.costs import Costs
from megatron_vshape.core.passes import PARTS, Kind, Pass, ScheduleError
from megatron_vshape.core.placement import Placement, check_placement, chunks_of, stages_of
from megatron_vshape.core.schedule import Schedule

try:
    from numba import njit
except ImportError:  # plain Python runs the same steps, a hundred times slower
    njit = None

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    return function if njit is None else cast(_Function, njit(cache=True)(function))


UNITS = 1 << 22
"""The work of the busiest device per period, in the whole numbers the search counts in."""

NEVER = 1 << 60
"""A period that no order reaches."""

ROUNDING = 1e-9
"""Sums of memory may exceed a limit by so much of it; the verifier allows the same."""

STARTS = 6
"""So many different starting points are annealed; of their results the best are returned."""


@dataclass(frozen=True, slots=True)
class SteadyOrder:
    """The cyclic order in which every device runs its passes once warm.

    Iteration k runs, for each (kind, stage, offset) of a row, microbatch
    k * `microbatches` + offset. `period_us` is the least time an iteration takes, `latency_us` the
    time from the start of a microbatch's first pass to the end of its last.
    """

    placement: Placement
    microbatches: int
    rows: tuple[tuple[tuple[Kind, int, int], ...], ...]
    period_us: float
    latency_us: float


def unroll(order: SteadyOrder, num_microbatches: int, name: str) -> Schedule:
    """Return the schedule that runs the order until `num_microbatches` are through.

    Passes of microbatches that do not exist are left out, which never raises a device's peak.
    """
    rows = []
    for row in order.rows:
        offsets = [offset for _, _, offset in row]
        first = -(max(offsets) // order.microbatches) - 1
        last = (num_microbatches - min(offsets)) // order.microbatches + 1
        rows.append(
            tuple(
                Pass(kind, stage, k * order.microbatches + offset)
                for k in range(first, last + 1)
                for kind, stage, offset in row
                if 0 <= k * order.microbatches + offset < num_microbatches
            )
        )
    return Schedule(name, len(rows), num_microbatches, order.placement, tuple(rows))


def least_memory(costs: Costs, placement: Placement, num_devices: int) -> tuple[float, ...]:
    """Return the least that each device must be allowed to hold.

    Before the first B every stage holds one microbatch, and running one microbatch at a time,
    each W right after its B, needs no more than that and the B's own growth.
    """
    least = []
    for stages in stages_of(placement, num_devices):
        held = sum(costs.held_after_forward_bytes[stage] for stage in stages)
        top = held
        for stage in reversed(stages):
            held -= costs.held_after_forward_bytes[stage]
            top = max(top, held + costs.held_after_backward_bytes[stage])
        least.append(top)
    return tuple(least)


def find_steady_orders(
    costs: Costs,
    placement: Placement,
    num_devices: int,
    limits: Sequence[float],
    steps: int,
    seed: int = 0,
) -> list[SteadyOrder]:
    """Return a few different orders that fit the memory, the least period first.

    `limits` is the most each device may hold, in the unit of the costs' memory; `steps` bounds
    the work: about a microsecond each at 8 devices, more with more devices.

    Raises:
        ScheduleError: the costs or limits do not match the placement, or a limit is below what
            any schedule needs.
    """
    _check(costs, placement, num_devices, limits)
    found = _search(_make_problem(costs, placement, num_devices, limits, 1), steps, seed, [])
    if found[0].period > found[0].problem.busy:
        double = _make_problem(costs, placement, num_devices, limits, 2)
        starts = [_doubled(each, double) for each in found[:2]]
        found = sorted(
            found + _search(double, steps // 2, seed, starts),
            key=lambda each: (each.period / each.problem.graph.classes, each.latency),
        )
    return [each.steady(costs, placement) for each in found]


def _check(costs: Costs, placement: Placement, num_devices: int, limits: Sequence[float]) -> None:
    check_placement(placement, num_devices)
    if costs.num_stages != len(placement):
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, the placement has {len(placement)}"
        )
    if len(limits) != num_devices:
        raise ScheduleError(
            f"there are {len(limits)} memory limits for {num_devices} devices; give one each"
        )
    for device, least in enumerate(least_memory(costs, placement, num_devices)):
        if not limits[device] * (1 + ROUNDING) >= least:
            raise ScheduleError(
                f"a memory limit of {limits[device]:g} fits no schedule on device {device}: its "
                f"stages hold {least:g} for one microbatch alone; the least limit is {least:g}"
            )


class Graph(NamedTuple):
    """The passes of one period and their data arcs; a node is (part * stages + stage, class).

    The microbatches of a period are its classes. Arrays are indexed by node.
    """

    work: Ints  # time of the pass
    part: Ints  # place in PARTS
    home: Ints  # device
    feeds: Ints  # [node, 2] nodes that read its result, -1 for none
    lag: Ints  # [node, 2] time from its start until they may start
    before: Floats  # memory taken when it starts
    after: Floats  # memory taken when it ends
    limit: Floats  # by device
    own: Ints  # [device, n] its nodes, the same kinds in the same places on every device
    chunk: Ints  # by stage
    classes: int  # how many microbatches a period has


class Orders(NamedTuple):
    """The devices' orders, changed in place, with potentials.

    In iteration k a node runs block k + turn, `classes` microbatches being a block.
    """

    seq: Ints  # [device, n] nodes
    at: Ints  # place of every node in its row
    turn: Ints
    x: Ints  # start of block 0, in a solution for the current period


class Scratch(NamedTuple):
    """Working memory of the kernels."""

    queue: Ints
    queued: npt.NDArray[np.bool_]
    raised: Ints  # how often each node was
    parent: Ints
    ring: npt.NDArray[np.bool_]  # whether the arc from the parent is one of a device's order
    cycle: Ints  # the last positive cycle: its length, then 2 * node + ring, backwards
    critical: Ints  # the cycle that sets the current period
    saved: Ints
    random: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Problem:
    graph: Graph
    num_stages: int
    busy: int  # work of the busiest device
    unit_us: float


@dataclass(frozen=True, slots=True)
class _Found:
    problem: _Problem
    orders: Orders
    period: int
    latency: int

    def steady(self, costs: Costs, placement: Placement) -> SteadyOrder:
        classes, stages = self.problem.graph.classes, self.problem.num_stages
        rows = tuple(
            tuple(
                (
                    Kind(PARTS[node // (classes * stages)]),
                    node // classes % stages,
                    int(self.orders.turn[node]) * classes + node % classes,
                )
                for node in map(int, row)
            )
            for row in self.orders.seq
        )
        unit = self.problem.unit_us
        return SteadyOrder(placement, classes, rows, self.period * unit, self.latency * unit)


def _make_problem(
    costs: Costs,
    placement: Placement,
    num_devices: int,
    limits: Sequence[float],
    classes: int,
) -> _Problem:
    stages, parts = len(placement), len(PARTS)
    unit_us = costs.busy_us(placement, num_devices, classes) / UNITS
    size = parts * stages * classes
    part, stage = np.divmod(np.arange(size) // classes, stages)
    times = np.array([[costs.time_us(kind, s) for s in range(stages)] for kind in PARTS])
    forward = np.array(costs.held_after_forward_bytes)[stage]
    backward = np.array(costs.held_after_backward_bytes)[stage]
    work = np.maximum(1, np.rint(times / unit_us)).astype(np.int64)[part, stage]
    home = np.array(placement, np.int64)[stage]
    own = np.stack([np.flatnonzero(home == device) for device in range(num_devices)])
    graph = Graph(
        work,
        part,
        home,
        *_data_arcs(stages, classes, work, home, round(costs.send_us / unit_us)),
        np.where(part == 0, forward, 0.0),
        np.select([part == 0, part == 1], [0.0, backward - forward], -backward),
        np.array(limits, np.float64) * (1 + ROUNDING),
        own,
        np.array(chunks_of(placement), np.int64),
        classes,
    )
    return _Problem(graph, stages, int(work[own].sum(axis=1).max()), unit_us)


def _data_arcs(stages: int, classes: int, work: Ints, home: Ints, send: int) -> tuple[Ints, Ints]:
    """Return the nodes that read each node's result, and the time until they may start."""
    size = len(work)
    feeds, lag = np.full((size, 2), -1, np.int64), np.zeros((size, 2), np.int64)
    for node in range(size):
        place, index = divmod(node, classes)
        reader = Pass(PARTS[place // stages], place % stages, index)
        for need in reader.needs(stages):
            source = (PARTS.index(need.kind) * stages + need.stage) * classes + index
            way = 0 if feeds[source, 0] < 0 else 1
            feeds[source, way] = node
            lag[source, way] = work[source] + (send if home[source] != home[node] else 0)
    return feeds, lag


def _empty_orders(graph: Graph) -> Orders:
    size = len(graph.work)
    return Orders(np.zeros_like(graph.own), *(np.zeros(size, np.int64) for _ in range(3)))


def _scratch(graph: Graph, seed: int) -> Scratch:
    size = len(graph.work)

    def ints(extra: int = 0) -> Ints:
        return np.zeros(size + extra, np.int64)

    def flags() -> npt.NDArray[np.bool_]:
        return np.zeros(size, np.bool_)

    state = (seed * 0x9E3779B97F4A7C15 + 0x1234567887654321) % (1 << 64) or 1
    random = np.array([state], np.uint64)
    return Scratch(ints(1), flags(), ints(), ints(), flags(), ints(1), ints(1), ints(), random)


def _search(problem: _Problem, steps: int, seed: int, starts: list[Orders]) -> list[_Found]:
    """Return the annealed results of the best starting points, the best first."""
    graph = problem.graph
    scratch = _scratch(graph, seed)
    if not starts:
        starts = _draw_starts(problem, scratch, max(1, steps // 40))
    found: list[_Found] = []
    for orders in starts:
        best = _empty_orders(graph)
        share = steps // len(starts)
        period = int(anneal(graph, orders, scratch, problem.busy, share, problem.busy // 7, best))
        latency = int(find_latency(graph, best, scratch, period))
        found.append(_Found(problem, best, period, latency))
    return sorted(found, key=lambda each: (each.period, each.latency))


def _draw_starts(problem: _Problem, scratch: Scratch, tries: int) -> list[Orders]:
    graph = problem.graph
    periods = np.full(STARTS, NEVER, np.int64)
    slices = np.zeros(STARTS, np.int64)
    times = np.zeros((STARTS, len(graph.work)), np.int64)
    orders = _empty_orders(graph)
    sample(graph, orders, scratch, problem.busy, tries, periods, slices, times)
    starts = []
    for period, slice_, start in zip(periods, slices, times, strict=True):
        if period < NEVER:
            orders = _empty_orders(graph)
            lay(graph, orders, start, int(slice_))
            orders.x[:] = start
            starts.append(orders)
    return starts


def _doubled(found: _Found, problem: _Problem) -> Orders:
    """Return the order with two of its iterations as one."""
    orders = _empty_orders(problem.graph)
    length = found.orders.seq.shape[1]
    for device, row in enumerate(found.orders.seq):
        for place in range(2 * length):
            node = row[place % length]
            block = place // length + int(found.orders.turn[node])
            orders.seq[device, place] = 2 * node + block % 2
            orders.at[2 * node + block % 2] = place
            orders.turn[2 * node + block % 2] = block // 2
    return orders


@_compiled
def draw(random: npt.NDArray[np.uint64], bound: int) -> int:
    """Return a random whole number in [0, bound), by xorshift."""
    state = random[0]
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    random[0] = state
    return np.int64((state >> np.uint64(33)) % np.uint64(bound))  # type: ignore[return-value]


@_compiled
def is_after(orders: Orders, one: int, other: int, blocks: int) -> bool:
    """Return whether a device runs `one` of a block after `other` of the block `blocks` later."""
    early, late = orders.turn[one], orders.turn[other] - blocks
    return bool(early < late or (early == late and orders.at[one] > orders.at[other]))


@_compiled
def find_peak(graph: Graph, orders: Orders, device: int) -> float:
    """Return the most the device holds; infinite if its order breaks its own dependencies.

    Microbatches keep their order within a stage, as the streams of messages need.
    """
    row = orders.seq[device]
    third, classes = len(graph.work) // 3, graph.classes
    held = 0.0
    for node in row:
        if graph.part[node] < 2 and is_after(orders, node, node + third, 0):
            return np.inf
        if classes > 1:
            last = node % classes == classes - 1
            follower = node + 1 - classes * last
            if is_after(orders, node, follower, 1 if last else 0):
                return np.inf
        # summed over F, B and W of a stage: what lives when an iteration starts
        held += orders.turn[node] * (graph.before[node] + graph.after[node])
    top = held
    for node in row:
        held += graph.before[node]
        top = max(top, held)
        held += graph.after[node]
    return top


@_compiled
def find_forebear(parent: Ints, node: int, wanted: int) -> int:
    """Return `wanted`, or another node on a cycle, if the line of parents leads there; or -1."""
    for _ in range(len(parent)):
        if node < 0 or node == wanted:
            break
        node = parent[node]
    return int(node)


@_compiled
def settle(graph: Graph, orders: Orders, scratch: Scratch, period: int, tail: int) -> int:
    """Raise the potentials until they fit the period; -1, or a node of a positive cycle.

    The first `tail` entries of the queue are the nodes whose arcs may be violated.
    """
    queue, queued, raised, parent, ring = scratch[:5]
    x, seq, at, turn = orders.x, orders.seq, orders.at, orders.turn
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
                start = x[node] + graph.work[node] + (turn[node] - turn[other] - wraps) * period
            if start <= x[other]:
                continue
            x[other], parent[other], ring[other] = start, node, way == 2
            raised[other] += 1
            # every cycle passes along some device's order; a parent that is its own forebear
            # has been raised around a positive cycle
            if way == 2 and raised[other] > 2:
                forebear = find_forebear(parent, node, other)
                if forebear >= 0:
                    queued[:] = False
                    return forebear
            if not queued[other]:
                queued[other] = True
                queue[tail] = other
                tail = tail + 1 if tail + 1 < room else 0
    return -1


@_compiled
def data_lag(graph: Graph, source: int, target: int) -> int:
    """Return the lag of a data arc."""
    way = 0 if graph.feeds[source, 0] == target else 1
    return int(graph.lag[source, way])


@_compiled
def ring_height(orders: Orders, source: int, target: int) -> int:
    """Return how many periods lie on the arc from a pass to the next of its device."""
    return int(orders.turn[target] - orders.turn[source] + (orders.at[target] == 0))


@_compiled
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
    return NEVER if height <= 0 else (time + height - 1) // height


@_compiled
def still_critical(graph: Graph, orders: Orders, scratch: Scratch, period: int) -> bool:
    """Return whether the critical cycle is still there and as slow as the period."""
    cycle, seq = scratch.critical, orders.seq
    length, time, height = cycle[0], 0, 0
    for k in range(1, length + 1):
        target, source = cycle[k] >> 1, cycle[k + 1 if k < length else 1] >> 1
        if cycle[k] & 1:
            if seq[graph.home[target], orders.at[target] - 1] != source:
                return False
            time += graph.work[source]
            height += ring_height(orders, source, target)
        else:
            time += data_lag(graph, source, target)
    return bool(length > 0 and time > height * (period - 1))


@_compiled
def find_period(graph: Graph, orders: Orders, scratch: Scratch, trial: int, most: int) -> int:
    """Return the least period that is at least `trial`, or NEVER if it is above `most`.

    Newton's iteration from below: the ratio of a positive cycle is the next trial. The
    potentials fit the period returned, and are as before for NEVER.
    """
    nodes = len(orders.x)
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


@_compiled
def find_latency(graph: Graph, orders: Orders, scratch: Scratch, period: int) -> int:
    """Return the time from a block's first start to its last end when nothing waits needlessly."""
    nodes = len(orders.x)
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


@_compiled
def slide(orders: Orders, device: int, place: int, distance: int) -> int:
    """Move a pass by `distance` places along its device's cyclic order; return its new place."""
    seq, at, turn = orders.seq, orders.at, orders.turn
    length = seq.shape[1]
    for _ in range(abs(distance)):
        if distance > 0:
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


@_compiled
def copy_orders(source: Orders, target: Orders) -> None:
    """Make `target` equal to `source`."""
    target.seq[:] = source.seq
    target.at[:] = source.at
    target.turn[:] = source.turn
    target.x[:] = source.x


@_compiled
def propose(graph: Graph, orders: Orders, scratch: Scratch, moves: Ints) -> int:
    """Make a random move; return how many devices changed, negative if it does not fit.

    `moves` receives (device, new place, distance) of every pass moved: one pass anywhere, one on
    the critical cycle, or the same pass on a run of neighbouring devices.
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
        if not find_peak(graph, orders, device) <= graph.limit[device]:
            return -(index + 1)
    return int(run)


@_compiled
def evaluate(
    graph: Graph, orders: Orders, scratch: Scratch, moves: Ints, run: int, now: int, most: int,
    busy: int, kept: tuple[Ints, Ints],
) -> int:  # fmt: skip
    """Return the period after a move from one of period `now`; NEVER if above `most`.

    Potentials and critical cycle are as before if it is NEVER.
    """
    potentials, critical = kept
    potentials[:] = orders.x
    tail = 0
    for index in range(run):
        for node in orders.seq[moves[index, 0]]:
            scratch.queue[tail] = node
            scratch.queued[node] = True
            tail += 1
    cycle = settle(graph, orders, scratch, now, tail)
    if cycle < 0:
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


@_compiled
def anneal(
    graph: Graph, orders: Orders, scratch: Scratch, busy: int, steps: int, heat: int, best: Orders
) -> int:
    """Change the orders at random, ever less willing to raise the period; return the least.

    `best` receives its orders. `heat` is the most the period may rise in the first step.
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
            for index in range(abs(run) - 1, -1, -1):
                slide(orders, moves[index, 0], moves[index, 1], -moves[index, 2])
    return int(least)


@_compiled
def lay(graph: Graph, orders: Orders, times: Ints, period: int) -> None:
    """Set the orders to those of blocks that start at `times` and repeat every `period`."""
    for device in range(len(graph.own)):
        row = orders.seq[device]
        for place in range(len(row)):
            node = graph.own[device, place]
            phase = times[node] % period
            while place > 0 and times[row[place - 1]] % period > phase:
                row[place] = row[place - 1]
                place -= 1
            row[place] = node
            orders.turn[node] = -(times[node] // period)
        for place in range(len(row)):
            orders.at[row[place]] = place


@_compiled
def all_fit(graph: Graph, orders: Orders) -> bool:
    """Return whether every device is within its limit."""
    for device in range(len(orders.seq)):
        if not find_peak(graph, orders, device) <= graph.limit[device]:
            return False
    return True


@_compiled
def draw_block(
    graph: Graph, random: npt.NDArray[np.uint64], busy: int, times: Ints, serial: bool
) -> None:
    """Set `times` to a random block whose hops are the same between all devices.

    The passes follow each other at once but for pauses: one per chunk and direction at every hop,
    one at every turn from chunk to chunk, one before W. A serial block has none.
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
        # W goes before another B that might start when this one ends, for the memory's sake
        done = clock + graph.work[stages + stage] - 1
        times[2 * stages + stage] = done + pauses[4, graph.chunk[stage]]


@_compiled
def sample(
    graph: Graph, orders: Orders, scratch: Scratch, busy: int, tries: int,
    periods: Ints, slices: Ints, times: Ints,
) -> None:  # fmt: skip
    """Fill `periods`, `slices` and `times` with the best of `tries` random blocks.

    A block is repeated ever more slowly until its orders fit the memory; what the orders then
    allow is their period. No two kept have the same.
    """
    block = np.zeros(len(orders.x), np.int64)
    last = len(periods) - 1
    for attempt in range(tries):
        draw_block(graph, scratch.random, busy, block, attempt == 0)
        slice_ = busy + draw(scratch.random, busy // 8)
        lay(graph, orders, block, slice_)
        # a slice longer than the block has one microbatch at a time, the least memory
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
