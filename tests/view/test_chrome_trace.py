"""The trace contains the passes, memory and messages of the timeline."""

import io
import json

import pytest

from megatron_vshape import Costs, Schedule, Timeline, make, simulate
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Slot
from megatron_vshape.core.paper.catalogue import NAMES
from megatron_vshape.view.chrome_trace import write_trace


def trace_of(timeline, costs=None):
    stream = io.StringIO()
    write_trace(timeline, stream, costs)
    return json.loads(stream.getvalue())["traceEvents"]


def of_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


@pytest.mark.parametrize("name", NAMES)
def test_trace_has_every_pass_of_the_timeline(name):
    schedule = make(name, 4, 8)
    timeline = simulate(schedule)
    slices = of_phase(trace_of(timeline), "X")
    for device in range(4):
        device_slots = [
            Slot(Pass.parse(event["name"]), event["ts"], event["ts"] + event["dur"])
            for event in slices
            if event["pid"] == device
        ]
        assert device_slots == list(timeline.slots(device))
    assert all(
        Pass.parse(event["name"])[1:] == (event["args"]["stage"], event["args"]["microbatch"])
        for event in slices
    )


def test_every_device_is_a_named_and_sorted_process():
    names = of_phase(trace_of(simulate(make("v-half", 4, 8))), "M")
    assert [event["args"] for event in names if event["name"] == "process_name"] == [
        {"name": f"device {device}"} for device in range(4)
    ]
    assert [event["args"] for event in names if event["name"] == "process_sort_index"] == [
        {"sort_index": device} for device in range(4)
    ]


@pytest.mark.parametrize(("name", "messages"), [("1f1b", 6), ("v-min", 12), ("v-half", 12)])
def test_every_message_has_an_arrow_from_sender_to_reader(name, messages):
    schedule = make(name, 4, 8)
    timeline = simulate(schedule, Costs.uniform(4, schedule.num_stages, 1, 1.5, 0.75, 0.1))
    events = trace_of(timeline)
    starts, ends = of_phase(events, "s"), of_phase(events, "f")
    assert len(starts) == len(ends) == 8 * messages
    assert [event["id"] for event in starts] == [event["id"] for event in ends]
    for start, end in zip(starts, ends, strict=True):
        assert start["ts"] < end["ts"]
        assert abs(start["pid"] - end["pid"]) == 1
        for event in (start, end):
            running_slots = [
                slot for slot in timeline.slots(event["pid"]) if slot.start < event["ts"] < slot.end
            ]
            assert len(running_slots) == 1


def test_trace_of_measured_timeline_escapes_the_name():
    planned = simulate(make("v-zb", 2, 3))
    name = 'a "quoted"\n\\ name\u2028</script>'
    schedule = Schedule(name, 2, 3, planned.schedule.placement, planned.schedule.order)
    measured = Timeline(
        schedule,
        tuple(tuple(1e6 + 1.1 * time for time in row) for row in planned.starts),
        tuple(tuple(1e6 + 1.1 * time for time in row) for row in planned.ends),
    )
    stream = io.StringIO()
    write_trace(measured, stream)
    assert json.loads(stream.getvalue())["otherData"] == {"schedule": name}
    first = of_phase(trace_of(measured), "X")[0]
    assert first["ts"] == 1e6
    assert first["dur"] == pytest.approx(1.1)
