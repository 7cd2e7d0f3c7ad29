"""Orders for one placement: starting points, local search and evaluation."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from operator import add, attrgetter
from typing import Any

import numpy as np

from megatron_vshape.core.check import bounds
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.evaluated_schedule import ORDER_ALONE, EvaluatedSchedule, MemoryStrategy
from megatron_vshape.core.list_scheduler import EIGHTHS
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement, looping, stages_of
from megatron_vshape.core.model.schedule import Objective, Schedule, reversed_slice
from megatron_vshape.core.paper import blocks
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.core.planner import improve
from megatron_vshape.core.planner.job_shop import (
    Codec,
    PassSubset,
    Problem,
    fill_idle_time,
    make_shop,
    merge_queues,
    proven_limits,
    reinsert_weights,
    select_passes,
    with_parts_alone,
)
from megatron_vshape.core.planner.modulo import SteadyOrder, find_steady_orders
from megatron_vshape.core.planner.race import best_of

Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""Applies a function to each of several items, like `map`; may use threads."""

STARTS = 8
"""Number of orders in the first round of the local search."""

_W_REINSERTED = ", W reinserted"

_MAX_ANNEALED_STAGES = 36
"""Maximum stages of a placement with annealed orders, unless it has at most two per device."""

_FILL_THROUGHOUT_BELOW = 3_000
"""Orders of fewer passes are also filled throughout, not only in warm-up and cool-down.

Simulated overhead at d=8, m=24, 1/2/1/.05, 12 chunks: 16.4 with, 17.3 without.
"""

RESTART_STEPS, RESTART_SHARE = 150, 0.2
"""Steps of a restart, and the fraction by which it may lengthen the order."""

MAX_STEPS_AT_ONCE = 300_000
"""Maximum search steps between two progress reports and reinsertions of W."""


def annealing_steps(budget: int, num_devices: int) -> int:
    """Return the steps of annealing for a budget of the local search."""
    return budget // 4 if num_devices <= 16 else budget


def _published_blocks(placement: Placement, num_devices: int) -> Iterator[BuildingBlock]:
    """Yield the published building blocks with this placement."""
    chunks = len(placement) // num_devices
    candidates = [
        make(num_devices)
        for make in (
            *(blocks.v_min, blocks.v_half, blocks.v_zb, blocks.one_f_one_b_v),
            *(blocks.two_thirds, blocks.one_f_one_b, blocks.zb_h1, blocks.zb_h2),
        )
    ]
    if chunks > 1:
        candidates.append(blocks.interleaved(num_devices, chunks))
        # Smaller groups need less memory and a longer warm-up. A group smaller than half of the
        # devices has finished before its first microbatch returns for the next chunk.
        for group in sorted({-(-part * num_devices // 8) for part in (4, 5, 6, 8)}):
            candidates.append(blocks.grouped_interleaved(num_devices, chunks, group))
    for block in candidates:
        if block.placement == placement:
            yield block


_pass_type = Codec(1).pass_type


@dataclass(frozen=True, slots=True)
class CyclicOrder:
    """In period p, a device runs pass (type, offset) of microbatch p * k + offset.

    `rows[device]` is (types, offsets) in order of time; `Codec` defines types. An order of few
    microbatches that contains a complete period represents any number, because further periods can
    be spliced in. So only warm-up and cool-down have to be searched.
    """

    name: str
    microbatches: int  # k
    rows: tuple[tuple[np.ndarray, np.ndarray], ...]

    def offset_range(self) -> tuple[int, int]:
        """Return the minimum and the maximum offset."""
        offsets = np.concatenate([row[1] for row in self.rows])
        return int(offsets.min()), int(offsets.max())

    def unroll(self, num_microbatches: int) -> np.ndarray:
        """Return each device's passes, as numbers type * num_microbatches + microbatch.

        Passes of one type are renumbered in microbatch order, which changes neither times nor
        memory.
        """
        periods = self._periods(num_microbatches)
        rows = []
        for row in self.rows:
            passes, _ = self._passes(row, periods, num_microbatches)
            # The positions of each type, in order of time, get its microbatches in ascending order.
            by_sort = np.argsort(passes // num_microbatches, kind="stable")
            passes[by_sort] = np.sort(passes)
            rows.append(passes)
        return np.stack(rows)

    def window(self, num_microbatches: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return start and end of the middle full period on each device; None if there is none."""
        min_offset, max_offset = self.offset_range()
        # From `first` to `last`, every offset is a microbatch of the step: the period is complete.
        first = -(min_offset // self.microbatches)
        last = (num_microbatches - 1 - max_offset) // self.microbatches
        # One complete period must remain on each side of the middle one, whose memory then repeats.
        if last - first < 2:
            return None
        middle = (first + last) // 2
        periods = self._periods(num_microbatches)
        periods_of_devices = [self._passes(row, periods, num_microbatches)[1] for row in self.rows]
        low = [
            int(np.searchsorted(device_periods, middle)) for device_periods in periods_of_devices
        ]
        high = [
            int(np.searchsorted(device_periods, middle + 1))
            for device_periods in periods_of_devices
        ]
        return np.array(low), np.array(high)

    def _periods(self, num_microbatches: int) -> np.ndarray:
        """Return all periods in which any offset is a microbatch of the step."""
        min_offset, max_offset = self.offset_range()
        first = -(max_offset // self.microbatches) - 1
        return np.arange(first, (num_microbatches - min_offset) // self.microbatches + 1)

    def _passes(
        self, row: tuple[np.ndarray, np.ndarray], periods: np.ndarray, num_microbatches: int
    ) -> tuple[np.ndarray, np.ndarray]:
        pass_types, offsets = row
        microbatch = periods[:, None] * self.microbatches + offsets
        inside = (microbatch >= 0) & (microbatch < num_microbatches)
        passes = (pass_types * num_microbatches + microbatch)[inside]
        return passes, np.broadcast_to(periods[:, None], microbatch.shape)[inside]


def cyclic_order_of_block(block: BuildingBlock) -> CyclicOrder:
    """Return the steady order of a building block; a full backward becomes B, then W.

    With slices, the period is the shortest that has complete microbatches.
    """
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(block.num_devices)]
    # A block of slices repeats a shorter pattern `share` times; `own < numbers` selects one.
    share = gcd(block.num_microbatches // block.slices, block.slices)
    numbers, interval = block.num_microbatches // share, block.interval // share
    for (kind, stage, index), start, _ in block.passes:
        period, slot = divmod(start, interval)
        parts = (Kind.B, Kind.W) if kind is Kind.BW else (kind,)
        for part_index, part in enumerate(parts):
            pass_type = _pass_type(part, stage)
            number = reversed_slice(index, block.slices) if part.is_execution_numbered else index
            if number < numbers:
                # A pass that starts p intervals late runs in period k what belongs to block k - p.
                entry = (slot, part_index, pass_type, number - period * numbers)
                rows[block.placement[stage]].append(entry)
    return _cyclic_order(block.name, numbers, rows)


def _cyclic_order(
    name: str, k: int, rows: Iterable[list[tuple[int, int, int, int]]]
) -> CyclicOrder:
    arrays = []
    for row in rows:
        ordered = sorted(row)
        pass_types = np.array([entry[2] for entry in ordered])
        arrays.append((pass_types, np.array([entry[3] for entry in ordered])))
    return CyclicOrder(name, k, tuple(arrays))


def _sequential_order(placement: Placement, num_devices: int, slices: int) -> CyclicOrder:
    """Return the order of one microbatch after the other, which needs the minimum memory."""
    rows: list[list[tuple[int, int, int, int]]] = []
    for stages in stages_of(placement, num_devices):
        passes = [
            (0, _pass_type(Kind.F, stage), number) for stage in stages for number in range(slices)
        ]
        passes += [
            (1, _pass_type(kind, stage), number)
            for stage in reversed(stages)
            for number in range(slices)
            for kind in Kind.BW.does
        ]
        rows.append(
            [
                (slot, position, pass_type, number)
                for position, (slot, pass_type, number) in enumerate(passes)
            ]
        )
    return _cyclic_order("sequential", slices, rows)


def cyclic_order_of_steady(order: SteadyOrder, name: str, slices: int = 1) -> CyclicOrder:
    """Return a steady order as arrays, with slices scheduled like its microbatches.

    B and W start `slices` - 1 slices later, after all F of their microbatch. A period has complete
    microbatches.
    """
    times = slices // gcd(order.microbatches, slices)
    shifts = np.arange(times)[:, None] * order.microbatches
    rows = []
    for row in order.rows:
        pass_types = np.array([_pass_type(kind, stage) for kind, stage, _ in row])
        # In the same period, a smaller offset runs an earlier microbatch: each one runs later.
        numbers = np.array(
            [offset - (slices - 1) * kind.is_execution_numbered for kind, _, offset in row]
        )
        rows.append((np.tile(pass_types, times), (numbers + shifts).ravel()))
    return CyclicOrder(name, times * order.microbatches, tuple(rows))


def _is_period(
    row: np.ndarray, low: np.ndarray, high: np.ndarray, num_microbatches: int, period: int
) -> bool:
    """Return whether each device runs `period` microbatches of every type within [low, high)."""
    for device_row, begin, end in zip(row, low, high, strict=True):
        types, microbatch = np.divmod(device_row[begin:end], num_microbatches)
        for pass_type in np.unique(device_row // num_microbatches):
            window_microbatches = microbatch[types == pass_type]
            # Microbatches of this type before the window; the window must have the next ones.
            first = np.count_nonzero(device_row[:begin] // num_microbatches == pass_type)
            if not np.array_equal(window_microbatches, np.arange(first, first + period)):
                return False
    return True


def splice(
    row: np.ndarray, low: np.ndarray, high: np.ndarray, period: int, short: int, full: int
) -> np.ndarray:
    """Extend an order from `short` to `full` microbatches by repeating [low, high)."""
    num_repeats = (full - short) // period
    rows = []
    for device_row, begin, end in zip(row, low, high, strict=True):
        types, microbatch = np.divmod(device_row, short)
        copies = np.arange(num_repeats + 1)[:, None] * period
        type_parts = (types[:begin], np.tile(types[begin:end], num_repeats + 1), types[end:])
        microbatch_parts = (
            microbatch[:begin],
            (microbatch[begin:end] + copies).ravel(),
            microbatch[end:] + num_repeats * period,
        )
        # Renumbered: a pass is type * number of microbatches + microbatch.
        rows.append(np.concatenate(type_parts) * full + np.concatenate(microbatch_parts))
    return np.stack(rows).astype(np.int32)


@dataclass(slots=True)
class Candidate:
    """An order in the local search: complete, or shortened and spliced to be evaluated."""

    name: str
    period: int  # microbatches
    microbatches: int
    state: improve.State
    low: np.ndarray
    high: np.ndarray
    shop: improve.JobShop
    chosen_passes: PassSubset | None = None  # numbering of the state if passes are left out
    value: int = 0


VALUE = attrgetter("value")


class PlacementSearch:
    """Search for orders of one placement: creates orders, improves them and keeps the best."""

    kinds: tuple[Kind, ...] = PARTS

    def __init__(self, problem: Problem, seed: int, strategy: MemoryStrategy = ORDER_ALONE) -> None:
        self.problem = problem
        self.strategy = strategy
        self.parts = problem if problem.kinds == PARTS else with_parts_alone(problem)
        self.seed = seed
        self.shops: dict[int, improve.JobShop] = {}
        self.parts_shop: improve.JobShop | None = None
        self.best: tuple[int, np.ndarray, str] | None = None
        self.bound = self._bound()

    def _bound(self) -> float:
        """Return a lower bound for all orders of this placement and these kinds."""
        problem = self.problem
        return bounds.lower_bound(
            problem.costs,
            problem.placement,
            problem.num_devices,
            problem.num_microbatches,
            proven_limits(problem.kinds, problem.limits),
            span=problem.objective is Objective.SPAN,
        )

    @property
    def is_annealed(self) -> bool:
        """Return whether the starting points include annealed orders.

        Published loops of many chunks are near the optimum, and annealing of many passes is slow.
        """
        devices, placement = self.problem.num_devices, self.problem.placement
        chunks = len(placement) // devices
        is_loop = placement == looping(devices, chunks)
        return chunks <= 2 or (not is_loop and len(placement) <= _MAX_ANNEALED_STAGES)

    def start_orders(self, budget: int, run: Run) -> list[Candidate]:
        """Return the orders to improve: variants of the best cyclic orders.

        Without a budget, only those of the published blocks.
        """
        # With more devices a step costs more, so fewer orders share the budget.
        starts = STARTS if self.problem.num_devices <= 8 else STARTS // 2
        # The first maker, the published blocks, needs no search steps.
        makers = self._cyclic_order_makers(budget)
        cyclic = [
            order
            for orders in run(lambda make: make(), makers if budget else makers[:1])
            for order in orders
        ]
        candidates = [candidate for group in run(self._candidates, cyclic) for candidate in group]
        for candidate in candidates:
            self.keep_if_best(candidate)
        return best_of(candidates, starts, VALUE)

    def value(self) -> float:
        """Return the best value so far, in whole ticks converted to the costs' unit of time.

        Raises:
            ScheduleError: no order that fits has been found yet.
        """
        return self._best_order()[0] / self.problem.ticks_per_us

    def _best_order(self) -> tuple[int, np.ndarray, str]:
        """Return the best order so far.

        Raises:
            ScheduleError: no order fits.
        """
        if self.best is None:
            raise ScheduleError(f"no order was found within the limits {self.problem.limits}")
        return self.best

    def _cyclic_order_makers(self, budget: int) -> list[Callable[[], list[CyclicOrder]]]:
        """Return independent functions that create cyclic orders."""
        problem = self.problem
        devices, slices = problem.num_devices, problem.costs.slices

        def published() -> list[CyclicOrder]:
            building_blocks = _published_blocks(problem.placement, devices)
            cyclic_orders = (
                cyclic_order_of_block(blocks.sliced(block, slices)) for block in building_blocks
            )
            return [_sequential_order(problem.placement, devices, slices), *cyclic_orders]

        if not self.is_annealed:
            return [published]
        # Steady orders schedule each slice like a microbatch.
        costs = replace(problem.costs.of_activations(), slices=1)
        min_memory = bounds.min_memory(costs, problem.placement, devices)
        stages = stages_of(problem.placement, devices)
        # Annealing ignores workspaces: the largest one is reserved.
        workspaces = [
            max(workspaces_of_stage)
            for workspaces_of_stage in zip(*map(problem.costs.workspace, PARTS), strict=True)
        ]
        activation_limits = [
            limit - max(workspaces[stage] for stage in local_stages)
            for limit, local_stages in zip(problem.limits, stages, strict=True)
        ]
        # V-ZB needs the memory of 1F1B; more memory only improves warm-up and cool-down.
        activation_bytes = problem.costs.held_after_forward_bytes
        activations = [
            sum(activation_bytes[stage] for stage in local_stages) for local_stages in stages
        ]
        useful_limits = [devices * amount for amount in activations]
        # B and W start slices - 1 slices later, and the slices stay in memory for longer.
        sliced_limits = [
            y - (slices - 1) * amount
            for y, amount in zip(activation_limits, activations, strict=True)
        ]
        limits = [
            max(x, min(y, z))
            for x, y, z in zip(min_memory, sliced_limits, useful_limits, strict=True)
        ]

        def steady(steps: int) -> list[CyclicOrder]:
            orders = find_steady_orders(costs, problem.placement, devices, limits, steps, self.seed)
            return [
                cyclic_order_of_steady(order, f"steady-{index}", slices)
                for index, order in enumerate(orders)
            ]

        return [published, partial(steady, annealing_steps(budget, devices))]

    def _shop(self, num_microbatches: int) -> improve.JobShop:
        if num_microbatches not in self.shops:
            self.shops[num_microbatches] = make_shop(self.problem, num_microbatches)
        return self.shops[num_microbatches]

    def _candidates(self, cyclic: CyclicOrder) -> list[Candidate]:
        """Return the variants of a cyclic order that fit: as it is, filled, and with W reinserted.

        The order is cut to the few microbatches that show warm-up and cool-down, if a complete
        period remains.
        """
        problem, m, k = self.problem, self.problem.num_microbatches, cyclic.microbatches
        min_offset, max_offset = cyclic.offset_range()
        # Complete periods of the shortened order, besides its warm-up and cool-down.
        full = max(-(-8 // problem.costs.slices), problem.num_devices // k, 2)
        short = max_offset - min_offset + (full + 1) * k
        # The rest is then a multiple of the period, as `splice` requires.
        short += (m - short) % k
        window = cyclic.window(short) if short < m else None
        if window is None:
            short = m
        name, row = cyclic.name, cyclic.unroll(short)
        filled = fill_idle_time(problem, row, problem.num_devices)
        rows = {
            name: row,
            name + ", filled": filled,
            name + _W_REINSERTED: reinsert_weights(problem, row),
        }
        if filled is not None:
            rows[name + ", filled" + _W_REINSERTED] = reinsert_weights(problem, filled)
        if row.size < _FILL_THROUGHOUT_BELOW:
            throughout = fill_idle_time(problem, row, m)
            rows[name + ", filled throughout"] = throughout
            if throughout is not None:
                rows[name + ", filled throughout" + _W_REINSERTED] = reinsert_weights(
                    problem, throughout
                )
        if problem.costs.slices > 1:
            # If a group has as many slices as devices, messages leave gaps shorter than a pass in
            # every round, which the local search does not close.
            rows[name + ", filled at once"] = fill_idle_time(problem, row, m, delay=EIGHTHS)
        # An empty window at the end of each queue: `local_search` may then move every pass.
        ends = self._shop(short).length
        candidates = (
            self._make_candidate(source, k, short, source_row, *(window or (ends, ends)))
            for source, source_row in rows.items()
        )
        return [candidate for candidate in candidates if candidate is not None]

    def _parts_shop(self) -> improve.JobShop:
        if self.parts_shop is None:
            self.parts_shop = make_shop(self.parts, self.problem.num_microbatches)
        return self.parts_shop

    def _make_candidate(
        self,
        name: str,
        period: int,
        short: int,
        row: np.ndarray | None,
        low: np.ndarray,
        high: np.ndarray,
    ) -> Candidate | None:
        """Return the order as a candidate; None if it does not fit, run or stay periodic."""
        is_complete = int(low[0]) == int(high[0])
        # Fillers may have moved passes out of the middle period, which could then not be repeated.
        if row is None or not (is_complete or _is_period(row, low, high, short, period)):
            return None
        shop, chosen_passes = self._shop(short), None
        if np.count_nonzero(row != improve.NONE) < len(shop.type_of):
            chosen_passes = select_passes(shop, row)
            shop, row = chosen_passes.shop, chosen_passes.reduce_rows(row)
            low = high = shop.length
        state = improve.new_state(row, self.seed, max(shop.inputs.shape[1], shop.readers.shape[1]))
        if not improve.settle(shop, state):
            return None
        candidate = Candidate(name, period, short, state, low, high, shop, chosen_passes)
        return candidate if self._evaluate(candidate) else None

    def _reinserted(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with W reinserted, if it fits."""
        short = candidate.microbatches
        row = reinsert_weights(self.problem, self._numbered_row(candidate), short)
        name = candidate.name.removesuffix(_W_REINSERTED) + _W_REINSERTED
        return self._make_candidate(
            name, candidate.period, short, row, candidate.low, candidate.high
        )

    def improve(self, candidate: Candidate, steps: int) -> None:
        """Run `steps` of local search, then reinsert W unless that increases the value.

        Changes only the candidate, so threads can improve several.
        """
        improve.local_search(candidate.shop, candidate.state, candidate.low, candidate.high, steps)
        self._evaluate(candidate)
        reinserted = self._reinserted(candidate)
        # Ties change the order too: another arrangement of W opens new moves.
        if reinserted is not None and reinserted.value <= candidate.value:
            # The reinserted order continues the random numbers, or each round would repeat the same
            # moves.
            reinserted.state.random[0] = candidate.state.random[0]
            candidate.state, candidate.value = reinserted.state, reinserted.value

    def reseeded_copy(self, candidate: Candidate, number: int, restart: bool = False) -> Candidate:
        """Return a reseeded copy of the candidate; to restart, it is perturbed first."""
        state = improve.State(*(part.copy() for part in candidate.state))
        improve.reseed(state, number)
        copy = replace(candidate, state=state)
        if restart:
            low, high = candidate.low, candidate.high
            improve.local_search(candidate.shop, state, low, high, RESTART_STEPS, RESTART_SHARE)
            self._evaluate(copy)
        return copy

    def keep_if_best(self, candidate: Candidate) -> None:
        """Store the candidate's order if it is the best so far."""
        if self.best is None or candidate.value < self.best[0]:
            self.best = (candidate.value, self.full_row(candidate).copy(), candidate.name)

    def _numbered_row(self, candidate: Candidate) -> np.ndarray:
        """Return the candidate's order in the numbering of all passes."""
        row, chosen_passes = candidate.state.row, candidate.chosen_passes
        return (
            row
            if chosen_passes is None
            else chosen_passes.expand_rows(row, len(self.problem.memory_limits))
        )

    def full_row(self, candidate: Candidate) -> np.ndarray:
        """Return the candidate's order for all microbatches."""
        m, short = self.problem.num_microbatches, candidate.microbatches
        row = self._numbered_row(candidate)
        if short == m:
            return row
        # A complete period leaves the memory unchanged, so it can be repeated any number of times.
        return splice(row, candidate.low, candidate.high, candidate.period, short, m)

    def _evaluate(self, candidate: Candidate) -> bool:
        """Evaluate the candidate for all microbatches; return whether its order can run."""
        m = self.problem.num_microbatches
        if candidate.microbatches == m:
            candidate.value = int(improve.objective(candidate.shop, candidate.state))
            return True
        value = int(improve.measure(self._shop(m), self.full_row(candidate)))
        if value != improve.NONE:
            candidate.value = value
        return value != improve.NONE

    def best_plan(self) -> EvaluatedSchedule:
        """Return the best order as a plan."""
        problem = self.problem
        _, row, source = self._best_order()
        schedule = self._schedule(row)
        timeline = simulate(schedule, problem.costs)
        peaks = peak_held(schedule, problem.costs)
        if self.parts is not problem:
            verify(schedule)
            if not bounds.fits(peaks, problem.limits):
                raise ScheduleError(
                    f"a pass order has {peaks}, more than the limits {problem.limits}"
                )
        return EvaluatedSchedule(
            timeline,
            problem.costs,
            peak=tuple(map(add, peaks, problem.fixed)),
            objective=problem.objective,
            # Rounding can put the bound a last bit above the value of an optimal schedule.
            lower_bound=min(self.bound, problem.objective.of(timeline)),
            source=source,
        )

    def _schedule(self, row: np.ndarray) -> Schedule:
        """Convert an order to a schedule, with the queues of each device merged."""
        problem, m = self.problem, self.problem.num_microbatches
        rows = merge_queues(problem, self._shop(m), row)
        slices, devices = problem.costs.slices, problem.num_devices
        order = Codec(m, problem.kinds, slices).order(rows)
        return Schedule("plan", devices, m, problem.placement, order, slices=slices)
