"""Compute the answer to a request; runs in a worker, so that it can be killed at any time."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.schedule_names import PLUS_NAMES
from megatron_vshape.playground.picture import (
    Facts,
    Picture,
    encode,
    size_note,
    step_pictures,
    trace_text,
)
from megatron_vshape.playground.request import (
    AnswerKind,
    FieldError,
    FileChoice,
    NamedChoice,
    PlanChoice,
    Request,
    ScheduleChoice,
)
from megatron_vshape.playground.schedules import Pricing, Report, make_choice, make_named
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import argument


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
