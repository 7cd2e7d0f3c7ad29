"""Evaluate schedules by name or file at the costs of a request, and compare them with a plan.

Among equal times, the schedule with less memory is better; among equal ones, Megatron's.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import bound_at, fits, limits_by_device, without_state
from megatron_vshape.core.check.simulate import costs_of, peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.model.costs import Costs, without_copies
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Objective, Schedule, load_schedule
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.core.paper.catalogue import EVERY_NAME, no_such_schedule
from megatron_vshape.core.planner.vocabulary import with_vocabulary_passes
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.core.request import SAME, PlanRequest, PlanResult
from megatron_vshape.core.schedule_names import (
    AUTO,
    SCHEDULE_NAMES,
    SUFFIXES,
    BaselineSpec,
    baselines_of,
    with_chunks,
)


def find_schedule(name: str, names: Sequence[str] = (*SCHEDULE_NAMES, AUTO)) -> str | Schedule:
    """Return the name if it is one of `names`; otherwise load and verify a schedule file.

    A name may be followed by a colon and the stages per device (see `with_chunks`).

    Raises:
        ScheduleError: the name is unknown, or the file is unreadable or its schedule infeasible.
    """
    spec = with_chunks(name)
    if (name if spec is None else spec.name) in names:
        return name
    path = Path(name)
    if path.suffix not in SUFFIXES and not path.exists():
        raise no_such_schedule(name, names, "; a schedule file ends in .json or .csv")
    schedule = load_schedule(path)
    try:
        verify(schedule)
        lower(schedule)  # proves the order of its messages too
    except ScheduleError as error:
        raise ScheduleError(f"the schedule file {path} cannot run: {error}") from None
    return schedule


def check_sizes(schedule: Schedule, name: str, num_devices: int, num_microbatches: int) -> None:
    """Raise ScheduleError if the schedule with this name or file is for other sizes."""
    devices, microbatches = schedule.num_devices, schedule.unsliced_microbatches
    if (devices, microbatches) != (num_devices, num_microbatches):
        raise ScheduleError(
            f"{name} is for {devices} devices and {microbatches} microbatches, not for "
            f"{num_devices} and {num_microbatches}"
        )


def evaluate_schedule(
    schedule: Schedule,
    costs: Costs,
    objective: Objective = Objective.MAKESPAN,
    baseline: BaselineSpec | None = None,
) -> EvaluatedSchedule:
    """Simulate the schedule at these costs and compute its peak memory.

    With vocabulary parallelism in the costs, its passes are added.
    """
    schedule = with_vocabulary_passes(schedule, costs)
    timeline, peak = simulate(schedule, costs), peak_held(schedule, costs)
    return EvaluatedSchedule(timeline, costs, peak, objective, baseline)


def evaluate_named(name: str | BaselineSpec, request: PlanRequest) -> EvaluatedSchedule:
    """Simulate a published schedule or a schedule file at the request's costs; compute its peak.

    A text is a catalogue name, possibly with a colon and the stages per device, as
    interleaved-1f1b:4; or a schedule file.

    Raises:
        ScheduleError: the name is unknown or does not support this size, or the costs are for other
            stages.
    """
    devices, microbatches = request.num_devices, request.num_microbatches
    spec = find_schedule(name, EVERY_NAME) if isinstance(name, str) else name
    if isinstance(spec, Schedule):
        check_sizes(spec, str(name), devices, microbatches)
        costs = request.costs_of(spec.placement, spec.name)
        return evaluate_schedule(spec, costs, request.objective)
    if isinstance(spec, str):
        spec = with_chunks(spec) or BaselineSpec(spec)
    schedule = spec.make(devices, microbatches)
    costs = request.costs_of(schedule.placement, str(spec))
    return evaluate_schedule(schedule.split_overlapped(), costs, request.objective, spec)


def limits_of(request: PlanRequest) -> tuple[float, ...]:
    """Return the memory limit of every device; by default, or for a name, a schedule's peak."""
    limit = "1f1b" if request.limit is None else request.limit
    if isinstance(limit, str):
        limit = max(evaluate_named(limit, request).peak)
    return limits_by_device(limit, request.num_devices)


cached_bound = lru_cache(maxsize=256)(bound_at)
"""Bounds of placements, cached because they are required before and after a search."""


def result_rank(result: PlanResult) -> tuple[float, float, bool]:
    """Return the sort key of a result; values within rounding are equal."""
    plan = result.plan
    value, peak = (float(f"{number:.9g}") for number in (plan.value, max(plan.peak)))
    return value, peak, not plan.is_megatrons


def no_worse_than_published(
    request: PlanRequest, stopped_result: PlanResult | None
) -> PlanResult | None:
    """Return the result of a stopped search, or the fastest published schedule if that is faster.

    It evaluates the published schedules that fit, in about a second.
    """
    limits = limits_of(request)
    baselines = map(with_fused_backwards, possible_baselines(request, math.inf, Budget()))
    best = min(fitting_results(baselines, limits), key=result_rank, default=stopped_result)
    if stopped_result is None or best is None:
        return best
    return best if best.plan.value < stopped_result.plan.value * (1 - SAME) else stopped_result


def compare_baselines(
    request: PlanRequest, result: PlanResult, budget: Budget | None = None
) -> Iterator[EvaluatedSchedule]:
    """Yield Megatron's and the published schedules for a comparison with the result.

    Schedules with optional chunks that do not fit or cannot be faster are omitted unless Megatron
    runs them, because they are slow to generate. After the budget is used up, no schedule is
    generated.
    """
    evaluated_by_spec = {evaluated.baseline: evaluated for evaluated in result.baselines}
    for baseline, _ in _blocks(request):
        is_megatrons = baseline.is_megatrons(request.num_devices, request.num_microbatches)
        if baseline in evaluated_by_spec:
            yield evaluated_by_spec[baseline]
        elif baseline.chunks is None or is_megatrons:
            if budget is not None and budget.stopped():
                continue
            try:
                evaluated = evaluate_named(baseline, request)
            except ScheduleError:  # the costs do not have its stages
                continue
            yield with_fused_backwards(evaluated)


def possible_baselines(
    request: PlanRequest, value: float, budget: Budget
) -> Iterator[EvaluatedSchedule]:
    """Yield the published schedules that may be better than a plan of this value.

    Schedules that cannot be better or cannot fit are not generated.
    """
    limits, microbatches = limits_of(request), request.num_microbatches
    for baseline, block in _blocks(request):
        if value < math.inf and budget.stopped():
            return
        try:
            costs = request.costs_of(block.placement, str(baseline)).sliced(baseline.slices)
        except ScheduleError:  # the costs do not have its stages
            continue
        placement, alone = block.placement, without_copies(costs)
        if not request.allows(placement) or not _may_fit(block, costs, microbatches, limits):
            continue
        bound = cached_bound(alone, placement, microbatches, limits, request.objective)
        if bound <= value * (1 + SAME):
            yield evaluate_named(baseline, request)


def fitting_results(
    evaluated_schedules: Iterator[EvaluatedSchedule] | Sequence[EvaluatedSchedule],
    limits: tuple[float, ...],
) -> list[PlanResult]:
    """Return those that fit the limits as results of a search."""
    return [
        PlanResult.of_plan(as_plan(evaluated, limits), limits)
        for evaluated in evaluated_schedules
        if fits(evaluated.peak, limits)
    ]


def as_plan(
    evaluated: EvaluatedSchedule,
    limits: Sequence[float],
    searched: EvaluatedSchedule | None = None,
) -> EvaluatedSchedule:
    """Return an evaluated schedule as a plan, which has a lower bound and a source.

    Args:
        evaluated: the schedule.
        limits: memory limit of each device.
        searched: the plan that it comes from; None for a published schedule.
    """
    schedule, timeline = evaluated.schedule, evaluated.timeline
    costs, microbatches = costs_of(schedule, evaluated.costs), schedule.unsliced_microbatches
    bound = bound_at(costs, schedule.placement, microbatches, limits, evaluated.objective)
    return replace(
        evaluated,
        timeline=replace(timeline, schedule=replace(schedule, name="plan")),
        lower_bound=min(bound, evaluated.value),
        source=searched.source if searched else str(evaluated.baseline or schedule.name),
        steps=searched.steps if searched else 0,
    )


def with_fused_backwards(evaluated: EvaluatedSchedule) -> EvaluatedSchedule:
    """Fuse B and W to BW where that is not slower, if BW has a separate cost.

    B sends its gradient before W has run, and W fills idle time. BW costs less if it hides a
    collective or saves launch overhead. So the better choice depends on the position: BW in the
    steady state, if no pass waits for B; B in warm-up and cool-down, where a chain of B is the
    critical path.
    """
    costs, objective = evaluated.costs, evaluated.objective
    if costs.full_us is None:
        return evaluated
    # Imported here because numba needs a second to import.
    from megatron_vshape.core.fusing import fuse_backwards

    schedule = fuse_backwards(evaluated.timeline, costs, objective)
    return evaluate_schedule(schedule, costs, objective, evaluated.baseline)


def _blocks(request: PlanRequest) -> Iterator[tuple[BaselineSpec, BuildingBlock]]:
    """Yield the published schedules of these sizes with their blocks."""
    chunks, slices = request.chunk_counts(), request.slice_counts()
    return baselines_of(request.num_devices, request.num_microbatches, chunks, slices)


def _may_fit(
    block: BuildingBlock, costs: Costs, num_microbatches: int, limits: Sequence[float]
) -> bool:
    """Return whether the block's schedule may fit; False if its steady phase exceeds the limits."""
    if num_microbatches * costs.slices < 2 * block.num_devices:  # it may have no steady phase
        return True
    retained = list(map(min, costs.held_after_forward_bytes, costs.held_after_backward_bytes))
    rows = zip(block.peaks(), stages_of(block.placement, block.num_devices), strict=True)
    _, limits = without_state(costs, block.placement, limits)
    return fits(
        [peak * min(retained[stage] for stage in local_stages) for peak, local_stages in rows],
        limits,
    )
