"""Which activations wait in host memory, and when they are copied: put into an order of F, B and W.

The order is one that runs with more memory than there is. On every device by itself, by its times:

* Copies to the host start behind their F, in that order; copies back as late as their B allows.
* What is copied is what lives longest, and of that the fewest with which the device fits its limit:
  one line of a knapsack, so in the fluid nothing else is better. Where that is not enough because
  the link is full, it is as much as holds least.
* Room is made for a copy back before the pass in which it must start, and what was copied is let
  go of behind the pass in which its copy ends. Where passes then do not fit, what lets go comes
  earlier and what takes later.

W are dealt out anew afterwards (`refilling`): where they run decides how much is held between B and
W, and V-ZB's own order with copies runs out of memory in its tail, where W wait.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT, PARTS, RELEASE, RELOAD, Kind
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.planner.improve import NONE, Shop, run_rows
from megatron_vshape.core.planner.job_shop import Problem

_NEVER = 1 << 62


class _Chunks(NamedTuple):
    """What a device holds, one chunk of a microbatch after the other: times in ticks."""

    stage: np.ndarray
    microbatch: np.ndarray
    start: np.ndarray  # of F
    ready: np.ndarray  # F has ended
    due: np.ndarray  # B starts
    done: np.ndarray  # B has ended
    end: np.ndarray  # a W right behind B has ended
    held: np.ndarray  # from F on
    moved: np.ndarray  # of that, what a copy frees
    grows: np.ndarray  # between B and W so much more is held
    out: np.ndarray  # ticks of the copies
    back: np.ndarray


class _Copies(NamedTuple):
    """When the chunks that are copied are away, in ticks; `begins` and `returns` order the link."""

    away: np.ndarray  # of all chunks, whether it is
    begins: np.ndarray  # the copy to the host
    left: np.ndarray  # it has ended
    returns: np.ndarray  # the copy back


def with_copies(
    problem: Problem,
    parts: Shop,
    row: np.ndarray,
    slacks: Sequence[float] = (0.0,),
    throughout: Sequence[int] = (),
    room_in_host: int | None = None,
) -> Iterator[np.ndarray]:
    """Yield the order with copies, as rows of all lanes, for every slack with which it fits.

    `row` is one of F, B and W, of the shop `parts`. By the slack times what a chunk holds at most
    the limit counts as lower: where passes are late, what was let go of in time no longer is. If
    any stages are to be copied `throughout`, they are and nothing else. Else of a device no more
    waits in host memory than it has room for.
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
        if not all(device.add_to(lanes, slack) for device in devices):
            continue
        made = np.full((len(lanes), max(map(len, lanes))), NONE, np.int64)
        for lane, passes in enumerate(lanes):
            made[lane, : len(passes)] = passes
        yield made


class _Device:
    """What a device runs and holds, and what it copies."""

    def __init__(
        self,
        problem: Problem,
        device: int,
        stages: Sequence[int],
        starts: np.ndarray,
        ends: np.ndarray,
        throughout: Sequence[int],
        room_in_host: int | None,
    ) -> None:
        self.problem, self.device = problem, device
        self.chunks = _chunks_of(problem, stages, starts, ends)
        self.limit = int(problem.room[device])
        self.bounds = np.sort(starts[list(stages)].ravel())
        self.lane_of = {kind: _lane_of(problem, kind, stages[0]) for kind in (COPY_OUT, COPY_BACK)}
        self.throughout, self.room_in_host = throughout, room_in_host
        self.tried: dict[int, tuple[int, _Copies]] = {}  # by how many chunks: peak and copies

    def add_to(self, lanes: list[list[int]], slack: float) -> bool:
        """Add the passes of the device to its lanes; return whether they fit."""
        problem, chunks = self.problem, self.chunks
        copies = self._chosen(self.limit - int(slack * chunks.held.max()))
        row = _Fitted(_events(problem, chunks, copies, self.bounds), self.limit).run()
        if row is None:
            return False
        lanes[self.device] += row
        when: dict[int, list[tuple[int, int]]] = {lane: [] for lane in self.lane_of.values()}
        for at in np.flatnonzero(copies.away).tolist():
            for kind, time in ((COPY_OUT, copies.begins[at]), (COPY_BACK, copies.returns[at])):
                when[self.lane_of[kind]].append((int(time), _pass(problem, chunks, at, kind)))
        for lane, own in when.items():
            lanes[lane] += [work for _, work in sorted(own)]
        return True

    def _chosen(self, limit: int) -> _Copies:
        """Return the fewest copies of what lives longest that fit, or those that hold least."""
        chunks, problem = self.chunks, self.problem
        if self.throughout:
            return _timed(problem, chunks, np.flatnonzero(np.isin(chunks.stage, self.throughout)))
        gain = (chunks.due - chunks.ready - chunks.out - chunks.back) * chunks.moved
        ranked = np.argsort(-gain / (chunks.out + chunks.back), kind="stable")
        ranked = self._with_room_in_host(ranked[gain[ranked] > 0])

        def peak(count: int) -> int:
            if count not in self.tried:
                copies = _timed(problem, chunks, ranked[:count])
                self.tried[count] = _peak(chunks, copies, self.bounds), copies
            return self.tried[count][0]

        low, high = 0, len(ranked)
        while low < high:
            middle = (low + high) // 2
            if peak(middle) <= limit:
                high = middle
            else:
                low = middle + 1
        if peak(low) > limit:  # the link is full: of those tried, what holds least
            low = min(self.tried, key=lambda count: (self.tried[count][0], count))
        return self.tried[low][1]

    def _with_room_in_host(self, ranked: np.ndarray) -> np.ndarray:
        """Return those for which host memory has room beside the ones before them."""
        if self.room_in_host is None:
            return ranked
        chunks, there = self.chunks, np.zeros(len(self.bounds) + 1, np.int64)
        begins, ends = (np.searchsorted(self.bounds, at) for at in (chunks.ready, chunks.due))
        kept = []
        for at in ranked.tolist():
            own = there[begins[at] : ends[at]]
            if own.max(initial=0) + chunks.moved[at] <= self.room_in_host:
                own += chunks.moved[at]
                kept.append(at)
        return np.array(kept, np.int64)


def _chunks_of(
    problem: Problem, stages: Sequence[int], starts: np.ndarray, ends: np.ndarray
) -> _Chunks:
    m, sorts = problem.num_microbatches, problem.sorts
    stage, microbatch = np.repeat(stages, m), np.tile(np.arange(m), len(stages))
    forward, backward, _ = range(len(PARTS))

    def of(amounts: object, kind: Kind) -> np.ndarray:
        sort = len(problem.kinds) * stage + problem.kinds.index(kind)
        made: np.ndarray = np.asarray(amounts)[sort]
        return made

    return _Chunks(
        stage=stage,
        microbatch=microbatch,
        start=starts[stage, forward, microbatch],
        ready=ends[stage, forward, microbatch],
        due=starts[stage, backward, microbatch],
        done=ends[stage, backward, microbatch],
        end=ends[stage, backward, microbatch] + of(sorts.ticks, Kind.W),
        held=of(sorts.most, Kind.F),
        grows=np.maximum(of(sorts.change, Kind.B), 0),
        moved=of(sorts.most, RELOAD),
        out=of(sorts.ticks, COPY_OUT),
        back=of(sorts.ticks, COPY_BACK),
    )


def _lane_of(problem: Problem, kind: Kind, stage: int) -> int:
    return int(problem.sorts.lane[len(problem.kinds) * stage + problem.kinds.index(kind)])


def _pass(problem: Problem, chunks: _Chunks, at: int, kind: Kind) -> int:
    sort = len(problem.kinds) * int(chunks.stage[at]) + problem.kinds.index(kind)
    return sort * problem.num_microbatches + int(chunks.microbatch[at])


def _timed(problem: Problem, chunks: _Chunks, ranked: np.ndarray) -> _Copies:
    """Return when these are copied: back as late as they may be, and out as soon as they can."""
    count = len(chunks.stage)
    away = np.zeros(count, bool)
    begins, left, returns = (np.full(count, _NEVER) for _ in range(3))
    busy_back: list[tuple[int, int]] = []
    busy_out = busy_back if problem.costs.half_duplex else []
    for at in sorted(ranked.tolist(), key=lambda at: -chunks.due[at]):
        returns[at] = _latest(busy_back, int(chunks.due[at]), int(chunks.back[at]))
    for at in sorted(ranked.tolist(), key=lambda at: chunks.ready[at]):
        start = _soonest(busy_out, int(chunks.ready[at]), int(chunks.out[at]))
        begins[at], left[at] = start, start + chunks.out[at]
        away[at] = left[at] < returns[at]
    return _Copies(away, begins, left, returns)


def _latest(busy: list[tuple[int, int]], end: int, length: int) -> int:
    """Take the last free time of this length that ends at `end` at the latest; return its start."""
    at = bisect_left(busy, (end, end))
    while at and busy[at - 1][1] + length > end:
        at -= 1
        end = min(end, busy[at][0])
    busy.insert(at, (end - length, end))
    return end - length


def _soonest(busy: list[tuple[int, int]], start: int, length: int) -> int:
    """Take the first free time of this length from `start` on; return its start."""
    at = bisect_right(busy, (start, start))
    if at and busy[at - 1][1] > start:
        start = busy[at - 1][1]
    while at < len(busy) and busy[at][0] < start + length:
        start = max(start, busy[at][1])
        at += 1
    insort(busy, (start, start + length))
    return start


def _peak(chunks: _Chunks, copies: _Copies, bounds: np.ndarray) -> int:
    """Return the most that is held; markers stand between passes."""
    away = copies.away
    left, returns = _between(copies, bounds)
    moved = chunks.moved[away]
    times = np.concatenate((chunks.start, chunks.done, chunks.end, left, returns))
    last = -chunks.held - chunks.grows
    change = np.concatenate((chunks.held, chunks.grows, last, -moved, moved))
    return int(np.cumsum(change[np.lexsort((change, times))]).max())


def _between(copies: _Copies, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, of what is away, when it is let go of and when room is made: between passes."""
    away = copies.away
    after = np.searchsorted(bounds, copies.left[away])
    left = np.append(bounds, _NEVER)[after]
    before = np.searchsorted(bounds, copies.returns[away], side="right") - 1
    return left, bounds[np.maximum(before, 0)]


class _Event(NamedTuple):
    """A pass of a device's processor, at its time; of the same time, in the order of `turn`."""

    time: int
    turn: int
    work: int
    chunk: int
    change: int  # of what is held


_LEAVES, _WEIGHT, _RETURNS, _BACKWARD, _FORWARD = range(5)
"""The turns of a release, a W, a reload, a B and an F."""

_BEHIND = 2
"""Passes until what is copied is let go of where its F comes later than it was to."""


def _events(problem: Problem, chunks: _Chunks, copies: _Copies, bounds: np.ndarray) -> list[_Event]:
    """Return the passes of a device's processor in order."""
    made = []

    def add(turn: int, kind: Kind, times: np.ndarray, of: np.ndarray, change: np.ndarray) -> None:
        for time, at, more in zip(times.tolist(), of.tolist(), change.tolist(), strict=True):
            made.append(_Event(time, turn, _pass(problem, chunks, at, kind), at, more))

    every, away = np.arange(len(chunks.stage)), np.flatnonzero(copies.away)
    left, returns = _between(copies, bounds)
    add(_FORWARD, Kind.F, chunks.start, every, chunks.held)
    add(_BACKWARD, Kind.B, chunks.due, every, chunks.grows)
    add(_WEIGHT, Kind.W, chunks.end, every, -chunks.held - chunks.grows)
    add(_LEAVES, RELEASE, left, away, -chunks.moved[away])
    add(_RETURNS, RELOAD, returns, away, chunks.moved[away])
    return sorted(made)


class _Fitted:
    """A device's row in the order of its events, but that what does not fit waits until it does.

    What takes memory waits, one behind the other. A B whose room is still missing has what is
    copied let go of at once, which then waits for its copies.
    """

    def __init__(self, events: Sequence[_Event], limit: int) -> None:
        self.events, self.limit = events, limit
        self.row: list[int] = []
        self.held = 0
        self.ran: set[int] = set()
        self.begun: dict[int, int] = {}  # chunks whose F has run, and the passes until then
        self.waiting: deque[_Event] = deque()
        self.release_of = {each.chunk: each for each in events if each.turn == _LEAVES}
        self.reload_of = {each.chunk: each for each in events if each.turn == _RETURNS}
        self.releases = deque(self.release_of.values())
        self.late: deque[_Event] = deque()  # releases whose F had not run

    def run(self) -> list[int] | None:
        """Return the row; None if not all fits."""
        for each in self.events:
            while self.late and self._is_due(self.late[0]):
                self._add(self.late.popleft())
            if each.work in self.ran:
                continue
            if each.turn == _LEAVES and each.chunk not in self.begun:
                self.late.append(each)
            elif each.turn in (_FORWARD, _RETURNS) and (self.waiting or not self._fits(each)):
                self.waiting.append(each)
            elif each.turn == _BACKWARD and not self._make_room(each):
                return None
            else:
                self._add(each)
            while self.waiting and self._fits(self.waiting[0]):
                self._add(self.waiting.popleft())
        for each in self.late:
            self._add(each)
        return self.row if not self.waiting else None

    def _is_due(self, release: _Event) -> bool:
        begun = self.begun.get(release.chunk)
        return begun is not None and len(self.row) >= begun + _BEHIND

    def _fits(self, each: _Event) -> bool:
        return self.held + each.change <= self.limit

    def _add(self, each: _Event) -> None:
        if each.work in self.ran:
            return
        if each.turn == _RETURNS:
            self._add(self.release_of[each.chunk])
        self.row.append(each.work)
        self.ran.add(each.work)
        self.held += each.change
        if each.turn == _FORWARD:
            self.begun[each.chunk] = len(self.row)

    def _make_room(self, each: _Event) -> bool:
        """Bring back what a B reads; return whether that, and what it takes itself, fits."""
        if each.chunk not in self.begun:
            return False
        reload = self.reload_of.get(each.chunk)
        if reload is not None and reload.work not in self.ran:
            if not self._let_go(reload):
                return False
            if reload in self.waiting:
                self.waiting.remove(reload)
            self._add(reload)
        return self._let_go(each)

    def _let_go(self, for_this: _Event) -> bool:
        """Let go of what is copied, until this fits; return whether it does."""
        kept = deque[_Event]()
        while self.releases and not self._fits(for_this):
            each = self.releases.popleft()
            if each.chunk in self.begun:
                self._add(each)
            else:
                kept.append(each)
        self.releases.extendleft(reversed(kept))
        return self._fits(for_this)
