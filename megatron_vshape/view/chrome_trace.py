"""Chrome trace of a timeline, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each device is a process with a thread of passes, a memory counter, and an arrow for every message.
Simulated and measured timelines have the same format.
"""

import json
from collections.abc import Iterable, Iterator
from typing import TextIO

from megatron_vshape.core.check.simulate import unit_costs
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PAIR_SIGN
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.view.numbers import held_steps

_COMPUTE = 0
"""Thread of the passes; parallel resources use the following threads."""

_INSIDE = 0.01
"""Arrows start and end inside a pass by this share, so that viewers assign them correctly."""

_compact = json.JSONEncoder(separators=(",", ":")).encode

Value = str | int | float | dict[str, str | int | float]
Event = dict[str, Value]


def write_trace(
    timeline: Timeline, stream: TextIO, costs: Costs | None = None, held_unit: str = "chunks"
) -> None:
    """Write a trace for Perfetto to `stream`; one unit of time is a microsecond.

    `costs` give the memory of passes, in `held_unit`; without costs, every chunk counts as one.

    >>> import io, json
    >>> from megatron_vshape import make, simulate, write_trace
    >>> written = io.StringIO()
    >>> write_trace(simulate(make("1f1b", 2, 2)), written)
    >>> events = json.loads(written.getvalue())["traceEvents"]
    >>> [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    ['F1.0', 'BW1.0', 'F1.1', 'BW1.1']
    """
    _write(stream, timeline.schedule.name, events(timeline, costs, held_unit))


def write_planned_and_measured(
    planned: Timeline, measured: Timeline, stream: TextIO, costs: Costs
) -> None:
    """Write a planned and a measured timeline of a step to one trace, planned first.

    `costs` are in bytes.
    """
    all_events = (
        _shifted_event(event, word, index, timeline)
        for index, (word, timeline) in enumerate((("planned", planned), ("measured", measured)))
        for event in events(timeline, costs, "bytes")
    )
    _write(stream, measured.schedule.name, all_events)


def _write(stream: TextIO, name: str, written: Iterable[Event]) -> None:
    """Write the events of the schedule `name`, one per line."""
    head = {"displayTimeUnit": "ms", "otherData": {"schedule": name}}
    stream.write(_compact(head)[:-1] + ',"traceEvents":[\n')
    for index, event in enumerate(written):
        stream.write(("" if index == 0 else ",\n") + _compact(event))
    stream.write("\n]}\n")


def _shifted_event(event: Event, word: str, index: int, timeline: Timeline) -> Event:
    """Move an event to the processes of its timeline, with a distinct name and id."""
    process = int(str(event["pid"])) + index * timeline.schedule.num_devices
    shifted: Event = {**event, "pid": process}
    if event["name"] == "process_name":
        shifted["args"] = {"name": f"{word}, device {event['pid']}"}
    elif event["name"] == "process_sort_index":
        shifted["args"] = {"sort_index": process}
    if "id" in event:
        shifted["id"] = 2 * int(str(event["id"])) + index
    return shifted


def events(
    timeline: Timeline, costs: Costs | None = None, held_unit: str = "chunks"
) -> Iterator[Event]:
    """Yield the events, device by device, then the arrows."""
    costs = unit_costs(timeline.schedule) if costs is None else costs
    for device in range(timeline.schedule.num_devices):
        yield from _names(timeline, device)
        yield from _passes(timeline, device)
        for time, memory in held_steps(timeline, costs, device):
            args: dict[str, str | int | float] = {held_unit: memory}
            yield {"ph": "C", "name": "held", "pid": device, "ts": time, "args": args}
    yield from _arrows(timeline)


def _resources(timeline: Timeline, device: int) -> list[str]:
    """Return the device's resources; the index is the number of the thread."""
    return [lane.resource for lane in timeline.schedule.queues() if lane.device == device]


def _names(timeline: Timeline, device: int) -> Iterator[Event]:
    yield _meta(device, "process_name", {"name": f"device {device}"})
    yield _meta(device, "process_sort_index", {"sort_index": device})
    yield _meta(device, "thread_name", {"name": "passes"})
    for thread, resource in enumerate(_resources(timeline, device)):
        if thread != _COMPUTE:
            yield {**_meta(device, "thread_name", {"name": resource}), "tid": thread}


def _meta(device: int, name: str, args: dict[str, str | int | float]) -> Event:
    return {"ph": "M", "name": name, "pid": device, "tid": _COMPUTE, "args": args}


def _passes(timeline: Timeline, device: int) -> Iterator[Event]:
    chunks = chunks_of(timeline.schedule.placement)
    threads = _resources(timeline, device)
    pairs = timeline.schedule.overlapped_pairs()
    partners = set(pairs.values())
    for work, start, end in timeline.slots(device):
        if work in partners:  # part of the event of its F
            continue
        step = (work, pairs[work]) if work in pairs else (work,)
        yield {
            "ph": "X",
            "name": PAIR_SIGN.join(map(str, step)),
            "cat": " & ".join(work.kind.label for work in step),
            "pid": device,
            "tid": threads.index(work.kind.resource),
            "ts": start,
            "dur": end - start,
            "args": {
                "stage": work.stage,
                "chunk": chunks[work.stage],
                **timeline.schedule.position(work),
            },
        }


def _arrows(timeline: Timeline) -> Iterator[Event]:
    """Yield two events per message: a start in the sending pass, an end in the reading pass."""
    placement = timeline.schedule.placement
    slot_by_pass = {
        slot.work._replace(kind=kind): slot
        for device in range(timeline.schedule.num_devices)
        for slot in timeline.slots(device)
        for kind in slot.work.parts()
    }
    number = 0
    for device in range(timeline.schedule.num_devices):
        for reader in timeline.slots(device):
            for dependency in reader.work.needs(len(placement)):
                sender = slot_by_pass.get(dependency)  # None: of another stage of the device
                if sender is None or placement[dependency.stage] == device:
                    continue
                departure = sender.end - _INSIDE * (sender.end - sender.start)
                arrival = max(departure, reader.start + _INSIDE * (reader.end - reader.start))
                yield _arrow("s", number, placement[dependency.stage], departure)
                yield {**_arrow("f", number, device, arrival), "bp": "e"}
                number += 1


def _arrow(phase: str, number: int, device: int, time: float) -> Event:
    return {
        "ph": phase,
        "name": "message",
        "cat": "message",
        "id": number,
        "pid": device,
        "tid": _COMPUTE,
        "ts": time,
    }
