"""Compute the answer to a request; runs in a worker, so that it can be killed at any time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import PurePath

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.pieces import regroup, with_ends
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest, PlanResult, StageCostFunction
from megatron_vshape.core.schedule_names import AUTO, PLUS_NAMES
from megatron_vshape.playground.picture import (
    Facts,
    Picture,
    encode,
    size_note,
    step_pictures,
    trace_text,
)
from megatron_vshape.playground.request import (
    MOST_CHUNKS,
    AnswerKind,
    CostChoice,
    FieldError,
    FileChoice,
    FileText,
    NamedChoice,
    PlanChoice,
    Request,
    ScheduleChoice,
    check_drawn,
)
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import GIB, argument, base_peak, format_sufficient_limit

Report = Callable[[dict[str, object]], None]
"""Progress callback: phase of the work, best value."""


_CHUNKS = (4, 2, 1)
"""Chunks per rank that a plan's costs are merged to, most first."""


class Pricing:
    """Costs of the model, for the stages of any schedule."""

    def __init__(self, choice: CostChoice) -> None:
        self.choice = choice
        self.measured: Costs | None = None
        if choice.file is not None:
            try:
                self.measured = Costs.from_json(choice.file.text)
            except ScheduleError as error:
                raise FieldError("costs", f"{choice.file.name}: {error}") from None

    @property
    def in_bytes(self) -> bool:
        """Whether memory is in bytes and time in microseconds, rather than chunks and passes."""
        return self.measured is not None

    def plan_costs(self, num_devices: int) -> Costs:
        """Return the costs of the stages of a plan; those of a file are merged only if too many."""
        if self.measured is None:
            return self.costs_for(num_devices, MOST_CHUNKS * num_devices)
        stages_per_device, remainder = divmod(self.measured.num_stages, num_devices)
        if remainder or not stages_per_device:
            raise FieldError(
                "costs",
                f"the costs are for {self.measured.num_stages} stages, which cannot be "
                f"distributed over {num_devices} ranks",
            )
        divisors = [
            stages_per_device,
            *(chunks for chunks in _CHUNKS if stages_per_device % chunks == 0),
        ]
        chunks = next(chunks for chunks in divisors if chunks <= MOST_CHUNKS)
        return self.costs_for(num_devices, chunks * num_devices)

    def question(self, devices: int, microbatches: int) -> PlanRequest:
        """Return the request for the best schedule at these costs."""
        costs = self.plan_costs(devices)
        return PlanRequest(AUTO, devices, microbatches, costs, self.stage_cost_function(devices))

    def stage_cost_function(self, devices: int) -> StageCostFunction:
        """Return a function from the number of stages to the costs on these devices."""
        return lambda num_stages, _: self.costs_for(devices, num_stages)

    def base_peak(self, num_devices: int) -> float | None:
        """Return the peak of 1F1B at these costs; None if the costs file does not allow it."""
        try:
            return base_peak(num_devices, self.costs_for(num_devices, num_devices))
        except FieldError:
            return None

    def costs_for(self, num_devices: int, num_stages: int) -> Costs:
        """Return the costs of `num_stages` stages on `num_devices` devices.

        Raises:
            FieldError: the stages of the file cannot be merged to these.
        """
        if self.measured is not None:
            try:
                return regroup(self.measured, num_stages, "this schedule")
            except ScheduleError as error:
                raise FieldError("costs", str(error)) from None
        choice = self.choice
        costs = Costs.uniform(
            num_devices, num_stages, choice.forward, choice.backward, choice.weight, choice.send
        )
        ends = (StageCosts.of(*times) for times in (choice.embedding, choice.head))
        return with_ends(costs, *ends)


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
            request,
            choice,
            pricing.stage_cost_function(request.devices),
            Budget(report=_progress(report)),
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
    stage_cost_function: StageCostFunction | None = None,
    budget: Budget | None = None,
) -> PlanResult:
    """Make the catalogue schedule of this name, with these costs or unit costs."""
    name = choice.name if choice.chunks is None else f"{choice.name}:{choice.chunks}"
    named_request = PlanRequest(
        name, request.devices, request.microbatches, stage_cost_function=stage_cost_function
    )
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


def make_answer(request: Request, report: Report) -> bytes:
    """Return the encoded answer to a request.

    Raises:
        ScheduleError: the request cannot be answered; a FieldError if one field is the cause.
    """
    pricing = Pricing(request.costs)
    choice = request.schedule
    if request.answer_kind is AnswerKind.STEPS:
        return encode(list(_steps(request, choice, report)))
    picture = _picture(request, choice, pricing, report)
    if request.answer_kind is AnswerKind.SCHEDULE_FILE:
        return picture.timeline.schedule.to_json().encode()
    if request.answer_kind is AnswerKind.TRACE_FILE:
        return trace_text(picture).encode()
    return encode([picture])


def _picture(request: Request, choice: ScheduleChoice, pricing: Pricing, report: Report) -> Picture:
    result = make_choice(request, choice, pricing, report)
    schedule, costs = result.schedule, result.costs
    report({"doing": "simulating"})
    timeline = simulate(schedule, costs)
    title = display_name(schedule.name)
    if isinstance(choice, PlanChoice):
        title = f"Plan within {choice.limit:g} {'GiB' if choice.limit_in_gib else 'chunks'}"
    facts = Facts(
        in_bytes=pricing.in_bytes,
        base_peak=pricing.base_peak(schedule.num_devices),
        title=title,
        note=size_note(schedule),
        recipe=_recipe(choice, request, pricing),
        train=choice.name if isinstance(choice, NamedChoice) and choice.chunks is None else "",
    )
    if result.searched is not None:
        bound, objective = result.plan.lower_bound, result.plan.objective
        facts = replace(facts, limit=result.limits[0], lower_bound=bound, bounded=objective)
    return Picture(timeline, costs, facts)


def _recipe(choice: ScheduleChoice, request: Request, pricing: Pricing) -> str:
    """Return the arguments of the command that makes this."""
    size = f"--devices {request.devices} --microbatches {request.microbatches}"
    costs = request.costs
    times = (costs.forward, costs.backward, costs.weight, costs.send)
    cost_arguments = f" --cost {','.join(map(argument, times))}"
    if costs.file is not None:
        cost_arguments = f" --costs {costs.file.argument}"
    for name, extra_times in (("embedding", costs.embedding), ("head", costs.head)):
        if any(extra_times):
            cost_arguments += f" --{name} {','.join(map(argument, extra_times))}"
    if isinstance(choice, PlanChoice):
        unit = "GiB" if choice.limit_in_gib else "" if costs.file is None else "chunks"
        limit = argument(choice.limit) + unit
        seconds = "" if choice.seconds is None else f" --seconds {argument(choice.seconds)}"
        # By default, the command uses the maximum chunks for the layers, so set the number.
        num_chunks = pricing.plan_costs(request.devices).num_stages // request.devices
        return f"plan {size}{cost_arguments} --memory-limit {limit} --chunks {num_chunks}{seconds}"
    if isinstance(choice, FileChoice):
        return f"schedule {choice.file.argument}{cost_arguments}"
    chunks = "" if choice.chunks is None else f":{choice.chunks}"
    return f"schedule {choice.name}{chunks} {size}{cost_arguments}"


def _steps(request: Request, choice: ScheduleChoice, report: Report) -> Iterator[Picture]:
    """Yield the paper's four steps, all in passes of equal length: slots and unit costs."""
    if not isinstance(choice, NamedChoice):
        raise FieldError(
            "schedule", "only a schedule of the catalogue is made in the four steps; choose one"
        )
    if choice.name in PLUS_NAMES:
        raise FieldError("schedule", f"{choice.name} is planned, in no steps; choose another")
    report({"doing": "repeating"})
    result = make_named(request, choice)
    if result.block is None:
        raise ScheduleError(f"{choice.name} is made from no building block")
    yield from step_pictures(result.block, result.schedule)
