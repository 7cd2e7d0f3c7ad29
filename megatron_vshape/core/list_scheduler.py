"""List scheduling: queues of passes run in simulated time, and a policy chooses the next pass.

`number_passes` encodes passes as integers, in lists or in arrays. `fill_idle_slots` runs a later
ready pass where a queue would idle; `place_weights` runs each W as a filler after its B. Step 4 of
the paper uses the first in units of a pass; the planner compiles both for its ticks and units.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

from megatron_vshape.core import compiling
from megatron_vshape.core.model.kinds import PROCESSOR, Kind, NeedTable
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement

NONE = -1

WITHOUT = -2
"""For a pass that a microbatch omits: no pass waits for it."""

LATE = 1 << 62
"""Start time of a pass that cannot start."""

FIRST, BACKWARD, OTHER, WEIGHT = 0, 1, 2, 3
"""Priority of passes that can start at the same time: the lowest goes first."""

EIGHTHS = 8
"""Unit of the delay that a pass may cause: an eighth of its time."""


class _IntSequence(Protocol):
    """A list or an array of integers."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


class RaggedList(NamedTuple):
    """Several numbers per index i: `numbers[begin[i] : begin[i + 1]]`."""

    numbers: _IntSequence
    begin: _IntSequence


def _ragged_list(rows: Iterable[Sequence[int]]) -> RaggedList:
    """Concatenate the rows."""
    row_list = list(rows)
    return RaggedList(list(chain.from_iterable(row_list)), [0, *accumulate(map(len, row_list))])


class PassTypes(NamedTuple):
    """Properties of pass types; a pass type is the number of a kind and a stage.

    A queue is that of a resource of a device, as in `Schedule.lanes`. Sequences are lists or
    arrays.
    """

    queue: _IntSequence
    ticks: _IntSequence
    needs: RaggedList  # pass types of the inputs, without inputs of these inputs
    lag: _IntSequence  # of an input: ticks of its message; 0 on the same device
    is_reversed: _IntSequence  # of an input: whether its kind runs a microbatch's passes in reverse
    woken_queues: RaggedList  # other queues that may go on after it
    peak: _IntSequence  # maximum increase of a queue's memory while such a pass runs
    change: _IntSequence  # and after it has run
    priority: _IntSequence
    is_forward: _IntSequence  # whether it is the first pass of a microbatch
    is_first_stage: _IntSequence  # whether its stage is the first of its device
    types_of_queue: RaggedList


class PassOrder(NamedTuple):
    """The pass order to fill; a pass is its index, queue after queue."""

    types: PassTypes
    begin: _IntSequence  # first index of a queue; the last entry is the total
    type_of: _IntSequence
    microbatch: _IntSequence
    index_of: _IntSequence  # [type * num_microbatches + microbatch]; NONE or WITHOUT if missing
    limit: _IntSequence  # memory limit of a queue
    num_microbatches: int
    reversed_numbers: _IntSequence  # of a microbatch: its number for inputs that `is_reversed`
    is_strict: bool  # whether passes without memory may only overtake passes that still fit
    delay: int = 0  # maximum delay of overtaken passes, in eighths of the time of a pass


class SchedulerState(NamedTuple):
    """State of the simulation, changed in place."""

    end: _IntSequence  # of a pass; LATE until it has run
    following: _IntSequence  # of a pass: the next of its type
    first_of_type: _IntSequence  # of a pass type: its first remaining pass
    first: _IntSequence  # of a queue: its first remaining pass
    clock: _IntSequence
    memory: _IntSequence
    remaining_forwards: _IntSequence  # remaining forwards
    num_run: _IntSequence  # number of passes that have run
    first_stage_memory: _IntSequence  # allocated by the first stage
    is_warm: _IntSequence  # whether any of that has been freed
    start: _IntSequence  # of the next pass
    choice: _IntSequence
    is_stale: _IntSequence  # whether the start and choice must be recomputed


class _PassNumbering(NamedTuple):
    """Passes by index, resource queue after resource queue.

    A pass of stage s has the type len(kinds) * s + the index of its kind. `index_of` is the index
    of the pass that includes the work of a pass type and microbatch: for B and W, it may be a full
    backward.
    """

    begin: _IntSequence  # first index of each queue; the last entry is the total
    type_of: _IntSequence
    microbatch: _IntSequence
    index_of: _IntSequence  # [type * num_microbatches + microbatch]; NONE if there is none


def number_passes(
    lanes: Sequence[Sequence[Pass]], kinds: Sequence[Kind], num_stages: int, num_microbatches: int
) -> _PassNumbering:
    """Encode the passes of all queues; `kinds` includes all their kinds and parts.

    Returns arrays if there are enough passes for a compiled loop, otherwise lists.

    Raises:
        IndexError: a stage or a microbatch does not exist. A wrong one could silently address
            another pass, and compiled loops do not check indices.
    """
    count, m = len(kinds), num_microbatches
    kind_index = {kind: index for index, kind in enumerate(kinds)}
    parts = [[kind_index[part] for part in kind.does] for kind in kinds]
    passes = list(chain.from_iterable(lanes))
    begin = [0, *accumulate(map(len, lanes))]
    pass_types = [count * stage + kind_index[kind] for kind, stage, _ in passes]
    microbatches = [microbatch for _, _, microbatch in passes]
    for numbers, end in ((pass_types, count * num_stages), (microbatches, m)):
        if passes and not 0 <= min(numbers) <= max(numbers) < end:
            raise IndexError("a pass has a stage or a microbatch that does not exist")
    if len(passes) >= compiling.COMPILED_FROM:
        return _in_arrays(begin, pass_types, microbatches, parts, num_stages, m)
    place_of = [NONE] * (count * num_stages * m)
    for index, (pass_type, microbatch_number) in enumerate(
        zip(pass_types, microbatches, strict=True)
    ):
        kind = pass_type % count
        for part in parts[kind]:
            # `pass_type - kind` is the first type of the stage.
            place_of[(pass_type - kind + part) * m + microbatch_number] = index
    return _PassNumbering(begin, pass_types, microbatches, place_of)


def _in_arrays(
    begin: Sequence[int],
    pass_types: Sequence[int],
    microbatches: Sequence[int],
    parts: Sequence[Sequence[int]],
    num_stages: int,
    num_microbatches: int,
) -> _PassNumbering:
    """Return the same encoding in arrays."""
    import numpy as np

    type_array, microbatch_array = np.array(pass_types, np.int64), np.array(microbatches, np.int64)
    place_of = np.full(len(parts) * num_stages * num_microbatches, NONE, np.int64)
    kinds = type_array % len(parts)
    for kind, kind_parts in enumerate(parts):
        indices = np.flatnonzero(kinds == kind)
        # Entry of part 0 for each pass, as in the loop of `number_passes`.
        first = (type_array[indices] - kind) * num_microbatches + microbatch_array[indices]
        for part in kind_parts:
            place_of[first + part * num_microbatches] = indices
    return _PassNumbering(np.array(begin, np.int64), type_array, microbatch_array, place_of)


def make_pass_types(
    kinds: Sequence[Kind],
    placement: Placement,
    amounts: Callable[[Kind, int], tuple[int, int, int]],
    message: Callable[[int, int], int] = lambda *_: 0,
) -> PassTypes:
    """Return the pass types of all stages; the number is len(kinds) * stage + index in `kinds`.

    `amounts` returns, for a kind and a stage, the ticks of a pass, the increase of memory while it
    runs, and the change after it has ended; `message` the ticks from one stage to another.
    queue d is the processor of device d.
    """
    table = NeedTable(len(placement), kinds)
    direct = table.direct_needs()
    pass_types = [(kind, stage) for stage in range(len(placement)) for kind in kinds]
    type_numbers = {pass_type: index for index, pass_type in enumerate(pass_types)}
    queues = {(device, PROCESSOR): device for device in range(max(placement) + 1)}
    queue = [
        queues.setdefault((placement[stage], kind.resource), len(queues))
        for kind, stage in pass_types
    ]
    needs = [
        [
            type_numbers[table.parts[part], source_stage]
            for part, source_stage in direct[kind][stage]
        ]
        for kind, stage in pass_types
    ]
    readers: list[set[int]] = [set() for _ in pass_types]
    for pass_type, type_needs in enumerate(needs):
        for source in type_needs:
            readers[source].add(queue[pass_type])
    woken = [
        # Without its queue, which `finish_pass` always marks.
        set[int]().union(*(readers[type_numbers[part, stage]] for part in kind.does))
        - {queue[pass_type]}
        for pass_type, (kind, stage) in enumerate(pass_types)
    ]
    ticks, increases, changes = map(
        list, zip(*(amounts(*pass_type) for pass_type in pass_types), strict=True)
    )
    reverse = [kind.is_execution_numbered for kind, _ in pass_types]
    stages = [stage for _, stage in pass_types]
    return PassTypes(
        queue=queue,
        ticks=ticks,
        needs=_ragged_list(needs),
        lag=[
            message(stages[source], stages[pass_type])
            for pass_type, type_needs in enumerate(needs)
            for source in type_needs
        ],
        is_reversed=[
            reverse[source] != reverse[pass_type]
            for pass_type, type_needs in enumerate(needs)
            for source in type_needs
        ],
        woken_queues=_ragged_list(map(sorted, woken)),
        peak=list(map(max, increases, changes)),
        change=changes,
        priority=[_type_priority(kind, kinds) for kind, _ in pass_types],
        is_first_stage=[stage == placement.index(placement[stage]) for _, stage in pass_types],
        is_forward=[kind.everywhere and bool(kind.allocated) for kind, _ in pass_types],
        types_of_queue=_ragged_list(
            [
                queue_type
                for queue_type in range(len(pass_types))
                if queue[queue_type] == queue_number
            ]
            for queue_number in queues.values()
        ),
    )


def _type_priority(kind: Kind, kinds: Iterable[Kind]) -> int:
    reads = (read for reader in kinds for read in reader.reads)
    # WEIGHT is for passes that free memory and have no reader: they can wait in cool-down.
    awaited = kind.before or any(read.kind in kind.does for read in reads)
    if kind.freed and not awaited:
        return WEIGHT
    return OTHER if kind.allocated else BACKWARD


def new_scheduler_state(order: PassOrder, zeros: Callable[[int], _IntSequence]) -> SchedulerState:
    """Return an empty state for `fill_idle_slots`; `zeros(n)` makes n zeros."""
    num_passes, num_queues = len(order.type_of), len(order.limit)
    # The ten fields from `first` to `is_stale` have one entry per queue.
    return SchedulerState(
        zeros(num_passes),
        zeros(num_passes),
        zeros(len(order.types.ticks)),
        *map(zeros, [num_queues] * 10),
    )


def fill_idle_slots(
    order: PassOrder, state: SchedulerState, new_order: _IntSequence, cool_down: int, max_ahead: int
) -> int:
    """Run the queues in the order of their next starts; return the number of passes that have run.

    `new_order` receives the new order, as indices of the old one. A queue is in cool-down with at
    most `cool_down` forwards left. With `max_ahead` other than NONE, passes move as in
    `paper.catalogue.fill_warm_up`.
    """
    reset_state(order, state)
    starts, is_stale, num_queues = state.start, state.is_stale, len(order.limit)
    now, queue, num_done = 0, num_queues, 0
    while num_done < len(new_order):
        if queue == num_queues:
            now = LATE
            for candidate in range(num_queues):
                if is_stale[candidate]:
                    starts[candidate], state.choice[candidate] = _choose(
                        order, state, candidate, cool_down, max_ahead
                    )
                    is_stale[candidate] = 0
                if starts[candidate] < now:
                    now, queue = starts[candidate], candidate
            if now == LATE:
                break
        # A pass that ran since the choice enables others only later; at most it prevents overtaking
        # the first pass of the queue. So only a choice that overtakes is recomputed.
        if is_stale[queue] and starts[queue] == now and state.choice[queue] != state.first[queue]:
            starts[queue], state.choice[queue] = _choose(order, state, queue, cool_down, max_ahead)
            is_stale[queue] = 0
        if starts[queue] > now:
            queue += 1
            continue
        index = state.choice[queue]
        new_order[order.begin[queue] + state.num_run[queue]] = index
        num_done += 1
        finish_pass(order, state, queue, index)
        _advance(order, state, queue, index)
        # A pass of zero length may have woken an earlier queue for the same time.
        queue = queue + 1 if order.types.ticks[order.type_of[index]] else num_queues
    return num_done


def reset_state(order: PassOrder, state: SchedulerState) -> None:
    """Reset the state: no pass has run."""
    for pass_type in range(len(state.first_of_type)):
        state.first_of_type[pass_type] = NONE
    for queue in range(len(order.limit)):
        state.first[queue] = order.begin[queue]
        state.is_stale[queue] = 1
        # From the last pass to the first, so that `first_of_type` ends at the first of each type.
        for index in range(order.begin[queue + 1] - 1, order.begin[queue] - 1, -1):
            pass_type = order.type_of[index]
            state.end[index] = LATE
            state.following[index] = state.first_of_type[pass_type]
            state.first_of_type[pass_type] = index
            state.remaining_forwards[queue] += order.types.is_forward[pass_type]


def ready_time(order: PassOrder, state: SchedulerState, index: int, start: int) -> int:
    """Return the start time of a pass, at least `start`; LATE if an input has not run."""
    needs, pass_type, microbatch = order.types.needs, order.type_of[index], order.microbatch[index]
    for entry in range(needs.begin[pass_type], needs.begin[pass_type + 1]):
        # All kinds are numbered in execution order.
        source_microbatch = (
            order.reversed_numbers[microbatch] if order.types.is_reversed[entry] else microbatch
        )
        source = order.index_of[needs.numbers[entry] * order.num_microbatches + source_microbatch]
        if source == WITHOUT:
            continue
        if source == NONE or state.end[source] == LATE:
            return LATE
        arrival = state.end[source] + order.types.lag[entry]
        if arrival > start:
            start = arrival
    return start


def finish_pass(order: PassOrder, state: SchedulerState, queue: int, index: int) -> None:
    """Run a pass at `state.start`, and mark the queues that may go on as stale."""
    types, pass_type = order.types, order.type_of[index]
    state.clock[queue] = state.start[queue] + types.ticks[pass_type]
    state.end[index] = state.clock[queue]
    state.memory[queue] += types.change[pass_type]
    state.num_run[queue] += 1
    state.is_stale[queue] = 1
    for entry in range(
        types.woken_queues.begin[pass_type], types.woken_queues.begin[pass_type + 1]
    ):
        state.is_stale[types.woken_queues.numbers[entry]] = 1


def _advance(order: PassOrder, state: SchedulerState, queue: int, index: int) -> None:
    """Remove a pass that has run from the remaining passes."""
    pass_type = order.type_of[index]
    # `_choose` considers only the first remaining pass of a type, so `index` is that one.
    state.first_of_type[pass_type] = state.following[index]
    state.remaining_forwards[queue] -= order.types.is_forward[pass_type]
    if order.types.is_first_stage[pass_type]:
        change = order.types.change[pass_type]
        state.first_stage_memory[queue] += change
        if change < 0:
            state.is_warm[queue] = 1
    first, end = state.first[queue], order.begin[queue + 1]
    # Passes after `first` may have run already, by overtaking.
    while first < end and state.end[first] < LATE:
        first += 1
    state.first[queue] = first


def _choose(
    order: PassOrder, state: SchedulerState, queue: int, cool_down: int, max_ahead: int
) -> tuple[int, int]:
    """Return the start and the index of the queue's next pass; LATE and NONE if there is none."""
    first, clock, types = state.first[queue], state.clock[queue], order.types
    if first == order.begin[queue + 1]:
        return LATE, NONE
    is_cooling = state.remaining_forwards[queue] <= cool_down
    # `first_start` is the start of the first pass; LATE if it lacks memory or an input.
    first_start, pass_type = LATE, order.type_of[first]
    if state.memory[queue] + types.peak[pass_type] <= order.limit[queue]:
        first_start = ready_time(order, state, first, clock)
    # Fast path: the first pass can start at once, so overtaking it gains nothing.
    if first_start == clock and not (is_cooling and types.priority[pass_type] == WEIGHT):
        return clock, first
    best_start, best_priority, best = LATE, NONE, NONE
    for entry in range(types.types_of_queue.begin[queue], types.types_of_queue.begin[queue + 1]):
        index = state.first_of_type[types.types_of_queue.numbers[entry]]
        if index == NONE or (
            max_ahead != NONE and not _may_move(order, state, queue, index, max_ahead)
        ):
            continue
        start = ready_time(order, state, index, clock)
        # `_fits` scans the row, so the cheap conditions come first.
        if start > best_start or start == LATE or not _fits(order, state, queue, index):
            continue
        priority = _priority_of(order, state, queue, index, start, first_start, is_cooling)
        # With equal start and rank, the original order decides.
        is_better = start < best_start or (priority, index) < (best_priority, best)
        if priority != NONE and is_better:
            best_start, best_priority, best = start, priority, index
    return best_start, best


def _may_move(
    order: PassOrder, state: SchedulerState, queue: int, index: int, max_ahead: int
) -> bool:
    """Return whether a pass may move up if only the warm-up is filled."""
    if index == state.first[queue]:
        return True
    pass_type = order.type_of[index]
    is_too_far = (
        order.types.is_first_stage[pass_type]
        and order.types.is_forward[pass_type]
        and state.first_stage_memory[queue] >= max_ahead
    )
    return not (state.is_warm[queue] or is_too_far)


def _fits(order: PassOrder, state: SchedulerState, queue: int, index: int) -> bool:
    """Return whether the pass fits now, and the remaining passes before it still fit after it."""
    peak, change, limit = order.types.peak, order.types.change, order.limit[queue]
    memory, pass_type = state.memory[queue], order.type_of[index]
    # A pass that allocates nothing cannot make the passes before it exceed the limit.
    if peak[pass_type] <= 0 and not order.is_strict:
        return True
    if memory + peak[pass_type] > limit:
        return False
    memory += change[pass_type]
    for earlier in range(state.first[queue], index):
        if state.end[earlier] == LATE:
            pass_type = order.type_of[earlier]
            if memory + peak[pass_type] > limit:
                return False
            memory += change[pass_type]
    return True


def _priority_of(
    order: PassOrder,
    state: SchedulerState,
    queue: int,
    index: int,
    start: int,
    first_start: int,
    is_cooling: bool,
) -> int:
    """Return the priority of a pass among those with the same start; NONE if it must wait."""
    types, pass_type = order.types, order.type_of[index]
    priority = types.priority[pass_type]
    if is_cooling and priority == WEIGHT:
        return WEIGHT
    first = state.first[queue]
    if index == first or (is_cooling and _only_weights(order, state, first, index)):
        return FIRST
    # Overtaking must not delay the first pass by more than the allowed share.
    if (
        start + types.ticks[pass_type]
        <= first_start + order.delay * types.ticks[pass_type] // EIGHTHS
    ):
        # Before cool-down, a W may fill idle time like any other pass.
        return min(priority, OTHER)
    return NONE


def _only_weights(order: PassOrder, state: SchedulerState, first: int, index: int) -> bool:
    for earlier in range(first, index):
        if state.end[earlier] == LATE and order.types.priority[order.type_of[earlier]] != WEIGHT:
            return False
    return True


def place_weights(
    order: PassOrder,
    state: SchedulerState,
    weight_of: _IntSequence,
    ready_weights: _IntSequence,
    num_ready: _IntSequence,
    num_placed: _IntSequence,
    new_order: _IntSequence,
) -> bool:
    """Run the queues in order of their next starts, with W as filler; return False on deadlock.

    Args:
        order: the passes; `delay` limits by how much a W delays the next pass.
        state: an empty state.
        weight_of: [type] of a B or W: the type of its W; else NONE.
        ready_weights: [index] the W of a queue whose B have run, oldest first.
        num_ready: [queue] their number; 0 at the start.
        num_placed: [queue] number of these that have run; 0 at the start.
        new_order: receives the new order, as indices of the old one.
    """
    reset_state(order, state)
    for _ in range(len(new_order)):
        queue = 0
        for candidate in range(len(order.limit)):
            # Only queues whose input or memory has changed get a new start.
            if state.is_stale[candidate]:
                state.is_stale[candidate] = 0
                state.start[candidate] = _start_without_weights(order, state, weight_of, candidate)
                # The oldest W first: it frees memory that the next forward may need.
                if num_placed[candidate] < num_ready[candidate]:
                    weight = ready_weights[order.begin[candidate] + num_placed[candidate]]
                    _prefer_weight(order, state, candidate, weight)
            if state.start[candidate] < state.start[queue]:
                queue = candidate
        # The earliest start is LATE, so every queue is blocked.
        if state.start[queue] == LATE:
            return False
        index = state.choice[queue]
        new_order[order.begin[queue] + state.num_run[queue]] = index
        finish_pass(order, state, queue, index)
        pass_type = order.type_of[index]
        if weight_of[pass_type] == pass_type:
            num_placed[queue] += 1
            continue
        state.first[queue] += 1
        # A B has run: its W is available as filler.
        if weight_of[pass_type] != NONE:
            weight = weight_of[pass_type] * order.num_microbatches + order.microbatch[index]
            ready_weights[order.begin[queue] + num_ready[queue]] = order.index_of[weight]
            num_ready[queue] += 1
    return True


def _start_without_weights(
    order: PassOrder, state: SchedulerState, weight_of: _IntSequence, queue: int
) -> int:
    """Return the start of the next pass except W; LATE if its input or memory is missing."""
    first, end = state.first[queue], order.begin[queue + 1]
    # W are not part of this sequence: they run as filler.
    while first < end and weight_of[order.type_of[first]] == order.type_of[first]:
        first += 1
    state.first[queue] = state.choice[queue] = first
    if first == end:
        return LATE
    if state.memory[queue] + order.types.peak[order.type_of[first]] > order.limit[queue]:
        return LATE
    return ready_time(order, state, first, state.clock[queue])


def _prefer_weight(order: PassOrder, state: SchedulerState, queue: int, weight: int) -> None:
    """Choose the oldest W if it delays the next start by at most `delay`."""
    start, clock = state.start[queue], state.clock[queue]
    ticks = order.types.ticks[order.type_of[weight]]
    if start > clock and clock + ticks <= start + order.delay * ticks // EIGHTHS:
        state.start[queue], state.choice[queue] = clock, weight


FILL_CALLEES = (
    reset_state,
    ready_time,
    finish_pass,
    _advance,
    _choose,
    _may_move,
    _fits,
    _priority_of,
    _only_weights,
)
"""Functions that `fill_idle_slots` calls, for the compiler."""

WEIGHT_CALLEES = (reset_state, ready_time, finish_pass, _start_without_weights, _prefer_weight)
"""Functions that `place_weights` calls, for the compiler."""
