"""Lowering: messages, their order on every stream, no deadlock, and BW only where it is free."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from posting import streams_of
from strategies import catalogue_schedules, costs_of, with_boundary_costs

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, linear, looping, stages_of, v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import (
    Await,
    Message,
    Program,
    Receive,
    Run,
    Send,
    Stream,
)
from megatron_vshape.core.program.lowering import forward_wave, fuse, lower

HEALTHY = list(HealthCheck)


def per_stream(program: Program, kind: type) -> dict[tuple[Stream, int, int], list[Message]]:
    """Return the messages of every stream between two devices, in the order of `kind`."""
    found: dict[tuple[Stream, int, int], list[Message]] = {}
    for row in program.instructions:
        for each in row:
            if isinstance(each, kind):
                key = (each.message.stream, each.message.source, each.message.target)
                found.setdefault(key, []).append(each.message)
    return found


def finishes(program: Program) -> bool:
    """Return whether the program ends when a send blocks until its receive is posted."""
    at = [0] * len(program.instructions)
    posted, sent = set(), set()
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(program.instructions):
            while at[device] < len(row):
                each = row[at[device]]
                if isinstance(each, Receive):
                    posted.add(each.message)
                elif isinstance(each, Send):
                    if each.message not in posted:
                        break
                    sent.add(each.message)
                elif isinstance(each, Await) and each.message not in sent:
                    break
                at[device] += 1
                moved = True
    return all(place == len(row) for place, row in zip(at, program.instructions, strict=True))


def check(schedule: Schedule, window: int = 2) -> Program:
    program = lower(schedule, window=window)
    assert [[i.work for i in row if isinstance(i, Run)] for row in program.instructions] == [
        list(row) for row in schedule.order
    ]
    sends, receives = per_stream(program, Send), per_stream(program, Receive)
    assert sends == receives
    awaited = per_stream(program, Await)
    assert {key: set(value) for key, value in awaited.items()} == {
        key: set(value) for key, value in sends.items()
    }
    assert streams_of(program) == sorted({key[0] for key in sends})
    assert finishes(program)
    return program


@settings(max_examples=60, suppress_health_check=HEALTHY)
@given(schedule=catalogue_schedules(max_microbatches=20), window=st.integers(1, 4))
def test_every_stream_is_first_in_first_out_and_nothing_blocks(
    schedule: Schedule, window: int
) -> None:
    check(schedule, window)


@settings(max_examples=80, suppress_health_check=HEALTHY)
@given(data=st.data())
def test_fusing_delays_nothing(data: st.DataObject) -> None:
    schedule = data.draw(catalogue_schedules(max_devices=6, max_microbatches=12))
    costs = data.draw(with_boundary_costs(data.draw(costs_of(schedule.num_stages))))
    before = simulate(schedule, costs)
    fused = fuse(before)
    verify(fused)
    after = simulate(fused, costs)
    for new, old in zip(after.starts, before.starts, strict=True):
        assert new[-1] <= old[-1] + 1e-9
    assert after.makespan == pytest.approx(before.makespan, abs=1e-9)
    assert max(peak_held(fused, costs)) <= max(peak_held(schedule, costs)) + 1e-9
    check(fused)


def test_b_and_w_side_by_side_become_one() -> None:
    schedule = make("zb-h1", 2, 2)
    timeline = simulate(schedule)
    kinds = [[work.kind for work in row] for row in fuse(timeline).order]
    assert Kind.BW in kinds[0]
    assert lower(schedule, timeline).schedule == fuse(timeline)


def test_a_result_that_stays_is_no_message() -> None:
    program = lower(make("v-min", 2, 1))
    turning = {Pass(Kind.F, 1, 0), Pass(Kind.B, 2, 0)}
    sent = {i.message.work for row in program.instructions for i in row if isinstance(i, Send)}
    assert not sent & turning
    assert sent == {Pass(*each) for each in ((Kind.F, 0, 0), (Kind.F, 2, 0), (Kind.B, 3, 0),
                                              (Kind.B, 1, 0))}  # fmt: skip


def test_the_instructions_of_a_small_schedule() -> None:
    first, second = lower(make("1f1b", 2, 1)).instructions
    assert [type(each).__name__ for each in first] == "Receive Run Send Await Run".split()
    assert [type(each).__name__ for each in second] == "Receive Await Run Run Send".split()
    stream = Stream(Kind.F, 0, True)
    assert second[0] == Receive(Message(Pass(Kind.F, 0, 0), 0, 1, stream))


def test_a_v_has_two_streams_each_way() -> None:
    streams = streams_of(lower(make("v-half", 3, 4)))
    assert streams == [
        Stream(Kind.B, 0, False),
        Stream(Kind.B, 1, True),
        Stream(Kind.F, 0, True),
        Stream(Kind.F, 1, False),
    ]


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, Placement]:
    devices = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3))
    return devices, tuple(draw(st.permutations(list(range(devices)) * chunks)))


@given(placements(), st.integers(1, 9))
@settings(max_examples=50)
def test_evaluation_runs_every_forward_once_on_any_placement(
    placed: tuple[int, Placement], microbatches: int
) -> None:
    devices, placement = placed
    wave = forward_wave(placement, devices, microbatches)
    passes = [(each.stage, each.microbatch) for row in wave.order for each in row]
    assert sorted(passes) == [(s, m) for s in range(len(placement)) for m in range(microbatches)]
    check(wave)


@pytest.mark.parametrize("placement", [linear(4), looping(4, 2), v_shape(4)])
def test_evaluation_keeps_every_device_busy(placement: Placement) -> None:
    chunks = len(placement) // 4
    wave = forward_wave(placement, 4, 20)
    # One pass of every device per unit, but for the way through the pipeline.
    assert simulate(wave).makespan * chunks / 2 <= 20 * chunks + len(placement) - 1


def test_messages_that_deadlock_are_told() -> None:
    rows = ("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")
    order = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    with pytest.raises(ScheduleError) as error:
        lower(Schedule("bad", 2, 2, (0, 1), order))
    assert str(error.value) == (
        "the messages deadlock, however far ahead receives are posted:\n"
        "    device 0 waits for B1.0 from device 1\n"
        "    device 1 waits for F0.1 from device 0"
    )


def test_a_stream_from_two_devices_is_posted_for_each_by_itself() -> None:
    """On this placement device 2 has F of chunk 0 from both its neighbours."""
    placement = (0, 2, 1, 2, 0, 1)
    order = tuple(
        tuple(
            Pass(kind, stage, m)
            for m in range(16)
            for kind, own in ((Kind.F, stages), (Kind.BW, reversed(stages)))
            for stage in own
        )
        for stages in stages_of(placement, 3)
    )
    schedule = Schedule("one by one", 3, 16, placement, order)
    verify(schedule)
    check(schedule, window=1)
    program = lower(schedule, window=1)
    assert program.window == 1
    sources = [
        {(each.message.stream, each.message.source) for each in row if isinstance(each, Receive)}
        for row in program.instructions
    ]
    assert {(Stream(Kind.F, 0, True), 0), (Stream(Kind.F, 0, True), 1)} <= sources[2]
    assert [program.most_posted(device) for device in range(3)] == list(map(len, sources))


def test_a_window_of_none_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the window is 0 receives; it must be at least 1"):
        lower(make("1f1b", 2, 2), window=0)


def test_costs_decide_what_is_fused() -> None:
    schedule = make("v-half", 4, 8)
    free = fuse(simulate(schedule, Costs.uniform(4, 8, send=100.0)))
    assert sum(work.kind is Kind.BW for row in free.order for work in row) < 4 * 2 * 8
