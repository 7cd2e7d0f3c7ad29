"""A placement's planning problem in integers, and the fillers of its orders.

Times are in ticks and memory in units, both integer. Compiled functions get orders as rows of
numbers, one number per pass (`Codec`). A pass type is len(kinds) * stage + the index of a kind in
`kinds`. A pass has the number type * num_microbatches + microbatch. Rows are padded to the longest
with NONE.

Two fillers improve an order. `fill_idle_time` is step 4 of the paper, compiled, with the
problem's costs. `reinsert_weights` keeps the order of all passes except W. A W only frees memory,
so it can run in any sufficient idle time, or before a forward that needs its memory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_vshape.core.check import bounds
from megatron_vshape.core.compiling import compiled_once
from megatron_vshape.core.list_scheduler import (
    FILL_CALLEES,
    NONE,
    WEIGHT_CALLEES,
    WITHOUT,
    PassOrder,
    PassTypes,
    RaggedList,
    fill_idle_slots,
    make_pass_types,
    new_scheduler_state,
    place_weights,
)
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Objective, check_size, reversed_slice
from megatron_vshape.core.planner import improve

_MAX_TICKS = 1e18
"""Maximum total ticks of all passes and messages of a step: times have 64 bits."""

_MAX_DELAY = 4
"""Maximum delay of the next pass by a W, in eighths of the W's time.

At d=8, m=24, 1/1.15/.85/.05, 16 chunks: 150.35; without it 151.15.
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """A planning problem in integer ticks and integer units of memory."""

    costs: Costs  # per slice if microbatches are sliced
    placement: Placement
    num_devices: int
    num_microbatches: int  # times the number of slices
    limits: tuple[float, ...]  # without static memory, in the costs' unit
    fixed: tuple[float, ...]  # static memory per device, in the costs' unit
    objective: Objective
    kinds: tuple[Kind, ...]
    ticks_per_us: float
    units_per_byte: float
    types: PassTypes  # arrays
    weight_of: np.ndarray  # [type] of a B or W: the type of its W; else NONE
    memory_limits: np.ndarray  # [queue] memory limit, in units
    moved_limit: float  # of moved memory per device, in the costs' unit

    def turned(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of these passes in kinds that run them in the opposite order."""
        reversed_numbers: np.ndarray = reversed_slice(numbers, self.costs.slices)
        return reversed_numbers

    @property
    def max_useful_passes(self) -> int:
        """Number of passes whose activations 1F1B has in memory; more cannot shorten the order."""
        return self.num_devices + self.costs.slices - 1

    @property
    def max_moved(self) -> float:
        """Limit of the moved memory per device, in units of memory."""
        return self.moved_limit * self.units_per_byte * (1 + 1e-9)


def make_problem(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    limit: float | Sequence[float],
    objective: Objective,
    placement: Placement,
    kinds: tuple[Kind, ...] = PARTS,
    moved_limit: float = math.inf,
) -> Problem:
    """Convert the costs and limits of one placement to integer ticks and units of memory.

    Args:
        costs: costs of a microbatch or of a slice.
        num_microbatches: microbatches per step, times the slices of each.
        kinds: kinds of passes that a stage and microbatch may have, in the table's order.
        moved_limit: limit of moved memory per device, in the costs' unit.

    Raises:
        LimitError: one microbatch alone does not fit the limits.
        ScheduleError: a count is below 1, sizes do not match, or the schedule is too large.
    """
    for label, count in (("devices", num_devices), ("microbatches", num_microbatches)):
        if count < 1:
            raise ScheduleError(f"a plan needs at least 1 of {label}, not {count}")
    limits = bounds.limits_by_device(limit, num_devices)
    bounds.check_limits(costs, placement, num_devices, proven_limits(kinds, limits))
    fixed = costs.fixed_bytes(placement, num_devices)
    costs, limits = bounds.without_state(costs, placement, limits)
    check_size(len(placement), num_microbatches)
    # Integers, so that the search compares ties exactly and gives the same plan on every machine.
    times = [costs.time_us(kind, stage) for kind in kinds for stage in range(len(placement))]
    ticks_per_us = _time_scale(times, costs.longest_send_us, num_microbatches)
    memory_amounts = (
        amounts for kind in kinds for amounts in (*costs.held(kind)[:2], costs.workspace(kind))
    )
    # The largest amount has 12 digits: 10^7 of them fit in 64 bits.
    units_per_byte = scale_to(1e11, max(map(max, memory_amounts)) or 1.0)
    types = _pass_type_arrays(costs, placement, kinds, ticks_per_us, units_per_byte)
    # Zero is enough for other queues: their kinds allocate nothing.
    # The limits of the processors come first.
    memory_limits = np.zeros(len(types.types_of_queue.begin) - 1, np.int64)
    peaks = _peak_memory(costs, placement, num_devices, kinds)
    for device, (limit, peak) in enumerate(zip(limits, peaks, strict=True)):
        # More than all activations of the step has no effect; so the limit in units is finite.
        memory_limits[device] = int(
            min(limit, num_microbatches * peak) * units_per_byte * (1 + 1e-9)
        )
    return Problem(
        costs=costs,
        placement=placement,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        limits=limits,
        fixed=fixed,
        objective=objective,
        kinds=kinds,
        ticks_per_us=ticks_per_us,
        units_per_byte=units_per_byte,
        types=types,
        weight_of=_weight_of(kinds, len(placement)),
        memory_limits=memory_limits,
        moved_limit=moved_limit,
    )


def with_parts_alone(problem: Problem) -> Problem:
    """Return the problem with F, B and W only, in the same ticks and units."""
    ticks, units_per_byte = problem.ticks_per_us, problem.units_per_byte
    return replace(
        problem,
        kinds=PARTS,
        types=_pass_type_arrays(problem.costs, problem.placement, PARTS, ticks, units_per_byte),
        weight_of=_weight_of(PARTS, len(problem.placement)),
        memory_limits=problem.memory_limits[: problem.num_devices],
    )


def proven_limits(kinds: Sequence[Kind], limits: Sequence[float]) -> tuple[float, ...]:
    """Return the limits for lower bounds: infinite if kinds beyond F, B and W can free memory."""
    if not any(kind.freed for kind in kinds if kind not in PARTS):
        return tuple(limits)
    return tuple(math.inf if limit > 0 else limit for limit in limits)


def _peak_memory(
    costs: Costs, placement: Placement, num_devices: int, kinds: Sequence[Kind]
) -> Iterator[float]:
    """Yield the maximum memory of one microbatch per device; a higher limit has no effect."""
    pairs = zip(costs.held_after_forward_bytes, costs.held_after_backward_bytes, strict=True)
    peaks = [max(pair) for pair in pairs]
    for allocated, retained, _ in (costs.held(kind) for kind in kinds if kind not in PARTS):
        peaks = [sum(amounts) for amounts in zip(peaks, allocated, retained, strict=True)]
    workspaces = [max(amounts) for amounts in zip(*map(costs.workspace, kinds), strict=True)]
    for local_stages in stages_of(placement, num_devices):
        yield sum(peaks[stage] + workspaces[stage] for stage in local_stages)


def _weight_of(kinds: tuple[Kind, ...], num_stages: int) -> np.ndarray:
    weight_of = np.full((num_stages, len(kinds)), NONE)
    weights = np.arange(num_stages) * len(kinds) + kinds.index(Kind.W)
    weight_of[:, [kinds.index(Kind.B), kinds.index(Kind.W)]] = weights[:, None]
    return weight_of.ravel()


def _pass_type_arrays(
    costs: Costs,
    placement: Placement,
    kinds: Sequence[Kind],
    ticks_per_us: float,
    units_per_byte: float,
) -> PassTypes:
    """Return the types as arrays, for compiled functions."""

    def amounts(kind: Kind, stage: int) -> tuple[int, int, int]:
        ticks = round(costs.time_us(kind, stage) * ticks_per_us)
        stage_costs = costs.stages[stage]
        sizes = (*stage_costs.memory(kind), stage_costs.workspace(kind))
        allocated, retained, freed, workspace = (round(size * units_per_byte) for size in sizes)
        # The memory changes while the pass runs, and after it.
        return ticks, allocated + workspace, allocated + retained - freed

    def message(stage: int, reader: int) -> int:
        is_sent = placement[stage] != placement[reader]
        return round(costs.message_us(stage, reader) * ticks_per_us) if is_sent else 0

    fields: list[Any] = [
        RaggedList(*(np.array(column, np.int64) for column in field))
        if isinstance(field, RaggedList)
        else np.array(field, np.int64)
        for field in make_pass_types(kinds, placement, amounts, message)
    ]
    return PassTypes(*fields)


def scale_to(at_least: float, value: float) -> float:
    """Return the power of ten that scales `value` to `at_least`; decimals stay exact."""
    scale = 1.0
    while value * scale < at_least:
        scale *= 10
    while value * scale >= 10 * at_least:
        scale /= 10
    return scale


def _time_scale(times: Sequence[float], send_us: float, num_microbatches: int) -> float:
    """Return the ticks per unit of time: fine for the shortest pass, a step within 64 bits."""
    step = num_microbatches * (sum(times) + 3 * len(times) * send_us)
    scale = scale_to(1e5, min(filter(None, times)))
    # Long steps have coarser ticks, to stay within 64 bits.
    while step * scale > _MAX_TICKS:
        scale /= 10
    return scale


def make_shop(problem: Problem, num_microbatches: int) -> improve.JobShop:
    """Return the passes of `num_microbatches` microbatches for the local search."""
    types, m = problem.types, num_microbatches
    queue, change, peak = (np.asarray(field) for field in (types.queue, types.change, types.peak))
    num_types = len(queue)
    inputs, readers, queue_readers = (_Links(num_types) for _ in range(3))
    for pass_type in range(num_types):
        for entry in range(types.needs.begin[pass_type], types.needs.begin[pass_type + 1]):
            source = types.needs.numbers[entry]
            lag = types.lag[entry]
            is_reversed = bool(types.is_reversed[entry])
            inputs.add(pass_type, source, lag, is_reversed)
            (readers if queue[source] != queue[pass_type] else queue_readers).add(
                source, pass_type, lag, is_reversed
            )
    reversed_numbers = problem.turned(np.arange(m))
    return improve.JobShop(
        *inputs.to_passes(reversed_numbers),
        *readers.to_passes(reversed_numbers),
        queue_readers.to_passes(reversed_numbers)[0],
        ticks=np.repeat(np.asarray(types.ticks), m),
        queue=np.repeat(queue, m).astype(np.int32),
        type_of=np.repeat(np.arange(num_types), m).astype(np.int32),
        delta=change,
        # A pass that allocates nothing always fits: only the memory after it counts.
        over=np.where(peak > 0, peak - change, 0),
        length=np.diff(np.asarray(types.types_of_queue.begin)) * m,
        limit=problem.memory_limits,
        due=_due_ticks(problem),
        **_moved_fields(problem, m),
    )


def _moved_fields(problem: Problem, num_microbatches: int) -> dict[str, Any]:
    """Return the fields of a shop for moved memory; inactive without a limit of it."""
    kinds, types = problem.kinds, problem.types
    count = len(types.queue)
    link, moved = np.full(len(problem.memory_limits), NONE), np.zeros(count, np.int64)
    stay = np.full((count, num_microbatches, 2), NONE, np.int32)
    movers = [] if math.isinf(problem.moved_limit) else [kind for kind in kinds if kind.offloaded]
    for mover in movers:
        out, *ends = (
            np.arange(kinds.index(kind), count, len(kinds)) for kind in (mover, Kind.F, Kind.B)
        )
        queue, amounts = np.asarray(types.queue), problem.costs.required(mover.offloaded)
        # Both queues have the link, because a move in either can change the moved memory.
        link[queue[out]] = link[queue[ends[0]]] = queue[out]
        moved[out] = [round(amount * problem.units_per_byte) for amount in amounts]
        passes = np.arange(count * num_microbatches).reshape(count, num_microbatches)
        forward, backward = (passes[end] for end in ends)
        reversed_numbers = problem.turned(np.arange(num_microbatches))
        # Copies out are numbered as F, and B in the opposite order.
        stay[out] = np.stack([forward, backward[:, reversed_numbers]], axis=2)
    max_moved = int(min(problem.max_moved, num_microbatches * float(moved.sum())))
    return {"link": link, "stay": stay.reshape(-1, 2), "moved": moved, "room": max_moved}


class PassSubset(NamedTuple):
    """A shop reduced to the passes and queues of an order, renumbered without gaps.

    Passes of optional kinds exist for some microbatches only.
    """

    shop: improve.JobShop
    passes: np.ndarray  # [new number] -> pass
    numbers: np.ndarray  # [pass] -> new number, NONE if it is not in the order
    queues: np.ndarray  # [new number] -> queue

    def reduce_rows(self, full_rows: np.ndarray) -> np.ndarray:
        """Renumber an order of all queues to this shop's numbers."""
        # NONE is -1, so padding selects the appended NONE, here and in `select_passes`.
        rows: np.ndarray = np.append(self.numbers, NONE)[full_rows[self.queues]]
        return rows.astype(np.int32)

    def expand_rows(self, rows: np.ndarray, num_queues: int) -> np.ndarray:
        """Renumber this shop's order to the numbers of all queues and passes."""
        full_rows = np.full((num_queues, rows.shape[1]), NONE, np.int64)
        full_rows[self.queues] = np.append(self.passes, NONE)[rows]
        return full_rows


def select_passes(shop: improve.JobShop, row: np.ndarray) -> PassSubset:
    """Reduce a shop to the passes of an order; dependencies on other passes are dropped."""
    is_present = np.zeros(len(shop.type_of), bool)
    is_present[row[row != NONE]] = True
    # The index among the passes that are there.
    number = np.where(is_present, np.cumsum(is_present) - 1, NONE)
    padded = np.append(number, NONE).astype(np.int32)
    length = np.bincount(shop.queue[is_present], minlength=len(shop.length))
    queues = np.flatnonzero(length)
    queue_numbers = np.cumsum(length > 0) - 1
    reduced = shop._replace(
        inputs=padded[shop.inputs[is_present]],
        lag=shop.lag[is_present],
        readers=padded[shop.readers[is_present]],
        reader_lag=shop.reader_lag[is_present],
        queue_readers=padded[shop.queue_readers[is_present]],
        ticks=shop.ticks[is_present],
        queue=queue_numbers[shop.queue[is_present]].astype(np.int32),
        type_of=shop.type_of[is_present],
        length=length[queues],
        limit=shop.limit[queues],
        due=shop.due[queues],
        link=np.append(np.where(length, queue_numbers, NONE), NONE)[shop.link[queues]],
        stay=padded[shop.stay[is_present]],
    )
    return PassSubset(reduced, np.flatnonzero(is_present), number, queues)


def merge_queues(problem: Problem, shop: improve.JobShop, row: np.ndarray) -> list[list[int]]:
    """Merge the queues of every device into one list of passes.

    Compute passes stay in order; a pass of another resource follows the last pass that it reads.
    """
    # There are only compute queues, so nothing has to be merged.
    if len(row) == problem.num_devices:
        return [device_row[device_row != NONE].tolist() for device_row in row]
    chosen_passes = select_passes(shop, row)
    shop, row = chosen_passes.shop, chosen_passes.reduce_rows(row)
    state = improve.new_state(row, 1)
    improve.settle(shop, state)
    run_order = improve.run_rows(shop, row, state.position, state.head).tolist()
    anchors: dict[int, int] = {}  # position in the compute queue after which a pass is placed
    last = [0] * len(row)  # by queue
    passes_per_stage = problem.num_microbatches * len(problem.kinds)
    device_of = [
        problem.placement[work // passes_per_stage] for work in chosen_passes.passes.tolist()
    ]
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.num_devices)]
    for order_index, work in enumerate(run_order):
        queue, device = shop.queue[work], device_of[work]
        local_sources = [
            source for source in shop.inputs[work] if source >= 0 and device_of[source] == device
        ]
        if queue == device:
            anchors[work] = int(state.position[work])
        else:
            anchors[work] = last[queue] = max(
                [last[queue], *(anchors[source] for source in local_sources)]
            )
        # Sorted by position in the compute queue, then by the simulated order.
        rows[device].append((anchors[work], order_index, work))
    return [[int(chosen_passes.passes[work]) for *_, work in sorted(entries)] for entries in rows]


class _Links:
    """The types that each type reads, or that read it, with the lag of the result."""

    def __init__(self, num_types: int) -> None:
        self.links: list[list[tuple[int, int, bool]]] = [[] for _ in range(num_types)]

    def add(self, pass_type: int, linked_type: int, lag: int, is_reversed: bool) -> None:
        self.links[pass_type].append((linked_type, lag, is_reversed))

    def to_passes(self, reversed_numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return passes and lags as [pass, index], padded.

        `reversed_numbers` are as in `Problem.turned`.
        """
        num_microbatches = len(reversed_numbers)
        width = max(1, *map(len, self.links))
        row_padding = [(NONE, 0, False)]
        table = np.array(
            [type_links + row_padding * (width - len(type_links)) for type_links in self.links]
        )
        pass_links = np.repeat(table, num_microbatches, axis=0)
        linked_types, lags, is_reversed = (pass_links[:, :, column] for column in range(3))
        microbatch = np.tile(np.arange(num_microbatches), len(self.links))[:, None]
        microbatch = np.where(is_reversed, reversed_numbers[microbatch], microbatch)
        passes = np.where(linked_types >= 0, linked_types * num_microbatches + microbatch, NONE)
        return passes.astype(np.int32), np.ascontiguousarray(lags)


def _due_ticks(problem: Problem) -> np.ndarray:
    """Return minus the first start of each queue's device for the span: no order changes it."""
    due = np.zeros(len(problem.memory_limits), np.int64)
    if problem.objective is Objective.SPAN:
        clock, types = 0, problem.types
        first_starts = [-1] * problem.num_devices
        for stage, device in enumerate(problem.placement):
            if stage and device != problem.placement[stage - 1]:
                message_us = problem.costs.message_us(stage - 1, stage)
                clock += round(message_us * problem.ticks_per_us)
            first_starts[device] = clock if first_starts[device] < 0 else first_starts[device]
            clock += types.ticks[len(problem.kinds) * stage]
        # All queues of a device, including copy links, count from its first forward.
        for pass_type, queue in enumerate(types.queue):
            due[queue] = -first_starts[problem.placement[pass_type // len(problem.kinds)]]
    return due


class Codec(NamedTuple):
    """Converts passes of simple kinds to numbers and back.

    With `slices` per microbatch, B and W run the slices in descending order. Passes of a type stay
    in order, so these are numbered by their turn, as if all were ascending.
    """

    num_microbatches: int
    kinds: tuple[Kind, ...] = PARTS
    slices: int = 1

    def pass_type(self, kind: Kind, stage: int) -> int:
        """Return the type of a kind of pass on a stage."""
        return len(self.kinds) * stage + self.kinds.index(kind)

    def number(self, work: Pass) -> int:
        """Return the number of a simple pass."""
        index = self._in_execution_order(work.kind, work.microbatch)
        return self.pass_type(work.kind, work.stage) * self.num_microbatches + index

    def _in_execution_order(self, kind: Kind, number: int) -> int:
        return (
            reversed_slice(number, self.slices)
            if self.slices > 1 and kind.is_execution_numbered
            else number
        )

    def work(self, number: int) -> Pass:
        """Return the pass of a number."""
        pass_type, microbatch = divmod(number, self.num_microbatches)
        stage, kind_index = divmod(pass_type, len(self.kinds))
        kind = self.kinds[kind_index]
        return Pass(kind, stage, self._in_execution_order(kind, microbatch))

    def order(self, rows: Iterable[Iterable[int]]) -> tuple[tuple[Pass, ...], ...]:
        """Return the passes of rows of numbers."""
        return tuple(tuple(self.work(n) for n in row if n != NONE) for row in rows)


def padded(rows: Iterable[Sequence[int]]) -> np.ndarray:
    """Return rows of numbers in one array, padded to the longest."""
    numbers_of_rows = list(rows)
    longest = max(map(len, numbers_of_rows), default=0)
    array = np.full((len(numbers_of_rows), longest), NONE, np.int64)
    for row, numbers in zip(array, numbers_of_rows, strict=True):
        row[: len(numbers)] = numbers
    return array


_fill = compiled_once(fill_idle_slots, *FILL_CALLEES)
_place_weights = compiled_once(place_weights, *WEIGHT_CALLEES)


def fill_idle_time(
    problem: Problem, row: np.ndarray, cool_down: int, delay: int = 0
) -> np.ndarray | None:
    """Return the order with its idle time filled; None if no pass fits in the memory.

    Args:
        problem: costs and limits.
        row: [queue, position] -> pass.
        cool_down: if a device has at most this many forwards left, W only run if nothing else can.
        delay: maximum delay of the next pass by a filler, in eighths of the filler's time.
    """
    order, flat = _order_of(problem, row)
    order = order._replace(delay=delay)
    new_order = np.empty(len(flat), np.int64)
    if _fill(order, new_scheduler_state(order, _zeros), new_order, cool_down, NONE) < len(flat):
        return None
    return _in_rows_of(row, flat[new_order])


def reinsert_weights(
    problem: Problem, row: np.ndarray, num_microbatches: int = 0
) -> np.ndarray | None:
    """Return the order with its W reinserted as fillers; None if the memory does not suffice.

    Args:
        problem: costs and limits.
        row: [queue, position] -> pass.
        num_microbatches: required for an order that lacks passes (default: by its length).
    """
    order, flat = _order_of(problem, row, num_microbatches)
    order, state = order._replace(delay=_MAX_DELAY), new_scheduler_state(order, _zeros)
    new_order, ready = np.empty(len(flat), np.int64), np.empty(len(flat), np.int64)
    counts = _zeros(len(order.limit)), _zeros(len(order.limit))
    if not _place_weights(order, state, problem.weight_of, ready, *counts, new_order):
        return None
    return _in_rows_of(row, flat[new_order])


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, np.int64)


def _in_rows_of(template: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Return the passes of all queues in rows of the shape of `template`."""
    rows = np.full(template.shape, NONE, np.int64)
    rows[template != NONE] = flat
    return rows


def _order_of(
    problem: Problem, row: np.ndarray, num_microbatches: int = 0
) -> tuple[PassOrder, np.ndarray]:
    """Return the order as step 4 needs it, and the passes of its positions."""
    flat = row[row != NONE].astype(np.int64)
    types = problem.types
    m = num_microbatches or len(flat) // len(types.ticks)
    pass_type, microbatch = np.divmod(flat, m)
    index_of = np.full(len(types.ticks) * m, WITHOUT)
    index_of[flat] = np.arange(len(flat))
    order = PassOrder(
        types=types,
        begin=np.append(0, np.cumsum(np.count_nonzero(row != NONE, axis=1))),
        type_of=pass_type,
        microbatch=microbatch,
        index_of=index_of,
        limit=problem.memory_limits,
        num_microbatches=m,
        reversed_numbers=problem.turned(np.arange(m)),
        is_strict=True,
    )
    return order, flat
