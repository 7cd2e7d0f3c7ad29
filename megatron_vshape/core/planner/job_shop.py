"""What the adaptive scheduler is asked, in ticks and units of memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vshape.core.check import bounds
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Objective, check_size
from megatron_vshape.core.paper.reordering import Lists, Sorts, make_sorts
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
    kinds: tuple[Kind, ...]
    ticks_per_us: float
    sorts: Sorts  # arrays
    weight_of: np.ndarray  # of the sort of a B and of its W, that of the W; NONE of others
    room: np.ndarray  # of a lane, in whole units
    send: int


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
    kinds = PARTS
    stages = range(len(placement))
    times = [costs.time_us(kind, stage) for kind in kinds for stage in stages]
    ticks_per_us = _time_scale(times, costs.send_us, num_microbatches)
    held = {kind: costs.held(kind) for kind in kinds}
    units = scale_to(1e11, max(max(*takes, *keeps) for takes, keeps, _ in held.values()) or 1.0)

    def amounts(kind: Kind, stage: int) -> tuple[int, int, int]:
        takes, keeps, frees = (round(each[stage] * units) for each in held[kind])
        ticks = round(costs.time_us(kind, stage) * ticks_per_us)
        return ticks, takes, takes + keeps - frees

    problem = Problem(
        costs=costs,
        placement=placement,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        limits=limits,
        objective=objective,
        kinds=kinds,
        ticks_per_us=ticks_per_us,
        send=round(costs.send_us * ticks_per_us),
        sorts=_arrays(make_sorts(kinds, placement, amounts)),
        weight_of=_weight_of(kinds, len(placement)),
        room=np.zeros(num_devices, np.int64),
    )
    problem.room[:] = [int(limit * units * (1 + 1e-9)) for limit in _limits(problem)]
    return problem


def _weight_of(kinds: tuple[Kind, ...], num_stages: int) -> np.ndarray:
    weight_of = np.full((num_stages, len(kinds)), improve.NONE)
    weights = np.arange(num_stages) * len(kinds) + kinds.index(Kind.W)
    weight_of[:, [kinds.index(Kind.B), kinds.index(Kind.W)]] = weights[:, None]
    return weight_of.ravel()


def _arrays(sorts: Sorts) -> Sorts:
    """Return lists as arrays, for compiled functions."""
    made: list[Any] = [
        Lists(*(np.array(part, np.int64) for part in each))
        if isinstance(each, Lists)
        else np.array(each, np.int64)
        for each in sorts
    ]
    return Sorts(*made)


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
    sorts, m = problem.sorts, num_microbatches
    lane, change, most = (np.asarray(each) for each in (sorts.lane, sorts.change, sorts.most))
    count = len(lane)
    before, after, behind = (_Ways(count) for _ in range(3))
    for sort in range(count):
        for at in range(sorts.needs.begin[sort], sorts.needs.begin[sort + 1]):
            need, lag = sorts.needs.of[at], problem.send * sorts.away[at]
            before.add(sort, need, lag)
            (after if lane[need] != lane[sort] else behind).add(need, sort, lag)
    return improve.Shop(
        *before.of_passes(m),
        *after.of_passes(m),
        behind.of_passes(m)[0],
        ticks=np.repeat(np.asarray(sorts.ticks), m),
        lane=np.repeat(lane, m).astype(np.int32),
        sort=np.repeat(np.arange(count), m).astype(np.int32),
        delta=change,
        over=np.where(most > 0, most - change, 0),
        length=np.diff(np.asarray(sorts.of_lane.begin)) * m,
        limit=problem.room,
        due=_due(problem),
    )


class _Ways:
    """The sorts that are read by each sort, or that read it, and what the result takes to come."""

    def __init__(self, num_sorts: int) -> None:
        self.ways: list[list[tuple[int, int]]] = [[] for _ in range(num_sorts)]

    def add(self, sort: int, other: int, lag: int) -> None:
        self.ways[sort].append((other, lag))

    def of_passes(self, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the passes and the lags as [pass, way]; NONE where there are fewer."""
        width = max(1, *map(len, self.ways))
        none = [(improve.NONE, 0)]
        table = np.array([own + none * (width - len(own)) for own in self.ways])
        sorts, lags = (np.repeat(table[:, :, at], num_microbatches, axis=0) for at in (0, 1))
        microbatch = np.tile(np.arange(num_microbatches), len(self.ways))[:, None]
        passes = np.where(sorts >= 0, sorts * num_microbatches + microbatch, improve.NONE)
        return passes.astype(np.int32), np.ascontiguousarray(lags)


def _limits(problem: Problem) -> Iterator[float]:
    """Yield the limit of every device, not above all that it could ever hold."""
    costs = problem.costs
    held = zip(costs.held_after_forward_bytes, costs.held_after_backward_bytes, strict=True)
    most = [problem.num_microbatches * max(pair) for pair in held]
    stages = stages_of(problem.placement, problem.num_devices)
    for limit, own in zip(problem.limits, stages, strict=True):
        yield min(limit, sum(most[stage] for stage in own))


def _due(problem: Problem) -> np.ndarray:
    """Return minus each device's first start for the span: no order can move it."""
    due = np.zeros(problem.num_devices, np.int64)
    if problem.objective is Objective.SPAN:
        clock = 0
        seen: set[int] = set()
        for stage, device in enumerate(problem.placement):
            clock += problem.send if stage and device != problem.placement[stage - 1] else 0
            if device not in seen:
                seen.add(device)
                due[device] = -clock
            clock += int(problem.sorts.ticks[len(problem.kinds) * stage])
    return due
