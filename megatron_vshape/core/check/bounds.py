"""Proven lower bounds of makespan and span, and the least memory that anything fits.

Each bound holds for every order within the limits; the greatest one counts. Notation: stage s of
device i, h = what a microbatch holds there, M = the device's limit, m microbatches.

* Resource and start-up: a device works for all microbatches, not before the first one comes.
* Memory over time: a microbatch holds h at least as long as its way from F(s) to the last stage
  and back takes; the device can give M all the time and no more.
* Warm-up: before the first microbatch is back for its next chunk, only forwards of the first
  chunk can run, as many as leave room for that chunk; before its B(s) of the first chunk is
  over, no memory of the first chunk comes free, so only so many microbatches have any work.
* Drain: what follows the last B on a device is a chain to device 0. Meanwhile the device has only
  W left, and no more of them than its memory could put off.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_vshape.core.model.costs import Costs, held_text, regroup
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, check_placement, stages_of

_ROUNDING = 1e-9


class LimitError(ScheduleError):
    """Nothing fits: on a device, one microbatch alone needs more than the device may hold.

    All devices may hold `least`, and something fits. All in the unit of the costs' memory.
    """

    def __init__(self, device: int, limit: float, need: float, least: float) -> None:
        super().__init__(device, limit, need, least)  # as it is pickled
        self.device, self.limit, self.need, self.least = device, limit, need, least

    def __str__(self) -> str:
        return self.told(held_text)

    def told(self, text: Callable[[float], str]) -> str:
        """Return the sentence, in which `text` writes what is held, such as in GiB."""
        return (
            f"no schedule fits: device {self.device} may hold {text(self.limit)}, but one "
            f"microbatch alone needs {text(self.need)} there; the least limit for all devices is "
            f"{text(self.least)}"
        )


class _Paths(NamedTuple):
    """Shortest times along the way of one microbatch, per stage."""

    forward: tuple[float, ...]  # until F(s) can start
    round_trip: tuple[float, ...]  # from the start of F(s) to the end of B(s)
    drain: tuple[float, ...]  # from the end of B(s) to the end of B(0) and its W


def each_limit(limits: float | Sequence[float], num_devices: int) -> tuple[float, ...]:
    """Return the limit of every device; raises ScheduleError if there are more or fewer."""
    if isinstance(limits, int | float):
        return (limits,) * num_devices
    if len(limits) != num_devices:
        raise ScheduleError(
            f"there are {len(limits)} limits for {num_devices} devices; give one, or one each"
        )
    return tuple(limits)


def least_memory(costs: Costs, placement: Placement, num_devices: int) -> tuple[float, ...]:
    """Return what each device holds when microbatches run one after the other.

    No order needs less: before the first B of a microbatch on a device, all its F there have run.
    """
    least = []
    for stages in stages_of(placement, num_devices):
        held = [costs.held_after_forward_bytes[stage] for stage in stages]
        worst = sum(held)
        for at, stage in enumerate(stages):
            worst = max(worst, sum(held[:at]) + costs.held_after_backward_bytes[stage])
        least.append(worst)
    return tuple(least)


def check_limits(
    costs: Costs, placement: Placement, num_devices: int, limits: Sequence[float]
) -> None:
    """Raise LimitError unless every device may hold what one microbatch alone needs there.

    Raises:
        ScheduleError: the placement is none for so many devices, or the costs for other stages.
    """
    check_placement(placement, num_devices)
    if len(placement) != costs.num_stages:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, the placement has {len(placement)}"
        )
    needs = least_memory(costs, placement, num_devices)
    for device, (need, limit) in enumerate(zip(needs, limits, strict=True)):
        if not need <= limit * (1 + _ROUNDING):  # so, as nan fits nothing
            raise LimitError(device, limit, need, max(needs))


def fits(peak: Sequence[float], limits: Sequence[float]) -> bool:
    """Return whether no device holds more than its limit, but for rounding."""
    return all(held <= most * (1 + _ROUNDING) for held, most in zip(peak, limits, strict=True))


def least_limit(costs: Costs, num_devices: int, placements: Sequence[Placement]) -> float:
    """Return the least limit, the same for all devices, that something fits on one placement.

    Costs of more stages than a placement has are added up; raises ScheduleError where they
    cannot be.
    """
    return min(
        max(least_memory(regroup(costs, len(placement), "a plan"), placement, num_devices))
        for placement in placements
    )


def lower_bound(
    costs: Costs,
    placement: Placement,
    num_devices: int,
    num_microbatches: int,
    limits: Sequence[float],
    span: bool = False,
) -> float:
    """Return a value that no order within the limits is below.

    For the span, each device's own first start is subtracted: when the first microbatch can be
    there, and no order that runs at once what it can starts later.
    """
    costs = costs.split_no_slower()
    paths = _make_paths(costs, placement)
    best = paths.round_trip[0] + costs.weight_us[0]
    for device, stages in enumerate(stages_of(placement, num_devices)):
        start = paths.forward[stages[0]]
        work = num_microbatches * sum(_work_us(costs, stage) for stage in stages)
        ends = [
            start + work,
            start + _over_time(costs, paths, stages, num_microbatches, limits[device]),
            work + _warm_up(costs, paths, stages, num_microbatches, limits[device]),
        ]
        best = max(best, *(end - (start if span else 0.0) for end in ends))
        if not span:
            late = _put_off(costs, stages, num_microbatches, limits[device])
            best = max(best, start + work - late + paths.drain[stages[0]])
    return best


def _work_us(costs: Costs, stage: int) -> float:
    return costs.forward_us[stage] + costs.backward_us[stage] + costs.weight_us[stage]


def _make_paths(costs: Costs, placement: Placement) -> _Paths:
    stages = len(placement)
    hop = [costs.send_us if placement[s] != placement[s - 1] else 0.0 for s in range(1, stages)]
    forward, drain = [0.0], [costs.weight_us[0]]
    for stage in range(1, stages):
        forward.append(forward[-1] + costs.forward_us[stage - 1] + hop[stage - 1])
        drain.append(drain[-1] + costs.backward_us[stage - 1] + hop[stage - 1])
    trip = [costs.forward_us[-1] + costs.backward_us[-1]]
    for stage in reversed(range(stages - 1)):
        own = costs.forward_us[stage] + costs.backward_us[stage]
        trip.append(trip[-1] + own + 2 * hop[stage])
    return _Paths(tuple(forward), tuple(reversed(trip)), tuple(drain))


def _over_time(
    costs: Costs, paths: _Paths, stages: Sequence[int], num_microbatches: int, limit: float
) -> float:
    """Return how long the device's memory is needed, all of it all the time."""
    if limit <= 0:
        return 0.0
    area = sum(
        costs.held_after_forward_bytes[stage] * paths.round_trip[stage]
        + costs.held_after_backward_bytes[stage] * costs.weight_us[stage]
        for stage in stages
    )
    return num_microbatches * area / (limit * (1 + _ROUNDING))


def _warm_up(
    costs: Costs, paths: _Paths, stages: Sequence[int], num_microbatches: int, limit: float
) -> float:
    """Return the least time, start included, that the device idles before it is warm."""
    first = stages[0]
    held = costs.held_after_forward_bytes
    idle = paths.forward[first]
    if held[first] <= 0:
        return idle
    if len(stages) > 1:
        second = stages[1]
        ahead = _count((limit - held[second]) / held[first], num_microbatches)
        idle = max(idle, paths.forward[second] - ahead * costs.forward_us[first])
    # until the first B of this chunk is over, so many microbatches are in and have any work here
    inside = _count(limit / held[first], num_microbatches)
    later = sum(_work_us(costs, stage) for stage in stages[1:])
    done = inside * (costs.forward_us[first] + later) + costs.backward_us[first]
    return max(idle, paths.forward[first] + paths.round_trip[first] - done)


def _put_off(costs: Costs, stages: Sequence[int], num_microbatches: int, limit: float) -> float:
    """Return the most time that W still take after the device's last B."""
    if any(costs.held_after_backward_bytes[stage] <= 0 for stage in stages):
        return num_microbatches * sum(costs.weight_us[stage] for stage in stages)
    rates = sorted(
        ((costs.weight_us[s] / costs.held_after_backward_bytes[s], s) for s in stages), reverse=True
    )
    room, late = limit * (1 + _ROUNDING), 0.0
    for _, stage in rates:
        held = costs.held_after_backward_bytes[stage]
        # the last one may count in part: a bound may be too low, not too high
        count = min(num_microbatches, room / held)
        late += count * costs.weight_us[stage]
        room -= count * held
    return late


def _count(ratio: float, most: int) -> int:
    return max(0, math.floor(min(most, ratio * (1 + _ROUNDING) + _ROUNDING)))
