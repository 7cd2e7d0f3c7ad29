"""Step 4: passes move into the idle slots of warm-up and cool-down, within the memory.

The devices run in simulated time. One that would idle takes a later pass that is ready, if this
delays nothing and never makes it hold more than it may. Once a device has few forwards left, it
cools down: what nothing waits for but memory, as W, waits until nothing else can run.

`fill` is written for lists of whole numbers as for arrays: the planner compiles it and all that it
calls, for its own units of time and memory.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.kinds import PARTS, PROCESSOR, Kind, ScheduleError, resource_of
from megatron_vshape.core.model.numbering import (
    NONE,
    WITHOUT,
    Lists,
    Numbers,
    in_lists,
    lists_of,
    number,
    soonest,
)
from megatron_vshape.core.model.passes import NeedTable
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule

LATE = 1 << 62
"""A start that is never."""

FIRST, BACKWARD, OTHER, WEIGHT = 0, 1, 2, 3
"""Of passes that can start at the same time, the least goes first."""

EIGHTHS = 8
"""Unit of the delay that a pass may cause: an eighth of its time."""

_KINDS = (*PARTS, Kind.BW)
"""Those that the paper's schedules have."""


def reorder(schedule: Schedule, max_held: int) -> Schedule:
    """Return the schedule with idle slots filled from later in each device's order.

    All simple passes take the same time, and no device ever holds more than `max_held` stage
    activations. Once it has at most `max_held` forwards left, so few that all could be held at
    once, it cools down. Where there is no idle time, as in a stable phase that repeats cleanly,
    nothing moves.

    Raises:
        ScheduleError: a forward does not fit `max_held`, or a pass waits for one that never runs.
    """
    return _filled(schedule, max_held, max_held, NONE)


def fill_warm_up(schedule: Schedule, max_held: int, ahead: int) -> Schedule:
    """Return the schedule with idle slots filled until a device first lets go of its first stage.

    As in `reorder`, but forwards of the first stage move up only while fewer than `ahead` of
    them are held: they would take the memory that the forwards of the last stage need.

    Raises:
        ScheduleError: a forward does not fit `max_held`, or a pass waits for one that never runs.
    """
    return _filled(schedule, max_held, NONE, ahead)


def _filled(schedule: Schedule, max_held: int, cool: int, ahead: int) -> Schedule:
    order = _order_of(schedule, max_held)
    size = len(order.sort)
    run = new_run(order, lambda count: [0] * count)
    filled, order, run, made = soonest(size, fill, CALLED, order, run, [0] * size)
    if filled(order, run, made, cool, ahead) < size:
        _explain(schedule, order, run)
    passes, made = list(chain.from_iterable(schedule.order)), in_lists(made)
    rows = (made[begin:end] for begin, end in pairwise(order.begin))
    return replace(schedule, order=tuple(tuple(map(passes.__getitem__, row)) for row in rows))


def _order_of(schedule: Schedule, max_held: int) -> "Order":
    passes = number(schedule.order, _KINDS, schedule.num_stages, schedule.num_microbatches)
    return Order(
        **passes._asdict(),
        sorts=_equal_sorts(schedule.placement),
        limit=[max_held] * schedule.num_devices,
        lag=0,
        num_microbatches=schedule.num_microbatches,
        slices=1,  # these numbers are those of the slices, which do not change their turns
        strict=False,
    )


@lru_cache(maxsize=4)
def _equal_sorts(placement: Placement) -> "Sorts":
    """Return that every simple pass takes 1, and that a stage's activation is held from F to W."""

    def amounts(kind: Kind, _stage: int) -> tuple[int, int, int]:
        takes = bool(kind.takes)
        return len(kind.does), takes, takes + bool(kind.keeps) - bool(kind.frees)

    return make_sorts(_KINDS, placement, amounts)


def _explain(schedule: Schedule, order: "Order", run: "Refill") -> None:
    """Raise ScheduleError for what is stuck: only the memory stops what has its inputs."""
    heads = [
        (device, place) for device, place in enumerate(run.first) if place < order.begin[device + 1]
    ]
    full = [(device, place) for device, place in heads if ready(order, run, place, 0) < LATE]
    if full:
        device, place = min(full, key=lambda each: order.microbatch[each[1]])  # others wait for it
        work = schedule.order[device][place - order.begin[device]]
        raise ScheduleError(
            f"{work} does not fit on device {device}, which holds {run.held[device]} "
            f"stage activations then and its limit is {order.limit[device]}"
        )
    simulate(schedule)  # raises: what a pass waits for never runs


class Sorts(NamedTuple):
    """What passes of one sort, a kind and a stage, have in common; a sort is a number.

    A lane is a resource of a device, as in `Schedule.lanes`. Sequences are lists or arrays.
    """

    lane: Numbers
    ticks: Numbers
    needs: Lists  # sorts that it reads, but what another of them waits for
    away: Numbers  # of a need: whether its result comes from another device
    turns: Numbers  # of a need: whether slices of a microbatch are in turn there, and not here
    wakes: Lists  # other lanes that may go on when it has run
    most: Numbers  # what a lane holds more at most while such a pass runs
    change: Numbers  # and when it has run
    rank: Numbers
    forward: Numbers  # whether a microbatch comes in with it
    leads: Numbers  # whether its stage is the first of its device
    of_lane: Lists


class Order(NamedTuple):
    """The order to fill; a pass is its place in it, lane after lane."""

    sorts: Sorts
    begin: Numbers  # of a lane; at last where all end
    sort: Numbers
    microbatch: Numbers
    place_of: Numbers  # [sort * num_microbatches + microbatch], NONE or WITHOUT if there is none
    limit: Numbers  # of a lane
    lag: int  # ticks that a result takes to another device
    num_microbatches: int
    slices: int  # of a microbatch; of what has the last first, the number is that of its turn
    strict: bool  # whether even what takes no memory moves up only where all it passes still fits
    delay: int = 0  # by how many eighths of its time what moves up may delay what it passes


class Refill(NamedTuple):
    """What has run so far, changed in place."""

    end: Numbers  # of a pass; LATE until it has run
    following: Numbers  # of a pass: the next of its sort
    waiting: Numbers  # of a sort: its first pass left
    first: Numbers  # of a lane: its first pass left
    clock: Numbers
    held: Numbers
    forwards: Numbers  # left to run
    ran: Numbers  # so many passes
    led: Numbers  # held of the first stage
    warm: Numbers  # whether it has let go of any of that
    start: Numbers  # of what it runs next
    chosen: Numbers
    stale: Numbers  # whether these two must be looked at again


def make_sorts(
    kinds: Sequence[Kind],
    placement: Placement,
    amounts: Callable[[Kind, int], tuple[int, int, int]],
    half_duplex: bool = False,
) -> Sorts:
    """Return the sorts of all stages, in lists; a sort is len(kinds) * stage + place in `kinds`.

    `amounts` are, of a kind and a stage, the ticks of a pass, what is held more while it runs, and
    what is when it has ended. Lane d is the processor of device d.
    """
    table = NeedTable(len(placement), kinds)
    direct = table.direct_needs()
    sorts = [(kind, stage) for stage in range(len(placement)) for kind in kinds]
    number = {sort: at for at, sort in enumerate(sorts)}
    lanes = {(device, PROCESSOR): device for device in range(max(placement) + 1)}
    lane = [
        lanes.setdefault((placement[stage], resource_of(kind, half_duplex)), len(lanes))
        for kind, stage in sorts
    ]
    needs = [
        [number[table.parts[part], s] for part, s in direct[kind][stage]] for kind, stage in sorts
    ]
    readers: list[set[int]] = [set() for _ in sorts]
    for sort, own in enumerate(needs):
        for need in own:
            readers[need].add(lane[sort])
    wakes = [
        set[int]().union(*(readers[number[part, stage]] for part in kind.does)) - {lane[sort]}
        for sort, (kind, stage) in enumerate(sorts)
    ]
    ticks, takes, change = map(list, zip(*(amounts(*sort) for sort in sorts), strict=True))
    device = [placement[stage] for _, stage in sorts]
    ranked = [kind.by_rank for kind, _ in sorts]
    return Sorts(
        lane=lane,
        ticks=ticks,
        needs=lists_of(needs),
        away=[device[need] != device[sort] for sort, own in enumerate(needs) for need in own],
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
    awaited = kind.before or any(read.kind in kind.does for read in reads)
    if kind.frees and not awaited:
        return WEIGHT
    return OTHER if kind.takes else BACKWARD


def new_run(order: Order, zeros: Callable[[int], Numbers]) -> Refill:
    """Return what `fill` works with, made of `zeros`, which makes so many numbers."""
    passes, lanes = len(order.sort), len(order.limit)
    return Refill(
        zeros(passes), zeros(passes), zeros(len(order.sorts.ticks)), *map(zeros, [lanes] * 10)
    )


def fill(order: Order, run: Refill, made: Numbers, cool: int, ahead: int) -> int:
    """Let the lanes run in the order of their next starts; return how many passes have run.

    `made` is the new order, of places in the old one. A lane cools down when it has at most `cool`
    forwards left. With `ahead` other than NONE, `fill_warm_up` says what may move.
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
        # what ran before it now is ready later, and at most keeps others from passing its first
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
        # what takes no time may have woken a lane before it for now
        lane = lane + 1 if order.sorts.ticks[order.sort[place]] else lanes
    return done


def begin_run(order: Order, run: Refill) -> None:
    """Let nothing have run yet."""
    for sort in range(len(run.waiting)):
        run.waiting[sort] = NONE
    for lane in range(len(order.limit)):
        run.first[lane] = order.begin[lane]
        run.stale[lane] = 1
        for place in range(order.begin[lane + 1] - 1, order.begin[lane] - 1, -1):
            sort = order.sort[place]
            run.end[place] = LATE
            run.following[place] = run.waiting[sort]
            run.waiting[sort] = place
            run.forwards[lane] += order.sorts.forward[sort]


def ready(order: Order, run: Refill, place: int, start: int) -> int:
    """Return when the pass can start, from `start` on; LATE while what it reads has not run."""
    needs, sort, microbatch = order.sorts.needs, order.sort[place], order.microbatch[place]
    for at in range(needs.begin[sort], needs.begin[sort + 1]):
        own = microbatch
        if order.slices > 1 and order.sorts.turns[at]:
            own += order.slices - 1 - 2 * (microbatch % order.slices)
        need = order.place_of[needs.of[at] * order.num_microbatches + own]
        if need == WITHOUT:
            continue
        if need == NONE or run.end[need] == LATE:
            return LATE
        there = run.end[need] + order.lag * order.sorts.away[at]
        if there > start:
            start = there
    return start


def finish(order: Order, run: Refill, lane: int, place: int) -> None:
    """Run a pass from `run.start` on, and have all lanes looked at that may go on then."""
    sorts, sort = order.sorts, order.sort[place]
    run.clock[lane] = run.start[lane] + sorts.ticks[sort]
    run.end[place] = run.clock[lane]
    run.held[lane] += sorts.change[sort]
    run.ran[lane] += 1
    run.stale[lane] = 1
    for at in range(sorts.wakes.begin[sort], sorts.wakes.begin[sort + 1]):
        run.stale[sorts.wakes.of[at]] = 1


def _advance(order: Order, run: Refill, lane: int, place: int) -> None:
    """Leave the pass, which has run, out of what is left."""
    sort = order.sort[place]
    run.waiting[sort] = run.following[place]
    run.forwards[lane] -= order.sorts.forward[sort]
    if order.sorts.leads[sort]:
        change = order.sorts.change[sort]
        run.led[lane] += change
        if change < 0:
            run.warm[lane] = 1
    first, end = run.first[lane], order.begin[lane + 1]
    while first < end and run.end[first] < LATE:
        first += 1
    run.first[lane] = first


def _choose(order: Order, run: Refill, lane: int, cool: int, ahead: int) -> tuple[int, int]:
    """Return the start and the place of what the lane runs next; LATE and NONE if nothing."""
    first, clock, sorts = run.first[lane], run.clock[lane], order.sorts
    if first == order.begin[lane + 1]:
        return LATE, NONE
    cooling = run.forwards[lane] <= cool
    leads, sort = LATE, order.sort[first]
    if run.held[lane] + sorts.most[sort] <= order.limit[lane]:
        leads = ready(order, run, first, clock)
    if leads == clock and not (cooling and sorts.rank[sort] == WEIGHT):
        return clock, first
    best_start, best_rank, best = LATE, NONE, NONE
    for at in range(sorts.of_lane.begin[lane], sorts.of_lane.begin[lane + 1]):
        place = run.waiting[sorts.of_lane.of[at]]
        if place == NONE or (ahead != NONE and not _may_move(order, run, lane, place, ahead)):
            continue
        start = ready(order, run, place, clock)
        if start > best_start or start == LATE or not _fits(order, run, lane, place):
            continue
        rank = _rank_of(order, run, lane, place, start, leads, cooling)
        better = start < best_start or (rank, place) < (best_rank, best)
        if rank != NONE and better:
            best_start, best_rank, best = start, rank, place
    return best_start, best


def _may_move(order: Order, run: Refill, lane: int, place: int, ahead: int) -> bool:
    """Return whether a pass may move up where only the warm-up is filled."""
    if place == run.first[lane]:
        return True
    sort = order.sort[place]
    far = order.sorts.leads[sort] and order.sorts.forward[sort] and run.led[lane] >= ahead
    return not (run.warm[lane] or far)


def _fits(order: Order, run: Refill, lane: int, place: int) -> bool:
    """Return whether the pass at `place` can run now, and those left before it still after it."""
    most, change, limit = order.sorts.most, order.sorts.change, order.limit[lane]
    held, sort = run.held[lane], order.sort[place]
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
    """Return how the pass stands among those of its start; NONE if it must wait."""
    sorts, sort = order.sorts, order.sort[place]
    rank = sorts.rank[sort]
    if cooling and rank == WEIGHT:
        return WEIGHT
    first = run.first[lane]
    if place == first or (cooling and _only_weights(order, run, first, place)):
        return FIRST
    if start + sorts.ticks[sort] <= leads + order.delay * sorts.ticks[sort] // EIGHTHS:
        return min(rank, OTHER)
    return NONE


def _only_weights(order: Order, run: Refill, first: int, place: int) -> bool:
    for before in range(first, place):
        if run.end[before] == LATE and order.sorts.rank[order.sort[before]] != WEIGHT:
            return False
    return True


CALLED = (begin_run, ready, finish, _advance, _choose, _may_move, _fits, _rank_of, _only_weights)
"""Functions that `fill` calls, for the compiler."""
