"""A placement's planning problem in integers, and the fillers of its orders.

Times are in ticks and memory in units, both integer. Compiled functions get orders as rows of
numbers, one number per pass (`Codec`). A sort is len(kinds) * stage + the index of a kind in
`kinds`. A pass has the number sort * num_microbatches + microbatch. Rows are padded to the longest
with NONE.

Two fillers improve an order. `fill` is step 4 of the paper, compiled, with the problem's costs.
`refill` keeps the order of all passes except W. A W only frees memory, so it can run in any
sufficient idle time, or before a forward that needs its memory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_vshape.core.check import bounds
from megatron_vshape.core.compiling import compiled, compiled_once
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Objective, check_size, turned
from megatron_vshape.core.paper import reordering
from megatron_vshape.core.paper.reordering import (
    EIGHTHS,
    LATE,
    NONE,
    WITHOUT,
    Lists,
    Order,
    Refill,
    Sorts,
    begin_run,
    finish,
    make_sorts,
    new_run,
    ready,
)
from megatron_vshape.core.planner import improve

MOST_TICKS = 1e18
"""Maximum total ticks of all passes and messages of a step: times have 64 bits."""

DELAY = 4
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
    sorts: Sorts  # arrays
    weight_of: np.ndarray  # [sort] of a B or W: the sort of its W; else NONE
    room: np.ndarray  # [lane] memory limit, in units
    moved_limit: float  # of memory that passes move off a device, in the costs' unit

    def turned(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of these passes in kinds that run them in the opposite order."""
        made: np.ndarray = turned(numbers, self.costs.slices)
        return made

    @property
    def most_useful(self) -> int:
        """Number of passes whose activations 1F1B has in memory; more cannot shorten the order."""
        return self.num_devices + self.costs.slices - 1

    @property
    def room_for_moved(self) -> float:
        """Return the limit of moved memory per device, in units of memory."""
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
        moved_limit: limit of memory that passes move off a device, in the costs' unit.

    Raises:
        LimitError: one microbatch alone does not fit the limits.
        ScheduleError: a count is below 1, sizes do not match, or the schedule is too large.
    """
    for what, count in (("devices", num_devices), ("microbatches", num_microbatches)):
        if count < 1:
            raise ScheduleError(f"a plan needs at least 1 of {what}, not {count}")
    limits = bounds.each_limit(limit, num_devices)
    bounds.check_limits(costs, placement, num_devices, proven_limits(kinds, limits))
    fixed = costs.fixed_bytes(placement, num_devices)
    costs, limits = bounds.room_in(costs, placement, limits)
    check_size(len(placement), num_microbatches)
    # Integers, so that the search compares ties exactly and gives the same plan on every machine.
    times = [costs.time_us(kind, stage) for kind in kinds for stage in range(len(placement))]
    ticks_per_us = _time_scale(times, costs.longest_send_us, num_microbatches)
    held = (each for kind in kinds for each in (*costs.held(kind)[:2], costs.works(kind)))
    # The largest amount has 12 digits: 10^7 of them fit in 64 bits.
    units = scale_to(1e11, max(map(max, held)) or 1.0)
    sorts = _arrays(costs, placement, kinds, ticks_per_us, units)
    # Zero is enough for other lanes: their kinds allocate nothing.
    room = np.zeros(len(sorts.of_lane.begin) - 1, np.int64)  # those of the processors come first
    most = _most_held(costs, placement, num_devices, kinds)
    for device, (limit, full) in enumerate(zip(limits, most, strict=True)):
        # More than all activations of the step has no effect; so room is finite without a limit.
        room[device] = int(min(limit, num_microbatches * full) * units * (1 + 1e-9))
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
        units_per_byte=units,
        sorts=sorts,
        weight_of=_weight_of(kinds, len(placement)),
        room=room,
        moved_limit=moved_limit,
    )


def with_parts_alone(problem: Problem) -> Problem:
    """Return the problem with F, B and W only, in the same ticks and units."""
    ticks, units = problem.ticks_per_us, problem.units_per_byte
    return replace(
        problem,
        kinds=PARTS,
        sorts=_arrays(problem.costs, problem.placement, PARTS, ticks, units),
        weight_of=_weight_of(PARTS, len(problem.placement)),
        room=problem.room[: problem.num_devices],
    )


def proven_limits(kinds: Sequence[Kind], limits: Sequence[float]) -> tuple[float, ...]:
    """Return the limits for lower bounds: infinite if kinds beyond F, B and W can free memory."""
    if not any(kind.frees for kind in kinds if kind not in PARTS):
        return tuple(limits)
    return tuple(math.inf if limit > 0 else limit for limit in limits)


def _most_held(
    costs: Costs, placement: Placement, num_devices: int, kinds: Sequence[Kind]
) -> Iterator[float]:
    """Yield the maximum memory of one microbatch per device; a higher limit has no effect."""
    held = zip(costs.held_after_forward_bytes, costs.held_after_backward_bytes, strict=True)
    most = [max(pair) for pair in held]
    for takes, keeps, _ in (costs.held(kind) for kind in kinds if kind not in PARTS):
        most = [sum(each) for each in zip(most, takes, keeps, strict=True)]
    works = [max(each) for each in zip(*map(costs.works, kinds), strict=True)]
    for own in stages_of(placement, num_devices):
        yield sum(most[stage] + works[stage] for stage in own)


def _weight_of(kinds: tuple[Kind, ...], num_stages: int) -> np.ndarray:
    weight_of = np.full((num_stages, len(kinds)), NONE)
    weights = np.arange(num_stages) * len(kinds) + kinds.index(Kind.W)
    weight_of[:, [kinds.index(Kind.B), kinds.index(Kind.W)]] = weights[:, None]
    return weight_of.ravel()


def _arrays(
    costs: Costs, placement: Placement, kinds: Sequence[Kind], ticks_per_us: float, units: float
) -> Sorts:
    """Return the sorts as arrays, for compiled functions."""

    def amounts(kind: Kind, stage: int) -> tuple[int, int, int]:
        ticks = round(costs.time_us(kind, stage) * ticks_per_us)
        return (ticks, *held_by(costs, kind, stage, units))

    def message(stage: int, other: int) -> int:
        away = placement[stage] != placement[other]
        return round(costs.message_us(stage, other) * ticks_per_us) if away else 0

    made: list[Any] = [
        Lists(*(np.array(part, np.int64) for part in each))
        if isinstance(each, Lists)
        else np.array(each, np.int64)
        for each in make_sorts(kinds, placement, amounts, message)
    ]
    return Sorts(*made)


def held_by(costs: Costs, kind: Kind, stage: int, units: float) -> tuple[int, int]:
    """Return the change of memory while a pass runs, and after it, in units."""
    held = (*costs.held(kind), costs.works(kind))
    takes, keeps, frees, works = (round(each[stage] * units) for each in held)
    return takes + works, takes + keeps - frees


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
    while step * scale > MOST_TICKS:
        scale /= 10
    return scale


def make_shop(problem: Problem, num_microbatches: int) -> improve.JobShop:
    """Return the passes of `num_microbatches` microbatches for the local search."""
    sorts, m = problem.sorts, num_microbatches
    lane, change, most = (np.asarray(each) for each in (sorts.lane, sorts.change, sorts.most))
    count = len(lane)
    before, after, behind = (_Ways(count) for _ in range(3))
    for sort in range(count):
        for at in range(sorts.needs.begin[sort], sorts.needs.begin[sort + 1]):
            need, lag, turns = sorts.needs.of[at], sorts.lag[at], bool(sorts.turns[at])
            before.add(sort, need, lag, turns)
            (after if lane[need] != lane[sort] else behind).add(need, sort, lag, turns)
    ranks = problem.turned(np.arange(m))
    return improve.JobShop(
        *before.of_passes(ranks),
        *after.of_passes(ranks),
        behind.of_passes(ranks)[0],
        ticks=np.repeat(np.asarray(sorts.ticks), m),
        queue=np.repeat(lane, m).astype(np.int32),
        sort=np.repeat(np.arange(count), m).astype(np.int32),
        delta=change,
        # A pass that allocates nothing always fits: only the memory after it counts.
        over=np.where(most > 0, most - change, 0),
        length=np.diff(np.asarray(sorts.of_lane.begin)) * m,
        limit=problem.room,
        due=_due(problem),
        **_moved(problem, m),
    )


def _moved(problem: Problem, num_microbatches: int) -> dict[str, Any]:
    """Return the fields of a shop for moved memory; inactive without a limit of it."""
    kinds, sorts = problem.kinds, problem.sorts
    count = len(sorts.lane)
    link, moved = np.full(len(problem.room), NONE), np.zeros(count, np.int64)
    stay = np.full((count, num_microbatches, 2), NONE, np.int32)
    movers = [] if math.isinf(problem.moved_limit) else [kind for kind in kinds if kind.moves]
    for mover in movers:
        out, *ends = (
            np.arange(kinds.index(kind), count, len(kinds)) for kind in (mover, Kind.F, Kind.B)
        )
        lane, amounts = np.asarray(sorts.lane), problem.costs.amounts(mover.moves) or ()
        # Both lanes name the link, because a move in either can change the moved memory.
        link[lane[out]] = link[lane[ends[0]]] = lane[out]
        moved[out] = [round(each * problem.units_per_byte) for each in amounts]
        passes = np.arange(count * num_microbatches).reshape(count, num_microbatches)
        forward, backward = (passes[end] for end in ends)
        ranks = problem.turned(np.arange(num_microbatches))
        # Copies out are numbered as F, and B in the opposite order.
        stay[out] = np.stack([forward, backward[:, ranks]], axis=2)
    room = int(min(problem.room_for_moved, num_microbatches * float(moved.sum())))
    return {"link": link, "stay": stay.reshape(-1, 2), "moved": moved, "room": room}


class Chosen(NamedTuple):
    """A shop reduced to the passes and lanes of an order, renumbered without gaps.

    Passes of optional kinds exist for some microbatches only.
    """

    shop: improve.JobShop
    passes: np.ndarray  # [new number] -> pass
    number: np.ndarray  # [pass] -> new number, NONE if it is not in the order
    lanes: np.ndarray  # [new number] -> lane

    def row(self, whole: np.ndarray) -> np.ndarray:
        """Renumber an order of all lanes to this shop's numbers."""
        # NONE is -1, so padding selects the appended NONE, here and in `choose`.
        made: np.ndarray = np.append(self.number, NONE)[whole[self.lanes]]
        return made.astype(np.int32)

    def whole(self, row: np.ndarray, num_lanes: int) -> np.ndarray:
        """Renumber this shop's order to the numbers of all lanes and passes."""
        made = np.full((num_lanes, row.shape[1]), NONE, np.int64)
        made[self.lanes] = np.append(self.passes, NONE)[row]
        return made


def choose(shop: improve.JobShop, row: np.ndarray) -> Chosen:
    """Reduce a shop to the passes of an order; dependencies on other passes are dropped."""
    there = np.zeros(len(shop.sort), bool)
    there[row[row != NONE]] = True
    # The index among the passes that are there.
    number = np.where(there, np.cumsum(there) - 1, NONE)
    padded = np.append(number, NONE).astype(np.int32)
    length = np.bincount(shop.queue[there], minlength=len(shop.length))
    lanes = np.flatnonzero(length)
    lane = np.cumsum(length > 0) - 1
    left = shop._replace(
        before=padded[shop.before[there]],
        lag=shop.lag[there],
        after=padded[shop.after[there]],
        after_lag=shop.after_lag[there],
        queue_readers=padded[shop.queue_readers[there]],
        ticks=shop.ticks[there],
        queue=lane[shop.queue[there]].astype(np.int32),
        sort=shop.sort[there],
        length=length[lanes],
        limit=shop.limit[lanes],
        due=shop.due[lanes],
        link=np.append(np.where(length, lane, NONE), NONE)[shop.link[lanes]],
        stay=padded[shop.stay[there]],
    )
    return Chosen(left, np.flatnonzero(there), number, lanes)


def in_one_row(problem: Problem, shop: improve.JobShop, row: np.ndarray) -> list[list[int]]:
    """Merge the lanes of every device into one list of passes.

    Compute passes stay in order; a pass of another resource follows the last pass that it reads.
    """
    # There are only compute lanes, so nothing has to be merged.
    if len(row) == problem.num_devices:
        return [own[own != NONE].tolist() for own in row]
    chosen = choose(shop, row)
    shop, row = chosen.shop, chosen.row(row)
    state = improve.new_state(row, 1)
    improve.settle(shop, state)
    ran = improve.run_rows(shop, row, state.place, state.head).tolist()
    anchor: dict[int, int] = {}  # position in the compute lane after which a pass is placed
    last = [0] * len(row)  # by lane
    each = problem.num_microbatches * len(problem.kinds)
    device_of = [problem.placement[work // each] for work in chosen.passes.tolist()]
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.num_devices)]
    for at, work in enumerate(ran):
        lane, device = shop.queue[work], device_of[work]
        own = [need for need in shop.before[work] if need >= 0 and device_of[need] == device]
        if lane == device:
            anchor[work] = int(state.place[work])
        else:
            anchor[work] = last[lane] = max([last[lane], *(anchor[need] for need in own)])
        # Sorted by position in the compute lane, then by the simulated order.
        rows[device].append((anchor[work], at, work))
    return [[int(chosen.passes[work]) for *_, work in sorted(each)] for each in rows]


class _Ways:
    """The sorts that each sort reads, or that read it, with the lag of the result."""

    def __init__(self, num_sorts: int) -> None:
        self.ways: list[list[tuple[int, int, bool]]] = [[] for _ in range(num_sorts)]

    def add(self, sort: int, other: int, lag: int, turns: bool) -> None:
        self.ways[sort].append((other, lag, turns))

    def of_passes(self, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return passes and lags as [pass, index], padded; `ranks` are as in `Problem.turned`."""
        num_microbatches = len(ranks)
        width = max(1, *map(len, self.ways))
        none = [(NONE, 0, False)]
        table = np.array([own + none * (width - len(own)) for own in self.ways])
        each = np.repeat(table, num_microbatches, axis=0)
        sorts, lags, turns = (each[:, :, at] for at in range(3))
        microbatch = np.tile(np.arange(num_microbatches), len(self.ways))[:, None]
        microbatch = np.where(turns, ranks[microbatch], microbatch)
        passes = np.where(sorts >= 0, sorts * num_microbatches + microbatch, NONE)
        return passes.astype(np.int32), np.ascontiguousarray(lags)


def _due(problem: Problem) -> np.ndarray:
    """Return minus the first start of each lane's device for the span: no order changes it."""
    due = np.zeros(len(problem.room), np.int64)
    if problem.objective is Objective.SPAN:
        clock, sorts = 0, problem.sorts
        first = [-1] * problem.num_devices
        for stage, device in enumerate(problem.placement):
            if stage and device != problem.placement[stage - 1]:
                message_us = problem.costs.message_us(stage - 1, stage)
                clock += round(message_us * problem.ticks_per_us)
            first[device] = clock if first[device] < 0 else first[device]
            clock += sorts.ticks[len(problem.kinds) * stage]
        # All lanes of a device, including copy links, count from its first forward.
        for sort, lane in enumerate(sorts.lane):
            due[lane] = -first[problem.placement[sort // len(problem.kinds)]]
    return due


class Codec(NamedTuple):
    """Converts passes of simple kinds to numbers and back.

    With `slices` per microbatch, B and W run the slices in descending order. Passes of a sort stay
    in order, so these are numbered by their turn, as if all were ascending.
    """

    num_microbatches: int
    kinds: tuple[Kind, ...] = PARTS
    slices: int = 1

    def sort(self, kind: Kind, stage: int) -> int:
        """Return the sort of a kind of pass on a stage."""
        return len(self.kinds) * stage + self.kinds.index(kind)

    def number(self, work: Pass) -> int:
        """Return the number of a simple pass."""
        own = self._turned(work.kind, work.microbatch)
        return self.sort(work.kind, work.stage) * self.num_microbatches + own

    def _turned(self, kind: Kind, number: int) -> int:
        return turned(number, self.slices) if self.slices > 1 and kind.by_rank else number

    def work(self, number: int) -> Pass:
        """Return the pass of a number."""
        sort, microbatch = divmod(number, self.num_microbatches)
        stage, place = divmod(sort, len(self.kinds))
        kind = self.kinds[place]
        return Pass(kind, stage, self._turned(kind, microbatch))

    def order(self, rows: Iterable[Iterable[int]]) -> tuple[tuple[Pass, ...], ...]:
        """Return the passes of rows of numbers."""
        return tuple(tuple(self.work(n) for n in row if n != NONE) for row in rows)


def padded(rows: Iterable[Sequence[int]], length: int = 0) -> np.ndarray:
    """Return rows of numbers in one array, padded to the longest or to `length`."""
    made = list(rows)
    array = np.full((len(made), max(length, *map(len, made))), NONE, np.int64)
    for row, own in zip(array, made, strict=True):
        row[: len(own)] = own
    return array


_fill = compiled_once(reordering.fill, *reordering.CALLED)


def fill(
    problem: Problem, row: np.ndarray, cool: int, num_microbatches: int = 0, delay: int = 0
) -> np.ndarray | None:
    """Return the order with its idle time filled; None if no pass fits in the memory.

    Args:
        problem: costs and limits.
        row: [lane, position] -> pass.
        cool: if a device has at most this many forwards left, W only run if nothing else can.
        num_microbatches: required for an order that lacks passes (default: by its length).
        delay: maximum delay of the next pass by a filler, in eighths of the filler's time.
    """
    order, flat = _order_of(problem, row, num_microbatches)
    order = order._replace(delay=delay)
    made = np.empty(len(flat), np.int64)
    if _fill(order, new_run(order, _zeros), made, cool, NONE) < len(flat):
        return None
    return _rows(row, flat[made])


def refill(problem: Problem, row: np.ndarray, num_microbatches: int = 0) -> np.ndarray | None:
    """Return the order with its W placed again as filler; None if the memory does not suffice.

    Args:
        problem: costs and limits.
        row: [lane, position] -> pass.
        num_microbatches: required for an order that lacks passes (default: by its length).
    """
    order, flat = _order_of(problem, row, num_microbatches)
    made, queue = np.empty(len(flat), np.int64), np.empty(len(flat), np.int64)
    if not _place_weights(order, new_run(order, _zeros), problem.weight_of, queue, made):
        return None
    return _rows(row, flat[made])


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, np.int64)


def _rows(like: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Return the passes of all lanes in rows of the shape of `like`."""
    rows = np.full(like.shape, NONE, np.int64)
    rows[like != NONE] = flat
    return rows


def _order_of(problem: Problem, row: np.ndarray, num_microbatches: int) -> tuple[Order, np.ndarray]:
    """Return the order as step 4 needs it, and the passes of its positions."""
    flat = row[row != NONE].astype(np.int64)
    sorts = problem.sorts
    m = num_microbatches or len(flat) // len(sorts.ticks)
    sort, microbatch = np.divmod(flat, m)
    place_of = np.full(len(sorts.ticks) * m, WITHOUT)
    place_of[flat] = np.arange(len(flat))
    order = Order(
        sorts=sorts,
        begin=np.append(0, np.cumsum(np.count_nonzero(row != NONE, axis=1))),
        sort=sort,
        microbatch=microbatch,
        place_of=place_of,
        limit=problem.room,
        num_microbatches=m,
        ranks=problem.turned(np.arange(m)),
        strict=True,
    )
    return order, flat


@compiled
def _next_start(order: Order, run: Refill, weight_of: np.ndarray, lane: int) -> int:
    """Return the start of the next pass except W; LATE if its input or memory is missing."""
    first, end = run.first[lane], order.begin[lane + 1]
    # W are not part of this sequence: they run as filler.
    while first < end and weight_of[order.sort[first]] == order.sort[first]:
        first += 1
    run.first[lane] = run.chosen[lane] = first
    if first == end:
        return LATE
    if run.held[lane] + order.sorts.most[order.sort[first]] > order.limit[lane]:
        return LATE
    return ready(order, run, first, run.clock[lane])


@compiled
def _place_weights(
    order: Order, run: Refill, weight_of: np.ndarray, queue: np.ndarray, made: np.ndarray
) -> bool:
    """Run the lanes in order of their next starts, with W as filler; return False on deadlock.

    A lane's part of `queue` contains the W whose B have run, oldest first.
    """
    lanes = len(order.limit)
    taken, listed = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    starts = np.asarray(run.start)
    begin_run(order, run)
    for _ in range(len(made)):
        for lane in range(lanes):
            # Only lanes whose input or memory has changed get a new start.
            if run.stale[lane]:
                run.stale[lane] = 0
                run.start[lane] = _next_start(order, run, weight_of, lane)
                # The oldest W first: it frees memory that the next forward may need.
                if taken[lane] < listed[lane]:
                    weight = queue[order.begin[lane] + taken[lane]]
                    _prefer_weight(order, run, lane, weight)
        lane = int(np.argmin(starts))
        # The earliest start is LATE, so every lane is blocked.
        if run.start[lane] == LATE:
            return False
        place = run.chosen[lane]
        made[order.begin[lane] + run.ran[lane]] = place
        finish(order, run, lane, place)
        sort = order.sort[place]
        if weight_of[sort] == sort:
            taken[lane] += 1
            continue
        run.first[lane] += 1
        # A B has run: its W is available as filler.
        if weight_of[sort] != NONE:
            weight = weight_of[sort] * order.num_microbatches + order.microbatch[place]
            queue[order.begin[lane] + listed[lane]] = order.place_of[weight]
            listed[lane] += 1
    return True


@compiled
def _prefer_weight(order: Order, run: Refill, lane: int, weight: int) -> None:
    """Choose the oldest W if it delays the next start by at most `DELAY`."""
    start, clock = run.start[lane], run.clock[lane]
    ticks = order.sorts.ticks[order.sort[weight]]
    if start > clock and clock + ticks <= start + DELAY * ticks // EIGHTHS:
        run.start[lane], run.chosen[lane] = clock, weight
