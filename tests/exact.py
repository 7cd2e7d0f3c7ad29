"""The optimum of small schedules, or a proven gap, by constraint programming.

OR-tools' CP-SAT starts from a plan and proves that it is optimal, finds a better one, or stops with
the bound reached so far. Up to about 4 devices and 8 microbatches it needs seconds to minutes,
depending on the number of passes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_vshape.core.check.bounds import in_passes, limits_by_device, without_state
from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.evaluation import evaluate_schedule
from megatron_vshape.core.model.costs import Costs, format_memory
from megatron_vshape.core.model.kinds import PARTS, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline
from megatron_vshape.core.planner.job_shop import Codec, scale_to

TICKS = 10_000
"""Minimum ticks of the mean pass; times are rounded down to ticks for the bound."""


@dataclass(frozen=True, slots=True)
class _Model:
    """The solver's model: the start of every pass, and the objective."""

    model: Any
    start: dict[Pass, Any]
    ticks: dict[Pass, int]
    value: Any
    per_us: float


def prove(
    plan: EvaluatedSchedule,
    costs: Costs,
    limits: float | Sequence[float],
    seconds: float,
    workers: int = 1,
) -> EvaluatedSchedule:
    """Return the plan with the bound that is proven in `seconds`, or a better plan.

    `limits` are the memory limits of the plan. The solver supports F, B and W only: a plan with
    passes of other kinds, or for costs with times of full backwards, is returned unchanged. With
    one worker the result depends only on the elapsed time; more workers are faster and less
    repeatable.

    Raises:
        ScheduleError: OR-tools is not installed, or the plan does not fit the limits.
    """
    from ortools.sat.python import cp_model

    schedule = plan.schedule
    is_nonuniform = costs.by_microbatch or costs.more_send_us
    if costs.whole_us is not None or is_nonuniform or not schedule.kinds.issubset(PARTS):
        return plan
    device_limits = limits_by_device(limits, schedule.num_devices)
    for device, (peak, limit) in enumerate(zip(plan.peak, device_limits, strict=True)):
        if peak > limit * (1 + 1e-9):
            raise ScheduleError(
                f"the plan has {format_memory(peak)} on device {device}, not "
                f"{format_memory(limit)} or less"
            )
    problem = _make_model(
        cp_model.CpModel(), plan, *without_state(costs, schedule.placement, device_limits)
    )
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(problem.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        return plan  # rounding has excluded the plan, so nothing is proven
    bound = max(plan.lower_bound, solver.best_objective_bound / problem.per_us)
    if status != cp_model.UNKNOWN:
        plan = _improved_plan(
            plan, costs, device_limits, {p: solver.value(s) for p, s in problem.start.items()}
        )
    return replace(plan, lower_bound=min(bound, plan.value))


def _make_model(
    model: Any, plan: EvaluatedSchedule, costs: Costs, limits: Sequence[float]
) -> _Model:
    schedule = plan.schedule
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    codec, unsliced_costs = Codec(microbatches, slices=schedule.slices), costs
    costs = in_passes(costs.sliced(schedule.slices))
    times = (*costs.forward_us, *costs.backward_us, *costs.weight_us)
    per_us = scale_to(TICKS, fmean(times))
    timeline = simulate(schedule, unsliced_costs)
    spans = plan.objective is Objective.SPAN  # of the device that starts last, too
    latest = max(row[0] for row in timeline.starts) if spans else 0.0
    horizon = int((plan.value + latest) * per_us) + TICKS
    horizon += int(costs.send_us * per_us) * 4 * stages
    passes = [
        Pass(kind, s, j) for j in range(microbatches) for s in range(stages) for kind in PARTS
    ]
    # rounded down, so that the bound of the model is also a bound of the costs
    ticks = {p: int(costs.time_us(p.kind, p.stage) * per_us + 1e-6) for p in passes}
    start = {p: model.new_int_var(0, horizon, str(p)) for p in passes}
    end = {p: start[p] + ticks[p] for p in passes}
    for work in passes:
        for dependency in work.needs(stages):
            is_remote = schedule.placement[dependency.stage] != schedule.placement[work.stage]
            lag = int(costs.send_us * per_us + 1e-6) if is_remote else 0
            model.add(start[work] >= end[dependency] + lag)
        previous = codec.number(work) - 1
        if previous >= 0 and codec.work(previous)[:2] == work[:2]:
            # microbatches and slices are equal, so each pass type may keep their order
            model.add(start[work] >= end[codec.work(previous)])
    _add_devices(model, schedule, costs, limits, start, end, ticks)
    value = model.new_int_var(0, horizon, "value")
    _add_objective(model, plan, timeline, value, end, per_us)
    for device in range(schedule.num_devices):
        for work, begin, _ in timeline.slots(device):
            model.add_hint(start[work], int(begin * per_us))
    return _Model(model, start, ticks, value, per_us)


def _add_devices(
    model: Any,
    schedule: Schedule,
    costs: Costs,
    limits: Sequence[float],
    start: dict[Pass, Any],
    end: dict[Pass, Any],
    ticks: dict[Pass, int],
) -> None:
    """Make a device run one pass at a time within its memory limit."""
    unit = max(costs.held_after_forward_bytes + costs.held_after_backward_bytes) / 1e6 or 1.0
    for device, stages in enumerate(stages_of(schedule.placement, schedule.num_devices)):
        runs, lifetimes, amounts = [], [], []
        for stage in stages:
            for j in range(schedule.num_microbatches):
                f, b, w = (Pass(kind, stage, j) for kind in PARTS)
                runs += [
                    model.new_fixed_size_interval_var(start[p], ticks[p], f"run {p}")
                    for p in (f, b, w)
                ]
                lifetimes += runs[-len(PARTS) :]
                amounts += [int(costs.workspace(kind)[stage] / unit) for kind in PARTS]
                for first, last, memory in (
                    (start[f], end[b], costs.held_after_forward_bytes[stage]),
                    (end[b], end[w], costs.held_after_backward_bytes[stage]),
                ):
                    length = model.new_int_var(0, 1 << 40, "")
                    lifetimes.append(model.new_interval_var(first, length, last, f"hold {f}"))
                    amounts.append(int(memory / unit))
        model.add_no_overlap(runs)
        # at most the sum of all: the solver counts in 64 bits
        limit = min(limits[device] / unit * (1 + 1e-9), sum(amounts))
        model.add_cumulative(lifetimes, amounts, int(limit) + 1)


def _add_objective(
    model: Any,
    plan: EvaluatedSchedule,
    timeline: Timeline,
    value: Any,
    end: dict[Pass, Any],
    per_us: float,
) -> None:
    """Minimize the last end, or the last end after the first start of its device."""
    schedule = plan.schedule
    for work, last in end.items():
        first = 0.0
        if plan.objective is Objective.SPAN:
            first = timeline.starts[schedule.placement[work.stage]][0]
        model.add(value >= last - math.ceil(first * per_us - 1e-6))
    model.minimize(value)


def _improved_plan(
    plan: EvaluatedSchedule, costs: Costs, limits: Sequence[float], start: dict[Pass, int]
) -> EvaluatedSchedule:
    """Return the plan in the solver's order if it is better and, unrounded, fits."""
    old_schedule = plan.schedule
    rows: list[list[tuple[int, Pass]]] = [[] for _ in old_schedule.order]
    for work, tick in start.items():
        rows[old_schedule.placement[work.stage]].append((tick, work))
    # If passes start together, for example with zero ticks, inputs come first.
    rows = [sorted(row, key=lambda slot: (slot[0], PARTS.index(slot[1].kind))) for row in rows]
    schedule = replace(old_schedule, order=tuple(tuple(work for _, work in row) for row in rows))
    try:
        evaluated = evaluate_schedule(schedule, costs, plan.objective)
    except ScheduleError:  # rounding has hidden the order of two passes
        return plan
    peaks = zip(evaluated.peak, limits, strict=True)
    fits = all(memory <= limit * (1 + 1e-9) for memory, limit in peaks)
    if evaluated.value >= plan.value or not fits:
        return plan
    timeline, peak = evaluated.timeline, evaluated.peak
    return replace(plan, timeline=timeline, peak=peak, source="exact")
