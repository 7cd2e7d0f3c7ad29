"""Find schedules by name or file, and evaluate them at the costs of a request."""

from collections.abc import Sequence
from pathlib import Path

from megatron_vshape.core.check.bounds import limits_by_device
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Objective, Schedule, load_schedule
from megatron_vshape.core.paper.catalogue import EVERY_NAME, no_such_schedule
from megatron_vshape.core.planner.vocabulary import with_vocabulary_passes
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import (
    AUTO,
    SCHEDULE_NAMES,
    SUFFIXES,
    BaselineSpec,
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
        sizes = spec.num_devices, spec.unsliced_microbatches
        if sizes != (devices, microbatches):
            raise ScheduleError(
                f"{name} is for {sizes[0]} devices and {sizes[1]} microbatches, "
                f"not for {devices} and {microbatches}"
            )
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
