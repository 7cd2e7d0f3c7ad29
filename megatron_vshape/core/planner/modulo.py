"""Steady phase for measured costs: modulo scheduling within an exact memory limit.

After warm-up, every device repeats one cyclic order of its passes, with one or two microbatches per
period. This order determines both memory and period:

* Memory: a running sum over the device's order, exact and independent of times.
* Period: the largest ratio of time to periods over the cycles of the event graph, whose arcs are
  the data dependencies and each device's order. At a trial period this is a longest-path problem;
  the ratio of a positive cycle is above the trial and becomes the next trial.

`modulo_anneal` searches with one microbatch per period first, then with two, starting from the
orders of one, each doubled. Published blocks move in unit slots and repeat bubbles when F, B and W
differ (arXiv 2405.15362, section 5); this search has no slots.

Times and random numbers are integers (the work of the busiest device is 2 ** 30 units), so the same
inputs give the same orders on every machine, with numba or, slower, without.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vshape.core.check.bounds import check_limits, each_limit
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, chunks_of
from megatron_vshape.core.planner.modulo_anneal import anneal, sample
from megatron_vshape.core.planner.modulo_graph import (
    NEVER,
    Graph,
    Ints,
    Orders,
    Scratch,
    empty_orders,
    find_latency,
    lay,
    make_scratch,
)
from megatron_vshape.core.planner.race import race

UNITS = 1 << 30
"""Work of the busiest device per period, in the integer units of the search."""

PRECISION = 1 << 13
"""Periods that differ by less than 1 / PRECISION of the busiest device's work are equal."""

ROUNDING = 1e-9
"""Relative tolerance of a memory limit for rounding, the same as in the verifier."""

STARTS = 6
"""Number of starting points for annealing."""

RETURNED = 8
"""Maximum number of returned orders."""

INITIAL_TEMPERATURES = ((7, 15), (12, 25))
"""Initial temperatures: annealing first accepts periods longer by up to 1 / heat of the work.

For one and for two microbatches per period; starts alternate between the two values. The second
starts from orders of the first and loses them if it is hotter (10.8% instead of 9.2% at 8 devices
and 8 chunks).
"""


@dataclass(frozen=True, slots=True)
class SteadyOrder:
    """Cyclic pass order of every device in the steady phase.

    Iteration k runs, for each (kind, stage, offset) of a row, microbatch k * `microbatches` +
    offset. `period_us` is the minimum time of an iteration, `latency_us` the time from the start of
    a microbatch's first pass to the end of its last.
    """

    placement: Placement
    microbatches: int
    rows: tuple[tuple[tuple[Kind, int, int], ...], ...]
    period_us: float
    latency_us: float


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
    limits = each_limit(limits, num_devices)
    check_limits(costs, placement, num_devices, limits)
    single = _make_problem(costs, placement, num_devices, limits, 1)
    # One microbatch per period is the smaller search space, so it gets less of the budget.
    found = _search(single, steps // 4, seed, [])
    # A period equal to the busiest device's work is optimal: two microbatches cannot shorten it.
    if found[0].period > single.busy:
        double = _make_problem(costs, placement, num_devices, limits, 2)
        starts = [_doubled(each, double) for each in found[:STARTS]]
        found += _search(double, steps - steps // 4, seed, starts)
    found = sorted(found, key=_Found.rank)
    return [each.steady(costs, placement) for each in found[:RETURNED]]


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
                    PARTS[node // (classes * stages)],
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
            # A result has at most two readers.
            way = 0 if feeds[source, 0] < 0 else 1
            feeds[source, way] = node
            lag[source, way] = work[source] + (send if home[source] != home[node] else 0)
    return feeds, lag


def _search(problem: _Problem, steps: int, seed: int, starts: list[Orders]) -> list[_Found]:
    """Anneal the starting points and return the orders, best first.

    Rounds have equal cost: all starting points, then the better half, until one is left.
    """
    graph = problem.graph
    scratch = make_scratch(graph, seed)
    if not starts:
        starts = _draw_starts(problem, scratch, max(1, steps // 10))
    found: list[_Found] = []

    def advance(live: list[Orders], effort: int, _: int) -> list[Orders]:
        made = []
        for index, orders in enumerate(live):
            best = empty_orders(graph)
            heat = problem.busy // INITIAL_TEMPERATURES[graph.classes - 1][index % 2]
            period = int(anneal(graph, orders, scratch, problem.busy, effort, heat, best))
            made.append(_found(problem, best, scratch, period))
        made.sort(key=_Found.rank)
        # An order without idle time on the busiest device is optimal: end the race.
        half = len(made) // 2 if made[0].period > problem.busy else 0
        found.extend(made[half:])
        return [each.orders for each in made[:half]]

    race(starts, steps, len(starts).bit_length(), advance)
    return sorted(found, key=_Found.rank)


def _found(problem: _Problem, orders: Orders, scratch: Scratch, period: int) -> _Found:
    latency = int(find_latency(problem.graph, orders, scratch, period))
    return _Found(problem, orders, period, latency)


def _draw_starts(problem: _Problem, scratch: Scratch, tries: int) -> list[Orders]:
    graph = problem.graph
    periods = np.full(STARTS, NEVER, np.int64)
    slices = np.zeros(STARTS, np.int64)
    times = np.zeros((STARTS, len(graph.work)), np.int64)
    orders = empty_orders(graph)
    sample(graph, orders, scratch, problem.busy, tries, periods, slices, times)
    starts = []
    for period, slice_, start in zip(periods, slices, times, strict=True):
        if period < NEVER:
            orders = empty_orders(graph)
            lay(graph, orders, start, int(slice_))
            # The block's start times are good initial potentials for the longest paths.
            orders.x[:] = start
            starts.append(orders)
    return starts


def _doubled(found: _Found, problem: _Problem) -> Orders:
    """Return the order with two iterations merged into one."""
    orders = empty_orders(problem.graph)
    length = found.orders.seq.shape[1]
    for device, row in enumerate(found.orders.seq):
        for place in range(2 * length):
            node = row[place % length]
            block = place // length + int(found.orders.turn[node])
            # Even iterations become the first microbatch of the new period, odd ones the second.
            orders.seq[device, place] = 2 * node + block % 2
            orders.at[2 * node + block % 2] = place
            orders.turn[2 * node + block % 2] = block // 2
    return orders
