"""Make the schedule of a choice: from the catalogue, a file or a plan."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest, PlanResult, StageCostFunction
from megatron_vshape.playground.request import (
    FieldError,
    FileChoice,
    FileText,
    NamedChoice,
    PlanChoice,
    Request,
    ScheduleChoice,
    check_drawn,
)
from megatron_vshape.playground.stage_costs import Pricing
from megatron_vshape.view.numbers import GIB, format_sufficient_limit

Report = Callable[[dict[str, object]], None]
"""Progress callback: phase of the work, best value."""


def make_choice(
    request: Request, choice: ScheduleChoice, pricing: Pricing, report: Report
) -> PlanResult:
    """Make the requested schedule, with the costs of its stages.

    Raises:
        FieldError: the schedule cannot be made; names the field.
    """
    if isinstance(choice, NamedChoice):
        report({"doing": f"making {choice.name}"})
        return make_named(
            request, choice, pricing.cut(request.devices), Budget(report=_progress(report))
        )
    if isinstance(choice, FileChoice):
        report({"doing": "reading the file"})
        schedule = _read_schedule(choice.file)
        return PlanResult(schedule, pricing.costs_for(schedule.num_devices, schedule.num_stages))
    report({"doing": "planning"})
    return _make_planned(request, choice, pricing, report)


def make_named(
    request: Request,
    choice: NamedChoice,
    cut: StageCostFunction | None = None,
    budget: Budget | None = None,
) -> PlanResult:
    """Make the catalogue schedule of this name, with costs from `cut` or unit costs."""
    name = choice.name if choice.chunks is None else f"{choice.name}:{choice.chunks}"
    named_request = PlanRequest(name, request.devices, request.microbatches, cut=cut)
    try:
        return plan_request(named_request, budget)
    except FieldError:
        raise
    except ScheduleError as error:
        raise FieldError("schedule", str(error)) from None


def _read_schedule(file: FileText) -> Schedule:
    """Parse and verify the schedule in a file's text.

    Raises:
        FieldError: the text is not a schedule, or the schedule is infeasible or too large to draw.
    """
    path = PurePath(file.name)
    try:
        if path.suffix == ".csv":
            schedule = Schedule.from_csv(file.text, name=path.stem)
        else:
            schedule = Schedule.from_json(file.text)
        check_drawn(schedule)
        verify(schedule)
    except ScheduleError as error:
        raise FieldError("schedule", f"{file.name}: {error}") from None
    return schedule


def _make_planned(
    request: Request, choice: PlanChoice, pricing: Pricing, report: Report
) -> PlanResult:
    """Plan a schedule; the result has its limits in the costs' unit, and its lower bound."""
    if choice.limit_in_gib and not pricing.in_bytes:
        raise FieldError("limit", "a limit in GiB needs a costs file; enter chunks instead")
    if pricing.in_bytes and not choice.limit_in_gib:
        raise FieldError("limit", "these costs are in bytes; enter the limit in GiB")
    base_request = pricing.question(request.devices, request.microbatches)
    unit, name = (GIB, "GiB") if choice.limit_in_gib else (1.0, "chunks")
    limited_request = replace(base_request, limit=choice.limit * unit, seconds=choice.seconds)
    try:
        return plan_request(limited_request, Budget(report=_progress(report)))
    except LimitError as error:
        text = error.format_message(
            lambda memory: f"{format_sufficient_limit(memory / unit)} {name}"
        )
        raise FieldError("limit", text) from None
    except ScheduleError as error:
        raise FieldError("limit", str(error)) from None


def _progress(report: Report) -> Callable[[int, float, float], None]:
    """Return a progress callback for a search."""

    def progress(steps: int, value: float, bound: float) -> None:
        report({"doing": "planning", "steps": steps, "value": value, "bound": bound})

    return progress
