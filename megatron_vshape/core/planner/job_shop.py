"""What the adaptive scheduler is asked, in ticks and units of memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vshape.core.check import bounds
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Objective, check_size
from megatron_vshape.core.planner import improve

MOST_TICKS = 1e18
"""Of all passes of a step and their messages one after the other; times are 64 bits."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked, in whole ticks and whole units of memory."""

    costs: Costs
    placement: Placement
    num_devices: int
    num_microbatches: int
    limits: tuple[float, ...]
    objective: Objective
    ticks_per_us: float
    units_per_byte: float


def make_problem(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    limit: float | Sequence[float],
    objective: Objective,
    placement: Placement,
) -> Problem:
    """Return what is asked of one placement; `limit` is one value or one per device.

    Raises:
        LimitError: one microbatch alone does not fit the limits.
        ScheduleError: a count is below 1, the counts of devices, stages, costs and limits do not
            match, or the schedule would fill the memory.
    """
    for what, count in (("devices", num_devices), ("microbatches", num_microbatches)):
        if count < 1:
            raise ScheduleError(f"a plan needs at least 1 of {what}, not {count}")
    limits = bounds.each_limit(limit, num_devices)
    bounds.check_limits(costs, placement, num_devices, limits)
    check_size(len(placement), num_microbatches)
    times = (*costs.forward_us, *costs.backward_us, *costs.weight_us)
    held = (*costs.held_after_forward_bytes, *costs.held_after_backward_bytes)
    return Problem(
        costs,
        placement,
        num_devices,
        num_microbatches,
        limits,
        objective,
        _time_scale(times, costs.send_us, num_microbatches),
        scale_to(1e11, max(held) or 1.0),
    )


def scale_to(at_least: float, value: float) -> float:
    """Return the power of ten that lifts `value` to `at_least`; decimals then stay exact."""
    scale = 1.0
    while value * scale < at_least:
        scale *= 10
    while value * scale >= 10 * at_least:
        scale /= 10
    return scale


def _time_scale(times: Sequence[float], send_us: float, num_microbatches: int) -> float:
    """Return the ticks of a unit of time: fine for the shortest pass, whole steps in 64 bits."""
    step = num_microbatches * (sum(times) + 3 * len(times) * send_us)
    scale = scale_to(1e5, min(times))
    while step * scale > MOST_TICKS:
        scale /= 10
    return scale


def make_shop(problem: Problem, num_microbatches: int) -> improve.Shop:
    """Return the passes of `num_microbatches` microbatches for the inner loops."""
    costs, placement = problem.costs, problem.placement
    stages, m = len(placement), num_microbatches
    sorts = 3 * stages
    before = np.full(sorts, -1)
    lag = np.zeros(sorts, np.int64)
    send = round(costs.send_us * problem.ticks_per_us)
    for sort in range(sorts):
        kind, stage = PARTS[sort % 3], sort // 3
        # the last need is the latest: whatever else a pass reads was there before it
        for need in Pass(kind, stage, 0).needs(stages):
            before[sort] = 3 * need.stage + PARTS.index(need.kind)
            lag[sort] = send * (placement[need.stage] != placement[stage])
    times = zip(costs.forward_us, costs.backward_us, costs.weight_us, strict=True)
    ticks = np.array([[round(t * problem.ticks_per_us) for t in each] for each in times])
    device = np.repeat(np.array(placement), 3)
    after, weight = np.full(sorts, -1), np.full(sorts, -1)
    for sort, need in enumerate(before):
        if need >= 0:
            (weight if sort % 3 == 2 else after)[need] = sort
    micro = np.tile(np.arange(m), sorts)

    def passes(of: np.ndarray) -> np.ndarray:
        wide = np.repeat(of, m)
        return np.where(wide >= 0, wide * m + micro, -1).astype(np.int32)

    return improve.Shop(
        before=passes(before),
        after=passes(after),
        weight=passes(weight),
        ticks=np.repeat(ticks.ravel(), m).astype(np.int64),
        lag=np.repeat(lag, m),
        device=np.repeat(device, m).astype(np.int32),
        sort=np.repeat(np.arange(sorts), m).astype(np.int32),
        delta=deltas_of(problem),
        limit=np.array([int(x * problem.units_per_byte * (1 + 1e-9)) for x in _limits(problem)]),
        due=_due(problem, ticks, send),
    )


def _limits(problem: Problem) -> Iterator[float]:
    """Yield the limit of every device, not above all that it could ever hold."""
    costs = problem.costs
    held = zip(costs.held_after_forward_bytes, costs.held_after_backward_bytes, strict=True)
    most = [problem.num_microbatches * max(pair) for pair in held]
    stages = stages_of(problem.placement, problem.num_devices)
    for limit, own in zip(problem.limits, stages, strict=True):
        yield min(limit, sum(most[stage] for stage in own))


def deltas_of(problem: Problem) -> np.ndarray:
    """Return what a device holds more after a pass of each sort, in whole units of memory."""
    scale, costs = problem.units_per_byte, problem.costs
    deltas = []
    held = zip(costs.held_after_forward_bytes, costs.held_after_backward_bytes, strict=True)
    for after_forward, after_backward in held:
        full, rest = round(after_forward * scale), round(after_backward * scale)
        deltas += [full, rest - full, -rest]
    return np.array(deltas, np.int64)


def _due(problem: Problem, ticks: np.ndarray, send: int) -> np.ndarray:
    """Return minus each device's first start for the span: no order can move it."""
    due = np.zeros(problem.num_devices, np.int64)
    if problem.objective is Objective.SPAN:
        clock = 0
        seen: set[int] = set()
        for stage, device in enumerate(problem.placement):
            clock += send if stage and device != problem.placement[stage - 1] else 0
            if device not in seen:
                seen.add(device)
                due[device] = -clock
            clock += int(ticks[stage, 0])
    return due
