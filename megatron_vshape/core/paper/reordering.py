"""Step 4 (reorder): move passes into idle slots of warm-up and cool-down, within the memory limit.

The devices run in simulated time. A device that would idle runs a later ready pass, if that delays
no other pass and never exceeds the memory limit. A device with few forwards left is in cool-down:
passes that only free memory, such as W, then wait until no other pass can run.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.compiling import compile_if_large, in_lists
from megatron_vshape.core.list_scheduler import (
    FILL_CALLEES,
    LATE,
    NONE,
    PassOrder,
    PassTypes,
    SchedulerState,
    fill_idle_slots,
    make_pass_types,
    new_scheduler_state,
    number_passes,
    ready_time,
)
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule

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
    return _fill_schedule(schedule, max_held, max_held, NONE)


def fill_warm_up(schedule: Schedule, max_held: int, max_ahead: int) -> Schedule:
    """Fill idle slots until a device first frees an activation of its first stage.

    As in `reorder`, but forwards of the first stage move up only while fewer than `max_ahead` of
    them are allocated; more would use the memory that forwards of the last stage need.

    Raises:
        ScheduleError: a forward does not fit `max_held`, or a pass waits for one that never runs.
    """
    return _fill_schedule(schedule, max_held, NONE, max_ahead)


def _fill_schedule(schedule: Schedule, max_held: int, cool_down: int, max_ahead: int) -> Schedule:
    order = _order_of(schedule, max_held)
    size = len(order.type_of)
    state = new_scheduler_state(order, lambda count: [0] * count)
    compiled_fill, order, state, new_order = compile_if_large(
        size, fill_idle_slots, FILL_CALLEES, order, state, [0] * size
    )
    # Fewer passes than given: the rest is blocked by memory or a cycle of waits.
    if compiled_fill(order, state, new_order, cool_down, max_ahead) < size:
        _raise_blocked(schedule, order, state)
    passes, new_order = list(chain.from_iterable(schedule.order)), in_lists(new_order)
    rows = (new_order[begin:end] for begin, end in pairwise(order.begin))
    return replace(schedule, order=tuple(tuple(map(passes.__getitem__, row)) for row in rows))


def _order_of(schedule: Schedule, max_held: int) -> PassOrder:
    # All passes of the paper's schedules run on the processor: queue d is device d.
    passes = number_passes(schedule.order, _KINDS, schedule.num_stages, schedule.num_microbatches)
    return PassOrder(
        **passes._asdict(),
        types=_unit_pass_types(schedule.placement),
        limit=[max_held] * schedule.num_devices,
        num_microbatches=schedule.num_microbatches,
        reversed_numbers=list(range(schedule.num_microbatches)),  # passes keep their numbers
        is_strict=False,
    )


@lru_cache(maxsize=4)
def _unit_pass_types(placement: Placement) -> PassTypes:
    """Return unit costs: every simple pass takes 1; a stage's activation lives from F to W."""

    def amounts(kind: Kind, _stage: int) -> tuple[int, int, int]:
        allocates = bool(kind.allocated)
        return len(kind.does), allocates, allocates + bool(kind.retained) - bool(kind.freed)

    return make_pass_types(_KINDS, placement, amounts)


def _raise_blocked(schedule: Schedule, order: PassOrder, state: SchedulerState) -> None:
    """Raise ScheduleError for blocked passes: only memory blocks a pass with all its inputs."""
    heads = [
        (device, index)
        for device, index in enumerate(state.first)
        if index < order.begin[device + 1]
    ]
    ready_heads = [
        (device, index) for device, index in heads if ready_time(order, state, index, 0) < LATE
    ]
    if ready_heads:
        # The lowest microbatch, because the others wait for it.
        device, index = min(ready_heads, key=lambda head: order.microbatch[head[1]])
        work = schedule.order[device][index - order.begin[device]]
        raise ScheduleError(
            f"{work} does not fit on device {device}, which holds {state.memory[device]} "
            f"stage activations then and its limit is {order.limit[device]}"
        )
    simulate(schedule)  # raises: a pass waits for one that never runs
