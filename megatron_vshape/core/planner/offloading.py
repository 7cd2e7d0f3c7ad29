"""Search for orders with offloading to host memory: which activations to copy, and when.

The search starts from orders planned for more memory than the limit (`LEVELS`), and inserts copies
into them. The local search then moves copies and their markers like any pass.

Each device is handled separately, with the times of the order:

* Copies to the host start after their F, in that order. Copies back start as late as their B
  allows.
* The activations that live longest are offloaded, as few as the limit requires. This is a knapsack
  with one constraint, so the greedy choice is optimal up to rounding. If the link is full, the
  selection with the smallest peak is used.
* Memory is allocated before the pass in which a copy back must start, and freed after the pass in
  which a copy to the host ends. If passes then do not fit, frees move earlier and allocations
  later.

W are placed again afterwards (`job_shop.refill`), because they determine the memory between B and
W. The published order of V-ZB with copies exceeds the memory in its cool-down, where W wait.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf, isinf
from operator import lt
from typing import Any, NamedTuple

import numpy as np

from megatron_vshape.core.check.bounds import least_memory
from megatron_vshape.core.compiling import compiled
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
from megatron_vshape.core.model.schedule import ORDER_ALONE, MemoryStrategy
from megatron_vshape.core.planner.improve import NONE, JobShop, run_rows
from megatron_vshape.core.planner.job_shop import Problem, make_problem, padded, refill
from megatron_vshape.core.planner.orders import STARTS, VALUE, Candidate, PlacementSearch, Run
from megatron_vshape.core.planner.race import best_of

_NEVER = 1 << 62

_LEAVES, _WEIGHT, _RETURNS, _BACKWARD, _FORWARD = range(5)
"""Order of events at the same time: frees first."""

_KINDS = (RELEASE, Kind.W, RELOAD, Kind.B, Kind.F, COPY_OUT, COPY_BACK)
"""Kinds of these events, then the copies of the two links."""

_BEHIND = 2
"""Passes between a delayed F and the release of its activations."""


class _Chunks(NamedTuple):
    """Activations of a device, one entry per chunk and microbatch; times in ticks."""

    stage: np.ndarray
    passes: np.ndarray  # [chunk, kind], those of `_KINDS`
    start: np.ndarray  # of F
    ready: np.ndarray  # F has ended
    due: np.ndarray  # B starts
    done: np.ndarray  # B has ended
    end: np.ndarray  # a W right after B has ended
    held: np.ndarray  # memory from F on
    moved: np.ndarray  # part of it that a copy frees
    grows: np.ndarray  # additional memory between B and W
    out: np.ndarray  # ticks of the copies
    back: np.ndarray


class _Copies(NamedTuple):
    """Times of the offloaded activations, in ticks; `begins` and `returns` order the link."""

    away: np.ndarray  # whether a chunk is offloaded
    begins: np.ndarray  # start of the copy to the host
    left: np.ndarray  # end of it
    returns: np.ndarray  # start of the copy back


class _Events(NamedTuple):
    """Passes of a device's compute lane in order of time, with their chunks."""

    turn: np.ndarray
    chunk: np.ndarray
    change: np.ndarray  # of the memory
    release_of: np.ndarray  # by chunk; NONE if it is not offloaded
    reload_of: np.ndarray


class _Row(NamedTuple):
    """A device's row under construction; changed in place."""

    events: np.ndarray
    ran: np.ndarray  # [event] whether it is in the row
    begun: np.ndarray  # [chunk] number of events up to its F; NONE before that
    sums: np.ndarray  # number of events, and memory after them


def with_copies(
    problem: Problem,
    parts: JobShop,
    row: np.ndarray,
    slacks: Sequence[float] = (0.0,),
    throughout: Sequence[int] = (),
    room_in_host: float = inf,
) -> Iterator[np.ndarray]:
    """Yield the order with copies, as rows of all lanes, for every slack that fits.

    Args:
        problem: costs and limits.
        parts: shop of F, B and W.
        row: order of F, B and W in that shop.
        slacks: reductions of the limit, in multiples of the largest chunk, for choosing the copies.
            They leave room for passes that run late, whose memory is freed late.
        throughout: stages to offload in all microbatches; if there are any, nothing else is
            offloaded.
        room_in_host: host memory limit per device in units, if `throughout` is empty.
    """
    m = problem.num_microbatches
    place, head = np.empty(row.size, np.int32), np.empty(row.size, np.int64)
    for own in row:
        place[own] = np.arange(len(own))
    run_rows(parts, row, place, head)
    ends = head.reshape(len(problem.placement), len(PARTS), m)
    starts = (head - parts.ticks).reshape(ends.shape)
    stages = stages_of(problem.placement, problem.num_devices)
    devices = [
        _Device(problem, device, own, starts, ends, throughout, room_in_host)
        for device, own in enumerate(stages)
    ]
    for slack in slacks:
        lanes: list[list[int]] = [[] for _ in problem.room]
        if all(device.add_to(lanes, slack) for device in devices):
            yield padded(lanes)


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
        room_in_host: float,
    ) -> None:
        self.device = device
        self.chunks = _chunks_of(problem, stages, starts, ends)
        self.limit = int(problem.room[device])
        self.bounds = np.sort(starts[list(stages)].ravel())
        self.lanes = [_of(problem, problem.sorts.lane, kind, stages[0]) for kind in _KINDS[-2:]]
        self.throughout, self.room_in_host = throughout, room_in_host
        self.tried: dict[int, tuple[int, _Copies]] = {}  # by number of copies: peak and copies

    def add_to(self, lanes: list[list[int]], slack: float) -> bool:
        """Add the device's passes to its lanes; return whether they fit."""
        chunks = self.chunks
        copies = self._chosen(self.limit - int(slack * chunks.held.max()))
        events = _events(chunks, copies, self.bounds)
        row = np.empty(len(events.turn), np.int64)
        if not _fit(events, self.limit, row):
            return False
        lanes[self.device] += chunks.passes[events.chunk[row], events.turn[row]].tolist()
        away = np.flatnonzero(copies.away)
        times = np.concatenate((copies.begins[away], copies.returns[away]))
        passes = np.concatenate((chunks.passes[away, -2], chunks.passes[away, -1]))
        lane_of = np.repeat(self.lanes, len(away))
        order = np.lexsort((passes, times))
        for lane, work in zip(lane_of[order].tolist(), passes[order].tolist(), strict=True):
            lanes[lane].append(work)
        return True

    def _chosen(self, limit: int) -> _Copies:
        """Return the fewest copies that fit, longest lifetimes first, or the least peak."""
        chunks = self.chunks
        if self.throughout:
            every = np.flatnonzero(np.isin(chunks.stage, self.throughout))
            return _timed(chunks, every)
        # Memory times the time for which it is free; ranked per time of the link, the scarce
        # resource.
        gain = (chunks.due - chunks.ready - chunks.out - chunks.back) * chunks.moved
        ranked = np.argsort(-gain / (chunks.out + chunks.back), kind="stable")
        ranked = self._with_room_in_host(ranked[gain[ranked] > 0])

        def peak(count: int) -> int:
            if count not in self.tried:
                copies = _timed(chunks, ranked[:count])
                self.tried[count] = _peak(chunks, copies, self.bounds), copies
            return self.tried[count][0]

        # More copies lower the peak until the link is full, so the fewest are found by bisection.
        low, high = 0, len(ranked)
        while low < high:
            middle = (low + high) // 2
            if peak(middle) <= limit:
                high = middle
            else:
                low = middle + 1
        if peak(low) > limit:  # the link is full: use the smallest peak that was tried
            low = min(self.tried, key=lambda count: (self.tried[count][0], count))
        return self.tried[low][1]

    def _with_room_in_host(self, ranked: np.ndarray) -> np.ndarray:
        """Return the chunks that fit in host memory, better ranks first."""
        if isinf(self.room_in_host):
            return ranked
        chunks, there = self.chunks, np.zeros(len(self.bounds) + 1, np.int64)
        begins, ends = (np.searchsorted(self.bounds, at) for at in (chunks.ready, chunks.due))
        kept = []
        for at in ranked.tolist():
            # A view: the update below changes the host's memory during these passes.
            own = there[begins[at] : ends[at]]
            if own.max(initial=0) + chunks.moved[at] <= self.room_in_host:
                own += chunks.moved[at]
                kept.append(at)
        return np.array(kept, np.int64)


def _of(problem: Problem, amounts: object, kind: Kind, stage: np.ndarray | int) -> Any:
    """Return the values of the sorts of a kind, at these stages."""
    return np.asarray(amounts)[len(problem.kinds) * stage + problem.kinds.index(kind)]


def _chunks_of(
    problem: Problem, stages: Sequence[int], starts: np.ndarray, ends: np.ndarray
) -> _Chunks:
    m, sorts = problem.num_microbatches, problem.sorts
    stage, microbatch = np.repeat(stages, m), np.tile(np.arange(m), len(stages))
    forward, backward, _ = range(len(PARTS))
    rank = problem.turned(microbatch)  # in kinds of the opposite order
    every = np.arange(len(problem.placement) * len(problem.kinds))
    of = partial(_of, problem, stage=stage)
    return _Chunks(
        stage=stage,
        passes=np.stack(
            [of(every, kind) * m + (rank if kind.by_rank else microbatch) for kind in _KINDS],
            axis=1,
        ),
        start=starts[stage, forward, microbatch],
        ready=ends[stage, forward, microbatch],
        due=starts[stage, backward, rank],
        done=ends[stage, backward, rank],
        end=ends[stage, backward, rank] + of(sorts.ticks, Kind.W),
        held=of(sorts.peak, Kind.F),
        grows=np.maximum(of(sorts.change, Kind.B), 0),
        moved=of(sorts.peak, RELOAD),
        out=of(sorts.ticks, COPY_OUT),
        back=of(sorts.ticks, COPY_BACK),
    )


def _timed(chunks: _Chunks, ranked: np.ndarray) -> _Copies:
    """Schedule these copies: back as late as possible, out as early as possible."""
    count = len(chunks.stage)
    begins, left, returns = (np.full(count, _NEVER) for _ in range(3))
    busy = np.empty((2, 2 * count, 2), np.int64)
    back = ranked[np.argsort(-chunks.due[ranked], kind="stable")]
    _book(busy[0], back, chunks.due, chunks.back, True, returns)
    out = ranked[np.argsort(chunks.ready[ranked], kind="stable")]
    _book(busy[1], out, chunks.ready, chunks.out, False, begins)
    left[ranked] = begins[ranked] + chunks.out[ranked]
    away = np.zeros(count, bool)
    # A copy that would return before it has left is not made, though its link time stays booked.
    away[ranked] = left[ranked] < returns[ranked]
    return _Copies(away, begins, left, returns)


@compiled
def _book(
    busy: np.ndarray,
    ranked: np.ndarray,
    due: np.ndarray,
    ticks: np.ndarray,
    late: bool,
    starts: np.ndarray,
) -> None:
    """Book copies one after the other in the free time of a link; set their starts.

    With `late` a copy is the last that ends by `due`, else the first that starts from `due` on.
    `busy` has room for the sorted starts and ends of the copies on the link.
    """
    for count, chunk in enumerate(ranked):
        time, length = due[chunk], ticks[chunk]
        at = count
        while at > 0 and busy[at - 1, 0] >= time:
            at -= 1
        if late:
            # Try earlier gaps until one is long enough.
            while at > 0 and busy[at - 1, 1] + length > time:
                at -= 1
                time = min(time, busy[at, 0])
            time -= length
        else:
            if at > 0:
                time = max(time, busy[at - 1, 1])
            # Try later gaps until one is long enough.
            while at < count and busy[at, 0] < time + length:
                time = max(time, busy[at, 1])
                at += 1
        for after in range(count, at, -1):
            busy[after, 0], busy[after, 1] = busy[after - 1, 0], busy[after - 1, 1]
        busy[at, 0], busy[at, 1] = time, time + length
        starts[chunk] = time


def _peak(chunks: _Chunks, copies: _Copies, bounds: np.ndarray) -> int:
    """Return the peak memory; releases and reloads run between passes."""
    away = copies.away
    left, returns = _between(copies, bounds)
    moved = chunks.moved[away]
    times = np.concatenate((chunks.start, chunks.done, chunks.end, left, returns))
    # Without `moved`: the reload has allocated it again.
    last = -chunks.held - chunks.grows
    change = np.concatenate((chunks.held, chunks.grows, last, -moved, moved))
    # At equal times frees come before allocations.
    return int(np.cumsum(change[np.lexsort((change, times))]).max())


def _between(copies: _Copies, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the release and reload times of offloaded chunks, moved to the ends of passes."""
    away = copies.away
    after = np.searchsorted(bounds, copies.left[away])
    left = np.append(bounds, _NEVER)[after]
    # A reload allocates before the pass during which its copy starts.
    before = np.searchsorted(bounds, copies.returns[away], side="right") - 1
    return left, bounds[np.maximum(before, 0)]


def _events(chunks: _Chunks, copies: _Copies, bounds: np.ndarray) -> _Events:
    """Return the passes of a device's compute lane in order of time."""
    every, away = np.arange(len(chunks.stage)), np.flatnonzero(copies.away)
    left, returns = _between(copies, bounds)
    parts = (
        (left, away, -chunks.moved[away]),
        (chunks.end, every, -chunks.held - chunks.grows),
        (returns, away, chunks.moved[away]),
        (chunks.due, every, chunks.grows),
        (chunks.start, every, chunks.held),
    )
    time, chunk, change = (np.concatenate(each) for each in zip(*parts, strict=True))
    turn = np.repeat(np.arange(len(parts)), [len(of) for _, of, _ in parts])
    order = np.lexsort((chunks.passes[chunk, turn], turn, time))
    turn, chunk, change = turn[order], chunk[order], change[order]
    release_of, reload_of = (np.full(len(every), NONE) for _ in range(2))
    for events, of in ((_LEAVES, release_of), (_RETURNS, reload_of)):
        own = np.flatnonzero(turn == events)
        of[chunk[own]] = own
    return _Events(turn, chunk, change, release_of, reload_of)


@compiled
def _fit(events: _Events, limit: int, row: np.ndarray) -> bool:
    """Fill the row of a device in order of its events, with those that do not fit delayed.

    Events that allocate wait in a queue until they fit. If a B does not fit, activations are
    released early; the release then waits for its copy. Returns whether all events fit.
    """
    count = len(events.turn)
    made = _Row(
        row,
        np.zeros(count, np.bool_),
        np.full(len(events.release_of), NONE),
        np.zeros(2, np.int64),
    )
    waiting, first, last = np.empty(count, np.int64), 0, 0
    late, due, listed = np.empty(count, np.int64), 0, 0  # releases whose F had not run
    for at in range(count):
        while due < listed and _is_due(events, made, late[due]):
            _add(events, made, late[due])
            due += 1
        # An event may already be in the row, added to make room for an earlier B.
        turn = events.turn[at]
        if made.ran[at]:
            continue
        if turn == _LEAVES and made.begun[events.chunk[at]] == NONE:
            late[listed] = at
            listed += 1
        # Behind a waiting event, later ones wait too: overtaking could starve it.
        elif turn in (_FORWARD, _RETURNS) and (first < last or not _fits(events, made, at, limit)):
            waiting[last] = at
            last += 1
        elif turn == _BACKWARD and not _make_room(events, made, at, limit):
            return False
        else:
            _add(events, made, at)
        first = _admit(events, made, waiting, first, last, limit)
    for at in late[due:listed]:
        _add(events, made, at)
    return first == last


@compiled
def _admit(
    events: _Events, made: _Row, waiting: np.ndarray, first: int, last: int, limit: int
) -> int:
    """Add waiting events as long as they fit; return the first that still waits."""
    while first < last:
        if not made.ran[waiting[first]]:
            if not _fits(events, made, waiting[first], limit):
                break
            _add(events, made, waiting[first])
        first += 1
    return first


@compiled
def _is_due(events: _Events, made: _Row, at: int) -> bool:
    begun = made.begun[events.chunk[at]]
    is_due: bool = begun != NONE and made.sums[0] >= begun + _BEHIND
    return is_due


@compiled
def _fits(events: _Events, made: _Row, at: int, limit: int) -> bool:
    fits: bool = made.sums[1] + events.change[at] <= limit
    return fits


@compiled
def _add(events: _Events, made: _Row, at: int) -> None:
    """Add an event if it is missing, and before a reload its release."""
    if made.ran[at]:
        return
    chunk, turn = events.chunk[at], events.turn[at]
    release = events.release_of[chunk]
    # Its memory must be free before it is allocated a second time.
    if turn == _RETURNS and not made.ran[release]:
        _append(events, made, release)
    _append(events, made, at)
    if turn == _FORWARD:
        made.begun[chunk] = made.sums[0]


@compiled
def _append(events: _Events, made: _Row, at: int) -> None:
    made.events[made.sums[0]] = at
    made.ran[at] = True
    made.sums[0] += 1
    made.sums[1] += events.change[at]


@compiled
def _make_room(events: _Events, made: _Row, at: int, limit: int) -> bool:
    """Reload the activations of a B; return whether they and the B's memory fit."""
    chunk = events.chunk[at]
    # F is still in the queue, so B cannot run at all.
    if made.begun[chunk] == NONE:
        return False
    reload = events.reload_of[chunk]
    if reload != NONE and not made.ran[reload]:
        if not _let_go(events, made, reload, limit):
            return False
        _add(events, made, reload)
    return _let_go(events, made, at, limit)


@compiled
def _let_go(events: _Events, made: _Row, at: int, limit: int) -> bool:
    """Release offloaded activations until the event fits; return whether it does."""
    # In order of time: the copies of the first releases end soonest.
    for release in range(len(events.turn)):
        if _fits(events, made, at, limit):
            return True
        if events.turn[release] == _LEAVES and made.begun[events.chunk[release]] != NONE:
            _add(events, made, release)
    return _fits(events, made, at, limit)


LEVELS = ((1.0, 3), (0.75, 2), (0.5, 2), (0.25, 2))
"""Memory levels of the initial orders, and the number of orders per level that get copies.

At level x, orders are planned for the limit plus x times the memory that is missing to that of
1F1B, or times the host memory if that is less. They are of published blocks. Below the first level,
steady orders are added if host memory is less than the missing memory: at d=8, m=32, 4 chunks, a
copy as long as an F and 8 chunks in host memory, blocks alone lead to 66.0, with steady orders to
35.25. In other cases steady orders need a quarter of the time and improved one cell of 11 (6
chunks, a copy as long as two F: 15.65, without 16.1); a local search of that length
(`search.TURNS_OF_TRADES`) improves 6 of them.
"""

STEADY = 4
"""The steady orders of a level have 1 / STEADY of the budget."""

SLACKS = (0.0, 0.5, 1.0, 2.0)
"""Reductions of the limit, in chunks, for choosing the activations to offload."""


class _Base(NamedTuple):
    """An order of F, B and W that may exceed the memory limit."""

    name: str
    row: np.ndarray


Bases = dict[tuple[Placement, int], list[_Base]]
"""Orders that copies are inserted into, by placement and passes of a kind and stage."""


def ways_to_save(copies: bool, placement: Placement) -> Iterator[MemoryStrategy]:
    """Yield the strategies to compare: no offloading and, with `copies`, two that offload.

    Activations of the first chunks live longest, so published schedules offload all of these.
    """
    yield ORDER_ALONE
    if copies:
        first = tuple(stage for stage, chunk in enumerate(chunks_of(placement)) if not chunk)
        yield MemoryStrategy(copies=True, throughout=first, text="offload all of chunk 0")
        yield MemoryStrategy(copies=True, text="offload")


class OffloadSearch(PlacementSearch):
    """Search like `PlacementSearch`, with activations of some microbatches offloaded."""

    kinds = (*PARTS, *OFFLOAD)

    def __init__(
        self, problem: Problem, seed: int, way: MemoryStrategy, bases: Bases | None = None
    ) -> None:
        super().__init__(problem, seed, way)
        self.bases: Bases = {} if bases is None else bases

    def begin(self, budget: int, run: Run) -> list[Candidate]:
        """Return the orders to improve: orders planned for more memory, with copies inserted."""
        self._parts_shop()
        own = self.problem.placement, self.problem.num_microbatches
        if own not in self.bases:
            made = (self._bases(level, count, budget // STEADY, run) for level, count in LEVELS)
            self.bases[own] = [base for some in made for base in some]
        found = [each for made in run(self._with_copies, self.bases[own]) for each in made]
        for each in found:
            self.keep(each)
        return best_of(found, STARTS, VALUE)

    def _bases(self, level: float, count: int, budget: int, run: Run) -> Iterator[_Base]:
        """Yield orders planned for more memory than the limit."""
        problem, held = self.problem, self.problem.costs.held_after_forward_bytes
        devices = problem.num_devices
        stages = stages_of(problem.placement, devices)
        most = [problem.most_useful * sum(held[stage] for stage in own) for own in stages]
        ample = [limit + problem.moved_limit for limit in problem.limits]
        is_scarce = level < 1 and any(map(lt, ample, most))
        least = least_memory(problem.costs, problem.placement, devices)
        # At least the minimum of any schedule, or `make_problem` rejects them.
        limits = [
            max(need, limit + level * (max(limit, min(each)) - limit))
            for need, limit, *each in zip(least, problem.limits, most, ample, strict=True)
        ]
        asked = make_problem(
            problem.costs,
            devices,
            problem.num_microbatches,
            limits,
            problem.objective,
            problem.placement,
            PARTS,
        )
        search = PlacementSearch(asked, self.seed)
        for each in best_of(search.begin(budget if is_scarce else 0, run), count, VALUE):
            yield _Base(f"{each.name} at {level:.0%}", search.whole_row(each))

    def _with_copies(self, base: _Base) -> list[Candidate]:
        """Return the order with copies inserted, in every variant that fits."""
        problem, m = self.problem, self.problem.num_microbatches
        none = np.zeros(1, np.int64)
        made = []
        slacks: Sequence[float] = SLACKS[:1] if self.way.throughout else SLACKS
        throughout, in_host, shop = self.way.throughout, problem.room_for_moved, self._parts_shop()
        for rows in with_copies(problem, shop, base.row, slacks, throughout, in_host):
            made += [
                self._made(f"{base.name}, copies", 1, m, row, none, none)
                for row in (rows, refill(problem, rows, m))
            ]
        return [each for each in made if each is not None]

    def _found(self) -> tuple[int, np.ndarray, str]:
        if self.best is None and not isinf(self.problem.moved_limit):
            raise ScheduleError(
                f"no order was found within the limits {self.problem.limits} and with at most "
                f"{self.problem.moved_limit:g} of a device in host memory: make one of the two "
                "larger"
            )
        return super()._found()
