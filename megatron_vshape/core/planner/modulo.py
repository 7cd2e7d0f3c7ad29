"""Steady phase for measured costs: modulo scheduling within an exact memory limit.

After warm-up, every device repeats one cyclic order of its passes, with one or two microbatches per
period. This order determines both memory and period:

* Memory: a running sum over the device's order, exact and independent of times.
* Period: the largest ratio of time to periods over the cycles of the event graph, whose arcs are
  the data dependencies and each device's order. At a trial period this is a longest-path problem;
  the ratio of a positive cycle is above the trial and becomes the next trial.

`modulo_graph` searches with one microbatch per period first, then with two, starting from the
orders of one, each doubled. The result is a `CyclicOrder` for any number of microbatches: a
schedule of few that contains a whole period represents any number, because further periods can be
spliced in. So only warm-up and cool-down have to be searched.

Published blocks move in unit slots and repeat bubbles when F, B and W differ (arXiv 2405.15362,
section 5); this search has no slots.

Times and random numbers are integers (the work of the busiest device is 2 ** 30 units), so the same
inputs give the same orders on every machine, with numba or, slower, without.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from megatron_vshape.core.check.bounds import check_limits, each_limit
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, chunks_of, stages_of
from megatron_vshape.core.model.schedule import turned
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.core.planner.job_shop import Codec
from megatron_vshape.core.planner.modulo_graph import (
    NEVER,
    Graph,
    Ints,
    Orders,
    Scratch,
    anneal,
    empty_orders,
    find_latency,
    lay,
    make_scratch,
    sample,
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
                    # Kind, stage and offset of the node; an offset of several periods comes from
                    # `turn`.
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
    # A node is (part * stages + stage) * classes + class.
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
        *_data_arcs(costs, classes, work, home, unit_us),
        np.where(part == 0, forward, 0.0),
        # F frees nothing; B replaces F's memory by that for W; W frees the rest.
        np.select([part == 0, part == 1], [0.0, backward - forward], -backward),
        np.array(limits, np.float64) * (1 + ROUNDING),
        own,
        np.array(chunks_of(placement), np.int64),
        classes,
    )
    return _Problem(graph, stages, int(work[own].sum(axis=1).max()), unit_us)


def _data_arcs(
    costs: Costs, classes: int, work: Ints, home: Ints, unit_us: float
) -> tuple[Ints, Ints]:
    """Return the nodes that read each node's result, and the time until they may start."""
    size, stages = len(work), costs.num_stages
    feeds, lag = np.full((size, 2), -1, np.int64), np.zeros((size, 2), np.int64)
    for node in range(size):
        place, index = divmod(node, classes)
        reader = Pass(PARTS[place // stages], place % stages, index)
        for need in reader.needs(stages):
            source = (PARTS.index(need.kind) * stages + need.stage) * classes + index
            # A result has at most two readers.
            way = 0 if feeds[source, 0] < 0 else 1
            feeds[source, way] = node
            lag[source, way] = work[source]
            if home[source] != home[node]:
                lag[source, way] += round(costs.message_us(need.stage, reader.stage) / unit_us)
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
        # `made` is sorted, so the first has the shortest period.
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
    intervals = np.zeros(STARTS, np.int64)
    times = np.zeros((STARTS, len(graph.work)), np.int64)
    orders = empty_orders(graph)
    sample(graph, orders, scratch, problem.busy, tries, periods, intervals, times)
    starts = []
    for period, interval, start in zip(periods, intervals, times, strict=True):
        if period < NEVER:
            orders = empty_orders(graph)
            lay(graph, orders, start, int(interval))
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


_sort = Codec(1).sort


@dataclass(frozen=True, slots=True)
class CyclicOrder:
    """In period p, a device runs pass (sort, offset) of microbatch p * k + offset.

    `rows[device]` is (sorts, offsets) in order of time; module `rows` defines sorts.
    """

    name: str
    microbatches: int  # k
    rows: tuple[tuple[np.ndarray, np.ndarray], ...]

    def reach(self) -> tuple[int, int]:
        """Return the minimum and the maximum offset."""
        offsets = np.concatenate([row[1] for row in self.rows])
        return int(offsets.min()), int(offsets.max())

    def unroll(self, num_microbatches: int) -> np.ndarray:
        """Return each device's passes, as numbers sort * num_microbatches + microbatch.

        Passes of one sort are renumbered in microbatch order, which changes neither times nor
        memory.
        """
        least, most = self.reach()
        # All periods in which any offset is a microbatch of the step.
        periods = np.arange(-(most // self.microbatches) - 1, self._end(num_microbatches))
        rows = []
        for row in self.rows:
            passes, _ = self._passes(row, periods, num_microbatches)
            # The positions of each sort, in order of time, get its microbatches in ascending order.
            by_sort = np.argsort(passes // num_microbatches, kind="stable")
            passes[by_sort] = np.sort(passes)
            rows.append(passes)
        return np.stack(rows)

    def window(self, num_microbatches: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return start and end of the middle full period on each device; None if there is none."""
        least, most = self.reach()
        # From `first` to `last`, every offset is a microbatch of the step: the period is complete.
        first = -(least // self.microbatches)
        last = (num_microbatches - 1 - most) // self.microbatches
        # One complete period must remain on each side of the middle one, whose memory then repeats.
        if last - first < 2:
            return None
        middle = (first + last) // 2
        periods = np.arange(-(most // self.microbatches) - 1, self._end(num_microbatches))
        found = [self._passes(row, periods, num_microbatches)[1] for row in self.rows]
        low = [int(np.searchsorted(each, middle)) for each in found]
        high = [int(np.searchsorted(each, middle + 1)) for each in found]
        return np.array(low), np.array(high)

    def _end(self, num_microbatches: int) -> int:
        return (num_microbatches - self.reach()[0]) // self.microbatches + 1

    def _passes(
        self, row: tuple[np.ndarray, np.ndarray], periods: np.ndarray, num_microbatches: int
    ) -> tuple[np.ndarray, np.ndarray]:
        sorts, offsets = row
        microbatch = periods[:, None] * self.microbatches + offsets
        inside = (microbatch >= 0) & (microbatch < num_microbatches)
        passes = (sorts * num_microbatches + microbatch)[inside]
        return passes, np.broadcast_to(periods[:, None], microbatch.shape)[inside]


def cyclic_order_of_block(block: BuildingBlock) -> CyclicOrder:
    """Return the steady order of a building block; a full backward becomes B, then W.

    With slices, the period is the shortest that has whole microbatches.
    """
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(block.num_devices)]
    # A block of slices repeats a shorter pattern `share` times; `own < numbers` selects one.
    share = gcd(block.num_microbatches // block.slices, block.slices)
    numbers, interval = block.num_microbatches // share, block.interval // share
    for (kind, stage, within), start, _ in block.passes:
        period, slot = divmod(start, interval)
        parts = (Kind.B, Kind.W) if kind is Kind.BW else (kind,)
        for at, part in enumerate(parts):
            sort = _sort(part, stage)
            own = turned(within, block.slices) if part.by_rank else within
            if own < numbers:
                # A pass that starts p intervals late runs in period k what belongs to block k - p.
                entry = (slot, at, sort, own - period * numbers)
                rows[block.placement[stage]].append(entry)
    return _cyclic_order(block.name, numbers, rows)


def _cyclic_order(
    name: str, k: int, rows: Iterable[list[tuple[int, int, int, int]]]
) -> CyclicOrder:
    arrays = []
    for row in rows:
        ordered = sorted(row)
        sorts = np.array([entry[2] for entry in ordered])
        arrays.append((sorts, np.array([entry[3] for entry in ordered])))
    return CyclicOrder(name, k, tuple(arrays))


def sequential(placement: Placement, num_devices: int, slices: int) -> CyclicOrder:
    """Return the order of one microbatch after the other, which needs the minimum memory."""
    rows: list[list[tuple[int, int, int, int]]] = []
    for stages in stages_of(placement, num_devices):
        passes = [(0, _sort(Kind.F, s), own) for s in stages for own in range(slices)]
        passes += [
            (1, _sort(kind, s), own)
            for s in reversed(stages)
            for own in range(slices)
            for kind in Kind.BW.does
        ]
        rows.append([(slot, at, sort, own) for at, (slot, sort, own) in enumerate(passes)])
    return _cyclic_order("sequential", slices, rows)


def cyclic_order_of_steady(order: SteadyOrder, name: str, slices: int = 1) -> CyclicOrder:
    """Return a steady order as arrays, with slices scheduled like its microbatches.

    B and W start `slices` - 1 slices later, after all F of their microbatch. A period has whole
    microbatches.
    """
    times = slices // gcd(order.microbatches, slices)
    each = np.arange(times)[:, None] * order.microbatches
    rows = []
    for row in order.rows:
        sorts = np.array([_sort(kind, stage) for kind, stage, _ in row])
        # In the same period, a smaller offset runs an earlier microbatch: each one runs later.
        own = np.array([offset - (slices - 1) * kind.by_rank for kind, _, offset in row])
        rows.append((np.tile(sorts, times), (own + each).ravel()))
    return CyclicOrder(name, times * order.microbatches, tuple(rows))


def is_period(
    row: np.ndarray, low: np.ndarray, high: np.ndarray, num_microbatches: int, period: int
) -> bool:
    """Return whether each device runs `period` microbatches of every sort within [low, high)."""
    for own, begin, end in zip(row, low, high, strict=True):
        sort, microbatch = np.divmod(own[begin:end], num_microbatches)
        for each in np.unique(own // num_microbatches):
            mine = microbatch[sort == each]
            # Microbatches of this sort before the window; the window must have the next ones.
            before = np.count_nonzero(own[:begin] // num_microbatches == each)
            if not np.array_equal(mine, np.arange(before, before + period)):
                return False
    return True


def splice(
    row: np.ndarray, low: np.ndarray, high: np.ndarray, period: int, short: int, full: int
) -> np.ndarray:
    """Extend an order from `short` to `full` microbatches by repeating [low, high)."""
    more = (full - short) // period
    rows = []
    for own, begin, end in zip(row, low, high, strict=True):
        sort, microbatch = np.divmod(own, short)
        copies = np.arange(more + 1)[:, None] * period
        sorts = (sort[:begin], np.tile(sort[begin:end], more + 1), sort[end:])
        micro = (
            microbatch[:begin],
            (microbatch[begin:end] + copies).ravel(),
            microbatch[end:] + more * period,
        )
        # Renumbered: a pass is sort * number of microbatches + microbatch.
        rows.append(np.concatenate(sorts) * full + np.concatenate(micro))
    return np.stack(rows).astype(np.int32)
