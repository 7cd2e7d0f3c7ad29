"""Search for orders with offloading to host memory: which activations to copy, and when.

The search starts from orders planned for more memory than the limit (`_LEVELS`), and inserts copies
into them. The local search then moves copies and their markers like any pass.

Each device is handled separately, with the times of the order:

* Copies to the host start after their F, in that order. Copies back start as late as their B
  allows.
* The activations that live longest are offloaded, as few as the limit requires. This is a knapsack
  with one constraint, so the greedy choice is optimal up to rounding. If the link is full, two
  selections are compared: the smallest peak, and all activations. The second is often faster: the
  limit makes the order slower, so the link has time for more copies.
* Memory is allocated before the pass in which a copy back must start, and freed after the pass in
  which a copy to the host ends. If passes then do not fit, frees move earlier and allocations
  later.

W are reinserted afterwards (`job_shop.reinsert_weights`), because they determine the memory between
B and W. The published order of V-ZB with copies exceeds the memory in its cool-down, where W wait.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import inf, isinf
from operator import lt
from typing import Any, NamedTuple

import numpy as np

from megatron_vshape.core.check.bounds import min_memory
from megatron_vshape.core.compiling import compiled
from megatron_vshape.core.evaluated_schedule import ORDER_ALONE, MemoryStrategy
from megatron_vshape.core.model.kinds import (
    COPY_BACK,
    COPY_OUT,
    OFFLOAD,
    PARTS,
    RELEASE,
    RELOAD,
    Kind,
    ScheduleError,
)
from megatron_vshape.core.model.placement import Placement, chunks_of, stages_of
from megatron_vshape.core.planner.improve import NONE, JobShop, run_rows
from megatron_vshape.core.planner.job_shop import Problem, make_problem, padded, reinsert_weights
from megatron_vshape.core.planner.orders import STARTS, VALUE, Candidate, PlacementSearch, Run
from megatron_vshape.core.planner.race import best_of

_NEVER = 1 << 62

_RELEASE_EVENT, _WEIGHT_EVENT, _RELOAD_EVENT, _BACKWARD_EVENT, _FORWARD_EVENT = range(5)
"""Order of events at the same time: frees first."""

_KINDS = (RELEASE, Kind.W, RELOAD, Kind.B, Kind.F, COPY_OUT, COPY_BACK)
"""Kinds of these events, then the copies of the two links."""

_RELEASE_DELAY = 2
"""Passes between a delayed F and the release of its activations."""


class _ActivationBlocks(NamedTuple):
    """Activations of a device, one entry per stage and microbatch; times in ticks."""

    stage: np.ndarray
    passes: np.ndarray  # [activation, kind], those of `_KINDS`
    forward_start: np.ndarray  # of F
    forward_end: np.ndarray  # F has ended
    backward_start: np.ndarray  # B starts
    backward_end: np.ndarray  # B has ended
    weight_end: np.ndarray  # a W right after B has ended
    allocated: np.ndarray  # memory from F on
    offloaded: np.ndarray  # part of it that a copy frees
    backward_growth: np.ndarray  # additional memory between B and W
    out_ticks: np.ndarray  # ticks of the copies
    back_ticks: np.ndarray


class _Copies(NamedTuple):
    """Times of the offloaded activations, in ticks; `out_starts` and `back_starts` order the
    link.
    """

    is_offloaded: np.ndarray  # whether an activation is offloaded
    out_starts: np.ndarray  # start of the copy to the host
    out_ends: np.ndarray  # end of it
    back_starts: np.ndarray  # start of the copy back


class _Events(NamedTuple):
    """Passes of a device's compute queue in order of time, with their activations."""

    event_type: np.ndarray
    activation: np.ndarray
    change: np.ndarray  # of the memory
    release_of: np.ndarray  # by activation; NONE if it is not offloaded
    reload_of: np.ndarray


class _Row(NamedTuple):
    """A device's row under construction; changed in place."""

    events: np.ndarray
    is_added: np.ndarray  # [event] whether it is in the row
    forward_position: np.ndarray  # [activation] number of events up to its F; NONE before that
    totals: np.ndarray  # number of events, and memory after them


def _insert_copies(
    problem: Problem,
    parts: JobShop,
    row: np.ndarray,
    slacks: Sequence[float] = (0.0,),
    throughout: Sequence[int] = (),
    host_limit: float = inf,
) -> Iterator[np.ndarray]:
    """Yield the order with copies, as rows of all queues, for every selection that fits.

    Args:
        problem: costs and limits.
        parts: shop of F, B and W.
        row: order of F, B and W in that shop.
        slacks: reductions of the limit, in multiples of the largest activation, for choosing the
            copies. They leave room for passes that run late, whose memory is freed late.
        throughout: stages to offload in all microbatches; if there are any, nothing else is
            offloaded.
        host_limit: host memory limit per device in units, if `throughout` is empty.
    """
    m = problem.num_microbatches
    position, head = np.empty(row.size, np.int32), np.empty(row.size, np.int64)
    for passes in row:
        position[passes] = np.arange(len(passes))
    run_rows(parts, row, position, head)
    ends = head.reshape(len(problem.placement), len(PARTS), m)
    starts = (head - parts.ticks).reshape(ends.shape)
    stages = stages_of(problem.placement, problem.num_devices)
    devices = [
        _Device(problem, device, local_stages, starts, ends, throughout, host_limit)
        for device, local_stages in enumerate(stages)
    ]
    selections = dict.fromkeys(
        tuple(device.num_copies(slack, all_if_full) for device in devices)
        for slack, all_if_full in product(slacks, (False, True))
    )
    for selection in selections:
        queues: list[list[int]] = [[] for _ in problem.memory_limits]
        if all(
            device.add_to(queues, count) for device, count in zip(devices, selection, strict=True)
        ):
            yield padded(queues)


class _Device:
    """Activations and copies of one device."""

    def __init__(
        self,
        problem: Problem,
        device: int,
        stages: Sequence[int],
        starts: np.ndarray,
        ends: np.ndarray,
        throughout: Sequence[int],
        host_limit: float,
    ) -> None:
        self.device = device
        self.activations = _activations_of(problem, stages, starts, ends)
        self.limit = int(problem.memory_limits[device])
        self.bounds = np.sort(starts[list(stages)].ravel())
        self.queues = [
            _values_of_kind(problem, problem.types.queue, kind, stages[0]) for kind in _KINDS[-2:]
        ]
        self.throughout, self.host_limit = throughout, host_limit
        self.ranked = self._rank()
        self.evaluated: dict[int, tuple[int, _Copies]] = {}  # by number of copies: peak and copies

    def add_to(self, queues: list[list[int]], count: int) -> bool:
        """Add the device's passes with `count` copies to its queues; return whether they fit."""
        activations = self.activations
        _, copies = self._evaluate(count)
        events = _events(activations, copies, self.bounds)
        row = np.empty(len(events.event_type), np.int64)
        if not _fit_events(events, self.limit, row):
            return False
        queues[self.device] += activations.passes[
            events.activation[row], events.event_type[row]
        ].tolist()
        offloaded = np.flatnonzero(copies.is_offloaded)
        times = np.concatenate((copies.out_starts[offloaded], copies.back_starts[offloaded]))
        passes = np.concatenate(
            (activations.passes[offloaded, -2], activations.passes[offloaded, -1])
        )
        queue_of = np.repeat(self.queues, len(offloaded))
        order = np.lexsort((passes, times))
        for queue, work in zip(queue_of[order].tolist(), passes[order].tolist(), strict=True):
            queues[queue].append(work)
        return True

    def num_copies(self, slack: float, all_if_full: bool) -> int:
        """Return the fewest copies that fit; if the link is full, all or those of the least peak.

        Args:
            slack: reduction of the limit, in multiples of the largest activation.
            all_if_full: use all copies if the link is full.
        """
        if self.throughout:
            return len(self.ranked)
        limit = self.limit - int(slack * self.activations.allocated.max())
        # More copies lower the peak until the link is full, so the fewest are found by bisection.
        low, high = 0, len(self.ranked)
        while low < high:
            middle = (low + high) // 2
            if self._evaluate(middle)[0] <= limit:
                high = middle
            else:
                low = middle + 1
        if self._evaluate(low)[0] <= limit or all_if_full:
            return low
        # The link is full, and `low` is all copies: use the smallest peak that was tried.
        return min(self.evaluated, key=lambda count: (self.evaluated[count][0], count))

    def _evaluate(self, count: int) -> tuple[int, _Copies]:
        """Return the peak and the times with the first `count` activations offloaded."""
        if count not in self.evaluated:
            copies = _schedule_copies(self.activations, self.ranked[:count])
            self.evaluated[count] = _peak(self.activations, copies, self.bounds), copies
        return self.evaluated[count]

    def _rank(self) -> np.ndarray:
        """Return the activations to offload, longest lifetimes first."""
        activations = self.activations
        if self.throughout:
            return np.flatnonzero(np.isin(activations.stage, self.throughout))
        # Memory times the time for which it is free; ranked per time of the link, the scarce
        # resource.
        gain = (
            activations.backward_start
            - activations.forward_end
            - activations.out_ticks
            - activations.back_ticks
        ) * activations.offloaded
        ranked = np.argsort(-gain / (activations.out_ticks + activations.back_ticks), kind="stable")
        return self._limit_to_host(ranked[gain[ranked] > 0])

    def _limit_to_host(self, ranked: np.ndarray) -> np.ndarray:
        """Return the activations that fit in host memory, better ranks first."""
        if isinf(self.host_limit):
            return ranked
        activations, host_memory = self.activations, np.zeros(len(self.bounds) + 1, np.int64)
        first_passes, last_passes = (
            np.searchsorted(self.bounds, times)
            for times in (activations.forward_end, activations.backward_start)
        )
        selected = []
        for activation in ranked.tolist():
            # A view: the update below changes the host's memory during these passes.
            during = host_memory[first_passes[activation] : last_passes[activation]]
            if during.max(initial=0) + activations.offloaded[activation] <= self.host_limit:
                during += activations.offloaded[activation]
                selected.append(activation)
        return np.array(selected, np.int64)


def _values_of_kind(
    problem: Problem, values_of_types: object, kind: Kind, stage: np.ndarray | int
) -> Any:
    """Return the values of the pass types of a kind, at these stages."""
    return np.asarray(values_of_types)[len(problem.kinds) * stage + problem.kinds.index(kind)]


def _activations_of(
    problem: Problem, stages: Sequence[int], starts: np.ndarray, ends: np.ndarray
) -> _ActivationBlocks:
    m, pass_types = problem.num_microbatches, problem.types
    stage, microbatch = np.repeat(stages, m), np.tile(np.arange(m), len(stages))
    forward, backward, _ = range(len(PARTS))
    reversed_number = problem.turned(microbatch)  # in kinds of the opposite order
    all_types = np.arange(len(problem.placement) * len(problem.kinds))
    values = partial(_values_of_kind, problem, stage=stage)
    return _ActivationBlocks(
        stage=stage,
        passes=np.stack(
            [
                values(all_types, kind) * m
                + (reversed_number if kind.is_execution_numbered else microbatch)
                for kind in _KINDS
            ],
            axis=1,
        ),
        forward_start=starts[stage, forward, microbatch],
        forward_end=ends[stage, forward, microbatch],
        backward_start=starts[stage, backward, reversed_number],
        backward_end=ends[stage, backward, reversed_number],
        weight_end=ends[stage, backward, reversed_number] + values(pass_types.ticks, Kind.W),
        allocated=values(pass_types.peak, Kind.F),
        backward_growth=np.maximum(values(pass_types.change, Kind.B), 0),
        offloaded=values(pass_types.peak, RELOAD),
        out_ticks=values(pass_types.ticks, COPY_OUT),
        back_ticks=values(pass_types.ticks, COPY_BACK),
    )


def _schedule_copies(activations: _ActivationBlocks, ranked: np.ndarray) -> _Copies:
    """Schedule these copies: back as late as possible, out as early as possible."""
    count = len(activations.stage)
    out_starts, out_ends, back_starts = (np.full(count, _NEVER) for _ in range(3))
    busy = np.empty((2, 2 * count, 2), np.int64)
    back = ranked[np.argsort(-activations.backward_start[ranked], kind="stable")]
    _book(busy[0], back, activations.backward_start, activations.back_ticks, True, back_starts)
    out = ranked[np.argsort(activations.forward_end[ranked], kind="stable")]
    _book(busy[1], out, activations.forward_end, activations.out_ticks, False, out_starts)
    out_ends[ranked] = out_starts[ranked] + activations.out_ticks[ranked]
    is_offloaded = np.zeros(count, bool)
    # A copy that would return before its end is dropped, though its link time stays booked.
    is_offloaded[ranked] = out_ends[ranked] < back_starts[ranked]
    return _Copies(is_offloaded, out_starts, out_ends, back_starts)


@compiled
def _book(
    busy: np.ndarray,
    ranked: np.ndarray,
    due: np.ndarray,
    ticks: np.ndarray,
    is_latest: bool,
    starts: np.ndarray,
) -> None:
    """Book copies one after the other in the free time of a link; set their starts.

    With `is_latest` a copy is the last that ends by `due`, else the first that starts from `due`
    on. `busy` has room for the sorted starts and ends of the copies on the link.
    """
    for count, activation in enumerate(ranked):
        time, length = due[activation], ticks[activation]
        slot = count
        while slot > 0 and busy[slot - 1, 0] >= time:
            slot -= 1
        if is_latest:
            # Try earlier gaps until one is long enough.
            while slot > 0 and busy[slot - 1, 1] + length > time:
                slot -= 1
                time = min(time, busy[slot, 0])
            time -= length
        else:
            if slot > 0:
                time = max(time, busy[slot - 1, 1])
            # Try later gaps until one is long enough.
            while slot < count and busy[slot, 0] < time + length:
                time = max(time, busy[slot, 1])
                slot += 1
        for later_slot in range(count, slot, -1):
            busy[later_slot, 0], busy[later_slot, 1] = (
                busy[later_slot - 1, 0],
                busy[later_slot - 1, 1],
            )
        busy[slot, 0], busy[slot, 1] = time, time + length
        starts[activation] = time


def _peak(activations: _ActivationBlocks, copies: _Copies, bounds: np.ndarray) -> int:
    """Return the peak memory; releases and reloads run between passes."""
    is_offloaded = copies.is_offloaded
    release_times, reload_times = _at_pass_ends(copies, bounds)
    offloaded = activations.offloaded[is_offloaded]
    times = np.concatenate(
        (
            activations.forward_start,
            activations.backward_end,
            activations.weight_end,
            release_times,
            reload_times,
        )
    )
    # Without `offloaded`: the reload has allocated it again.
    last = -activations.allocated - activations.backward_growth
    change = np.concatenate(
        (activations.allocated, activations.backward_growth, last, -offloaded, offloaded)
    )
    # At equal times frees come before allocations.
    return int(np.cumsum(change[np.lexsort((change, times))]).max())


def _at_pass_ends(copies: _Copies, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the release and reload times of offloaded activations, moved to the ends of passes."""
    is_offloaded = copies.is_offloaded
    release_index = np.searchsorted(bounds, copies.out_ends[is_offloaded])
    release_times = np.append(bounds, _NEVER)[release_index]
    # A reload allocates before the pass during which its copy starts.
    reload_index = np.searchsorted(bounds, copies.back_starts[is_offloaded], side="right") - 1
    return release_times, bounds[np.maximum(reload_index, 0)]


def _events(activations: _ActivationBlocks, copies: _Copies, bounds: np.ndarray) -> _Events:
    """Return the passes of a device's compute queue in order of time."""
    indices, offloaded = np.arange(len(activations.stage)), np.flatnonzero(copies.is_offloaded)
    release_times, reload_times = _at_pass_ends(copies, bounds)
    parts = (
        (release_times, offloaded, -activations.offloaded[offloaded]),
        (activations.weight_end, indices, -activations.allocated - activations.backward_growth),
        (reload_times, offloaded, activations.offloaded[offloaded]),
        (activations.backward_start, indices, activations.backward_growth),
        (activations.forward_start, indices, activations.allocated),
    )
    time, activation, change = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    event_type = np.repeat(np.arange(len(parts)), [len(subset) for _, subset, _ in parts])
    order = np.lexsort((activations.passes[activation, event_type], event_type, time))
    event_type, activation, change = event_type[order], activation[order], change[order]
    release_of, reload_of = (np.full(len(indices), NONE) for _ in range(2))
    for kind, event_of in ((_RELEASE_EVENT, release_of), (_RELOAD_EVENT, reload_of)):
        selected = np.flatnonzero(event_type == kind)
        event_of[activation[selected]] = selected
    return _Events(event_type, activation, change, release_of, reload_of)


@compiled
def _fit_events(events: _Events, limit: int, row: np.ndarray) -> bool:
    """Fill the row of a device in order of its events, with those that do not fit delayed.

    Events that allocate wait in a queue until they fit. If a B does not fit, activations are
    released early; the release then waits for its copy. Returns whether all events fit.
    """
    count = len(events.event_type)
    state = _Row(
        row,
        np.zeros(count, np.bool_),
        np.full(len(events.release_of), NONE),
        np.zeros(2, np.int64),
    )
    pending, first, last = np.empty(count, np.int64), 0, 0
    # Releases whose F had not run.
    delayed, next_delayed, num_delayed = np.empty(count, np.int64), 0, 0
    for event in range(count):
        while next_delayed < num_delayed and _is_due(events, state, delayed[next_delayed]):
            _add(events, state, delayed[next_delayed])
            next_delayed += 1
        # An event may already be in the row, added to make room for an earlier B.
        event_type = events.event_type[event]
        if state.is_added[event]:
            continue
        if (
            event_type == _RELEASE_EVENT
            and state.forward_position[events.activation[event]] == NONE
        ):
            delayed[num_delayed] = event
            num_delayed += 1
        # Behind a waiting event, later ones wait too: overtaking could starve it.
        elif event_type in (_FORWARD_EVENT, _RELOAD_EVENT) and (
            first < last or not _fits(events, state, event, limit)
        ):
            pending[last] = event
            last += 1
        elif event_type == _BACKWARD_EVENT and not _reload_for_backward(
            events, state, event, limit
        ):
            return False
        else:
            _add(events, state, event)
        first = _admit(events, state, pending, first, last, limit)
    for event in delayed[next_delayed:num_delayed]:
        _add(events, state, event)
    return first == last


@compiled
def _admit(
    events: _Events, state: _Row, pending: np.ndarray, first: int, last: int, limit: int
) -> int:
    """Add waiting events as long as they fit; return the first that still waits."""
    while first < last:
        if not state.is_added[pending[first]]:
            if not _fits(events, state, pending[first], limit):
                break
            _add(events, state, pending[first])
        first += 1
    return first


@compiled
def _is_due(events: _Events, state: _Row, event: int) -> bool:
    forward_position = state.forward_position[events.activation[event]]
    is_due: bool = forward_position != NONE and state.totals[0] >= forward_position + _RELEASE_DELAY
    return is_due


@compiled
def _fits(events: _Events, state: _Row, event: int, limit: int) -> bool:
    fits: bool = state.totals[1] + events.change[event] <= limit
    return fits


@compiled
def _add(events: _Events, state: _Row, event: int) -> None:
    """Add an event if it is missing, and before a reload its release."""
    if state.is_added[event]:
        return
    activation, event_type = events.activation[event], events.event_type[event]
    release = events.release_of[activation]
    # Its memory must be free before it is allocated a second time.
    if event_type == _RELOAD_EVENT and not state.is_added[release]:
        _append(events, state, release)
    _append(events, state, event)
    if event_type == _FORWARD_EVENT:
        state.forward_position[activation] = state.totals[0]


@compiled
def _append(events: _Events, state: _Row, event: int) -> None:
    state.events[state.totals[0]] = event
    state.is_added[event] = True
    state.totals[0] += 1
    state.totals[1] += events.change[event]


@compiled
def _reload_for_backward(events: _Events, state: _Row, event: int, limit: int) -> bool:
    """Reload the activations of a B; return whether they and the B's memory fit."""
    activation = events.activation[event]
    # F is still in the queue, so B cannot run at all.
    if state.forward_position[activation] == NONE:
        return False
    reload = events.reload_of[activation]
    if reload != NONE and not state.is_added[reload]:
        if not _release_until_fits(events, state, reload, limit):
            return False
        _add(events, state, reload)
    return _release_until_fits(events, state, event, limit)


@compiled
def _release_until_fits(events: _Events, state: _Row, event: int, limit: int) -> bool:
    """Release offloaded activations until the event fits; return whether it does."""
    # In order of time: the copies of the first releases end soonest.
    for release in range(len(events.event_type)):
        if _fits(events, state, event, limit):
            return True
        if (
            events.event_type[release] == _RELEASE_EVENT
            and state.forward_position[events.activation[release]] != NONE
        ):
            _add(events, state, release)
    return _fits(events, state, event, limit)


_LEVELS = ((1.0, 3), (0.75, 2), (0.5, 2), (0.25, 2))
"""Memory levels of the initial orders, and the number of orders per level that get copies.

At level x, orders are planned for the limit plus x times the memory that is missing to that of
1F1B, or times the host memory if that is less. They are of published blocks. Below the first level,
steady orders are added if host memory is less than the missing memory: at d=8, m=32, 4 chunks, a
copy as long as an F and 8 chunks in host memory, blocks alone lead to 66.0, with steady orders to
35.25. In other cases steady orders need a quarter of the time and improved one cell of 11 (6
chunks, a copy as long as two F: 15.65, without 16.1); a local search of that length
(`search.TURNS_OF_TRADES`) improves 6 of them.
"""

_STEADY_SHARE = 4
"""The steady orders of a level have 1 / _STEADY_SHARE of the budget."""

_SLACKS = (0.0, 0.5, 1.0, 2.0)
"""Reductions of the limit, in chunks, for choosing the activations to offload."""


class _BaseOrder(NamedTuple):
    """An order of F, B and W that may exceed the memory limit."""

    name: str
    row: np.ndarray


BaseOrders = dict[tuple[Placement, int], list[_BaseOrder]]
"""Orders that copies are inserted into, by placement and passes of a kind and stage."""


def memory_strategies(copies: bool, placement: Placement) -> Iterator[MemoryStrategy]:
    """Yield the strategies to compare: no offloading and, with `copies`, two that offload.

    Activations of the first chunks live longest, so published schedules offload all of these.
    """
    yield ORDER_ALONE
    if copies:
        first_stages = tuple(stage for stage, chunk in enumerate(chunks_of(placement)) if not chunk)
        yield MemoryStrategy(copies=True, throughout=first_stages, text="offload all of chunk 0")
        yield MemoryStrategy(copies=True, text="offload")


class OffloadSearch(PlacementSearch):
    """Search like `PlacementSearch`, with activations of some microbatches offloaded."""

    kinds = (*PARTS, *OFFLOAD)

    def __init__(
        self,
        problem: Problem,
        seed: int,
        strategy: MemoryStrategy,
        base_orders: BaseOrders | None = None,
    ) -> None:
        super().__init__(problem, seed, strategy)
        self.base_orders: BaseOrders = {} if base_orders is None else base_orders

    def start_orders(self, budget: int, run: Run) -> list[Candidate]:
        """Return the orders to improve: orders planned for more memory, with copies inserted."""
        self._parts_shop()
        key = self.problem.placement, self.problem.num_microbatches
        if key not in self.base_orders:
            levels = (
                self._make_base_orders(level, count, budget // _STEADY_SHARE, run)
                for level, count in _LEVELS
            )
            self.base_orders[key] = [base for level_orders in levels for base in level_orders]
        candidates = [
            candidate
            for group in run(self._insert_copies, self.base_orders[key])
            for candidate in group
        ]
        for candidate in candidates:
            self.keep_if_best(candidate)
        return best_of(candidates, STARTS, VALUE)

    def _make_base_orders(
        self, level: float, count: int, budget: int, run: Run
    ) -> Iterator[_BaseOrder]:
        """Yield orders planned for more memory than the limit."""
        problem, activation_bytes = self.problem, self.problem.costs.held_after_forward_bytes
        devices = problem.num_devices
        stages = stages_of(problem.placement, devices)
        useful_limits = [
            problem.max_useful_passes * sum(activation_bytes[stage] for stage in local_stages)
            for local_stages in stages
        ]
        ample = [limit + problem.moved_limit for limit in problem.limits]
        is_scarce = level < 1 and any(map(lt, ample, useful_limits))
        min_by_device = min_memory(problem.costs, problem.placement, devices)
        # At least the minimum of any schedule, or `make_problem` rejects them.
        limits = [
            max(minimum, limit + level * (max(limit, min(caps)) - limit))
            for minimum, limit, *caps in zip(
                min_by_device, problem.limits, useful_limits, ample, strict=True
            )
        ]
        base_problem = make_problem(
            problem.costs,
            devices,
            problem.num_microbatches,
            limits,
            problem.objective,
            problem.placement,
            PARTS,
        )
        search = PlacementSearch(base_problem, self.seed)
        for candidate in best_of(
            search.start_orders(budget if is_scarce else 0, run), count, VALUE
        ):
            yield _BaseOrder(f"{candidate.name} at {level:.0%}", search.full_row(candidate))

    def _insert_copies(self, base: _BaseOrder) -> list[Candidate]:
        """Return the order with copies inserted, in every variant that fits."""
        problem, m = self.problem, self.problem.num_microbatches
        ends = np.zeros(len(problem.memory_limits), np.int64)
        candidates = []
        slacks: Sequence[float] = _SLACKS[:1] if self.strategy.throughout else _SLACKS
        throughout = self.strategy.throughout
        in_host = problem.max_moved
        shop = self._parts_shop()
        for rows in _insert_copies(problem, shop, base.row, slacks, throughout, in_host):
            candidates += [
                self._make_candidate(f"{base.name}, copies", 1, m, row, ends, ends)
                for row in (rows, reinsert_weights(problem, rows, m))
            ]
        return [candidate for candidate in candidates if candidate is not None]

    def _best_order(self) -> tuple[int, np.ndarray, str]:
        if self.best is None and not isinf(self.problem.moved_limit):
            raise ScheduleError(
                f"no order was found within the limits {self.problem.limits} and with at most "
                f"{self.problem.moved_limit:g} of a device in host memory: make one of the two "
                "larger"
            )
        return super()._best_order()
