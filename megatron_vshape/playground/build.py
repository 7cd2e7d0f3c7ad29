"""From a request to its answer; runs in a worker, so that it can be ended at any moment."""

import io
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megatron_vshape.core.building_block import BuildingBlock
from megatron_vshape.core.catalogue import NAMES, make, make_block
from megatron_vshape.core.costs import Costs
from megatron_vshape.core.passes import Kind, ScheduleError
from megatron_vshape.core.repeating import repeat
from megatron_vshape.core.schedule import Schedule, Timeline
from megatron_vshape.core.simulate import peak_held, simulate
from megatron_vshape.core.squeezing import squeeze
from megatron_vshape.core.verify import verify
from megatron_vshape.playground.payload import Facts, Period, Picture, encode
from megatron_vshape.playground.pricing import Pricing
from megatron_vshape.playground.request import (
    MAX_PASSES,
    FieldError,
    FileText,
    Request,
    ScheduleChoice,
    Source,
    Want,
)
from megatron_vshape.playground.traces import measured_pictures
from megatron_vshape.view.chrome_trace import write_trace
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import GIB, base_peak

Report = Callable[[dict[str, object]], None]
"""Called with what is known so far: the stage of the work, the best value, a point."""

STEP_TITLES = ("1  Building block", "2  Repeated", "3  Squeezed", "4  Reordered")


def build(request: Request, report: Report) -> bytes:
    """Return the answer to a request.

    Raises:
        ScheduleError: it cannot be made; a FieldError where one field is to blame.
    """
    pricing = Pricing(request.costs)
    if request.want is Want.MEASURED:
        assert request.trace is not None
        return encode(measured_pictures(request.trace, pricing))
    if request.want is Want.FRONTIER:
        return encode([], {"points": list(_frontier(request, pricing, report))})
    if request.want is Want.STEPS:
        return encode(list(_steps(request, report)))
    picture = _picture(request, pricing, report)
    if request.want is Want.SCHEDULE_FILE:
        return picture.timeline.schedule.to_json().encode()
    if request.want is Want.TRACE_FILE:
        return trace_text(picture).encode()
    return encode([picture])


def trace_text(picture: Picture) -> str:
    """Return the Perfetto trace of a picture."""
    stream = io.StringIO()
    unit = "bytes" if picture.facts.in_bytes else "chunks"
    write_trace(picture.timeline, stream, picture.costs, unit)
    return stream.getvalue()


@dataclass(frozen=True, slots=True)
class _Made:
    """A schedule, and what only its making knows."""

    schedule: Schedule
    block: BuildingBlock | None = None
    limit: float | None = None
    lower_bound: float | None = None


def _picture(request: Request, pricing: Pricing, report: Report) -> Picture:
    choice = request.schedule
    assert choice is not None
    makers = {Source.NAME: _named, Source.FILE: _from_file, Source.PLAN: _planned}
    made = makers[choice.source](request, choice, pricing, report)
    schedule = made.schedule
    report({"doing": "simulating"})
    costs = pricing.costs_for(schedule.num_devices, schedule.num_stages)
    timeline = simulate(schedule, costs)
    facts = Facts(
        in_bytes=pricing.in_bytes,
        in_us=pricing.in_bytes,
        limit=made.limit,
        base_peak=base_of(pricing, schedule.num_devices),
        lower_bound=made.lower_bound,
        bounded=choice.objective,
        period=period_of(timeline, 1 if made.block is None else made.block.num_microbatches),
        title=_title(choice, schedule),
        note=size_note(schedule),
        recipe=_recipe(choice, schedule, request),
        train=_train(choice),
    )
    return Picture(timeline, costs, facts)


def base_of(pricing: Pricing, num_devices: int) -> float | None:
    """Return what 1F1B holds at these costs; None if a costs file does not say."""
    try:
        return base_peak(num_devices, pricing.costs_for(num_devices, num_devices))
    except FieldError:
        return None


def _named(request: Request, choice: ScheduleChoice, pricing: Pricing, report: Report) -> _Made:
    block = _block(request, choice)
    report({"doing": f"making {choice.name}"})
    return _Made(_of_catalogue(request, choice), block)


def _of_catalogue(request: Request, choice: ScheduleChoice) -> Schedule:
    try:
        return make(
            choice.name,
            request.devices,
            request.microbatches,
            num_chunks=choice.chunks,
            group_size=choice.group_size,
        )
    except ScheduleError as error:
        raise FieldError("schedule", str(error)) from None


def _block(request: Request, choice: ScheduleChoice) -> BuildingBlock:
    try:
        return make_block(
            choice.name,
            request.devices,
            request.microbatches,
            num_chunks=choice.chunks,
            group_size=choice.group_size,
        )
    except ScheduleError as error:
        raise FieldError("schedule", str(error)) from None


def _from_file(request: Request, choice: ScheduleChoice, pricing: Pricing, report: Report) -> _Made:
    assert choice.file is not None
    report({"doing": "reading the file"})
    return _Made(read_schedule(choice.file))


def read_schedule(file: FileText) -> Schedule:
    """Return the proved schedule in a file's text.

    Raises:
        FieldError: it is none, too large to draw, or cannot run.
    """
    path = PurePath(file.name)
    try:
        if path.suffix == ".csv":
            schedule = Schedule.from_csv(file.text, name=path.stem)
        else:
            schedule = Schedule.from_json(file.text)
        if 3 * schedule.num_stages * schedule.num_microbatches > MAX_PASSES:
            raise ScheduleError(f"it has more than the {MAX_PASSES:,} passes that the page draws")
        verify(schedule)
    except ScheduleError as error:
        raise FieldError("schedule", f"{file.name}: {error}") from None
    return schedule


def _planned(request: Request, choice: ScheduleChoice, pricing: Pricing, report: Report) -> _Made:
    from megatron_vshape.core import search  # numba takes a second to load

    assert choice.limit is not None
    if choice.limit_in_gib and not pricing.in_bytes:
        raise FieldError("limit", "a limit in GiB needs a costs file; enter chunks instead")
    if pricing.in_bytes and not choice.limit_in_gib:
        raise FieldError("limit", "these costs are in bytes; enter the limit in GiB")
    costs = pricing.costs_for(request.devices, 2 * request.devices)
    limit = choice.limit * (GIB if choice.limit_in_gib else 1.0)

    def progress(steps: int, value: float, bound: float) -> None:
        report({"doing": "planning", "steps": steps, "value": value, "bound": bound})

    report({"doing": "planning"})
    try:
        plan = search.plan(
            costs,
            request.devices,
            request.microbatches,
            limit,
            choice.objective,
            seconds=choice.seconds,
            progress=progress,
        )
    except ScheduleError as error:
        raise FieldError("limit", str(error)) from None
    return _Made(plan.schedule, None, limit, plan.lower_bound)


def period_of(timeline: Timeline, microbatches: int) -> Period | None:
    """Return the repeat in the middle of the stable phase; None if there are too few.

    Its length is that of the turn: forwards of stage 0 may run ahead of the rhythm.
    """
    schedule = timeline.schedule
    first = (schedule.num_microbatches // 2 // microbatches) * microbatches
    if first + microbatches >= schedule.num_microbatches:
        return None
    last = schedule.num_stages - 1
    begin = _starts(timeline, Kind.F, 0, (first,))
    turns = _starts(timeline, Kind.B, last, (first, first + microbatches))
    if len(begin) != 1 or len(turns) != 2 or turns[1] <= turns[0]:
        return None
    return Period(begin[0], turns[1] - turns[0], first, microbatches)


def _starts(timeline: Timeline, kind: Kind, stage: int, microbatches: Sequence[int]) -> list[float]:
    """Return when the microbatches have this part of a stage begun, in order of time."""
    return [
        start
        for work, start, _ in timeline.slots(timeline.schedule.placement[stage])
        if work.stage == stage and work.microbatch in microbatches and kind in work.parts()
    ]


def _title(choice: ScheduleChoice, schedule: Schedule) -> str:
    if choice.source is Source.PLAN:
        unit = "GiB" if choice.limit_in_gib else "chunks"
        return f"Plan within {choice.limit:g} {unit}"
    return display_name(schedule.name)


def size_note(schedule: Schedule) -> str:
    """Return how large a schedule is, in words."""

    def count(number: int, word: str, plural: str) -> str:
        return f"{number:,} {word if number == 1 else plural}"

    return (
        f"{count(schedule.num_devices, 'device', 'devices')}, "
        f"{count(schedule.num_microbatches, 'microbatch', 'microbatches')}, "
        f"{count(sum(map(len, schedule.order)), 'pass', 'passes')}"
    )


def _train(choice: ScheduleChoice) -> str:
    """Return the name that `--pipeline-schedule` knows the schedule by; empty: it needs a file."""
    plain = choice.chunks is None and choice.group_size is None
    return choice.name if choice.source is Source.NAME and plain else ""


def _recipe(choice: ScheduleChoice, schedule: Schedule, request: Request) -> str:
    size = f"--devices {request.devices} --microbatches {request.microbatches}"
    costs = request.costs
    priced = f" --cost {costs.forward:g},{costs.backward:g},{costs.weight:g},{costs.send:g}"
    if costs.file is not None:
        priced = f" --costs {shlex.quote(costs.file.name)}"
    if choice.source is Source.PLAN:
        limit = f"{choice.limit:g}" + ("GiB" if choice.limit_in_gib else "")
        seconds = "" if choice.seconds is None else f" --seconds {choice.seconds:g}"
        goal = "" if choice.objective == "makespan" else f" --objective {choice.objective}"
        return f"plan {size}{priced} --memory-limit {limit}{goal}{seconds}"
    if choice.source is Source.FILE:
        assert choice.file is not None
        return f"schedule {shlex.quote(choice.file.name)}{priced}"
    chunks = "" if choice.chunks is None else f" --chunks {choice.chunks}"
    group = "" if choice.group_size is None else f" --group-size {choice.group_size}"
    return f"schedule {choice.name} {size}{priced}{chunks}{group}"


def _steps(request: Request, report: Report) -> Iterator[Picture]:
    """Yield the four steps of the paper, all in passes of equal length: slots and unit costs."""
    choice = request.schedule
    assert choice is not None
    if choice.source is not Source.NAME:
        raise FieldError(
            "schedule", "only a schedule of the catalogue is made in the four steps; choose one"
        )
    report({"doing": "repeating"})
    yield from step_pictures(_block(request, choice), _of_catalogue(request, choice))


def step_pictures(block: BuildingBlock, last: Schedule) -> Iterator[Picture]:
    """Yield the block, its repeats, the squeezed schedule, and `last`, made from them."""
    stages, devices = len(block.placement), block.num_devices
    num_microbatches = last.num_microbatches
    costs = Costs.uniform(devices, stages)
    alone = min(block.num_microbatches, num_microbatches)
    slot = 2 * devices / stages
    repeated = _scaled(repeat(block, num_microbatches), slot)
    squeezed = squeeze(repeated)
    timelines = (
        _scaled(repeat(block, alone), slot),
        repeated,
        simulate(squeezed, costs),
        simulate(last, costs),
    )
    notes = (
        f"The passes of one microbatch. The next one starts T = {block.interval} slots later.",
        "A copy every T slots. No two passes meet, and every lifespan is as the block's.",
        "Every device drops its redundant idle time; the order of its passes stays.",
        "Passes move into the idle slots of warm-up and cool-down, within the same memory."
        if last.order != squeezed.order
        else "Nothing to do: no pass of this schedule finds a better place.",
    )
    base = base_peak(devices)
    for at, timeline in enumerate(timelines):
        length = block.interval * slot
        period = Period(0.0, length, 0, alone) if at < 2 else period_of(timeline, alone)
        facts = Facts(base_peak=base, period=period, title=STEP_TITLES[at], note=notes[at])
        yield Picture(timeline, costs, facts)


def _scaled(timeline: Timeline, scale: float) -> Timeline:
    def rows(times: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time * scale for time in row) for row in times)

    return Timeline(timeline.schedule, rows(timeline.starts), rows(timeline.ends))


def _frontier(request: Request, pricing: Pricing, report: Report) -> Iterator[dict[str, object]]:
    """Yield a point per published schedule and, if asked for, per memory limit of the planner."""
    for at, name in enumerate(NAMES):
        choice = ScheduleChoice(Source.NAME, name)
        try:
            made = _named(request, choice, pricing, lambda _: None)
            point = _point(made.schedule, pricing)
        except ScheduleError as error:
            report({"doing": f"{name} has no point here: {error}"})
            continue
        point |= {"source": "name", "name": name, "title": display_name(name)}
        report({"doing": f"made {name}", "done": at + 1, "of": len(NAMES), "point": point})
        yield point
    if request.plans:
        yield from _planned_points(request, pricing, report)


def _planned_points(
    request: Request, pricing: Pricing, report: Report
) -> Iterator[dict[str, object]]:
    unit = GIB if pricing.in_bytes else 1.0
    limits = list(_limits(request, pricing))
    for at, limit in enumerate(limits):
        choice = ScheduleChoice(Source.PLAN, limit=limit / unit, limit_in_gib=pricing.in_bytes)
        try:
            made = _planned(request, choice, pricing, lambda _: None)
        except FieldError:
            continue
        point = _point(made.schedule, pricing)
        point |= {"source": "plan", "limit": limit / unit, "limit_in_gib": pricing.in_bytes}
        report({"doing": "planning", "done": at + 1, "of": len(limits), "point": point})
        yield point


def _limits(request: Request, pricing: Pricing) -> Iterator[float]:
    """Yield up to twelve limits from the least that one microbatch needs to what 1F1B holds."""
    from megatron_vshape.core.bounds import least_memory
    from megatron_vshape.core.placement import v_shape

    devices = request.devices
    costs = pricing.costs_for(devices, 2 * devices)
    least = max(least_memory(costs, v_shape(devices), devices))
    most = max(base_of(pricing, devices) or least, least)
    steps = 11 if pricing.in_bytes else min(11, max(round(most - least), 1))
    seen = set()
    for step in range(steps + 1):
        limit = least + (most - least) * step / steps
        limit = limit if pricing.in_bytes else float(round(limit))
        if limit >= least and limit not in seen:
            seen.add(limit)
            yield limit


def _point(schedule: Schedule, pricing: Pricing) -> dict[str, object]:
    costs = pricing.costs_for(schedule.num_devices, schedule.num_stages)
    timeline = simulate(schedule, costs)
    return {
        "peak": max(peak_held(schedule, costs)),
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "makespan": timeline.makespan,
    }
