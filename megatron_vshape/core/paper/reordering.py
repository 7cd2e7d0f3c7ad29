"""Step 4 (reorder): move passes into idle slots of warm-up and cool-down, within the memory limit.

The devices run in simulated time. A device that would idle runs a later ready pass, if that delays
no other pass and never exceeds the memory limit. A device with few forwards left is in cool-down:
passes that only free memory, such as W, then wait until no other pass can run.

`number` encodes the passes as integers. `fill` accepts them in lists or in arrays: the planner
compiles it and its callees for its units of time and memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol

from megatron_vshape.core import compiling
from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.compiling import in_lists, soonest
from megatron_vshape.core.model.kinds import PARTS, PROCESSOR, Kind, NeedTable, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule

NONE = -1

WITHOUT = -2
"""For a pass that a microbatch omits: no pass waits for it."""

LATE = 1 << 62
"""Start time of a pass that cannot start."""

FIRST, BACKWARD, OTHER, WEIGHT = 0, 1, 2, 3
"""Priority of passes that can start at the same time: the lowest goes first."""

EIGHTHS = 8
"""Unit of the delay that a pass may cause: an eighth of its time."""

_KINDS = (*PARTS, Kind.BW)
"""Kinds in the paper's schedules."""


def reorder(schedule: Schedule, max_held: int) -> Schedule:
    """Fill idle slots with later passes of each device.

    All simple passes take the same time, and no device exceeds `max_held` stage activations. A
    device with at most `max_held` forwards left (which fit in memory together) is in cool-down.
    Without idle time, as in a steady phase that repeats cleanly, nothing moves.

    Raises:
        ScheduleError: a forward does not fit `max_held`, or a pass waits for one that never runs.
    """
    return _filled(schedule, max_held, max_held, NONE)


def fill_warm_up(schedule: Schedule, max_held: int, ahead: int) -> Schedule:
    """Fill idle slots until a device first frees an activation of its first stage.

    As in `reorder`, but forwards of the first stage move up only while fewer than `ahead` of them
    are allocated; more would use the memory that forwards of the last stage need.

    Raises:
        ScheduleError: a forward does not fit `max_held`, or a pass waits for one that never runs.
    """
    return _filled(schedule, max_held, NONE, ahead)


def _filled(schedule: Schedule, max_held: int, cool: int, ahead: int) -> Schedule:
    order = _order_of(schedule, max_held)
    size = len(order.sort)
    run = new_run(order, lambda count: [0] * count)
    filled, order, run, made = soonest(size, fill, CALLED, order, run, [0] * size)
    # Fewer passes than given: the rest is blocked by memory or a cycle of waits.
    if filled(order, run, made, cool, ahead) < size:
        _explain(schedule, order, run)
    passes, made = list(chain.from_iterable(schedule.order)), in_lists(made)
    rows = (made[begin:end] for begin, end in pairwise(order.begin))
    return replace(schedule, order=tuple(tuple(map(passes.__getitem__, row)) for row in rows))


def _order_of(schedule: Schedule, max_held: int) -> "Order":
    # All passes of the paper's schedules run on the processor: lane d is device d.
    passes = number(schedule.order, _KINDS, schedule.num_stages, schedule.num_microbatches)
    return Order(
        **passes._asdict(),
        sorts=_equal_sorts(schedule.placement),
        limit=[max_held] * schedule.num_devices,
        num_microbatches=schedule.num_microbatches,
        ranks=list(range(schedule.num_microbatches)),  # passes keep their numbers
        strict=False,
    )


@lru_cache(maxsize=4)
def _equal_sorts(placement: Placement) -> "Sorts":
    """Return unit costs: every simple pass takes 1; a stage's activation lives from F to W."""

    def amounts(kind: Kind, _stage: int) -> tuple[int, int, int]:
        takes = bool(kind.takes)
        return len(kind.does), takes, takes + bool(kind.keeps) - bool(kind.frees)

    return make_sorts(_KINDS, placement, amounts)


def _explain(schedule: Schedule, order: "Order", run: "Refill") -> None:
    """Raise ScheduleError for blocked passes: only memory blocks a pass with all its inputs."""
    heads = [
        (device, place) for device, place in enumerate(run.first) if place < order.begin[device + 1]
    ]
    full = [(device, place) for device, place in heads if ready(order, run, place, 0) < LATE]
    if full:
        # The lowest microbatch, because the others wait for it.
        device, place = min(full, key=lambda each: order.microbatch[each[1]])
        work = schedule.order[device][place - order.begin[device]]
        raise ScheduleError(
            f"{work} does not fit on device {device}, which holds {run.held[device]} "
            f"stage activations then and its limit is {order.limit[device]}"
        )
    simulate(schedule)  # raises: a pass waits for one that never runs


class Numbers(Protocol):
    """A list or an array of integers."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, value: int, /) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


class Lists(NamedTuple):
    """Several numbers per index: those of `at` are `of[begin[at] : begin[at + 1]]`."""

    of: Numbers
    begin: Numbers


def lists_of(rows: Iterable[Sequence[int]]) -> Lists:
    """Concatenate the rows."""
    made = list(rows)
    return Lists(list(chain.from_iterable(made)), [0, *accumulate(map(len, made))])


class Sorts(NamedTuple):
    """Properties of pass types; a pass type is the number of a kind and a stage.

    A lane is a resource queue of a device, as in `Schedule.lanes`. Sequences are lists or arrays.
    """

    lane: Numbers
    ticks: Numbers
    needs: Lists  # pass types of the inputs, without inputs of these inputs
    lag: Numbers  # of an input: ticks of its message; 0 on the same device
    turns: Numbers  # of an input: whether its kind runs the passes of a microbatch in reverse
    wakes: Lists  # other lanes that may go on after it
    most: Numbers  # maximum increase of a lane's memory while such a pass runs
    change: Numbers  # and after it has run
    rank: Numbers
    forward: Numbers  # whether it is the first pass of a microbatch
    leads: Numbers  # whether its stage is the first of its device
    of_lane: Lists


class Order(NamedTuple):
    """The pass order to fill; a pass is its index, lane after lane."""

    sorts: Sorts
    begin: Numbers  # first index of a lane; the last entry is the total
    sort: Numbers
    microbatch: Numbers
    place_of: Numbers  # [sort * num_microbatches + microbatch]; NONE or WITHOUT if missing
    limit: Numbers  # memory limit of a lane
    num_microbatches: int
    ranks: Numbers  # of a microbatch: its number for inputs that `turns`
    strict: bool  # whether passes without memory may only overtake passes that still fit
    delay: int = 0  # maximum delay of overtaken passes, in eighths of the time of a pass


class Refill(NamedTuple):
    """State of the simulation, changed in place."""

    end: Numbers  # of a pass; LATE until it has run
    following: Numbers  # of a pass: the next of its type
    waiting: Numbers  # of a pass type: its first remaining pass
    first: Numbers  # of a lane: its first remaining pass
    clock: Numbers
    held: Numbers
    forwards: Numbers  # remaining forwards
    ran: Numbers  # number of passes that have run
    led: Numbers  # allocated by the first stage
    warm: Numbers  # whether any of that has been freed
    start: Numbers  # of the next pass
    chosen: Numbers
    stale: Numbers  # whether the start and choice must be recomputed


class Numbered(NamedTuple):
    """Passes by index, resource queue (lane) after lane.

    A pass of stage s has the type len(kinds) * s + the index of its kind. `place_of` is the index
    of the pass that includes the work of a pass type and microbatch: for B and W, it may be a full
    backward.
    """

    begin: Numbers  # first index of each lane; the last entry is the total
    sort: Numbers
    microbatch: Numbers
    place_of: Numbers  # [sort * num_microbatches + microbatch]; NONE if there is none


def number(
    lanes: Sequence[Sequence[Pass]], kinds: Sequence[Kind], num_stages: int, num_microbatches: int
) -> Numbered:
    """Encode the passes of all lanes; `kinds` includes all their kinds and parts.

    Returns arrays if there are enough passes for a compiled loop, otherwise lists.

    Raises:
        IndexError: a stage or a microbatch does not exist. A wrong one could silently address
            another pass, and compiled loops do not check indices.
    """
    count, m = len(kinds), num_microbatches
    own = {kind: at for at, kind in enumerate(kinds)}
    parts = [[own[part] for part in kind.does] for kind in kinds]
    passes = list(chain.from_iterable(lanes))
    begin = [0, *accumulate(map(len, lanes))]
    sort = [count * stage + own[kind] for kind, stage, _ in passes]
    microbatch = [microbatch for _, _, microbatch in passes]
    for each, end in ((sort, count * num_stages), (microbatch, m)):
        if passes and not 0 <= min(each) <= max(each) < end:
            raise IndexError("a pass has a stage or a microbatch that does not exist")
    if len(passes) >= compiling.COMPILED_FROM:
        return _in_arrays(begin, sort, microbatch, parts, num_stages, m)
    place_of = [NONE] * (count * num_stages * m)
    for place, (one, of) in enumerate(zip(sort, microbatch, strict=True)):
        kind = one % count
        for part in parts[kind]:
            # `one - kind` is the first type of the stage.
            place_of[(one - kind + part) * m + of] = place
    return Numbered(begin, sort, microbatch, place_of)


def _in_arrays(
    begin: Sequence[int],
    sort: Sequence[int],
    microbatch: Sequence[int],
    parts: Sequence[Sequence[int]],
    num_stages: int,
    num_microbatches: int,
) -> Numbered:
    """Return the same encoding in arrays."""
    import numpy as np

    sorts, of = np.array(sort, np.int64), np.array(microbatch, np.int64)
    place_of = np.full(len(parts) * num_stages * num_microbatches, NONE, np.int64)
    kinds = sorts % len(parts)
    for kind, does in enumerate(parts):
        places = np.flatnonzero(kinds == kind)
        # Entry of part 0 for each pass, as in the loop of `number`.
        first = (sorts[places] - kind) * num_microbatches + of[places]
        for part in does:
            place_of[first + part * num_microbatches] = places
    return Numbered(np.array(begin, np.int64), sorts, of, place_of)


def make_sorts(
    kinds: Sequence[Kind],
    placement: Placement,
    amounts: Callable[[Kind, int], tuple[int, int, int]],
    message: Callable[[int, int], int] = lambda *_: 0,
) -> Sorts:
    """Return the pass types of all stages; the number is len(kinds) * stage + index in `kinds`.

    `amounts` returns, for a kind and a stage, the ticks of a pass, the increase of memory while it
    runs, and the change after it has ended; `message` the ticks from one stage to another.
    Lane d is the processor of device d.
    """
    table = NeedTable(len(placement), kinds)
    direct = table.direct_needs()
    sorts = [(kind, stage) for stage in range(len(placement)) for kind in kinds]
    number = {sort: at for at, sort in enumerate(sorts)}
    lanes = {(device, PROCESSOR): device for device in range(max(placement) + 1)}
    lane = [
        lanes.setdefault((placement[stage], kind.resource), len(lanes)) for kind, stage in sorts
    ]
    needs = [
        [number[table.parts[part], s] for part, s in direct[kind][stage]] for kind, stage in sorts
    ]
    readers: list[set[int]] = [set() for _ in sorts]
    for sort, own in enumerate(needs):
        for need in own:
            readers[need].add(lane[sort])
    wakes = [
        # Without its lane, which `finish` always marks.
        set[int]().union(*(readers[number[part, stage]] for part in kind.does)) - {lane[sort]}
        for sort, (kind, stage) in enumerate(sorts)
    ]
    ticks, takes, change = map(list, zip(*(amounts(*sort) for sort in sorts), strict=True))
    ranked, stages = [kind.by_rank for kind, _ in sorts], [stage for _, stage in sorts]
    return Sorts(
        lane=lane,
        ticks=ticks,
        needs=lists_of(needs),
        lag=[message(stages[need], stages[sort]) for sort, own in enumerate(needs) for need in own],
        turns=[ranked[need] != ranked[sort] for sort, own in enumerate(needs) for need in own],
        wakes=lists_of(map(sorted, wakes)),
        most=list(map(max, takes, change)),
        change=change,
        rank=[_rank(kind, kinds) for kind, _ in sorts],
        leads=[stage == placement.index(placement[stage]) for _, stage in sorts],
        forward=[kind.everywhere and bool(kind.takes) for kind, _ in sorts],
        of_lane=lists_of(
            [s for s in range(len(sorts)) if lane[s] == own] for own in lanes.values()
        ),
    )


def _rank(kind: Kind, kinds: Iterable[Kind]) -> int:
    reads = (read for other in kinds for read in other.reads)
    # WEIGHT is for passes that free memory and have no reader: they can wait in cool-down.
    awaited = kind.before or any(read.kind in kind.does for read in reads)
    if kind.frees and not awaited:
        return WEIGHT
    return OTHER if kind.takes else BACKWARD


def new_run(order: Order, zeros: Callable[[int], Numbers]) -> Refill:
    """Return an empty state for `fill`; `zeros(n)` makes n zeros."""
    passes, lanes = len(order.sort), len(order.limit)
    # The ten fields from `first` to `stale` have one entry per lane.
    return Refill(
        zeros(passes), zeros(passes), zeros(len(order.sorts.ticks)), *map(zeros, [lanes] * 10)
    )


def fill(order: Order, run: Refill, made: Numbers, cool: int, ahead: int) -> int:
    """Run the lanes in the order of their next starts; return the number of passes that have run.

    `made` receives the new order, as indices of the old one. A lane is in cool-down with at most
    `cool` forwards left. With `ahead` other than NONE, passes move as in `fill_warm_up`.
    """
    begin_run(order, run)
    starts, stale, lanes = run.start, run.stale, len(order.limit)
    now, lane, done = 0, lanes, 0
    while done < len(made):
        if lane == lanes:
            now = LATE
            for each in range(lanes):
                if stale[each]:
                    starts[each], run.chosen[each] = _choose(order, run, each, cool, ahead)
                    stale[each] = 0
                if starts[each] < now:
                    now, lane = starts[each], each
            if now == LATE:
                break
        # A pass that ran since the choice enables others only later; at most it prevents overtaking
        # the first pass of the lane. So only a choice that overtakes is recomputed.
        if stale[lane] and starts[lane] == now and run.chosen[lane] != run.first[lane]:
            starts[lane], run.chosen[lane] = _choose(order, run, lane, cool, ahead)
            stale[lane] = 0
        if starts[lane] > now:
            lane += 1
            continue
        place = run.chosen[lane]
        made[order.begin[lane] + run.ran[lane]] = place
        done += 1
        finish(order, run, lane, place)
        _advance(order, run, lane, place)
        # A pass of zero length may have woken an earlier lane for the same time.
        lane = lane + 1 if order.sorts.ticks[order.sort[place]] else lanes
    return done


def begin_run(order: Order, run: Refill) -> None:
    """Reset the state: no pass has run."""
    for sort in range(len(run.waiting)):
        run.waiting[sort] = NONE
    for lane in range(len(order.limit)):
        run.first[lane] = order.begin[lane]
        run.stale[lane] = 1
        # From the last pass to the first, so that `waiting` ends at the first of each type.
        for place in range(order.begin[lane + 1] - 1, order.begin[lane] - 1, -1):
            sort = order.sort[place]
            run.end[place] = LATE
            run.following[place] = run.waiting[sort]
            run.waiting[sort] = place
            run.forwards[lane] += order.sorts.forward[sort]


def ready(order: Order, run: Refill, place: int, start: int) -> int:
    """Return the start time of a pass, at least `start`; LATE if an input has not run."""
    needs, sort, microbatch = order.sorts.needs, order.sort[place], order.microbatch[place]
    for at in range(needs.begin[sort], needs.begin[sort + 1]):
        # All kinds are numbered in execution order.
        own = order.ranks[microbatch] if order.sorts.turns[at] else microbatch
        need = order.place_of[needs.of[at] * order.num_microbatches + own]
        if need == WITHOUT:
            continue
        if need == NONE or run.end[need] == LATE:
            return LATE
        there = run.end[need] + order.sorts.lag[at]
        if there > start:
            start = there
    return start


def finish(order: Order, run: Refill, lane: int, place: int) -> None:
    """Run a pass at `run.start`, and mark the lanes that may go on as stale."""
    sorts, sort = order.sorts, order.sort[place]
    run.clock[lane] = run.start[lane] + sorts.ticks[sort]
    run.end[place] = run.clock[lane]
    run.held[lane] += sorts.change[sort]
    run.ran[lane] += 1
    run.stale[lane] = 1
    for at in range(sorts.wakes.begin[sort], sorts.wakes.begin[sort + 1]):
        run.stale[sorts.wakes.of[at]] = 1


def _advance(order: Order, run: Refill, lane: int, place: int) -> None:
    """Remove a pass that has run from the remaining passes."""
    sort = order.sort[place]
    # `_choose` considers only the first remaining pass of a type, so `place` is that one.
    run.waiting[sort] = run.following[place]
    run.forwards[lane] -= order.sorts.forward[sort]
    if order.sorts.leads[sort]:
        change = order.sorts.change[sort]
        run.led[lane] += change
        if change < 0:
            run.warm[lane] = 1
    first, end = run.first[lane], order.begin[lane + 1]
    # Passes after `first` may have run already, by overtaking.
    while first < end and run.end[first] < LATE:
        first += 1
    run.first[lane] = first


def _choose(order: Order, run: Refill, lane: int, cool: int, ahead: int) -> tuple[int, int]:
    """Return the start and the index of the lane's next pass; LATE and NONE if there is none."""
    first, clock, sorts = run.first[lane], run.clock[lane], order.sorts
    if first == order.begin[lane + 1]:
        return LATE, NONE
    cooling = run.forwards[lane] <= cool
    # `leads` is the start of the first pass; LATE if it lacks memory or an input.
    leads, sort = LATE, order.sort[first]
    if run.held[lane] + sorts.most[sort] <= order.limit[lane]:
        leads = ready(order, run, first, clock)
    # Fast path: the first pass can start at once, so overtaking it gains nothing.
    if leads == clock and not (cooling and sorts.rank[sort] == WEIGHT):
        return clock, first
    best_start, best_rank, best = LATE, NONE, NONE
    for at in range(sorts.of_lane.begin[lane], sorts.of_lane.begin[lane + 1]):
        place = run.waiting[sorts.of_lane.of[at]]
        if place == NONE or (ahead != NONE and not _may_move(order, run, lane, place, ahead)):
            continue
        start = ready(order, run, place, clock)
        # `_fits` scans the row, so the cheap conditions come first.
        if start > best_start or start == LATE or not _fits(order, run, lane, place):
            continue
        rank = _rank_of(order, run, lane, place, start, leads, cooling)
        # With equal start and rank, the original order decides.
        better = start < best_start or (rank, place) < (best_rank, best)
        if rank != NONE and better:
            best_start, best_rank, best = start, rank, place
    return best_start, best


def _may_move(order: Order, run: Refill, lane: int, place: int, ahead: int) -> bool:
    """Return whether a pass may move up if only the warm-up is filled."""
    if place == run.first[lane]:
        return True
    sort = order.sort[place]
    far = order.sorts.leads[sort] and order.sorts.forward[sort] and run.led[lane] >= ahead
    return not (run.warm[lane] or far)


def _fits(order: Order, run: Refill, lane: int, place: int) -> bool:
    """Return whether the pass fits now, and the remaining passes before it still fit after it."""
    most, change, limit = order.sorts.most, order.sorts.change, order.limit[lane]
    held, sort = run.held[lane], order.sort[place]
    # A pass that allocates nothing cannot make the passes before it exceed the limit.
    if most[sort] <= 0 and not order.strict:
        return True
    if held + most[sort] > limit:
        return False
    held += change[sort]
    for before in range(run.first[lane], place):
        if run.end[before] == LATE:
            sort = order.sort[before]
            if held + most[sort] > limit:
                return False
            held += change[sort]
    return True


def _rank_of(
    order: Order, run: Refill, lane: int, place: int, start: int, leads: int, cooling: bool
) -> int:
    """Return the priority of a pass among those with the same start; NONE if it must wait."""
    sorts, sort = order.sorts, order.sort[place]
    rank = sorts.rank[sort]
    if cooling and rank == WEIGHT:
        return WEIGHT
    first = run.first[lane]
    if place == first or (cooling and _only_weights(order, run, first, place)):
        return FIRST
    # Overtaking must not delay the first pass by more than the allowed share.
    if start + sorts.ticks[sort] <= leads + order.delay * sorts.ticks[sort] // EIGHTHS:
        # Before cool-down, a W may fill idle time like any other pass.
        return min(rank, OTHER)
    return NONE


def _only_weights(order: Order, run: Refill, first: int, place: int) -> bool:
    for before in range(first, place):
        if run.end[before] == LATE and order.sorts.rank[order.sort[before]] != WEIGHT:
            return False
    return True


CALLED = (begin_run, ready, finish, _advance, _choose, _may_move, _fits, _rank_of, _only_weights)
"""Functions that `fill` calls, for the compiler."""
