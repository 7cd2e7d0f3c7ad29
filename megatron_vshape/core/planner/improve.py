"""Local search over pass orders within a memory limit: the compiled loops of the planner.

A pass order is a job shop whose machines are queues. A queue is the sequence of passes on one
resource of a device. A pass waits for the previous pass of its queue and for the passes that it
reads (`JobShop.inputs`; dependencies implied by others are left out). `heads` are the earliest
ends, `tails` the longest remaining path after an end: head + tail <= makespan, with equality on a
critical path.

The search moves a pass by a few positions or exchanges two passes of a queue, and accepts every
change that does not increase the objective. Times are integer ticks, so ties are exact: with equal
costs most moves are ties, and following them is the way out of a plateau. Decisions use integers
only, so every machine finds the same plan. Without numba the same code runs as plain Python, about
100 times slower.
"""

from typing import NamedTuple

import numpy as np

from megatron_vshape.core.compiling import compiled, compiled_inline

NONE = -1
_MAX_DISTANCE = 12
"""Maximum distance of a move in positions; longer moves result from several."""
_MAX_MOVES = 8
"""Maximum number of passes of one type that move together."""
_MASK = 0xFFFFFFFF
_NONCRITICAL_PERIOD = 2
"""One in this many passes off the critical paths is moved, to make room for others."""
_EXCHANGE_SIXTEENTHS = 6
"""Share of the draws that exchange two passes, in sixteenths."""


class JobShop(NamedTuple):
    """Passes and their costs. Passes are numbered by type (kind and stage), then by microbatch.

    `inputs` are the passes that a pass reads; a result from another device arrives `lag` ticks
    after its end. `readers` are those in other queues, with `reader_lag`; `queue_readers` are
    those in the same queue.
    """

    inputs: np.ndarray  # [pass, index], padded with NONE
    lag: np.ndarray
    readers: np.ndarray
    reader_lag: np.ndarray
    queue_readers: np.ndarray
    ticks: np.ndarray  # [pass]
    queue: np.ndarray  # [pass]
    type_of: np.ndarray  # [pass] kind and stage; passes of one type stay in microbatch order
    delta: np.ndarray  # [type] change of a device's memory after a pass
    over: np.ndarray  # [type] memory during the pass, above the memory after it
    length: np.ndarray  # [queue] number of passes
    limit: np.ndarray  # [queue] memory limit
    due: np.ndarray  # [queue] added to its last end: for the span, minus its device's first start
    link: np.ndarray  # [queue] queue of the device that moves memory, if that is limited, else NONE
    stay: np.ndarray  # [pass, 2] F and B between which its memory stays moved, else NONE
    moved: np.ndarray  # [type] memory that is moved off the device
    room: int  # limit of the moved memory per device


class State(NamedTuple):
    """A pass order and the values derived from it; changed in place."""

    row: np.ndarray  # [queue, position] -> pass, padded with NONE
    position: np.ndarray  # [pass] position in its queue
    head: np.ndarray
    tail: np.ndarray
    memory: np.ndarray  # [queue, position] memory after the pass there
    heap_key: np.ndarray
    heap_pass: np.ndarray
    change: np.ndarray  # [position] working memory of `_fits_moved`
    moves: np.ndarray  # [move, 2] start and stop
    log_pass: np.ndarray
    log_head: np.ndarray
    random: np.ndarray


@compiled_inline
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
def run_rows(shop: JobShop, row: np.ndarray, position: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Simulate the queues: set the earliest ends and return the passes in an executable order.

    The returned order is incomplete if the queues deadlock.
    """
    num_queues, num_passes = len(row), len(shop.type_of)
    positions = np.zeros(num_queues, np.int64)
    clock = np.zeros(num_queues, np.int64)
    stack = np.zeros(num_queues + 1, np.int64)
    is_stacked = np.ones(num_queues, np.int64)
    order = np.empty(num_passes, np.int32)
    count = 0
    for queue in range(num_queues):
        # A stack, so queue 0 comes first.
        stack[queue] = num_queues - 1 - queue
    top = num_queues
    while top:
        top -= 1
        queue = stack[top]
        is_stacked[queue] = 0
        while positions[queue] < shop.length[queue]:
            work = row[queue, positions[queue]]
            start = _start_of(shop, position, head, positions, work, clock[queue])
            if start < 0:
                break
            clock[queue] = start + shop.ticks[work]
            head[work] = clock[queue]
            order[count] = work
            count += 1
            positions[queue] += 1
            for index in range(shop.readers.shape[1]):
                reader = shop.readers[work, index]
                if reader >= 0:
                    reader_queue = shop.queue[reader]
                    # Wake a queue only for its next pass; before that, it waits for other passes
                    # anyway.
                    if position[reader] == positions[reader_queue] and not is_stacked[reader_queue]:
                        is_stacked[reader_queue] = 1
                        stack[top] = reader_queue
                        top += 1
    return order[:count]


@compiled_inline
def _start_of(
    shop: JobShop,
    position: np.ndarray,
    head: np.ndarray,
    positions: np.ndarray,
    work: int,
    start: int,
) -> int:
    """Return the earliest start, at least `start`; NONE while a dependency has not run."""
    for index in range(shop.inputs.shape[1]):
        source = shop.inputs[work, index]
        if source >= 0:
            # The queue of `source` has not reached it yet.
            if position[source] >= positions[shop.queue[source]]:
                return NONE
            start = max(start, head[source] + shop.lag[work, index])
    return start


@compiled_inline
def _tail_of(shop: JobShop, state: State, work: int) -> int:
    """Return the longest path from the pass's end to the end of the step, from its readers."""
    queue = shop.queue[work]
    position = state.position[work] + 1
    if position < shop.length[queue]:
        following = state.row[queue, position]
        tail = shop.ticks[following] + state.tail[following]
    else:
        tail = shop.due[queue]
    for index in range(shop.readers.shape[1]):
        reader = shop.readers[work, index]
        if reader >= 0:
            tail = max(tail, shop.reader_lag[work, index] + shop.ticks[reader] + state.tail[reader])
    return tail


@compiled_inline
def _head_of(shop: JobShop, state: State, work: int) -> int:
    """Return the earliest end of the pass, from the heads of its dependencies."""
    queue = shop.queue[work]
    position = state.position[work]
    start = 0
    if position > 0:
        start = state.head[state.row[queue, position - 1]]
    for index in range(shop.inputs.shape[1]):
        source = shop.inputs[work, index]
        if source >= 0:
            start = max(start, state.head[source] + shop.lag[work, index])
    return start + shop.ticks[work]


@compiled_inline
def objective(shop: JobShop, state: State) -> int:
    """Return the makespan, or the span if `due` is set."""
    return _last_end(shop, state.row, state.head)


@compiled_inline
def _last_end(shop: JobShop, row: np.ndarray, head: np.ndarray) -> int:
    worst = head[row[0, shop.length[0] - 1]] + shop.due[0]
    for queue in range(1, len(row)):
        worst = max(worst, head[row[queue, shop.length[queue] - 1]] + shop.due[queue])
    return worst


@compiled
def settle(shop: JobShop, state: State) -> bool:
    """Compute positions, memory, heads and tails; return False on deadlock or too much memory."""
    fits = True
    for queue in range(len(state.row)):
        memory = 0
        for position in range(shop.length[queue]):
            work = state.row[queue, position]
            state.position[work] = position
            memory += shop.delta[shop.type_of[work]]
            state.memory[queue, position] = memory
            fits = fits and memory + shop.over[shop.type_of[work]] <= shop.limit[queue]
    for queue in range(len(state.row)):
        fits = fits and _fits_moved(shop, state, queue)
    order = run_rows(shop, state.row, state.position, state.head)
    if len(order) < len(shop.type_of):
        return False
    # Reverse order: the tails of all readers are final.
    for index in range(len(order) - 1, -1, -1):
        state.tail[order[index]] = _tail_of(shop, state, order[index])
    return fits


@compiled_inline
def _fits_moved(shop: JobShop, state: State, queue: int) -> bool:
    """Return whether the moved memory of this queue's device is within its limit."""
    link = shop.link[queue]
    if link == NONE:
        return True
    change, position = state.change, 0
    change[:] = 0
    for index in range(shop.length[link]):
        work = state.row[link, index]
        if shop.stay[work, 0] != NONE:
            # a copy starts after its F and after the earlier copies on the link
            position = max(position, state.position[shop.stay[work, 0]])
            change[position] += shop.moved[shop.type_of[work]]
            change[state.position[shop.stay[work, 1]]] -= shop.moved[shop.type_of[work]]
    memory = 0
    for delta in change:
        memory += delta
        if memory > shop.room:
            return False
    return True


@compiled_inline
def _push(state: State, size: int, key: int, work: int) -> int:
    """Add a pass to the heap of passes to update; return the heap's new size."""
    slot = size
    while slot > 0:
        parent = (slot - 1) // 2
        if state.heap_key[parent] <= key:
            break
        state.heap_key[slot] = state.heap_key[parent]
        state.heap_pass[slot] = state.heap_pass[parent]
        slot = parent
    state.heap_key[slot] = key
    state.heap_pass[slot] = work
    return size + 1


@compiled_inline
def _pop(state: State, size: int) -> int:
    """Remove the heap's first pass; return the heap's new size."""
    size -= 1
    key, work = state.heap_key[size], state.heap_pass[size]
    slot = 0
    while True:
        child = 2 * slot + 1
        if child >= size:
            break
        if child + 1 < size and state.heap_key[child + 1] < state.heap_key[child]:
            child += 1
        if state.heap_key[child] >= key:
            break
        state.heap_key[slot] = state.heap_key[child]
        state.heap_pass[slot] = state.heap_pass[child]
        slot = child
    state.heap_key[slot] = key
    state.heap_pass[slot] = work
    return size


@compiled_inline
def _target(shop: JobShop, state: State, queue: int, start: int, step: int, edge: int) -> int:
    """Return the farthest allowed position towards `edge`, by dependencies and memory."""
    work = state.row[queue, start]
    pass_type, limit = shop.type_of[work], shop.limit[queue]
    delta, over = shop.delta[pass_type], shop.over[pass_type]
    edge = _edge(shop, state, queue, work, step, edge)
    # passes in between change sides with it: moved right they lose its delta, moved left gain it
    change = -delta * step
    position = start
    while position != edge:
        passed = position + step
        memory = state.memory[queue, passed]
        if memory + change + shop.over[shop.type_of[state.row[queue, passed]]] > limit:
            break
        if step < 0:
            memory = (state.memory[queue, passed - 1] if passed > 0 else 0) + delta
        if memory + over > limit:
            break
        position = passed
    return position


@compiled_inline
def _edge(shop: JobShop, state: State, queue: int, work: int, step: int, edge: int) -> int:
    """Return `edge`, or the last position before a pass that the move must not cross."""
    # Microbatches of a type stay in order. Dependencies in other queues are checked by the heads.
    neighbour = work + step  # of its type, unless there is no other microbatch
    if 0 <= neighbour < len(shop.type_of) and shop.type_of[neighbour] == shop.type_of[work]:
        # Positions times `step`: a move to the left becomes one to the right, with the same
        # minimum.
        edge = min(edge * step, state.position[neighbour] * step - 1) * step
    if step > 0:
        # Readers in this queue are in `queue_readers`; inputs of all queues are in `inputs`.
        for index in range(shop.queue_readers.shape[1]):
            reader = shop.queue_readers[work, index]
            if reader >= 0:
                edge = min(edge, state.position[reader] - 1)
    else:
        for index in range(shop.inputs.shape[1]):
            source = shop.inputs[work, index]
            if source >= 0 and shop.queue[source] == queue:
                edge = max(edge, state.position[source] + 1)
    return edge


@compiled_inline
def _shift(shop: JobShop, state: State, queue: int, start: int, stop: int) -> None:
    """Move the pass at `start` to `stop`; the passes in between close the gap."""
    work = state.row[queue, start]
    delta = shop.delta[shop.type_of[work]]
    step = 1 if stop > start else -1
    for position in range(start, stop, step):
        neighbour = state.row[queue, position + step]
        state.row[queue, position] = neighbour
        state.position[neighbour] = position
        # a sum belongs to the pass now there: moved left, it is before the shifted pass
        if step > 0:
            state.memory[queue, position] = state.memory[queue, position + 1] - delta
        else:
            state.memory[queue, position] = state.memory[queue, position - 1] + delta
    if step < 0:
        below = state.memory[queue, stop - 1] if stop > 0 else 0
        state.memory[queue, stop] = below + delta
    state.row[queue, stop] = work
    state.position[work] = stop


@compiled_inline
def _looks_short(shop: JobShop, state: State, queue: int, low: int, high: int, bar: int) -> bool:
    """Estimate whether the paths through the changed positions are at most `bar`.

    The estimate uses the old heads and tails outside of these positions. It avoids most updates.
    """
    head = state.head[state.row[queue, low - 1]] if low > 0 else 0
    for position in range(low, high + 1):
        work = state.row[queue, position]
        for index in range(shop.inputs.shape[1]):
            source = shop.inputs[work, index]
            # Dependencies in this queue are before this pass, so `head` includes them.
            if source >= 0 and shop.queue[source] != queue:
                head = max(head, state.head[source] + shop.lag[work, index])
        head += shop.ticks[work]
        for index in range(shop.readers.shape[1]):
            reader = shop.readers[work, index]
            if reader >= 0:
                reader_tail = shop.reader_lag[work, index] + shop.ticks[reader] + state.tail[reader]
                if head + reader_tail > bar:
                    return False
    if high + 1 == shop.length[queue]:
        return head + shop.due[queue] <= bar
    following = state.row[queue, high + 1]
    return head + shop.ticks[following] + state.tail[following] <= bar


@compiled_inline
def _spread_heads(shop: JobShop, state: State, queue: int, low: int, high: int, bar: int) -> int:
    """Update the heads after a change; return the number of changes n, or -1 - n if above `bar`.

    The changed positions are updated first, in their new order, then other passes by their old
    ends. A pass is updated again if a dependency changes. In an order that deadlocks, heads grow
    until they exceed `bar`.
    """
    size, changed, next_position = 0, 0, low
    last = min(high + 1, shop.length[queue] - 1)
    while size or next_position <= last:
        if next_position <= last:
            work = state.row[queue, next_position]
            next_position += 1
        else:
            work = state.heap_pass[0]
            size = _pop(state, size)
        head = _head_of(shop, state, work)
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
        position, home = state.position[work], shop.queue[work]
        inside = home == queue and low <= position <= high
        # inside the changed positions the old tail is invalid: its path may lead through them
        if head > old and (head if inside else head + state.tail[work]) > bar:
            return -1 - changed
        # A changed position that the first loop has yet to visit needs no entry in the heap.
        if position + 1 < shop.length[home] and not (inside and next_position <= position + 1):
            following = state.row[home, position + 1]
            size = _push(state, size, state.head[following], following)
        for index in range(shop.readers.shape[1]):
            reader = shop.readers[work, index]
            if reader >= 0:
                size = _push(state, size, state.head[reader], reader)
    return changed


@compiled_inline
def _spread_tails(shop: JobShop, state: State, queue: int, low: int, high: int) -> None:
    """Update the tails after an accepted change; the heads are up to date."""
    size = 0
    # One before the changed positions, because its follower has changed. The latest ends come
    # first: readers are then mostly final before the passes that they read.
    for position in range(max(low - 1, 0), high + 1):
        work = state.row[queue, position]
        size = _push(state, size, -state.head[work], work)
    # A reader ends after its inputs, so with the latest ends first nearly every tail is computed
    # once. This also bounds the heap.
    while size:
        work = state.heap_pass[0]
        size = _pop(state, size)
        tail = _tail_of(shop, state, work)
        if tail == state.tail[work]:
            continue
        state.tail[work] = tail
        position, home = state.position[work], shop.queue[work]
        if position > 0:
            earlier = state.row[home, position - 1]
            size = _push(state, size, -state.head[earlier], earlier)
        for index in range(shop.inputs.shape[1]):
            source = shop.inputs[work, index]
            if source >= 0 and shop.queue[source] != home:
                size = _push(state, size, -state.head[source], source)


@compiled_inline
def _propose(
    shop: JobShop,
    state: State,
    start: int,
    reach: int,
    count: int,
    queue: int,
    first: int,
    last: int,
) -> int:
    """Move up to `count` passes of one type by `reach` positions; return the number of moves.

    The pass at `start` moves first. Neighboring microbatches have similar positions, and moving all
    of them may be shorter where moving one is longer. `state.moves` records the moves for undoing.
    """
    step = 1 if reach > 0 else -1
    work = state.row[queue, start]
    pass_type, num_moves = shop.type_of[work], 0
    while num_moves < count and 0 <= work < len(shop.type_of) and shop.type_of[work] == pass_type:
        start = state.position[work]
        if start < first or start > last:
            break
        stop = _target(shop, state, queue, start, step, max(first, min(last, start + reach)))
        if stop == start:
            break
        _shift(shop, state, queue, start, stop)
        state.moves[num_moves, 0] = start
        state.moves[num_moves, 1] = stop
        num_moves += 1
        # The neighbor behind, in the direction of the move, may follow into the free space.
        # Numbers of one type are consecutive microbatches.
        work -= step
    return num_moves


@compiled_inline
def _exchange(
    shop: JobShop, state: State, start: int, reach: int, queue: int, first: int, last: int
) -> int:
    """Exchange the pass at `start` with the one `reach` positions on; return the number of moves.

    At the memory limit neither pass can move alone: one frees the memory that the other allocates.
    """
    stop = max(first, min(last, start + reach))
    step = 1 if reach > 0 else -1
    if (
        abs(stop - start) < 2
        or _edge(shop, state, queue, state.row[queue, start], step, stop) != stop
        or _edge(shop, state, queue, state.row[queue, stop], -step, start) != start
        or not fit_exchanged(shop, state, queue, min(start, stop), max(start, stop))
    ):
        return 0
    _shift(shop, state, queue, start, stop)
    # The first shift has moved the other pass by one position.
    _shift(shop, state, queue, stop - step, start)
    state.moves[0, 0], state.moves[0, 1] = start, stop
    state.moves[1, 0], state.moves[1, 1] = stop - step, start
    return 2


@compiled_inline
def fit_exchanged(shop: JobShop, state: State, queue: int, low: int, high: int) -> bool:
    """Return whether the memory suffices with the passes at `low` and `high` exchanged."""
    limit = shop.limit[queue]
    low_type, high_type = shop.type_of[state.row[queue, low]], shop.type_of[state.row[queue, high]]
    change = shop.delta[high_type] - shop.delta[low_type]
    # Up to `high`, the memory differs by the allocations of the two passes; there, it is equal.
    if state.memory[queue, low] + change + shop.over[high_type] > limit:
        return False
    for position in range(low + 1, high):
        if (
            state.memory[queue, position]
            + change
            + shop.over[shop.type_of[state.row[queue, position]]]
            > limit
        ):
            return False
    return state.memory[queue, high] + shop.over[low_type] <= limit


@compiled_inline
def _decide(shop: JobShop, state: State, queue: int, num_moves: int, bar: int) -> bool:
    """Accept the last `num_moves` moves if the objective is at most `bar`, else undo them."""
    # Heads of all positions between the outermost moves may change.
    low, high = state.moves[0, 0], state.moves[0, 0]
    for index in range(num_moves):
        low = min(low, state.moves[index, 0], state.moves[index, 1])
        high = max(high, state.moves[index, 0], state.moves[index, 1])
    # The estimate first: it is cheap and rejects most moves.
    if _looks_short(shop, state, queue, low, high, bar) and _fits_moved(shop, state, queue):
        changed = _spread_heads(shop, state, queue, low, high, bar)
        if changed >= 0 and objective(shop, state) <= bar:
            _spread_tails(shop, state, queue, low, high)
            return True
        changed = changed if changed >= 0 else -1 - changed
        # From the last to the first, because a pass can be in the log several times.
        for index in range(changed - 1, -1, -1):
            state.head[state.log_pass[index]] = state.log_head[index]
    for index in range(num_moves - 1, -1, -1):
        _shift(shop, state, queue, state.moves[index, 1], state.moves[index, 0])
    return False


@compiled_inline
def local_search(
    shop: JobShop,
    state: State,
    low: np.ndarray,
    high: np.ndarray,
    steps: int,
    allowed_growth: float = 0.0,
) -> int:
    """Try `steps` random moves outside [low, high) of each queue; return the objective.

    Only passes on a critical path can shorten it, so half of the others are skipped. The objective
    may grow by the fraction `allowed_growth`.
    """
    # A step is not a separate function: the call makes the search a third slower.
    bar = objective(shop, state)
    bar += int(bar * allowed_growth)
    for _ in range(steps):
        queue = draw(state.random) % len(state.row)
        length = shop.length[queue]
        start = draw(state.random) % length
        work = state.row[queue, start]
        bits = draw(state.random)
        is_critical = state.head[work] + state.tail[work] >= bar
        # The middle [low, high) is a period that is repeated later, so it stays unchanged.
        if low[queue] <= start < high[queue] or (not is_critical and bits % _NONCRITICAL_PERIOD):
            continue
        first, last = 0, low[queue] - 1
        if start >= high[queue]:
            first, last = high[queue], length - 1
        # Separate bits of one random number choose distance, direction, kind and number of moves.
        distance = 1 + (bits >> 4) % _MAX_DISTANCE
        if (bits >> 12) & 1:
            distance = 1 + distance % 3
        if (bits >> 13) & 1:
            distance = -distance
        if (bits >> 22) % 16 < _EXCHANGE_SIXTEENTHS:
            num_moves = _exchange(shop, state, start, distance, queue, first, last)
        else:
            count = 1 + (bits >> 18) % _MAX_MOVES if (bits >> 16) & 3 else 1
            num_moves = _propose(shop, state, start, distance, count, queue, first, last)
        # With `allowed_growth` the bar stays, so that the order can leave its local optimum.
        if num_moves and _decide(shop, state, queue, num_moves, bar) and not allowed_growth:
            bar = objective(shop, state)
    return objective(shop, state)


@compiled
def measure(shop: JobShop, row: np.ndarray) -> int:
    """Return the objective of an order that fits in memory; NONE if it deadlocks.

    Dependencies on passes that the order lacks are ignored.
    """
    # NONE is below every position, so `_start_of` counts a missing pass as run, with end 0.
    position = np.full(len(shop.type_of), NONE, np.int32)
    head = np.zeros(len(shop.type_of), np.int64)
    for queue in range(len(row)):
        for index in range(shop.length[queue]):
            position[row[queue, index]] = index
    if len(run_rows(shop, row, position, head)) < shop.length.sum():
        return NONE
    return _last_end(shop, row, head)


def reseed(state: State, number: int) -> None:
    """Reseed the random numbers of the state, differently for every `number`."""
    # Never 0, which xorshift would repeat forever.
    state.random[0] = ((int(state.random[0]) ^ (number * 2654435761)) & _MASK) or 1


def new_state(row: np.ndarray, seed: int, num_neighbours: int = 1) -> State:
    """Return the state of an order, to be filled in by `settle`.

    Args:
        row: [queue, position] -> pass.
        seed: seed of the random numbers.
        num_neighbours: maximum number of passes in other queues that a pass reads, or that read it.
    """
    size = row.size
    # Each of the at most 2 * size + _MAX_DISTANCE logged changes adds its follower and readers.
    heap = (1 + num_neighbours) * (2 * size + 2 * _MAX_DISTANCE)
    return State(
        row=np.array(row, dtype=np.int32, order="C"),
        position=np.zeros(size, np.int32),
        head=np.zeros(size, np.int64),
        tail=np.zeros(size, np.int64),
        memory=np.zeros(row.shape, np.int64),
        heap_key=np.zeros(heap, np.int64),
        heap_pass=np.zeros(heap, np.int32),
        change=np.zeros(row.shape[1], np.int64),
        moves=np.zeros((_MAX_MOVES, 2), np.int64),
        log_pass=np.zeros(2 * size + _MAX_DISTANCE, np.int32),
        log_head=np.zeros(2 * size + 2 * _MAX_DISTANCE, np.int64),
        random=np.array([(seed * 2654435761 + 88172645) & _MASK or 1], np.int64),
    )
