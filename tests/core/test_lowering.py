"""Lowering: messages, their order per stream, no deadlock, and BW without delay."""

from collections.abc import Mapping

import pytest
from core.test_early_start import Network
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from posting import streams_of
from schedule_replay import replay
from strategies import catalogue_schedules, costs_of, with_boundary_costs

from megatron_vshape import Costs, Schedule, ScheduleError, lower, make, peak_held, simulate, verify
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, linear, looping, stages_of, v_shape
from megatron_vshape.core.program.instructions import (
    Await,
    Message,
    Program,
    Receive,
    Run,
    Send,
    Stream,
)
from megatron_vshape.core.program.lowering import (
    DeferredWgradOverlap,
    deferred_weight_overlap,
    forward_wave,
    fuse,
)

HEALTHY = list(HealthCheck)


def messages_by_stream(
    program: Program, kind: type
) -> dict[tuple[Stream, int, int], list[Message]]:
    """Return the messages of every stream between two devices, in the order of `kind`."""
    messages: dict[tuple[Stream, int, int], list[Message]] = {}
    for row in program.instructions:
        for instruction in row:
            if isinstance(instruction, kind):
                key = (
                    instruction.message.stream,
                    instruction.message.source,
                    instruction.message.target,
                )
                messages.setdefault(key, []).append(instruction.message)
    return messages


def check_lowering(schedule: Schedule, window: int = 2) -> Program:
    program = lower(schedule, window=window)
    assert [
        [instruction.work for instruction in row if isinstance(instruction, Run)]
        for row in program.instructions
    ] == [list(row) for row in schedule.order]
    sends, receives = messages_by_stream(program, Send), messages_by_stream(program, Receive)
    assert sends == receives
    awaited = messages_by_stream(program, Await)
    assert {key: set(value) for key, value in awaited.items()} == {
        key: set(value) for key, value in sends.items()
    }
    assert streams_of(program) == sorted({key[0] for key in sends})
    network = Network(sends_wait=True)
    network.run_all(list(program.instructions))
    assert network.is_idle()
    return program


@settings(max_examples=60, suppress_health_check=HEALTHY)
@given(schedule=catalogue_schedules(max_microbatches=20), window=st.integers(1, 4))
def test_streams_are_first_in_first_out_and_do_not_block(schedule: Schedule, window: int) -> None:
    check_lowering(schedule, window)


def with_full_backward_cost(costs: Costs, share: float) -> Costs:
    """Return the costs with full backwards of this share of B + W."""
    split = zip(costs.backward_us, costs.weight_us, strict=True)
    return costs.having(whole_backward_us=[share * (b + w) for b, w in split])


@settings(max_examples=120, suppress_health_check=HEALTHY)
@given(st.data(), catalogue_schedules(6, 12), st.none() | st.floats(0.3, 1.5))
def test_fusing_delays_no_pass(
    data: st.DataObject, schedule: Schedule, share: float | None
) -> None:
    """With any time of full backwards, or that of B and W."""
    costs = data.draw(with_boundary_costs(data.draw(costs_of(schedule.num_stages))))
    costs = costs if share is None else with_full_backward_cost(costs, share)
    timeline = simulate(schedule, costs)
    fused = fuse(timeline)
    verify(fused)
    fused_timeline = simulate(fused, costs)
    for device in range(schedule.num_devices):
        ends = {work: end for work, _, end in fused_timeline.slots(device)}
        for work, _, end in timeline.slots(device):
            if work in ends:
                assert ends[work] <= end * (1 + 1e-9)
            elif work.kind is Kind.W:
                assert ends[work._replace(kind=Kind.BW)] <= end * (1 + 1e-9)
    assert max(peak_held(fused, costs)) <= max(peak_held(schedule, costs)) + 1e-9
    if share is None:
        assert fused_timeline.makespan == pytest.approx(timeline.makespan, abs=1e-9)
    elif share > 1.0 + 1e-6:
        assert fused.order == schedule.order
    check_lowering(fused)


def test_instructions_of_a_small_schedule() -> None:
    first, second = lower(make("1f1b", 2, 1)).instructions
    assert [
        type(instruction).__name__ for instruction in first
    ] == "Receive Run Send Await Run".split()
    assert [
        type(instruction).__name__ for instruction in second
    ] == "Receive Await Run Run Send".split()
    stream = Stream(Kind.F, 0, True)
    assert second[0] == Receive(Message(Pass(Kind.F, 0, 0), 0, 1, stream))


def test_v_shape_has_two_streams_per_direction() -> None:
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
    passes = [(work.stage, work.microbatch) for row in wave.order for work in row]
    assert sorted(passes) == [(s, m) for s in range(len(placement)) for m in range(microbatches)]
    check_lowering(wave)


@pytest.mark.parametrize("placement", [linear(4), looping(4, 2), v_shape(4)])
def test_evaluation_keeps_every_device_busy(placement: Placement) -> None:
    chunks = len(placement) // 4
    wave = forward_wave(placement, 4, 20)
    # One pass per device and unit of time, except in warm-up and cool-down.
    assert simulate(wave).makespan * chunks / 2 <= 20 * chunks + len(placement) - 1


def test_deadlocking_messages_are_rejected() -> None:
    rows = ("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")
    order = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    with pytest.raises(ScheduleError) as error:
        lower(Schedule("bad", 2, 2, (0, 1), order))
    assert str(error.value) == (
        "the messages deadlock, however far ahead receives are posted:\n"
        "    device 0 waits for B1.0 from device 1\n"
        "    device 1 waits for F0.1 from device 0"
    )
    with pytest.raises(ScheduleError, match="the schedule deadlocks"):
        lower(Schedule("bad", 2, 2, (0, 1), order), kernels=True)


def test_stream_from_two_devices_is_posted_per_source() -> None:
    """On this placement, device 2 receives F of chunk 0 from both neighbours."""
    placement = (0, 2, 1, 2, 0, 1)
    order = tuple(
        tuple(
            Pass(kind, stage, m)
            for m in range(16)
            for kind, kind_stages in ((Kind.F, stages), (Kind.BW, reversed(stages)))
            for stage in kind_stages
        )
        for stages in stages_of(placement, 3)
    )
    schedule = Schedule("one by one", 3, 16, placement, order)
    verify(schedule)
    check_lowering(schedule, window=1)
    program = lower(schedule, window=1)
    assert program.window == 1
    sources = [
        {
            (instruction.message.stream, instruction.message.source)
            for instruction in row
            if isinstance(instruction, Receive)
        }
        for row in program.instructions
    ]
    assert {(Stream(Kind.F, 0, True), 0), (Stream(Kind.F, 0, True), 1)} <= sources[2]
    assert [program.peak_posted(device) for device in range(3)] == list(map(len, sources))


def test_empty_window_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="the window is 0 receives; it must be at least 1"):
        lower(make("1f1b", 2, 2), window=0)


def test_fusing_depends_on_costs() -> None:
    schedule = make("v-half", 4, 8)
    free = fuse(simulate(schedule, Costs.uniform(4, 8, send=100.0)))
    assert sum(work.kind is Kind.BW for row in free.order for work in row) < 4 * 2 * 8


def durations_of(
    schedule: Schedule, costs: Costs, deferred: Mapping[Pass, DeferredWgradOverlap]
) -> dict[Pass, float]:
    """Return the durations if a B also runs the given share of the W after it."""
    lengths = {work: costs.time_us(work.kind, work.stage) for row in schedule.order for work in row}
    for work, (weights, share) in deferred.items():
        lengths[work] += share * lengths[weights]
        lengths[weights] *= 1 - share
    return lengths


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_pass_is_delayed(data: st.DataObject) -> None:
    schedule = data.draw(catalogue_schedules(max_devices=5, max_microbatches=12))
    costs = data.draw(with_boundary_costs(data.draw(costs_of(schedule.num_stages))))
    schedule = fuse(simulate(schedule, costs))
    deferred = deferred_weight_overlap(simulate(schedule, costs))
    weights = {overlap.weights for overlap in deferred.values()}
    times = replay(schedule, costs)
    deferred_times = replay(schedule, costs, durations_of(schedule, costs, deferred))
    for work in times.keys() - weights:
        assert deferred_times[work][0] <= times[work][0] + 1e-9
    for row in schedule.order:
        for work, following in zip(row, row[1:], strict=False):
            if work in deferred:
                assert deferred[work].weights == following
                assert (work.kind, following.kind) == (Kind.B, Kind.W)
                assert work[1:] != following[1:]  # its own weight gradients are not available yet


def test_overlaps_depend_on_costs_and_tied_embeddings() -> None:
    """No pass reads B0; B1.0 runs after a W of its device, at most one message time later."""

    def overlap_text(ties_ends: bool = False, **costs: float) -> str:
        timeline = simulate(make("v-zb", 2, 3), Costs.uniform(2, 4, **costs))
        overlaps = deferred_weight_overlap(timeline, ties_ends).items()
        return " ".join(f"{work}:{overlap.weights}:{overlap.share:g}" for work, overlap in overlaps)

    firsts = "B0.0:W3.1:1 B0.1:W3.2:1 B0.2:W0.1:1"
    assert overlap_text() == f"{firsts} B1.0:W2.0:1"
    assert overlap_text(send=0.25) == f"{firsts} B1.0:W2.0:0.5"
    assert overlap_text(weight=2.0) == f"{firsts} B1.0:W2.0:1 B1.2:W2.1:0.5"
    # Otherwise the embedding's gradient would receive W3.1's part before B0.0's.
    assert overlap_text(ties_ends=True) == "B0.2:W0.1:1 B1.0:W2.0:1"


@pytest.mark.parametrize(("name", "share"), [("v-half", 0.02), ("v-zb", 0.3)])
def test_many_backwards_overlap_weight_passes(name: str, share: float) -> None:
    schedule = fuse(simulate(make(name, 8, 32)))
    split = sum(work.kind is Kind.B for row in schedule.order for work in row)
    assert len(deferred_weight_overlap(simulate(schedule))) > share * split
