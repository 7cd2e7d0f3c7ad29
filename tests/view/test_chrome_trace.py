"""The trace says what the timeline says."""

import io
import json

import pytest

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule, Slot, Timeline
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.view.chrome_trace import write_trace

COSTS = Costs.uniform(4, 8, 1.0, 1.5, 0.75, 0.1)


def trace_of(timeline, costs=None):
    stream = io.StringIO()
    write_trace(timeline, stream, costs)
    return json.loads(stream.getvalue())["traceEvents"]


def of_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


@pytest.mark.parametrize("name", NAMES)
def test_slices_are_the_timelines_passes(name):
    schedule = make(name, 4, 8)
    timeline = simulate(schedule)
    slices = of_phase(trace_of(timeline), "X")
    for device in range(4):
        mine = [
            Slot(Pass.parse(each["name"]), each["ts"], each["ts"] + each["dur"])
            for each in slices
            if each["pid"] == device
        ]
        assert mine == list(timeline.slots(device))
    assert all(
        Pass.parse(each["name"])[1:] == (each["args"]["stage"], each["args"]["microbatch"])
        for each in slices
    )


def test_every_device_is_a_process_with_a_name_and_a_place():
    names = of_phase(trace_of(simulate(make("v-half", 4, 8))), "M")
    assert [each["args"] for each in names if each["name"] == "process_name"] == [
        {"name": f"device {device}"} for device in range(4)
    ]
    assert [each["args"] for each in names if each["name"] == "process_sort_index"] == [
        {"sort_index": device} for device in range(4)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_counters_reach_the_peaks(name):
    schedule = make(name, 4, 8)
    counters = of_phase(trace_of(simulate(schedule)), "C")
    for device, peak in enumerate(peak_held(schedule)):
        held = [each["args"]["chunks"] for each in counters if each["pid"] == device]
        assert max(held) == pytest.approx(peak)
        assert held[-1] == 0


@pytest.mark.parametrize(("name", "messages"), [("1f1b", 6), ("v-min", 12), ("v-half", 12)])
def test_an_arrow_per_message_from_its_maker_to_its_reader(name, messages):
    schedule = make(name, 4, 8)
    timeline = simulate(schedule, Costs.uniform(4, schedule.num_stages, 1, 1.5, 0.75, 0.1))
    events = trace_of(timeline)
    begins, ends = of_phase(events, "s"), of_phase(events, "f")
    assert len(begins) == len(ends) == 8 * messages
    assert [each["id"] for each in begins] == [each["id"] for each in ends]
    for begin, end in zip(begins, ends, strict=True):
        assert begin["ts"] < end["ts"]
        assert abs(begin["pid"] - end["pid"]) == 1
        for each in (begin, end):
            inside = [
                slot for slot in timeline.slots(each["pid"]) if slot.start < each["ts"] < slot.end
            ]
            assert len(inside) == 1


def test_a_measured_timeline_and_a_hostile_name():
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
