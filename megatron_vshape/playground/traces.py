"""Read measured Perfetto traces, and compare them with the plan."""

import math
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

from megatron_vshape.core.check.simulate import simulate, times_in
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.files import is_number, is_whole, parse_object
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import NeedTable, Pass, parse_step
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.playground.picture import Facts, Picture
from megatron_vshape.playground.request import MAX_DEVICES, FieldError, FileText, check_drawn
from megatron_vshape.playground.stage_costs import Pricing
from megatron_vshape.view.numbers import base_peak

LATE = 0.1
"""A pass ran late if it adds more than this share of its planned time to the delay it met."""

_PLANNED = re.compile(r"plan|predict|simulat", re.IGNORECASE)
_DEVICE = re.compile(r"(?:device|rank)\s*([0-9]{1,6})", re.IGNORECASE)


_Rows = dict[int, list[tuple[float, float, Pass]]]
"""Passes of one timeline in a trace, by device: (start, end, pass)."""


def measured_pictures(trace: FileText, pricing: Pricing) -> list[Picture]:
    """Return the planned and the measured timeline, with the delay of each measured pass.

    The plan is part of the trace, if present. Otherwise it is the same order with times from the
    chosen costs file, or with the median times of the trace.

    Raises:
        FieldError: the file is not a trace, or its passes do not form a schedule.
    """
    try:
        planned, measured = _read(trace)
        verify(measured.schedule)
        if planned is not None and (planned.schedule.order, planned.schedule.overlapped) != (
            measured.schedule.order,
            measured.schedule.overlapped,
        ):
            planned = None  # times of another order do not apply to this order
        costs = _costs(measured, pricing)
        if planned is None:
            planned = simulate(measured.schedule, costs)
    except FieldError:
        raise
    except ScheduleError as error:
        raise FieldError("trace", f"{trace.name}: {error}") from None
    late = delays(planned, measured)
    marked = sum(value > 0 for row in late for value in row)
    count = sum(map(len, late))
    base = None if pricing.in_bytes else base_peak(measured.schedule.num_devices)
    facts = Facts(
        in_bytes=pricing.in_bytes, in_us=True, base_peak=base, title="Planned", note=trace.name
    )
    found = replace(
        facts,
        title="Measured",
        note=f"{marked:,} of {count:,} passes ran late by more than {LATE:.0%} of their time",
    )
    return [Picture(planned, costs, facts), Picture(measured, costs, found, late)]


def delays(planned: Timeline, measured: Timeline) -> tuple[tuple[float, ...], ...]:
    """Return the delay that each pass adds; 0 if it adds none.

    A pass inherits the maximum delay of the previous pass and of its inputs; only the excess is its
    delay. Both timelines start at 0 and have the same order.
    """
    schedule = planned.schedule
    table = NeedTable(schedule.num_stages, schedule.kinds)
    behind: dict[tuple[int, int, int], float] = {}
    for device in range(schedule.num_devices):
        for plan, real in zip(planned.slots(device), measured.slots(device), strict=True):
            for part in table.parts_of[plan.work.kind]:
                behind[part, plan.work.stage, plan.work.microbatch] = real.end - plan.end
    late = []
    for device in range(schedule.num_devices):
        own, before = [], 0.0
        for plan, real in zip(planned.slots(device), measured.slots(device), strict=True):
            kind, stage, microbatch = plan.work
            read = [behind[part, other, microbatch] for part, other in table.needs[kind][stage]]
            added = real.end - plan.end - max(before, 0.0, *read)
            own.append(added if added > LATE * (plan.end - plan.start) else 0.0)
            before = real.end - plan.end
        late.append(tuple(own))
    return tuple(late)


def _costs(measured: Timeline, pricing: Pricing) -> Costs:
    """Return the costs of the chosen file, or each stage's median times in the trace."""
    schedule = measured.schedule
    if pricing.in_bytes:
        return pricing.costs_for(schedule.num_devices, schedule.num_stages)
    times = times_in([measured])
    typical = {key: statistics.median(values) for key, values in times.items()}
    least = min((value for value in typical.values() if value > 0), default=1.0)

    def of(kind: Kind, stage: int) -> float:
        half = typical.get((Kind.BW, stage), 0.0) / 2
        return max(typical.get((kind, stage), half), least * 1e-3)

    stages = range(schedule.num_stages)
    unit = Costs.uniform(schedule.num_devices, schedule.num_stages)
    return Costs(
        tuple(of(Kind.F, stage) for stage in stages),
        tuple(of(Kind.B, stage) for stage in stages),
        tuple(of(Kind.W, stage) for stage in stages),
        0.0,
        unit.held_after_forward_bytes,
        unit.held_after_backward_bytes,
    )


def _read(trace: FileText) -> tuple[Timeline | None, Timeline]:
    """Read the planned timeline, if there is one, and the measured one."""
    data = parse_object(trace.text, "the trace")
    events = events_of(data)
    names = _process_names(events)
    planned: _Rows = defaultdict(list)
    measured: _Rows = defaultdict(list)
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            _add(event, names, planned, measured)
    if not measured:
        planned, measured = {}, planned
    if not measured:
        raise ScheduleError("no event of it is a pass, such as F3.12; is it another program's?")
    title = _title(data)
    return _timeline(planned, title) if planned else None, _timeline(measured, title)


def events_of(data: dict[str, object]) -> list[object]:
    """Return the events of a trace; raises ScheduleError if it has no list of events."""
    events = data.get("traceEvents")
    if not isinstance(events, list):
        raise ScheduleError(
            "it has no list of traceEvents; load a file that --pipeline-trace wrote"
        )
    return events


def _title(data: dict[str, object]) -> str:
    other = data.get("otherData")
    name = other.get("schedule") if isinstance(other, dict) else None
    return name[:60] if isinstance(name, str) and name.isprintable() and name else "measured"


def _process_names(events: list[object]) -> dict[int, str]:
    names = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "M":
            pid, args = event.get("pid"), event.get("args")
            if event.get("name") == "process_name" and is_whole(pid) and isinstance(args, dict):
                names[int(str(pid))] = str(args.get("name", ""))[:200]
    return names


def _add(event: dict[str, object], names: dict[int, str], planned: _Rows, measured: _Rows) -> None:
    """Add an event to its timeline if it is a pass; other events are ignored."""
    text, pid = event.get("name"), event.get("pid")
    try:
        step = parse_step(text)  # type: ignore[arg-type]
    except ScheduleError:
        return
    start, length = event.get("ts"), event.get("dur")
    if not (is_whole(pid) and is_number(start) and is_number(length)):
        raise ScheduleError(f"the event {text} needs pid, ts and dur as numbers")
    start, end = float(str(start)), float(str(start)) + float(str(length))
    if not (math.isfinite(start) and math.isfinite(end)) or end < start:
        raise ScheduleError(f"the event {text} ends before it starts, or never")
    number = int(str(pid))
    label = names.get(number, "")
    found = _DEVICE.search(label)
    device = int(found[1]) if found else number
    if not 0 <= device < MAX_DEVICES:
        raise ScheduleError(f"the event {text} is on device {device}; up to {MAX_DEVICES} are read")
    rows = planned if _PLANNED.search(label) else measured
    rows[device] += [(start, end, work) for work in step]


def _timeline(found: _Rows, name: str) -> Timeline:
    """Build the timeline of these passes; the device that runs a stage's passes has the stage."""
    devices = max(found) + 1
    rows = [sorted(found.get(device, []), key=itemgetter(0, 1)) for device in range(devices)]
    home = {work.stage: device for device, row in enumerate(rows) for _, _, work in row}
    if sorted(home) != list(range(len(home))):
        raise ScheduleError(f"it has passes of the stages {sorted(home)[:8]}, with gaps")
    placement = tuple(home[stage] for stage in range(len(home)))
    microbatches = 1 + max(work.microbatch for row in rows for _, _, work in row)
    order = tuple(tuple(work for _, _, work in row) for row in rows)
    overlapped = frozenset(
        one[2] for row in rows for one, other in pairwise(row) if one[0] == other[0] < one[1]
    )
    schedule = Schedule(name, devices, microbatches, placement, order, overlapped=overlapped)
    check_drawn(schedule)
    zero = min(row[0][0] for row in rows if row)
    starts = tuple(tuple(start - zero for start, _, _ in row) for row in rows)
    ends = tuple(tuple(end - zero for _, end, _ in row) for row in rows)
    return Timeline(schedule, starts, ends)
