"""A measured trace is read back, set beside its plan, and its late passes are found."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.playground.request import CostChoice, FieldError, FileText
from megatron_vshape.playground.stage_costs import Pricing
from megatron_vshape.playground.traces import delays, measured_pictures
from megatron_vshape.view.chrome_trace import events, write_trace

FREE = Pricing(CostChoice())


def trace_of(timeline: Timeline) -> FileText:
    stream = io.StringIO()
    write_trace(timeline, stream)
    return FileText("step.json", stream.getvalue())


def slowed(timeline: Timeline, device: int, at: int, by: float) -> Timeline:
    """Return the timeline with one pass longer, and what waits for it that much later."""
    order = timeline.schedule.order
    slow = order[device][at]
    rows = [(slot, row) for row in range(len(order)) for slot in timeline.slots(row)]
    rows.sort(key=lambda each: each[0].start)
    ends: dict[Pass, float] = {}
    clock = [0.0] * len(order)
    made: list[tuple[list[float], list[float]]] = [([], []) for _ in order]
    for (work, start, end), row in rows:
        begin = max(clock[row], *(ends[need] for need in work.needs(2 * len(order))), start)
        clock[row] = begin + end - start + (by if work == slow else 0.0)
        ends[work] = clock[row]
        made[row][0].append(begin)
        made[row][1].append(clock[row])
    starts, stops = zip(*made, strict=True)
    return Timeline(timeline.schedule, tuple(map(tuple, starts)), tuple(map(tuple, stops)))


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6))
def test_a_trace_comes_back_as_it_was(name, devices, microbatches):
    timeline = simulate(make(name, devices, microbatches))
    planned, measured = measured_pictures(trace_of(timeline), FREE)
    assert measured.timeline.schedule.order == timeline.schedule.order
    assert measured.timeline.starts == timeline.starts
    assert measured.late is not None
    assert not any(value for row in measured.late for value in row)
    assert planned.timeline.schedule == measured.timeline.schedule


def test_only_the_pass_to_blame_is_late():
    planned = simulate(make("v-half", 4, 8))
    late = delays(planned, slowed(planned, 2, 20, 0.5))
    blamed = [(device, at) for device, row in enumerate(late) for at, v in enumerate(row) if v]
    assert blamed == [(2, 20)]
    assert late[2][20] == pytest.approx(0.5)


def test_planned_and_measured_in_one_file():
    planned = simulate(make("v-min", 2, 4))
    measured = slowed(planned, 1, 3, 2.0)
    both = []
    for offset, label, timeline in ((0, "planned", planned), (100, "measured", measured)):
        for event in events(timeline):
            event = {**event, "pid": int(str(event["pid"])) + offset}
            if event["name"] == "process_name":
                event["args"] = {"name": f"{label}: device {event['pid'] - offset}"}
            both.append(event)
    file = FileText("both.json", json.dumps({"traceEvents": both}))
    first, second = measured_pictures(file, FREE)
    assert first.timeline.starts == planned.starts
    assert second.timeline.ends == measured.ends
    assert second.late is not None
    assert second.late[1][3] == pytest.approx(2.0)
    assert "1 of 48 passes ran late" in second.facts.note


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "no list of traceEvents"),
        ("[]", "contains a JSON list"),
        ('{"traceEvents": []}', "no event of it is a pass"),
        ('{"traceEvents": [{"ph": "X", "name": "matmul"}]}', "no event of it is a pass"),
        ('{"traceEvents": [{"ph": "X", "name": "F0.0"}]}', "needs pid, ts and dur"),
        (
            '{"traceEvents": [{"ph": "X", "name": "F0.0", "pid": 0, "ts": 1, "dur": -1}]}',
            "ends before it starts",
        ),
        (
            '{"traceEvents": [{"ph": "X", "name": "F0.0", "pid": 99999, "ts": 1, "dur": 1}]}',
            "up to 256 are read",
        ),
        (
            '{"traceEvents": [{"ph": "X", "name": "F3.0", "pid": 0, "ts": 1, "dur": 1}]}',
            "with gaps",
        ),
        (
            '{"traceEvents": [{"ph": "X", "name": "F0.0", "pid": 0, "ts": 1, "dur": 1}]}',
            "B0.0 runs never",
        ),
        (
            '{"traceEvents": [{"ph": "X", "name": "F0.999999", "pid": 0, "ts": 1, "dur": 1}]}',
            "more than the 1,600,000 passes",
        ),
    ],
)
def test_what_is_no_trace(text, said):
    with pytest.raises(FieldError, match=said) as caught:
        measured_pictures(FileText("bad.json", text), FREE)
    assert caught.value.field == "trace"


EVENT = st.fixed_dictionaries(
    {
        "ph": st.sampled_from(["X", "M", "C"]),
        "name": st.sampled_from(["F0.0", "B0.1", "W1.0", "x"]),
    },
    optional={
        "pid": st.integers(-2, 3) | st.text(max_size=2) | st.none(),
        "ts": st.floats() | st.integers() | st.booleans(),
        "dur": st.floats() | st.integers() | st.none(),
        "args": st.dictionaries(st.just("name"), st.text(max_size=9) | st.integers()),
    },
)


@given(st.lists(EVENT | st.integers() | st.none(), max_size=8))
def test_any_events(found):
    text = json.dumps({"traceEvents": found})
    with pytest.raises(ScheduleError):
        measured_pictures(FileText("any.json", text), FREE)
