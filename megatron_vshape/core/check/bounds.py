"""Proven lower bounds of makespan and span, and the least memory that anything fits.

Each bound holds for every order within the limits; the greatest one counts. Notation: stage s of
device i, h = what a microbatch holds there, M = the device's limit, m microbatches.

* Resource and start-up: a device works for all microbatches, not before the first one comes.
* Memory over time: a microbatch holds h at least as long as its way from F(s) to the last stage
  and back takes; the device can give M all the time and no more.
* Both ends: what a device idles in warm-up and in drain, `ends`, beside its work.

They are for the placement they are asked for, whatever order runs on it; for several placements
the least of theirs holds.
"""

from collections.abc import Callable, Sequence
from operator import sub

from megatron_vshape.core.check.relax import of_largest, split_no_slower
from megatron_vshape.core.check.ways import Ways, ways_of
from megatron_vshape.core.model.costs import Costs, held_text, regroup
from megatron_vshape.core.model.kinds import PARTS, ScheduleError
from megatron_vshape.core.model.placement import Placement, check_placement, stages_of
from megatron_vshape.core.model.schedule import Objective

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
            f"no schedule fits: the limit of rank {self.device} is {text(self.limit)}, and one "
            f"microbatch needs {text(self.need)} there; the minimum limit for all ranks is "
            f"{text(self.least)}"
        )


def each_limit(limits: float | Sequence[float], num_devices: int) -> tuple[float, ...]:
    """Return the limit of every device; raises ScheduleError if there are more or fewer."""
    if isinstance(limits, int | float):
        return (limits,) * num_devices
    if len(limits) != num_devices:
        raise ScheduleError(
            f"there are {len(limits)} limits for {num_devices} devices; give one, or one each"
        )
    return tuple(limits)


def room_in(
    costs: Costs, placement: Placement, limits: Sequence[float]
) -> tuple[Costs, tuple[float, ...]]:
    """Return the costs without state, and what the limits leave each device beside its own."""
    fixed = costs.fixed_bytes(placement, len(limits))
    return costs.without_state(), tuple(map(sub, limits, fixed))


def least_memory(
    costs: Costs, placement: Placement, num_devices: int, slices: int = 1
) -> tuple[float, ...]:
    """Return what each device holds when microbatches run one after the other.

    No order of split backwards needs less: before the first B of a microbatch on a device, all its
    F there have run, of all of its `slices`, of each of which `costs` are. A W may come when
    nothing else is held.
    """
    costs = of_largest(costs)
    fixed = costs.fixed_bytes(placement, num_devices)
    forward, backward, weight = map(costs.works, PARTS)
    least: list[float] = []
    for stages, worst in zip(stages_of(placement, num_devices), fixed, strict=True):
        before = after = worst
        for stage in stages:
            kept, held = (
                costs.held_after_backward_bytes[stage],
                costs.held_after_forward_bytes[stage],
            )
            after += slices * held
            with_all = after + max(forward[stage], backward[stage])
            others = before + (slices - 1) * held + kept
            worst = max(worst, with_all, others, fixed[len(least)] + kept + weight[stage])
            before = after
        least.append(worst)
    return tuple(least)


def check_limits(
    costs: Costs,
    placement: Placement,
    num_devices: int,
    limits: Sequence[float],
    slices: int = 1,
) -> None:
    """Raise LimitError unless every device may hold what one microbatch alone needs there.

    That has so many `slices`, of each of which `costs` are.

    Raises:
        ScheduleError: the placement is none for so many devices, or the costs for other stages.
    """
    check_placement(placement, num_devices)
    if len(placement) != costs.num_stages:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, the placement has {len(placement)}"
        )
    needs = least_memory(costs, placement, num_devices, slices)
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


def bound_at(
    costs: Costs,
    placement: Placement,
    num_microbatches: int,
    limits: Sequence[float],
    goal: Objective,
    slices: int = 1,
) -> float:
    """Return a value that no order of this placement is below, whatever the costs let it choose.

    `costs` are those of whole microbatches, each of which is cut in so many `slices`.
    """
    costs, limits = room_in(costs, placement, limits)
    costs, span = costs.sliced(slices), goal is Objective.SPAN
    sizes = placement, len(limits), num_microbatches * slices
    if not costs.trades:
        return lower_bound(costs, *sizes, limits, span, slices)
    from megatron_vshape.core.check.choices import bound_of_choices  # which begins from this

    return bound_of_choices([costs], costs.copies, *sizes, limits, span)


def lower_bound(
    costs: Costs,
    placement: Placement,
    num_devices: int,
    num_microbatches: int,
    limits: Sequence[float],
    span: bool = False,
    slices: int = 1,
) -> float:
    """Return a value that no order within the limits is below, which are beside all state.

    For the span, each device's own first start is subtracted: when the first microbatch can be
    there, and no order that runs at once what it can starts later.

    With `slices`, of each of which `costs` are and which `num_microbatches` counts, the n-th B of a
    stage is behind its n-th F: so all that holds of as many microbatches holds of them. But more
    does, for the first B of a microbatch waits for its last F (`_apart`).
    """
    # With numpy, which the names of schedules do not need.
    from megatron_vshape.core.check.ends import end_with_idle

    costs = split_no_slower(costs)
    paths = ways_of(costs, placement)
    apart = _apart(costs, slices)
    best, own_us = paths.round_trip[0] + apart[0] + costs.weight_us[0], costs.device_us()
    own_ends = []
    for device, stages in enumerate(stages_of(placement, num_devices)):
        start = paths.forward[stages[0]]
        work = num_microbatches * (sum(_work_us(costs, stage) for stage in stages) + own_us)
        ends = [
            start + work,
            start + _over_time(costs, paths, stages, num_microbatches, limits[device], apart),
        ]
        own_ends.append(max(ends))
        best = max(best, *(end - (start if span else 0.0) for end in ends))
    first = limits[placement[0]]
    for device, stages in enumerate(stages_of(placement, num_devices)):
        known = own_ends[device] if span else best
        room = (limits[device], first)
        end = end_with_idle(costs, paths, stages, num_microbatches, room, known, span)
        best = max(best, end - (paths.forward[stages[0]] if span else 0.0))
    return best


def _work_us(costs: Costs, stage: int) -> float:
    return costs.forward_us[stage] + costs.backward_us[stage] + costs.weight_us[stage]


def _apart(costs: Costs, slices: int) -> list[float]:
    """Return how much longer, from each stage, a microbatch's first slice is on its way than alone.

    From its F to its B: a stage behind runs the F of all other slices in between, and one their B,
    which descend. Of all slices the mean is half of that.
    """
    return [
        (slices - 1) * (max(costs.forward_us[stage:]) + max(costs.backward_us[stage:]))
        for stage in range(costs.num_stages)
    ]


def _over_time(
    costs: Costs,
    paths: Ways,
    stages: Sequence[int],
    num_microbatches: int,
    limit: float,
    apart: Sequence[float],
) -> float:
    """Return how long the device's memory is needed, all of it all the time."""
    if limit <= 0:
        return 0.0
    area = sum(
        costs.held_after_forward_bytes[stage] * (paths.round_trip[stage] + apart[stage] / 2)
        + costs.held_after_backward_bytes[stage] * costs.weight_us[stage]
        for stage in stages
    )
    return num_microbatches * area / (limit * (1 + _ROUNDING))
