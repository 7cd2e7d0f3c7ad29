"""Improvement of a given order within the memory: the inner loops of the adaptive scheduler.

An order is a job shop whose machines are lanes, the resources of devices: every pass waits for the
pass before it in its lane and for those whose results it reads, but what another of them waits for
(`Shop.before`). `heads` are the earliest ends, `tails` the longest work after an end, so
head + tail > makespan never, and = makespan on a critical path.

The walk moves a pass a few places, or exchanges two of a lane, and takes whatever does not make the
objective grow. Times are whole ticks, so that ties are exact: with equal costs most moves are ties,
and walking along them is what finds the way out. Decisions depend on whole numbers alone: every
machine makes the same plan. Without numba the same code runs as plain Python, a hundred times
slower.
"""

from typing import NamedTuple

import numpy as np

from megatron_vshape.core.compiling import compiled

NONE = -1
REACH = 12
"""A pass moves at most so many places; farther moves are found as several."""
MANY = 8
"""So many microbatches of a sort move at once, at most."""
_MASK = 0xFFFFFFFF
SPARED = 2
"""One of so many passes that are on no critical path is moved, to make room."""
EXCHANGED = 6
"""So many sixteenths of the draws exchange two passes."""


class Shop(NamedTuple):
    """The passes and their costs; a pass is a number, sort by sort.

    A pass reads `before`, which comes `lag` ticks later across devices. It is read by `after` of
    other lanes, which it reaches `after_lag` later, and by `behind` of its own.
    """

    before: np.ndarray  # [pass, way], NONE where there are fewer
    lag: np.ndarray
    after: np.ndarray
    after_lag: np.ndarray
    behind: np.ndarray
    ticks: np.ndarray  # of a pass
    lane: np.ndarray
    sort: np.ndarray  # kind and stage: passes of one sort keep the order of their microbatches
    delta: np.ndarray  # of a sort: what a device holds more after one
    over: np.ndarray  # and how much more than that while it runs
    length: np.ndarray  # of a lane
    limit: np.ndarray
    due: np.ndarray  # added to its last end; minus its device's first start for the span
    host: np.ndarray  # of a lane, that which copies to a host of limited memory, if they share both
    stay: np.ndarray  # [pass, F and B] between which the host holds what it copies; NONE of others
    moved: np.ndarray  # of a sort: how much that is
    room: int  # of the host's memory, for each device


class State(NamedTuple):
    """An order and what follows from it; changed in place."""

    row: np.ndarray  # [lane, place] -> pass; NONE from the lane's end on
    place: np.ndarray
    head: np.ndarray
    tail: np.ndarray
    held: np.ndarray  # [lane, place] after the pass there
    heap_key: np.ndarray
    heap_pass: np.ndarray
    moves: np.ndarray  # [done, start and stop]
    log_pass: np.ndarray
    log_head: np.ndarray
    random: np.ndarray


@compiled
def draw(random: np.ndarray) -> int:
    """Return the next of xorshift32, the same with and without numba."""
    x = random[0]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    random[0] = x
    return x


@compiled
def run_rows(shop: Shop, row: np.ndarray, place: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Set the earliest ends; return the passes in an order that can run, short if it deadlocks."""
    lanes, passes = len(row), len(shop.sort)
    at = np.zeros(lanes, np.int64)
    clock = np.zeros(lanes, np.int64)
    waiting = np.zeros(lanes + 1, np.int64)
    listed = np.ones(lanes, np.int64)
    order = np.empty(passes, np.int32)
    count = 0
    for lane in range(lanes):
        waiting[lane] = lanes - 1 - lane
    top = lanes
    while top:
        top -= 1
        lane = waiting[top]
        listed[lane] = 0
        while at[lane] < shop.length[lane]:
            work = row[lane, at[lane]]
            start = _start_of(shop, place, head, at, work, clock[lane])
            if start < 0:
                break
            clock[lane] = start + shop.ticks[work]
            head[work] = clock[lane]
            order[count] = work
            count += 1
            at[lane] += 1
            for way in range(shop.after.shape[1]):
                reader = shop.after[work, way]
                if reader >= 0:
                    other = shop.lane[reader]
                    if place[reader] == at[other] and not listed[other]:
                        listed[other] = 1
                        waiting[top] = other
                        top += 1
    return order[:count]


@compiled
def _start_of(
    shop: Shop, place: np.ndarray, head: np.ndarray, at: np.ndarray, work: int, start: int
) -> int:
    """Return when the pass can start, from `start` on; NONE while what it reads has not run."""
    for way in range(shop.before.shape[1]):
        need = shop.before[work, way]
        if need >= 0:
            if place[need] >= at[shop.lane[need]]:
                return NONE
            start = max(start, head[need] + shop.lag[work, way])
    return start


@compiled
def tail_of(shop: Shop, state: State, work: int) -> int:
    """Return the longest way from the pass's end to the end of all, from the tails behind it."""
    lane = shop.lane[work]
    place = state.place[work] + 1
    if place < shop.length[lane]:
        following = state.row[lane, place]
        tail = shop.ticks[following] + state.tail[following]
    else:
        tail = shop.due[lane]
    for way in range(shop.after.shape[1]):
        reader = shop.after[work, way]
        if reader >= 0:
            tail = max(tail, shop.after_lag[work, way] + shop.ticks[reader] + state.tail[reader])
    return tail


@compiled
def head_of(shop: Shop, state: State, work: int) -> int:
    """Return the earliest end of the pass, from the heads before it."""
    lane = shop.lane[work]
    place = state.place[work]
    start = 0
    if place > 0:
        start = state.head[state.row[lane, place - 1]]
    for way in range(shop.before.shape[1]):
        need = shop.before[work, way]
        if need >= 0:
            start = max(start, state.head[need] + shop.lag[work, way])
    return start + shop.ticks[work]


@compiled
def objective(shop: Shop, state: State) -> int:
    """Return the makespan or, if `due` says so, the span."""
    return _last_end(shop, state.row, state.head)


@compiled
def _last_end(shop: Shop, row: np.ndarray, head: np.ndarray) -> int:
    worst = head[row[0, shop.length[0] - 1]] + shop.due[0]
    for lane in range(1, len(row)):
        worst = max(worst, head[row[lane, shop.length[lane] - 1]] + shop.due[lane])
    return worst


@compiled
def settle(shop: Shop, state: State) -> bool:
    """Set all that follows from the rows; return False if they deadlock or hold too much."""
    fits = True
    for lane in range(len(state.row)):
        held = 0
        for place in range(shop.length[lane]):
            work = state.row[lane, place]
            state.place[work] = place
            held += shop.delta[shop.sort[work]]
            state.held[lane, place] = held
            fits = fits and held + shop.over[shop.sort[work]] <= shop.limit[lane]
    for lane in range(len(state.row)):
        fits = fits and _fits_host(shop, state, lane)
    order = run_rows(shop, state.row, state.place, state.head)
    if len(order) < len(shop.sort):
        return False
    for at in range(len(order) - 1, -1, -1):
        state.tail[order[at]] = tail_of(shop, state, order[at])
    return fits


@compiled
def _fits_host(shop: Shop, state: State, lane: int) -> bool:
    """Return whether the host has room for what the device of this lane has there."""
    link = shop.host[lane]
    if link == NONE:
        return True
    change, place = np.zeros(state.row.shape[1], np.int64), 0
    for at in range(shop.length[link]):
        work = state.row[link, at]
        if shop.stay[work, 0] != NONE:
            # a copy begins behind its F, and behind those before it on the link
            place = max(place, state.place[shop.stay[work, 0]])
            change[place] += shop.moved[shop.sort[work]]
            change[state.place[shop.stay[work, 1]]] -= shop.moved[shop.sort[work]]
    held = 0
    for each in change:
        held += each
        if held > shop.room:
            return False
    return True


@compiled
def _push(state: State, size: int, key: int, work: int) -> int:
    """Add a pass to the heap of those to look at again; return the heap's new size."""
    at = size
    while at > 0:
        parent = (at - 1) // 2
        if state.heap_key[parent] <= key:
            break
        state.heap_key[at] = state.heap_key[parent]
        state.heap_pass[at] = state.heap_pass[parent]
        at = parent
    state.heap_key[at] = key
    state.heap_pass[at] = work
    return size + 1


@compiled
def _pop(state: State, size: int) -> int:
    """Remove the heap's first pass; return the heap's new size."""
    size -= 1
    key, work = state.heap_key[size], state.heap_pass[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and state.heap_key[child + 1] < state.heap_key[child]:
            child += 1
        if state.heap_key[child] >= key:
            break
        state.heap_key[at] = state.heap_key[child]
        state.heap_pass[at] = state.heap_pass[child]
        at = child
    state.heap_key[at] = key
    state.heap_pass[at] = work
    return size


@compiled
def _target(shop: Shop, state: State, lane: int, start: int, step: int, edge: int) -> int:
    """Return how far the pass at `start` can go towards `edge`, within need and memory."""
    work = state.row[lane, start]
    sort, limit = shop.sort[work], shop.limit[lane]
    delta, over = shop.delta[sort], shop.over[sort]
    edge = _edge(shop, state, lane, work, step, edge)
    # what stands between changes places with it: to the right it loses delta, to the left gains it
    change = -delta * step
    place = start
    while place != edge:
        passed = place + step
        held = state.held[lane, passed]
        if held + change + shop.over[shop.sort[state.row[lane, passed]]] > limit:
            break
        if step < 0:
            held = (state.held[lane, passed - 1] if passed > 0 else 0) + delta
        if held + over > limit:
            break
        place = passed
    return place


@compiled
def _edge(shop: Shop, state: State, lane: int, work: int, step: int, edge: int) -> int:
    """Return `edge`, or the place before it at which something that must stay there stands."""
    neighbour = work + step  # of its sort, unless there is no other microbatch
    if 0 <= neighbour < len(shop.sort) and shop.sort[neighbour] == shop.sort[work]:
        edge = min(edge * step, state.place[neighbour] * step - 1) * step
    if step > 0:
        for way in range(shop.behind.shape[1]):
            reader = shop.behind[work, way]
            if reader >= 0:
                edge = min(edge, state.place[reader] - 1)
    else:
        for way in range(shop.before.shape[1]):
            need = shop.before[work, way]
            if need >= 0 and shop.lane[need] == lane:
                edge = max(edge, state.place[need] + 1)
    return edge


@compiled
def _shift(shop: Shop, state: State, lane: int, start: int, stop: int) -> None:
    """Move the pass at `start` to `stop`; those between close up."""
    work = state.row[lane, start]
    delta = shop.delta[shop.sort[work]]
    step = 1 if stop > start else -1
    for place in range(start, stop, step):
        other = state.row[lane, place + step]
        state.row[lane, place] = other
        state.place[other] = place
        # a place's sum is that of the pass now there: moved right, it lacks the one that jumped it
        if step > 0:
            state.held[lane, place] = state.held[lane, place + 1] - delta
        else:
            state.held[lane, place] = state.held[lane, place - 1] + delta
    if step < 0:
        below = state.held[lane, stop - 1] if stop > 0 else 0
        state.held[lane, stop] = below + delta
    state.row[lane, stop] = work
    state.place[work] = stop


@compiled
def _promises(shop: Shop, state: State, lane: int, low: int, high: int, bar: int) -> bool:
    """Return whether the ways through the changed places seem no longer than `bar`.

    Heads and tails outside are those of the old order, so it is a guess; it spares most of the
    exact looks.
    """
    head = state.head[state.row[lane, low - 1]] if low > 0 else 0
    for place in range(low, high + 1):
        work = state.row[lane, place]
        for way in range(shop.before.shape[1]):
            need = shop.before[work, way]
            if need >= 0 and shop.lane[need] != lane:
                head = max(head, state.head[need] + shop.lag[work, way])
        head += shop.ticks[work]
        for way in range(shop.after.shape[1]):
            reader = shop.after[work, way]
            if reader >= 0:
                further = shop.after_lag[work, way] + shop.ticks[reader] + state.tail[reader]
                if head + further > bar:
                    return False
    if high + 1 == shop.length[lane]:
        return head + shop.due[lane] <= bar
    following = state.row[lane, high + 1]
    return head + shop.ticks[following] + state.tail[following] <= bar


@compiled
def _spread_heads(shop: Shop, state: State, lane: int, low: int, high: int, bar: int) -> int:
    """Bring the heads up to date after a change; return how many changed, -1 - them if too long.

    The changed places go first and in their new order; then passes are looked at in the order of
    their old ends, each again when something before it has moved. An order that deadlocks drives
    its heads up until they are too long.
    """
    size, changed, place = 0, 0, low
    last = min(high + 1, shop.length[lane] - 1)
    while size or place <= last:
        if place <= last:
            work = state.row[lane, place]
            place += 1
        else:
            work = state.heap_pass[0]
            size = _pop(state, size)
        head = head_of(shop, state, work)
        old = state.head[work]
        if head == old:
            continue
        if changed >= len(state.log_pass):
            return -1 - changed
        state.log_pass[changed] = work
        state.log_head[changed] = old
        changed += 1
        state.head[work] = head
        at, home = state.place[work], shop.lane[work]
        inside = home == lane and low <= at <= high
        # the old tail may lead through the changed places: inside them it says nothing
        if head > old and (head if inside else head + state.tail[work]) > bar:
            return -1 - changed
        if at + 1 < shop.length[home] and not (inside and place <= at + 1):
            following = state.row[home, at + 1]
            size = _push(state, size, state.head[following], following)
        for way in range(shop.after.shape[1]):
            reader = shop.after[work, way]
            if reader >= 0:
                size = _push(state, size, state.head[reader], reader)
    return changed


@compiled
def _spread_tails(shop: Shop, state: State, lane: int, low: int, high: int) -> None:
    """Bring the tails up to date after a change that was taken; the heads are."""
    size = 0
    for place in range(max(low - 1, 0), high + 1):
        work = state.row[lane, place]
        size = _push(state, size, -state.head[work], work)
    while size:
        work = state.heap_pass[0]
        size = _pop(state, size)
        tail = tail_of(shop, state, work)
        if tail == state.tail[work]:
            continue
        state.tail[work] = tail
        place, home = state.place[work], shop.lane[work]
        if place > 0:
            earlier = state.row[home, place - 1]
            size = _push(state, size, -state.head[earlier], earlier)
        for way in range(shop.before.shape[1]):
            need = shop.before[work, way]
            if need >= 0 and shop.lane[need] != home:
                size = _push(state, size, -state.head[need], need)


@compiled
def _propose(
    shop: Shop, state: State, start: int, reach: int, count: int, lane: int, first: int, last: int
) -> int:
    """Move up to `count` passes of one sort, the first at `start`, `reach` places; return how many.

    Neighbouring microbatches are in like places, and what gains by moving all of them may lose by
    moving one. `moves` says what was done, so that it can be undone.
    """
    step = 1 if reach > 0 else -1
    work = state.row[lane, start]
    sort, done = shop.sort[work], 0
    while done < count and 0 <= work < len(shop.sort) and shop.sort[work] == sort:
        start = state.place[work]
        if start < first or start > last:
            break
        stop = _target(shop, state, lane, start, step, max(first, min(last, start + reach)))
        if stop == start:
            break
        _shift(shop, state, lane, start, stop)
        state.moves[done, 0] = start
        state.moves[done, 1] = stop
        done += 1
        work -= step
    return done


@compiled
def _exchange(
    shop: Shop, state: State, start: int, reach: int, lane: int, first: int, last: int
) -> int:
    """Exchange the pass at `start` with the one `reach` places on; return how many moves that is.

    Where the memory is full neither can go by itself: what one takes the other must give.
    """
    stop = max(first, min(last, start + reach))
    step = 1 if reach > 0 else -1
    if (
        abs(stop - start) < 2
        or _edge(shop, state, lane, state.row[lane, start], step, stop) != stop
        or _edge(shop, state, lane, state.row[lane, stop], -step, start) != start
        or not fit_exchanged(shop, state, lane, min(start, stop), max(start, stop))
    ):
        return 0
    _shift(shop, state, lane, start, stop)
    _shift(shop, state, lane, stop - step, start)
    state.moves[0, 0], state.moves[0, 1] = start, stop
    state.moves[1, 0], state.moves[1, 1] = stop - step, start
    return 2


@compiled
def fit_exchanged(shop: Shop, state: State, lane: int, low: int, high: int) -> bool:
    """Return whether the memory has room for the passes at `low` and `high` exchanged."""
    limit = shop.limit[lane]
    left, right = shop.sort[state.row[lane, low]], shop.sort[state.row[lane, high]]
    change = shop.delta[right] - shop.delta[left]
    if state.held[lane, low] + change + shop.over[right] > limit:
        return False
    for place in range(low + 1, high):
        if state.held[lane, place] + change + shop.over[shop.sort[state.row[lane, place]]] > limit:
            return False
    return state.held[lane, high] + shop.over[left] <= limit


@compiled
def _decide(shop: Shop, state: State, lane: int, done: int, bar: int) -> bool:
    """Keep the last `done` moves if the objective stays within `bar`, else undo them."""
    low, high = state.moves[0, 0], state.moves[0, 0]
    for at in range(done):
        low = min(low, state.moves[at, 0], state.moves[at, 1])
        high = max(high, state.moves[at, 0], state.moves[at, 1])
    if _promises(shop, state, lane, low, high, bar) and _fits_host(shop, state, lane):
        changed = _spread_heads(shop, state, lane, low, high, bar)
        if changed >= 0 and objective(shop, state) <= bar:
            _spread_tails(shop, state, lane, low, high)
            return True
        changed = changed if changed >= 0 else -1 - changed
        for at in range(changed - 1, -1, -1):
            state.head[state.log_pass[at]] = state.log_head[at]
    for at in range(done - 1, -1, -1):
        _shift(shop, state, lane, state.moves[at, 1], state.moves[at, 0])
    return False


@compiled
def walk(
    shop: Shop, state: State, low: np.ndarray, high: np.ndarray, steps: int, longer: float = 0.0
) -> int:
    """Draw `steps` passes outside [low, high) of each lane, move some; return the objective.

    Only what is on a critical path shortens anything. The objective may grow by a share `longer`.
    """
    # No function of its own for one step: calling it makes the walk a third slower.
    bar = objective(shop, state)
    bar += int(bar * longer)
    for _ in range(steps):
        lane = draw(state.random) % len(state.row)
        length = shop.length[lane]
        start = draw(state.random) % length
        work = state.row[lane, start]
        luck = draw(state.random)
        near = state.head[work] + state.tail[work] >= bar
        if low[lane] <= start < high[lane] or (not near and luck % SPARED):
            continue
        first, last = 0, low[lane] - 1
        if start >= high[lane]:
            first, last = high[lane], length - 1
        distance = 1 + (luck >> 4) % REACH
        if (luck >> 12) & 1:
            distance = 1 + distance % 3
        if (luck >> 13) & 1:
            distance = -distance
        if (luck >> 22) % 16 < EXCHANGED:
            done = _exchange(shop, state, start, distance, lane, first, last)
        else:
            count = 1 + (luck >> 18) % MANY if (luck >> 16) & 3 else 1
            done = _propose(shop, state, start, distance, count, lane, first, last)
        if done and _decide(shop, state, lane, done, bar) and not longer:
            bar = objective(shop, state)
    return objective(shop, state)


@compiled
def measure(shop: Shop, row: np.ndarray) -> int:
    """Return the objective of an order that fits the memory; NONE if it deadlocks.

    Nobody waits for passes that it lacks.
    """
    place = np.full(len(shop.sort), NONE, np.int32)
    head = np.zeros(len(shop.sort), np.int64)
    for lane in range(len(row)):
        for at in range(shop.length[lane]):
            place[row[lane, at]] = at
    if len(run_rows(shop, row, place, head)) < shop.length.sum():
        return NONE
    return _last_end(shop, row, head)


def stir(state: State, number: int) -> None:
    """Let the state's random numbers go on elsewhere, for every `number` at another place."""
    state.random[0] = ((int(state.random[0]) ^ (number * 2654435761)) & _MASK) or 1


def new_state(row: np.ndarray, seed: int, ways: int = 1) -> State:
    """Return the state of an order before `settle` has filled it.

    `ways` are how many passes of other lanes one reads, or is read by, at most.
    """
    size = row.size
    heap = (1 + ways) * (2 * size + 2 * REACH)
    return State(
        row=np.array(row, dtype=np.int32, order="C"),
        place=np.zeros(size, np.int32),
        head=np.zeros(size, np.int64),
        tail=np.zeros(size, np.int64),
        held=np.zeros(row.shape, np.int64),
        heap_key=np.zeros(heap, np.int64),
        heap_pass=np.zeros(heap, np.int32),
        moves=np.zeros((MANY, 2), np.int64),
        log_pass=np.zeros(2 * size + REACH, np.int32),
        log_head=np.zeros(2 * size + 2 * REACH, np.int64),
        random=np.array([(seed * 2654435761 + 88172645) & _MASK or 1], np.int64),
    )
