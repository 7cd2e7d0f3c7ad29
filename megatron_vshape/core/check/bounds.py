"""Proven lower bounds of makespan and span, and the minimum memory of any schedule.

Each bound applies to every schedule within the limits; the greatest bound counts. Notation: stage s
of device i, h = activation memory of a microbatch there, M = memory limit of the device, m
microbatches.

* Resource and start-up: a device works on all microbatches, and starts after the first arrives.
* Memory over time: a microbatch allocates h at least from F(s) to the last stage and back. The
  device provides M over time.
* Warm-up and cool-down: the idle time of a device in both (`ramp_idle`) adds to its work.

Some bounds use relaxed costs: a schedule that is feasible at the given costs is feasible at these,
no slower and with no more memory. The exception is `never_split`, which is for searches.

The bounds are for one placement, with any schedule on it. For several placements, the least of
their bounds applies.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from operator import sub

from megatron_vshape.core.model.costs import MIN_AMOUNT, Costs, format_memory
from megatron_vshape.core.model.kinds import COLLECTIVE_TIMES, PARTS, Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement, check_placement, stages_of
from megatron_vshape.core.model.schedule import Objective

MAX_GAP = 0.001
"""Gap to the lower bound below which a search ends."""

_ROUNDING = 1e-9


class LimitError(ScheduleError):
    """No schedule fits: one microbatch alone exceeds the memory limit of a device.

    `min_limit` is the minimum limit, the same for all devices, with a feasible schedule. All
    amounts are in the unit of the costs' memory.
    """

    def __init__(self, device: int, limit: float, required: float, min_limit: float) -> None:
        super().__init__(device, limit, required, min_limit)  # arguments as required by pickle
        self.device, self.limit, self.required, self.min_limit = device, limit, required, min_limit

    def __str__(self) -> str:
        return self.format_message(format_memory)

    def format_message(self, text: Callable[[float], str]) -> str:
        """Format the message; `text` formats an amount of memory, for example in GiB."""
        return (
            f"no schedule fits: the limit of rank {self.device} is {text(self.limit)}, and one "
            f"microbatch needs {text(self.required)} there; the minimum limit for all ranks is "
            f"{text(self.min_limit)}"
        )


def limits_by_device(limits: float | Sequence[float], num_devices: int) -> tuple[float, ...]:
    """Return the limit of every device; raises ScheduleError for a wrong number of limits."""
    if isinstance(limits, int | float):
        return (limits,) * num_devices
    if len(limits) != num_devices:
        raise ScheduleError(
            f"there are {len(limits)} limits for {num_devices} devices; give one, or one each"
        )
    return tuple(limits)


def without_state(
    costs: Costs, placement: Placement, limits: Sequence[float]
) -> tuple[Costs, tuple[float, ...]]:
    """Return the costs without state, and the limits minus the state of each device."""
    fixed = costs.fixed_bytes(placement, len(limits))
    return costs.without_state(), tuple(map(sub, limits, fixed))


def min_memory(costs: Costs, placement: Placement, num_devices: int) -> tuple[float, ...]:
    """Return the memory of each device if microbatches run one after the other.

    This is the minimum for split backwards: before the first B of a microbatch on a device, all its
    F there have run, for all of its slices. W may run when nothing else is allocated.
    """
    # Only the largest microbatch must fit alone.
    costs = _with_combined_factors(costs, max)
    fixed = costs.fixed_bytes(placement, num_devices)
    forward, backward, weight = map(costs.workspace, PARTS)
    peaks: list[float] = []
    for stages, peak in zip(stages_of(placement, num_devices), fixed, strict=True):
        # Memory before and after all slices' F of a stage, in model order. B frees it in reverse
        # order, so when it reaches a stage, only activations of earlier stages are left.
        bytes_before = bytes_after = peak
        for stage in stages:
            retained_bytes = costs.held_after_backward_bytes[stage]
            activation_bytes = costs.held_after_forward_bytes[stage]
            bytes_after += costs.slices * activation_bytes
            # During the stage's last F or first B; after that B: the other slices, and its part for
            # W.
            all_slices = bytes_after + max(forward[stage], backward[stage])
            after_first_backward = (
                bytes_before + (costs.slices - 1) * activation_bytes + retained_bytes
            )
            peak = max(
                peak,
                all_slices,
                after_first_backward,
                fixed[len(peaks)] + retained_bytes + weight[stage],
            )
            bytes_before = bytes_after
        peaks.append(peak)
    return tuple(peaks)


def check_limits(
    costs: Costs,
    placement: Placement,
    num_devices: int,
    limits: Sequence[float],
) -> None:
    """Raise LimitError unless one microbatch alone fits on every device.

    Raises:
        LimitError: one microbatch alone exceeds the limit of a device.
        ScheduleError: the placement is invalid for `num_devices`, or the costs are for other
            stages.
    """
    check_placement(placement, num_devices)
    if len(placement) != costs.num_stages:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, the placement has {len(placement)}"
        )
    min_limits = min_memory(costs, placement, num_devices)
    for device, (min_limit, limit) in enumerate(zip(min_limits, limits, strict=True)):
        if not min_limit <= limit * (1 + _ROUNDING):  # negated, so that nan is rejected
            raise LimitError(device, limit, min_limit, max(min_limits))


def fits(peak: Sequence[float], limits: Sequence[float]) -> bool:
    """Return whether each peak is within its limit, up to rounding."""
    return all(
        memory <= limit * (1 + _ROUNDING) for memory, limit in zip(peak, limits, strict=True)
    )


def bound_at(
    costs: Costs,
    placement: Placement,
    num_microbatches: int,
    limits: Sequence[float],
    goal: Objective,
) -> float:
    """Return a lower bound for this placement, over all choices that the costs allow.

    With costs of a slice, `num_microbatches` still counts microbatches with all their slices.
    """
    costs, limits = without_state(costs, placement, limits)
    if costs.copies:
        # A copied microbatch may leave the device's memory at any time, so memory bounds nothing.
        limits = (inf,) * len(limits)
    count = num_microbatches * costs.slices
    return lower_bound(costs, placement, len(limits), count, limits, goal is Objective.SPAN)


def lower_bound(
    costs: Costs,
    placement: Placement,
    num_devices: int,
    num_microbatches: int,
    limits: Sequence[float],
    span: bool = False,
) -> float:
    """Compute a lower bound of the makespan, or span, of any schedule within the limits.

    The limits exclude state. For the span, each device's first start is subtracted: the earliest
    arrival of the first microbatch. A schedule that does not delay any pass starts then.

    With costs of a slice, `num_microbatches` counts slices. The n-th B of a stage comes after its
    n-th F, so bounds for that number of microbatches apply. They are stronger, because the first B
    of a microbatch waits for its last F (`_extra_slices_us`).
    """
    # Imported here because it requires numpy, which `import megatron_vshape` must not load.
    from megatron_vshape.core.check.ramp_idle import end_with_idle, path_times

    costs = _relax_full_backwards(costs)
    paths = path_times(costs, placement)
    extra_slices_us = _extra_slices_us(costs)
    # Half of `extra_slices_us`, because the bound from memory needs the mean over all slices.
    held_us = [
        round_trip + extra_us / 2
        for round_trip, extra_us in zip(paths.round_trip, extra_slices_us, strict=True)
    ]
    # The first microbatch alone: from F of stage 0 to its B and W.
    best = paths.round_trip[0] + extra_slices_us[0] + costs.weight_us[0]
    device_us = costs.device_us()
    device_ends = []
    for device, stages in enumerate(stages_of(placement, num_devices)):
        start = paths.forward[stages[0]]
        passes_us = sum(
            costs.forward_us[stage] + costs.backward_us[stage] + costs.weight_us[stage]
            for stage in stages
        )
        work = num_microbatches * (passes_us + device_us)
        ends = [
            start + work,
            start + _memory_bound(costs, held_us, stages, num_microbatches, limits[device]),
        ]
        device_ends.append(max(ends))
        best = max(best, *(end - (start if span else 0.0) for end in ends))
    first_limit = limits[placement[0]]
    for device, stages in enumerate(stages_of(placement, num_devices)):
        known_end = device_ends[device] if span else best
        end_limits = (limits[device], first_limit)
        # The device's work plus its proven idle time in warm-up and cool-down. For the makespan,
        # all devices share one end, so bounds of other devices help this one.
        end = end_with_idle(costs, paths, stages, num_microbatches, end_limits, known_end, span)
        best = max(best, end - (paths.forward[stages[0]] if span else 0.0))
    return best


def _extra_slices_us(costs: Costs) -> list[float]:
    """Return the extra time between F and B of a microbatch's first slice, for each stage.

    In between, some later stage runs F of all other slices, and one runs their B, in descending
    order. The mean over all slices is half of that.
    """
    return [
        (costs.slices - 1) * (max(costs.forward_us[stage:]) + max(costs.backward_us[stage:]))
        for stage in range(costs.num_stages)
    ]


def _memory_bound(
    costs: Costs,
    held_us: Sequence[float],
    stages: Sequence[int],
    num_microbatches: int,
    limit: float,
) -> float:
    """Return the bound from memory over time: the total demand divided by the limit.

    `held_us` is the minimum time from F to the end of B, per stage.
    """
    if limit <= 0:
        return 0.0
    area = sum(
        costs.held_after_forward_bytes[stage] * held_us[stage]
        + costs.held_after_backward_bytes[stage] * costs.weight_us[stage]
        for stage in stages
    )
    return num_microbatches * area / (limit * (1 + _ROUNDING))


def _with_combined_factors(costs: Costs, combine: Callable[[Sequence[float]], float]) -> Costs:
    if not costs.by_microbatch:
        return costs
    combined = {amount: combine(factors) for amount, factors in costs.by_microbatch}
    stages = (
        stage.converted(lambda amount, value: combined.get(amount, 1.0) * value)
        for stage in costs.stages
    )
    return replace(costs, stages=tuple(stages), by_microbatch=())


def in_passes(costs: Costs) -> Costs:
    """Move collectives and host time into the times of the passes."""
    if not costs.host_us and costs.by_stage.keys().isdisjoint(COLLECTIVE_TIMES):
        return costs
    stages = range(costs.num_stages)
    # Without costs of its own, a BW still follows from B and W.
    kinds = PARTS if costs.full_us is None else (*PARTS, Kind.BW)
    times = {k.time: [costs.time_us(k, stage) for stage in stages] for k in kinds}
    return replace(costs, host_us=0.0).without(COLLECTIVE_TIMES).having(times)


def _relax_full_backwards(costs: Costs) -> Costs:
    """Relax the costs so that full backwards are no faster than separate passes.

    A schedule at the given costs then runs with each BW as B and W, no slower and with no more
    memory. So bounds for the relaxed costs apply.
    """
    # Every microbatch is as short as the shortest of each pass, and at most as long as given.
    shortest = _with_combined_factors(costs, lambda factors: min(1.0, *factors))
    relaxed = in_passes(shortest)
    # BW retains F's activations until it ends, even if B would retain more for its W.
    retained_bytes = map(min, costs.held_after_forward_bytes, costs.held_after_backward_bytes)
    relaxed = relaxed.having({Kind.B.retained: tuple(retained_bytes)})
    full_backward_us = relaxed.by_stage.get(Kind.BW.time)
    if full_backward_us is None:
        return relaxed
    backward, weight = [], []
    for backward_us, weight_us, full_us in zip(
        relaxed.backward_us, relaxed.weight_us, full_backward_us, strict=True
    ):
        weight.append(
            min(weight_us, max(full_us - backward_us, full_us / 1000))
        )  # positive, as times must be
        backward.append(min(backward_us, full_us - weight[-1]))
    split = relaxed.without([Kind.BW.time])
    return split.having({Kind.B.time: backward, Kind.W.time: weight})


def never_split(costs: Costs) -> Costs:
    """Return costs for schedules without split backwards: B is the full backward, W negligible."""
    full_us = [costs.time_us(Kind.BW, stage) for stage in range(costs.num_stages)]
    weight_share = 1e-6  # share of W; times must be positive
    return (
        in_passes(costs)
        .without([Kind.BW.time])
        .having(
            {
                Kind.B.time: [time_us * (1 - weight_share) for time_us in full_us],
                Kind.W.time: [max(time_us * weight_share, MIN_AMOUNT) for time_us in full_us],
                Kind.B.retained: [0.0] * costs.num_stages,
            }
        )
    )
