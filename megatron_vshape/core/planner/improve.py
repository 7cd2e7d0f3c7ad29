"""Local search over pass orders within a memory limit: the compiled loops of the planner.

A pass order is a job shop whose machines are lanes. A lane is the sequence of passes on one
resource of a device. A pass waits for the previous pass of its lane and for the passes that it
reads (`JobShop.before`; dependencies implied by others are left out). `heads` are the earliest
ends, `tails` the longest remaining path after an end: head + tail <= makespan, with equality on a
critical path.

The search moves a pass by a few positions or exchanges two passes of a lane, and accepts every
change that does not increase the objective. Times are integer ticks, so ties are exact: with equal
costs most moves are ties, and following them is the way out of a plateau. Decisions use integers
only, so every machine finds the same plan. Without numba the same code runs as plain Python, about
100 times slower.
"""

from typing import NamedTuple

import numpy as np

from megatron_vshape.core.compiling import compiled

NONE = -1
REACH = 12
"""Maximum distance of a move in positions; longer moves result from several."""
MANY = 8
"""Maximum number of passes of one sort that move together."""
_MASK = 0xFFFFFFFF
SPARED = 2
"""One in this many passes off the critical paths is moved, to make room for others."""
EXCHANGED = 6
"""Share of the draws that exchange two passes, in sixteenths."""


class JobShop(NamedTuple):
    """Passes and their costs. Passes are numbered by sort (kind and stage), then by microbatch.

    `before` are the passes that a pass reads; a result from another device arrives `lag` ticks
    after its end. `after` are the readers in other lanes, with `after_lag`; `behind` are the
    readers in the same lane.
    """

    before: np.ndarray  # [pass, index], padded with NONE
    lag: np.ndarray
    after: np.ndarray
    after_lag: np.ndarray
    behind: np.ndarray
    ticks: np.ndarray  # [pass]
    lane: np.ndarray  # [pass]
    sort: np.ndarray  # [pass] kind and stage; passes of one sort stay in microbatch order
    delta: np.ndarray  # [sort] change of a device's memory after a pass
    over: np.ndarray  # [sort] memory during the pass, above the memory after it
    length: np.ndarray  # [lane] number of passes
    limit: np.ndarray  # [lane] memory limit
    due: np.ndarray  # [lane] added to its last end: for the span, minus its device's first start
    link: np.ndarray  # [lane] lane of the device that moves memory, if that is limited, else NONE
    stay: np.ndarray  # [pass, 2] F and B between which its memory stays moved, else NONE
    moved: np.ndarray  # [sort] memory that is moved off the device
    room: int  # limit of the moved memory per device


class State(NamedTuple):
    """A pass order and the values derived from it; changed in place."""

    row: np.ndarray  # [lane, position] -> pass, padded with NONE
    place: np.ndarray  # [pass] position in its lane
    head: np.ndarray
    tail: np.ndarray
    held: np.ndarray  # [lane, position] memory after the pass there
    heap_key: np.ndarray
    heap_pass: np.ndarray
    moves: np.ndarray  # [move, 2] start and stop
    log_pass: np.ndarray
    log_head: np.ndarray
    random: np.ndarray


@compiled
def draw(random: np.ndarray) -> int:
    """Return the next random number (xorshift32), the same with and without numba."""
    x = random[0]
    # The masks keep 32 bits: integers have 64 with numba, and no limit without.
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    random[0] = x
    return x


@compiled
def run_rows(shop: JobShop, row: np.ndarray, place: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Simulate the lanes: set the earliest ends and return the passes in an executable order.

    The returned order is incomplete if the lanes deadlock.
    """
    lanes, passes = len(row), len(shop.sort)
    at = np.zeros(lanes, np.int64)
    clock = np.zeros(lanes, np.int64)
    waiting = np.zeros(lanes + 1, np.int64)
    listed = np.ones(lanes, np.int64)
    order = np.empty(passes, np.int32)
    count = 0
    for lane in range(lanes):
        # A stack, so lane 0 comes first.
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
                    # Wake a lane only for its next pass; before that, it waits for other passes
                    # anyway.
                    if place[reader] == at[other] and not listed[other]:
                        listed[other] = 1
                        waiting[top] = other
                        top += 1
    return order[:count]


@compiled
def _start_of(
    shop: JobShop, place: np.ndarray, head: np.ndarray, at: np.ndarray, work: int, start: int
) -> int:
    """Return the earliest start, at least `start`; NONE while a dependency has not run."""
    for way in range(shop.before.shape[1]):
        need = shop.before[work, way]
        if need >= 0:
            # The lane of `need` has not reached it yet.
            if place[need] >= at[shop.lane[need]]:
                return NONE
            start = max(start, head[need] + shop.lag[work, way])
    return start


@compiled
def tail_of(shop: JobShop, state: State, work: int) -> int:
    """Return the longest path from the pass's end to the end of the step, from its readers."""
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
def head_of(shop: JobShop, state: State, work: int) -> int:
    """Return the earliest end of the pass, from the heads of its dependencies."""
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
def objective(shop: JobShop, state: State) -> int:
    """Return the makespan, or the span if `due` is set."""
    return _last_end(shop, state.row, state.head)


@compiled
def _last_end(shop: JobShop, row: np.ndarray, head: np.ndarray) -> int:
    worst = head[row[0, shop.length[0] - 1]] + shop.due[0]
    for lane in range(1, len(row)):
        worst = max(worst, head[row[lane, shop.length[lane] - 1]] + shop.due[lane])
    return worst


@compiled
def settle(shop: JobShop, state: State) -> bool:
    """Compute positions, memory, heads and tails; return False on deadlock or too much memory."""
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
        fits = fits and _fits_moved(shop, state, lane)
    order = run_rows(shop, state.row, state.place, state.head)
    if len(order) < len(shop.sort):
        return False
    # Reverse order: the tails of all readers are final.
    for at in range(len(order) - 1, -1, -1):
        state.tail[order[at]] = tail_of(shop, state, order[at])
    return fits


@compiled
def _fits_moved(shop: JobShop, state: State, lane: int) -> bool:
    """Return whether the moved memory of this lane's device is within its limit."""
    link = shop.link[lane]
    if link == NONE:
        return True
    change, place = np.zeros(state.row.shape[1], np.int64), 0
    for at in range(shop.length[link]):
        work = state.row[link, at]
        if shop.stay[work, 0] != NONE:
            # a copy starts after its F and after the earlier copies on the link
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
    """Add a pass to the heap of passes to update; return the heap's new size."""
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
def _target(shop: JobShop, state: State, lane: int, start: int, step: int, edge: int) -> int:
    """Return the farthest allowed position towards `edge`, by dependencies and memory."""
    work = state.row[lane, start]
    sort, limit = shop.sort[work], shop.limit[lane]
    delta, over = shop.delta[sort], shop.over[sort]
    edge = _edge(shop, state, lane, work, step, edge)
    # passes in between change sides with it: moved right they lose its delta, moved left gain it
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
def _edge(shop: JobShop, state: State, lane: int, work: int, step: int, edge: int) -> int:
    """Return `edge`, or the last position before a pass that the move must not cross."""
    # Microbatches of a sort stay in order. Dependencies in other lanes are checked by the heads.
    neighbour = work + step  # of its sort, unless there is no other microbatch
    if 0 <= neighbour < len(shop.sort) and shop.sort[neighbour] == shop.sort[work]:
        # Positions times `step`: a move to the left becomes one to the right, with the same
        # minimum.
        edge = min(edge * step, state.place[neighbour] * step - 1) * step
    if step > 0:
        # Readers in this lane are in `behind`; inputs of all lanes are in `before`.
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
def _shift(shop: JobShop, state: State, lane: int, start: int, stop: int) -> None:
    """Move the pass at `start` to `stop`; the passes in between close the gap."""
    work = state.row[lane, start]
    delta = shop.delta[shop.sort[work]]
    step = 1 if stop > start else -1
    for place in range(start, stop, step):
        other = state.row[lane, place + step]
        state.row[lane, place] = other
        state.place[other] = place
        # a sum belongs to the pass now there: moved left, it is before the shifted pass
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
def _looks_short(shop: JobShop, state: State, lane: int, low: int, high: int, bar: int) -> bool:
    """Estimate whether the paths through the changed positions are at most `bar`.

    The estimate uses the old heads and tails outside of these positions. It avoids most updates.
    """
    head = state.head[state.row[lane, low - 1]] if low > 0 else 0
    for place in range(low, high + 1):
        work = state.row[lane, place]
        for way in range(shop.before.shape[1]):
            need = shop.before[work, way]
            # Dependencies in this lane are before this pass, so `head` includes them.
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
def _spread_heads(shop: JobShop, state: State, lane: int, low: int, high: int, bar: int) -> int:
    """Update the heads after a change; return the number of changes n, or -1 - n if above `bar`.

    The changed positions are updated first, in their new order, then other passes by their old
    ends. A pass is updated again if a dependency changes. In an order that deadlocks, heads grow
    until they exceed `bar`.
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
        # The log for undoing is full: treat the order as too long.
        if changed >= len(state.log_pass):
            return -1 - changed
        state.log_pass[changed] = work
        state.log_head[changed] = old
        changed += 1
        state.head[work] = head
        at, home = state.place[work], shop.lane[work]
        inside = home == lane and low <= at <= high
        # inside the changed positions the old tail is invalid: its path may lead through them
        if head > old and (head if inside else head + state.tail[work]) > bar:
            return -1 - changed
        # A changed position that the first loop has yet to visit needs no entry in the heap.
        if at + 1 < shop.length[home] and not (inside and place <= at + 1):
            following = state.row[home, at + 1]
            size = _push(state, size, state.head[following], following)
        for way in range(shop.after.shape[1]):
            reader = shop.after[work, way]
            if reader >= 0:
                size = _push(state, size, state.head[reader], reader)
    return changed


@compiled
def _spread_tails(shop: JobShop, state: State, lane: int, low: int, high: int) -> None:
    """Update the tails after an accepted change; the heads are up to date."""
    size = 0
    # One before the changed positions, because its follower has changed. The latest ends come
    # first: readers are then mostly final before the passes that they read.
    for place in range(max(low - 1, 0), high + 1):
        work = state.row[lane, place]
        size = _push(state, size, -state.head[work], work)
    # A reader ends after its inputs, so with the latest ends first nearly every tail is computed
    # once. This also bounds the heap.
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
    shop: JobShop,
    state: State,
    start: int,
    reach: int,
    count: int,
    lane: int,
    first: int,
    last: int,
) -> int:
    """Move up to `count` passes of one sort by `reach` positions; return the number of moves.

    The pass at `start` moves first. Neighboring microbatches have similar positions, and moving all
    of them may be shorter where moving one is longer. `state.moves` records the moves for undoing.
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
        # The neighbor behind, in the direction of the move, may follow into the free space.
        # Numbers of one sort are consecutive microbatches.
        work -= step
    return done


@compiled
def _exchange(
    shop: JobShop, state: State, start: int, reach: int, lane: int, first: int, last: int
) -> int:
    """Exchange the pass at `start` with the one `reach` positions on; return the number of moves.

    At the memory limit neither pass can move alone: one frees the memory that the other allocates.
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
    # The first shift has moved the other pass by one position.
    _shift(shop, state, lane, stop - step, start)
    state.moves[0, 0], state.moves[0, 1] = start, stop
    state.moves[1, 0], state.moves[1, 1] = stop - step, start
    return 2


@compiled
def fit_exchanged(shop: JobShop, state: State, lane: int, low: int, high: int) -> bool:
    """Return whether the memory suffices with the passes at `low` and `high` exchanged."""
    limit = shop.limit[lane]
    left, right = shop.sort[state.row[lane, low]], shop.sort[state.row[lane, high]]
    change = shop.delta[right] - shop.delta[left]
    # Up to `high`, the memory differs by the allocations of the two passes; there, it is equal.
    if state.held[lane, low] + change + shop.over[right] > limit:
        return False
    for place in range(low + 1, high):
        if state.held[lane, place] + change + shop.over[shop.sort[state.row[lane, place]]] > limit:
            return False
    return state.held[lane, high] + shop.over[left] <= limit


@compiled
def _decide(shop: JobShop, state: State, lane: int, done: int, bar: int) -> bool:
    """Accept the last `done` moves if the objective is at most `bar`, else undo them."""
    # Heads of all positions between the outermost moves may change.
    low, high = state.moves[0, 0], state.moves[0, 0]
    for at in range(done):
        low = min(low, state.moves[at, 0], state.moves[at, 1])
        high = max(high, state.moves[at, 0], state.moves[at, 1])
    # The estimate first: it is cheap and rejects most moves.
    if _looks_short(shop, state, lane, low, high, bar) and _fits_moved(shop, state, lane):
        changed = _spread_heads(shop, state, lane, low, high, bar)
        if changed >= 0 and objective(shop, state) <= bar:
            _spread_tails(shop, state, lane, low, high)
            return True
        changed = changed if changed >= 0 else -1 - changed
        # From the last to the first, because a pass can be in the log several times.
        for at in range(changed - 1, -1, -1):
            state.head[state.log_pass[at]] = state.log_head[at]
    for at in range(done - 1, -1, -1):
        _shift(shop, state, lane, state.moves[at, 1], state.moves[at, 0])
    return False


@compiled
def local_search(
    shop: JobShop, state: State, low: np.ndarray, high: np.ndarray, steps: int, longer: float = 0.0
) -> int:
    """Try `steps` random moves outside [low, high) of each lane; return the objective.

    Only passes on a critical path can shorten it, so half of the others are skipped. The objective
    may grow by the fraction `longer`.
    """
    # A step is not a separate function: the call makes the search a third slower.
    bar = objective(shop, state)
    bar += int(bar * longer)
    for _ in range(steps):
        lane = draw(state.random) % len(state.row)
        length = shop.length[lane]
        start = draw(state.random) % length
        work = state.row[lane, start]
        luck = draw(state.random)
        near = state.head[work] + state.tail[work] >= bar
        # The middle [low, high) is a period that is repeated later, so it stays unchanged.
        if low[lane] <= start < high[lane] or (not near and luck % SPARED):
            continue
        first, last = 0, low[lane] - 1
        if start >= high[lane]:
            first, last = high[lane], length - 1
        # Separate bits of one random number choose distance, direction, kind and number of moves.
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
        # With `longer` the bar stays, so that the order can leave its local optimum.
        if done and _decide(shop, state, lane, done, bar) and not longer:
            bar = objective(shop, state)
    return objective(shop, state)


@compiled
def measure(shop: JobShop, row: np.ndarray) -> int:
    """Return the objective of an order that fits in memory; NONE if it deadlocks.

    Dependencies on passes that the order lacks are ignored.
    """
    # NONE is below every position, so `_start_of` counts a missing pass as run, with end 0.
    place = np.full(len(shop.sort), NONE, np.int32)
    head = np.zeros(len(shop.sort), np.int64)
    for lane in range(len(row)):
        for at in range(shop.length[lane]):
            place[row[lane, at]] = at
    if len(run_rows(shop, row, place, head)) < shop.length.sum():
        return NONE
    return _last_end(shop, row, head)


def reseed(state: State, number: int) -> None:
    """Reseed the random numbers of the state, differently for every `number`."""
    # Never 0, which xorshift would repeat forever.
    state.random[0] = ((int(state.random[0]) ^ (number * 2654435761)) & _MASK) or 1


def new_state(row: np.ndarray, seed: int, ways: int = 1) -> State:
    """Return the state of an order, to be filled in by `settle`.

    Args:
        row: [lane, position] -> pass.
        seed: seed of the random numbers.
        ways: maximum number of passes in other lanes that a pass reads, or that read it.
    """
    size = row.size
    # Each of the at most 2 * size + REACH logged changes adds its follower and its readers.
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
