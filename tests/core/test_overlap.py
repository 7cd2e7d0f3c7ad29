"""Overlapped passes: files, verification, times equal to a replay, lowering and drawing."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_replay import peaks, replay
from strategies import catalogue_schedules, costs_of, costs_with_collectives, with_overlapped_pairs

from megatron_vshape import (
    Costs,
    Schedule,
    ScheduleError,
    lower,
    make,
    peak_held,
    plan,
    simulate,
    verify,
)
from megatron_vshape.core.model.costs import with_copies
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.paper.catalogue import JOINT_NAMES, NAMES, make_block
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.program.early_start import forward_stop_point
from megatron_vshape.core.program.instructions import Await, Message, Program, Run, Send, result_of
from megatron_vshape.core.program.kernels import deadlocks_under_device_sync
from megatron_vshape.core.program.lowering import fuse, pair_adjacent
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.view.chrome_trace import events
from megatron_vshape.view.figure import bars_of
from megatron_vshape.view.numbers import held_steps

HEALTHY = list(HealthCheck)

PAIRED = """\
F0.0,F0.1,F0.2&BW0.0,F0.3&BW0.1,BW0.2,BW0.3
F1.0,F1.1&BW1.0,F1.2&BW1.1,F1.3&B1.2,W1.2,BW1.3
"""

COSTS = Costs.uniform(2, 2, 0.3, 0.3, 0.3).having(
    forward_exchange_us=(0.8, 0.8), backward_exchange_us=(0.8, 0.8)
)


def check_messages(program: Program) -> None:
    """Check that every pass has received its inputs and that its results are sent next."""
    placement = program.schedule.placement
    sent_messages: set[Message] = set()
    awaited: set[Message] = set()
    for row in program.instructions:
        received: list[Message] = []
        unsent: list[Pass] = []
        for instruction in row:
            if isinstance(instruction, Await):
                assert not unsent
                received.append(instruction.message)
                awaited.add(instruction.message)
            elif isinstance(instruction, Run):
                assert not unsent
                expected = [
                    dependency
                    for work in instruction.passes
                    for dependency in work.needs(len(placement))
                    if placement[dependency.stage] != placement[work.stage]
                ]
                assert [message.work for message in received] == expected
                received = []
                unsent = [result_of(work) for work in instruction.passes]
                unsent = [work for work in unsent if is_sent(work, placement)]
            elif isinstance(instruction, Send):
                assert unsent.pop(0) == instruction.message.work
                sent_messages.add(instruction.message)
        assert not received
        assert not unsent
    assert sent_messages == awaited


def is_sent(work: Pass, placement: tuple[int, ...]) -> bool:
    reader = work.stage + {"F": 1, "B": -1, "W": 0}[work.kind]
    has_reader = 0 <= reader < len(placement) and work.kind is not Kind.W
    return has_reader and placement[reader] != placement[work.stage]


@settings(max_examples=60, suppress_health_check=HEALTHY)
@given(data=st.data(), kernels=st.booleans())
def test_random_pairs_match_the_replay_and_have_the_messages_of_both_passes(
    data: st.DataObject, kernels: bool
) -> None:
    schedule = data.draw(
        with_overlapped_pairs(data.draw(catalogue_schedules(max_devices=5, max_microbatches=8)))
    )
    costs = data.draw(costs_with_collectives(data.draw(costs_of(schedule.num_stages))))
    verify(schedule)
    timeline = simulate(schedule, costs)
    times = replay(schedule, costs)
    for device in range(schedule.num_devices):
        for work, *slot in timeline.slots(device):
            assert slot == pytest.approx(times[work])
    assert peak_held(schedule, costs) == pytest.approx(peaks(schedule, costs))
    assert Schedule.from_json(schedule.to_json()) == schedule
    reloaded = Schedule.from_csv(schedule.to_csv(), schedule.placement)
    assert (reloaded.order, reloaded.overlapped) == (schedule.order, schedule.overlapped)
    program = lower(schedule, timeline, kernels=kernels)
    assert program.schedule.overlapped == schedule.overlapped
    executed = [
        [instruction.passes for instruction in row if isinstance(instruction, Run)]
        for row in program.instructions
    ]
    assert executed == [list(program.schedule.steps(d)) for d in range(schedule.num_devices)]
    check_messages(program)
    assert not deadlocks_under_device_sync(program) or not kernels
    for end, row in zip(forward_stop_point(program), program.instructions, strict=True):
        assert all(
            len(instruction.passes) == 1
            for instruction in row[:end]
            if isinstance(instruction, Run)
        )


def test_pair_waits_for_both_inputs_and_ends_together() -> None:
    schedule = Schedule.from_csv(PAIRED)
    verify(schedule)
    assert schedule.to_csv() == PAIRED
    timeline = simulate(schedule, COSTS)
    # F 1.4, B 1.4, W 0.6; both collectives (1.6) take longer than the compute of F and B (1.2)
    (first, second) = [slot for slot in timeline.slots(1) if slot.work[2] in (1, 0)][1:3]
    assert (first.work.kind, second.work.kind) == (Kind.F, Kind.BW)
    assert (first.start, first.end) == (second.start, second.end)
    assert first.start == pytest.approx(2.8)
    assert first.end - first.start == pytest.approx(3.4 - 1.6)
    assert timeline.work[0] == pytest.approx(2 * 1.4 + 2 * 1.8 + 2 * 2.0)
    assert peak_held(schedule) == (12.0 / 2, 8.0 / 2)
    assert lower(schedule, timeline).text().count("F1.3&B1.2") == 1
    assert fuse(timeline).order == schedule.order  # W1.2 remains after its pair


def test_invalid_pairs_are_rejected() -> None:
    for text in ("F0.0&B0.0", "B0.0&F0.1", "F0.0&F0.1", "F0.0&B0.1&B0.2", "F0.0&W0.1"):
        with pytest.raises(
            ScheduleError, match="is not an overlapped pass: expected an F with a B or BW"
        ):
            Schedule.from_csv(f"{text}\n")
    schedule = make("1f1b", 2, 4)
    for marked, words in (
        (Pass(Kind.F, 0, 0), "F0.0&F0.1 on device 0 is not an overlapped pair"),
        (Pass(Kind.F, 1, 0), "F1.0&BW1.0 on device 1 is not an overlapped pair"),
        (Pass(Kind.F, 5, 0), "F5.0 is marked as overlapped, but no device runs it"),
    ):
        with pytest.raises(ScheduleError, match=words):
            verify(replace(schedule, overlapped=frozenset({marked})))


def test_deadlock_of_pairs_is_explained() -> None:
    stuck = "F0.0,F0.1&BW0.0,BW0.1\nF1.0,F1.1&BW1.0,BW1.1\n"
    with pytest.raises(ScheduleError) as error:
        verify(Schedule.from_csv(stuck))
    assert "F0.1 on device 0 waits for BW1.0: BW0.0, which runs with it" in str(error.value)
    assert "BW1.0 on device 1 waits for F1.1: runs with it" in str(error.value)


def test_former_fields_are_ignored() -> None:
    former_fields = {
        "joint": {"F0&B1": 1.0},
        "hidden_share": 0.5,
        "sources": {"joint": "measured here"},
    }
    assert Costs.from_json(json.dumps(json.loads(COSTS.to_json()) | former_fields)) == COSTS


def test_pair_is_drawn_as_one_box_of_two_colours() -> None:
    timeline = simulate(Schedule.from_csv(PAIRED), COSTS)
    bars = [bar for bar in bars_of(timeline) if bar.row == 0 and bar.work[2] in (0, 2)]
    _, upper, lower_half, _ = bars
    assert (upper.start, upper.end, upper.bottom) == (
        lower_half.start,
        lower_half.end,
        lower_half.top,
    )
    assert timeline.draw().split("\n")[0].startswith("FFF")
    assert "FBW" in timeline.draw()
    event_names = [event["name"] for event in events(timeline, COSTS) if event["ph"] == "X"]
    assert "F0.2&BW0.0" in event_names
    assert "BW0.0" not in event_names
    steps = held_steps(timeline, COSTS, 0)
    assert [time for time, _ in steps] == sorted(time for time, _ in steps)
    assert max(amount for _, amount in steps) == peak_held(timeline.schedule, COSTS)[0]
    assert steps[-1][1] == 0.0


def costs_with_all_to_all(devices: int, share: float, chunks: int = 2) -> Costs:
    """Return the costs of the model in the module's docstring."""
    stages, size = chunks * devices, 2 / chunks
    collective_us = (share * size,) * stages
    equal = Costs.uniform(devices, stages, 1 - share, 1 - share, 1 - share)
    return equal.having(forward_exchange_us=collective_us, backward_exchange_us=collective_us)


def replayed_makespan(schedule: Schedule, costs: Costs) -> float:
    """Return the step time of the replay, which shares no code with the simulator."""
    times = replay(schedule, costs)
    assert len(times) == sum(map(len, schedule.order))
    return max(end for _, end in times.values())


@pytest.mark.parametrize(
    ("microbatches", "share", "published", "interleaved"),
    [
        (32, 0.3, 156.5, (191.7, 158.7, 182.2, 151.3)),
        (64, 0.4, 255.2, (351.0, 255.8, 341.9, 249.5)),
    ],
)
def test_published_schedules_match_the_reference(
    microbatches: int,
    share: float,
    published: float,
    interleaved: tuple[float, float, float, float],
) -> None:
    costs = costs_with_all_to_all(8, share)
    schedule = make("dualpipev", 8, microbatches)
    verify(schedule, max_held=17)
    assert simulate(schedule, costs).makespan == pytest.approx(published, abs=0.051)
    assert replayed_makespan(schedule, costs) == pytest.approx(published, abs=0.051)
    makespans = [
        replayed_makespan(
            make(name, 8, microbatches, num_chunks=chunks),
            costs_with_all_to_all(8, share, chunks=chunks),
        )
        for chunks in (2, 4)
        for name in ("interleaved-1f1b", "overlapped-interleaved-1f1b")
    ]
    assert makespans == pytest.approx(interleaved, abs=0.051)


def test_megatrons_overlap_has_one_more_warm_up_pass() -> None:
    for chunks, peak in ((2, 24.0), (4, 20.0)):
        schedule = make("overlapped-interleaved-1f1b", 8, 32, num_chunks=chunks)
        assert max(peak_held(schedule)) == peak
        for device, row in enumerate(schedule.order):
            warm_up = next(index for index, work in enumerate(row) if work.kind is not Kind.F) - 1
            assert warm_up == 2 * (7 - device) + (chunks - 1) * 8 + 1


@pytest.mark.parametrize(("d", "m"), [(1, 2), (2, 4), (3, 9), (5, 12), (8, 16)])
def test_dualpipev_is_valid_and_within_its_block_memory(d: int, m: int) -> None:
    schedule = make("dualpipev", d, m)
    verify(schedule, max_held=2 * d + 1)
    assert max(make_block("dualpipev", d, m).peaks()) == 2 * d + 1
    assert schedule.placement == v_shape(d)


def test_dualpipev_rejects_few_microbatches() -> None:
    with pytest.raises(ScheduleError, match="at least 2 x ranks microbatches, 8 on 4, not 7"):
        make("dualpipev", 4, 7)


def test_plan_of_a_joint_name_runs_passes_separately() -> None:
    assert not set(JOINT_NAMES) & set(NAMES)
    for name in JOINT_NAMES:
        assert not plan_request(PlanRequest(name, 4, 8)).schedule.overlapped
        assert make(name, 4, 8).overlapped


def paired_and_checked(schedule: Schedule, costs: Costs | None) -> Schedule:
    """Return the schedule with adjacent passes paired, verified with both kinds of messages."""
    paired = pair_adjacent(schedule, costs)
    assert paired.order == schedule.order
    verify(paired)
    timeline = simulate(paired, costs)
    for kernels in (False, True):
        lower(paired, timeline, kernels=kernels)
    assert max(peak_held(paired)) == max(peak_held(schedule))
    return paired


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 3), (4, 12)])
def test_adjacent_passes_of_any_schedule_are_paired(
    name: str, devices: int, microbatches: int
) -> None:
    schedule = make(name, devices, microbatches)
    chunks = schedule.num_chunks
    paired_and_checked(schedule, None)
    costs = costs_with_all_to_all(devices, 0.35, chunks)
    paired = paired_and_checked(schedule, costs)
    assert simulate(paired, costs).makespan <= simulate(schedule, costs).makespan
    assert replayed_makespan(paired, costs) == pytest.approx(simulate(paired, costs).makespan)


@pytest.mark.parametrize(("name", "share"), [("interleaved-1f1b", 0.97), ("v-zb", 0.99)])
def test_pairs_hide_collectives(name: str, share: float) -> None:
    schedule, costs = make(name, 4, 16), costs_with_all_to_all(4, 0.35)
    paired = pair_adjacent(schedule, costs)
    assert len(paired.overlapped) > 16
    assert replayed_makespan(paired, costs) < share * replayed_makespan(schedule, costs)


def test_pairs_that_cost_more_than_they_hide_are_skipped() -> None:
    for name in ("1f1b-v", "zb-h1"):  # pairs would make them 81% and 9% slower
        assert not pair_adjacent(make(name, 8, 24)).overlapped
    assert pair_adjacent(make("v-zb", 8, 24)).overlapped


def test_pairing_keeps_published_pairs_and_offload_passes() -> None:
    for name in JOINT_NAMES:
        schedule = make(name, 4, 12)
        assert pair_adjacent(schedule) == schedule
    sliced = with_copies(Costs.uniform(4, 8), 1.0)
    copied = plan(sliced, 4, 12, 4.0, trades=True, steps=2000).schedule
    assert copied.copies
    assert pair_adjacent(copied, sliced) == copied
