"""Steady phase for measured costs: modulo scheduling within an exact memory limit.

After warm-up, every device repeats one cyclic order of its passes, with one or two microbatches per
period. The order determines both its memory and its minimum period (`modulo_graph`).
`find_steady_orders` anneals random orders, first with one microbatch per period, then with two,
starting from the orders of one, each doubled.

A step needs about a microsecond at 8 devices: a move changes the potentials only around its device,
and most moves are rejected by memory or by the first cycle that is too slow. Published blocks move
in unit slots and repeat bubbles when F, B and W differ (arXiv 2405.15362, section 5); this search
has no slots.

Times and random numbers are integers (the work of the busiest device is 2 ** 30 units), so the same
inputs give the same orders on every machine, with numba or, slower, without.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_vshape.core.check.bounds import check_limits, limits_by_device
from megatron_vshape.core.compiling import compiled
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, chunks_of
from megatron_vshape.core.planner.modulo_graph import (
    NEVER,
    Graph,
    Ints,
    Orders,
    Scratch,
    data_lag,
    empty_orders,
    find_latency,
    find_peak,
    find_period,
    find_period_after_moves,
    make_scratch,
)
from megatron_vshape.core.planner.race import race

UNITS = 1 << 30
"""Work of the busiest device per period, in the integer units of the search."""

PRECISION = 1 << 13
"""Periods that differ by less than 1 / PRECISION of the busiest device's work are equal."""

_ROUNDING = 1e-9
"""Relative tolerance of a memory limit for rounding, the same as in the verifier."""

STARTS = 6
"""Number of starting points for annealing."""

_MAX_RETURNED = 8
"""Maximum number of returned orders."""

_INITIAL_TEMPERATURES = ((7, 15), (12, 25))
"""Initial temperatures: annealing first accepts periods longer by at most 1 / value of the
work.

For one and for two microbatches per period; starts alternate between the two values. The second
starts from orders of the first and loses them if it is hotter (10.8% instead of 9.2% at 8 devices
and 8 chunks).
"""


@dataclass(frozen=True, slots=True)
class SteadyOrder:
    """Cyclic pass order of every device in the steady phase.

    Iteration k runs, for each (kind, stage, offset) of a row, microbatch k * `microbatches` +
    offset. `period_us` is the minimum time of an iteration.
    """

    placement: Placement
    microbatches: int
    rows: tuple[tuple[tuple[Kind, int, int], ...], ...]
    period_us: float


def find_steady_orders(
    costs: Costs,
    placement: Placement,
    num_devices: int,
    limits: Sequence[float],
    steps: int,
    seed: int = 0,
) -> list[SteadyOrder]:
    """Search for cyclic orders within the memory limits; the shortest period is first.

    Args:
        costs: costs of the stages.
        placement: device of every stage.
        num_devices: pipeline devices.
        limits: activation memory limit per device, in the costs' unit.
        steps: search steps, about 1 us each at 8 devices, more with more devices.
        seed: seed of the random numbers.

    Raises:
        ScheduleError: the costs or limits do not match the placement, or a limit is below the
            minimum of any schedule.
    """
    limits = limits_by_device(limits, num_devices)
    check_limits(costs, placement, num_devices, limits)
    single = _make_problem(costs, placement, num_devices, limits, 1)
    # One microbatch per period is the smaller search space, so it gets less of the budget.
    results = _search(single, steps // 4, seed, [])
    # A period equal to the busiest device's work is optimal: two microbatches cannot shorten it.
    if results[0].period > single.busy:
        double = _make_problem(costs, placement, num_devices, limits, 2)
        starts = [_doubled(result, double) for result in results[:STARTS]]
        results += _search(double, steps - steps // 4, seed, starts)
    results = sorted(results, key=_AnnealedOrders.rank)
    return [result.steady(costs, placement) for result in results[:_MAX_RETURNED]]


@dataclass(frozen=True, slots=True)
class _Problem:
    graph: Graph
    num_stages: int
    busy: int  # work of the busiest device
    unit_us: float


@dataclass(frozen=True, slots=True)
class _AnnealedOrders:
    problem: _Problem
    orders: Orders
    period: int
    latency: int

    def rank(self) -> tuple[int, int, int]:
        """Return a sort key, smaller for the better of two; periods are compared at PRECISION."""
        slack = self.period - self.problem.busy
        classes = self.problem.graph.classes
        return slack * PRECISION // self.problem.busy, classes, self.latency

    def steady(self, costs: Costs, placement: Placement) -> SteadyOrder:
        classes, stages = self.problem.graph.classes, self.problem.num_stages
        rows = tuple(
            tuple(
                (
                    # Kind, stage and offset of the node; an offset of several periods comes from
                    # `turn`.
                    PARTS[node // (classes * stages)],
                    node // classes % stages,
                    int(self.orders.turn[node]) * classes + node % classes,
                )
                for node in map(int, row)
            )
            for row in self.orders.rows
        )
        return SteadyOrder(placement, classes, rows, self.period * self.problem.unit_us)


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
    # A node is (part * stages + stage) * classes + class.
    part, stage = np.divmod(np.arange(size) // classes, stages)
    times = np.array([[costs.time_us(kind, s) for s in range(stages)] for kind in PARTS])
    forward = np.array(costs.held_after_forward_bytes)[stage]
    backward = np.array(costs.held_after_backward_bytes)[stage]
    work = np.maximum(1, np.rint(times / unit_us)).astype(np.int64)[part, stage]
    device_of = np.array(placement, np.int64)[stage]
    device_nodes = np.stack([np.flatnonzero(device_of == device) for device in range(num_devices)])
    graph = Graph(
        work,
        part,
        device_of,
        *_data_arcs(costs, classes, work, device_of, unit_us),
        np.where(part == 0, forward, 0.0),
        # F frees nothing; B replaces F's memory by that for W; W frees the rest.
        np.select([part == 0, part == 1], [0.0, backward - forward], -backward),
        np.array(limits, np.float64) * (1 + _ROUNDING),
        device_nodes,
        np.array(chunks_of(placement), np.int64),
        classes,
    )
    return _Problem(graph, stages, int(work[device_nodes].sum(axis=1).max()), unit_us)


def _data_arcs(
    costs: Costs, classes: int, work: Ints, device_of: Ints, unit_us: float
) -> tuple[Ints, Ints]:
    """Return the nodes that read each node's result, and the time until they may start."""
    size, stages = len(work), costs.num_stages
    readers, lag = np.full((size, 2), -1, np.int64), np.zeros((size, 2), np.int64)
    for node in range(size):
        type_index, index = divmod(node, classes)
        reader = Pass(PARTS[type_index // stages], type_index % stages, index)
        for read_pass in reader.needs(stages):
            source = (PARTS.index(read_pass.kind) * stages + read_pass.stage) * classes + index
            # A result has at most two readers.
            arc = 0 if readers[source, 0] < 0 else 1
            readers[source, arc] = node
            lag[source, arc] = work[source]
            if device_of[source] != device_of[node]:
                lag[source, arc] += round(costs.message_us(read_pass.stage, reader.stage) / unit_us)
    return readers, lag


def _search(
    problem: _Problem, steps: int, seed: int, starts: list[Orders]
) -> list[_AnnealedOrders]:
    """Anneal the starting points and return the orders, best first.

    Rounds have equal cost: all starting points, then the better half, until one is left.
    """
    graph = problem.graph
    scratch = make_scratch(graph, seed)
    if not starts:
        starts = _draw_starts(problem, scratch, max(1, steps // 10))
    results: list[_AnnealedOrders] = []

    def advance(orders_of_round: list[Orders], effort: int, _: int) -> list[Orders]:
        round_results = []
        for index, orders in enumerate(orders_of_round):
            best = empty_orders(graph)
            temperature = problem.busy // _INITIAL_TEMPERATURES[graph.classes - 1][index % 2]
            period = int(_anneal(graph, orders, scratch, problem.busy, effort, temperature, best))
            latency = int(find_latency(graph, best, scratch, period))
            round_results.append(_AnnealedOrders(problem, best, period, latency))
        round_results.sort(key=_AnnealedOrders.rank)
        # An order without idle time on the busiest device is optimal: end the race.
        # `round_results` is sorted, so the first has the shortest period.
        half = len(round_results) // 2 if round_results[0].period > problem.busy else 0
        results.extend(round_results[half:])
        return [result.orders for result in round_results[:half]]

    race(starts, steps, len(starts).bit_length(), advance)
    return sorted(results, key=_AnnealedOrders.rank)


def _draw_starts(problem: _Problem, scratch: Scratch, tries: int) -> list[Orders]:
    graph = problem.graph
    periods = np.full(STARTS, NEVER, np.int64)
    intervals = np.zeros(STARTS, np.int64)
    times = np.zeros((STARTS, len(graph.work)), np.int64)
    orders = empty_orders(graph)
    sample(graph, orders, scratch, problem.busy, tries, periods, intervals, times)
    starts = []
    for period, interval, start in zip(periods, intervals, times, strict=True):
        if period < NEVER:
            orders = empty_orders(graph)
            _lay_out(graph, orders, start, int(interval))
            # The block's start times are good initial potentials for the longest paths.
            orders.x[:] = start
            starts.append(orders)
    return starts


def _doubled(result: _AnnealedOrders, problem: _Problem) -> Orders:
    """Return the order with two iterations merged into one."""
    orders = empty_orders(problem.graph)
    length = result.orders.rows.shape[1]
    for device, row in enumerate(result.orders.rows):
        for position in range(2 * length):
            node = row[position % length]
            block = position // length + int(result.orders.turn[node])
            # Even iterations become the first microbatch of the new period, odd ones the second.
            orders.rows[device, position] = 2 * node + block % 2
            orders.position[2 * node + block % 2] = position
            orders.turn[2 * node + block % 2] = block // 2
    return orders


@compiled
def _shift_pass(orders: Orders, device: int, position: int, distance: int) -> int:
    """Move a pass by `distance` positions in its device's cyclic order; return its new position."""
    rows, positions, turn = orders.rows, orders.position, orders.turn
    length = rows.shape[1]
    for _ in range(abs(distance)):
        if distance > 0:
            # Neighbors are exchanged one by one; `is_right` is whether the pass is the right one.
            left_position, is_right = position, 0
        else:
            left_position, is_right = (position - 1 if position > 0 else length - 1), 1
        right_position = left_position + 1 if left_position + 1 < length else 0
        first, second = rows[device, left_position], rows[device, right_position]
        rows[device, left_position], rows[device, right_position] = second, first
        positions[second], positions[first] = left_position, right_position
        # The iteration ends between the two, so each now runs in the other's.
        if right_position == 0:
            turn[second] += 1
            turn[first] -= 1
        position = left_position if is_right else right_position
    return int(position)


@compiled
def _copy_orders(source: Orders, target: Orders) -> None:
    """Make `target` equal to `source`."""
    target.rows[:] = source.rows
    target.position[:] = source.position
    target.turn[:] = source.turn
    target.x[:] = source.x


@compiled
def _lay_out(graph: Graph, orders: Orders, times: Ints, period: int) -> None:
    """Set the orders to those of blocks that start at `times` and repeat every `period`."""
    for device in range(len(graph.device_nodes)):
        row = orders.rows[device]
        for position in range(len(row)):
            node = graph.device_nodes[device, position]
            phase = times[node] % period
            # Insertion sort by the phase within a period.
            while position > 0 and times[row[position - 1]] % period > phase:
                row[position] = row[position - 1]
                position -= 1
            row[position] = node
            # A start in period p means that iteration k runs block k - p.
            orders.turn[node] = -(times[node] // period)
        for position in range(len(row)):
            orders.position[row[position]] = position


@compiled
def _all_fit(graph: Graph, orders: Orders) -> bool:
    """Return whether every device is within its limit."""
    for device in range(len(orders.rows)):
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
def _propose(graph: Graph, orders: Orders, scratch: Scratch, moves: Ints) -> int:
    """Make a random move; return the number of changed devices, negative if it does not fit.

    The move is one pass anywhere, one on the critical cycle, or the same pass on neighboring
    devices. `moves` receives (device, new position, distance) of every moved pass.
    """
    random, rows = scratch.random, orders.rows
    devices, length = rows.shape
    move_type = draw(random, 4)
    distance = draw(random, 2) * 2 - 1
    if move_type < 3 and draw(random, 2):
        distance *= 1 + draw(random, length - 1)
    num_moved = 1
    if 0 < move_type < 3 and scratch.critical[0] > 0:
        node = scratch.critical[1 + draw(random, scratch.critical[0])] >> 1
        first, index_in_device = graph.device[node], 0
    else:
        first, index_in_device = draw(random, devices), draw(random, length)
        node = graph.device_nodes[first, index_in_device]
        if move_type == 3:
            num_moved = min(devices - first, 1 + draw(random, min(devices, 8)))
    for index in range(num_moved):
        device = first + index
        if index > 0:
            node = graph.device_nodes[device, index_in_device]
        moves[index, 0], moves[index, 2] = device, distance
        moves[index, 1] = _shift_pass(orders, device, orders.position[node], distance)
        # Memory is tested before the period because it is cheaper.
        if not find_peak(graph, orders, device) <= graph.limit[device]:
            return -(index + 1)
    return int(num_moved)


@compiled
def _anneal(
    graph: Graph,
    orders: Orders,
    scratch: Scratch,
    busy: int,
    steps: int,
    temperature: int,
    best: Orders,
) -> int:
    """Anneal the orders with decreasing temperature and return the shortest period found.

    `best` receives its orders. `temperature` is the maximum increase of the period in the first
    step.
    """
    moves = np.zeros((len(orders.rows), 3), np.int64)
    backup = (np.zeros_like(orders.x), np.zeros_like(scratch.critical))
    scratch.critical[0] = 0
    period_now = find_period(graph, orders, scratch, busy, NEVER)
    best_period = period_now
    _copy_orders(orders, best)
    for step in range(steps):
        if period_now == busy:
            break
        # The accepted increase is random, mostly small, and its maximum decreases linearly to 0.
        chance = draw(scratch.random, 1 << 20)
        rise = (temperature * (steps - step) // steps * chance >> 20) * chance >> 20
        num_moved = _propose(graph, orders, scratch, moves)
        period = NEVER
        if num_moved > 0:
            period = find_period_after_moves(
                graph,
                orders,
                scratch,
                moves,
                num_moved,
                period_now,
                period_now + rise,
                busy,
                backup,
            )
        if period < NEVER:
            period_now = period
            if period_now < best_period:
                best_period = period_now
                _copy_orders(orders, best)
        else:
            # Undo the moves in reverse order.
            for index in range(abs(num_moved) - 1, -1, -1):
                _shift_pass(orders, moves[index, 0], moves[index, 1], -moves[index, 2])
    return int(best_period)


@compiled
def _draw_block(
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
    for direction in range(5):
        for chunk in range(chunks):
            pause_type = 0 if serial else draw(random, 3)
            if pause_type > 0:
                pauses[direction, chunk] = draw(random, busy // (2 if pause_type == 1 else 6))
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
        # W precedes another B that might start when this one ends, because it frees memory.
        end = clock + graph.work[stages + stage] - 1
        times[2 * stages + stage] = end + pauses[4, graph.chunk[stage]]


@compiled
def sample(
    graph: Graph, orders: Orders, scratch: Scratch, busy: int, tries: int,
    periods: Ints, intervals: Ints, times: Ints,
) -> None:  # fmt: skip
    """Fill `periods`, `intervals` and `times` with the best of `tries` random blocks.

    The interval between blocks grows until their orders fit the memory; the period is then the
    minimum for these orders. All these periods differ.
    """
    block = np.zeros(len(orders.x), np.int64)
    last = len(periods) - 1
    for attempt in range(tries):
        _draw_block(graph, scratch.random, busy, block, attempt == 0)
        interval = busy + draw(scratch.random, busy // 8)
        _lay_out(graph, orders, block, interval)
        # An interval longer than the block has one microbatch at a time: the minimum memory.
        while not _all_fit(graph, orders) and interval <= block.max():
            interval += interval // 24
            _lay_out(graph, orders, block, interval)
        if not _all_fit(graph, orders):
            continue
        orders.x[:] = block
        # Only a period below the longest in `periods` is of interest.
        period = find_period(graph, orders, scratch, busy, periods[last] - 1)
        if period == NEVER or (periods == period).any():
            continue
        slot = last
        while slot > 0 and periods[slot - 1] > period:
            periods[slot], intervals[slot] = periods[slot - 1], intervals[slot - 1]
            times[slot] = times[slot - 1]
            slot -= 1
        periods[slot], intervals[slot] = period, interval
        times[slot] = block
