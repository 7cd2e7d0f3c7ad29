"""Where messages are kernels: no wait for a whole device hangs, and receives are posted early."""

import random

import pytest
from bench_posting import share_posted_early
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offloaded import offloaded
from posting import one_pass_earlier, with_device_waits_at_copies, with_gaps_by_stream
from strategies import catalogue_schedules, costs_of

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import COPY_OUT, PARTS, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.core.program.early_start import prefix_before_loss
from megatron_vshape.core.program.instructions import (
    Await,
    Message,
    Program,
    Receive,
    Release,
    Rows,
    Run,
    Send,
)
from megatron_vshape.core.program.kernels import deadlocks_under_device_sync
from megatron_vshape.core.program.lowering import forward_wave, lower

HEALTHY = list(HealthCheck)


def runs_to_the_end(rows: Rows, waits: float, seed: int, length_on_arrival: bool = False) -> bool:
    """Return whether all devices end where a share of the passes wait for their device's kernels.

    Devices go on in any order. A kernel ends when both ends have begun. What waits does so for the
    kernels that its device has begun before it. With `length_on_arrival` a
    receive waits for its message.
    """
    draw = random.Random(seed)
    waiting = {
        (device, at): draw.random() < waits
        for device, row in enumerate(rows)
        for at, each in enumerate(row)
        if isinstance(each, Run)
    }
    at = [0] * len(rows)
    begun: dict[Message, set[int]] = {}
    while True:
        able = []
        for device, row in enumerate(rows):
            if at[device] == len(row):
                continue
            each = row[at[device]]
            if isinstance(each, Run):
                mine = [m for m, ends in begun.items() if ends == {device}]
                is_able = not mine or not waiting[device, at[device]]
            elif isinstance(each, Await | Release):
                is_able = len(begun.get(each.message, ())) == 2
            else:
                is_able = not length_on_arrival or isinstance(each, Send) or each.message in begun
            if is_able:
                able.append(device)
        if not able:
            return all(place == len(row) for place, row in zip(at, rows, strict=True))
        device = draw.choice(able)
        each = rows[device][at[device]]
        if isinstance(each, Send | Receive):
            begun.setdefault(each.message, set()).add(device)
        at[device] += 1


def in_order(rows: Rows, kind: type[Send] | type[Receive]) -> dict[object, list[Message]]:
    found: dict[object, list[Message]] = {}
    for row in rows:
        for each in row:
            if isinstance(each, kind):
                message = each.message
                key = message.stream, message.source, message.target
                found.setdefault(key, []).append(message)
    return found


def check(program: Program, length_on_arrival: bool = False) -> None:
    """Assert all that a program for kernels has to be."""
    rows = program.instructions
    assert not deadlocks_under_device_sync(program, length_on_arrival=length_on_arrival)
    assert in_order(rows, Send) == in_order(rows, Receive)
    for device, row in enumerate(rows):
        passes = [each.work for each in row if isinstance(each, Run)]
        assert tuple(passes) == program.schedule.order[device]
        posted: set[Message] = set()
        sent: set[Message] = set()
        for before, each in zip([None, *row], row, strict=False):
            if isinstance(each, Receive):
                posted.add(each.message)
            elif isinstance(each, Await):
                posted.remove(each.message)
            elif isinstance(each, Send):
                assert isinstance(before, Run)
                sent.add(each.message)
            elif isinstance(each, Release):
                sent.remove(each.message)
        assert not posted
    for seed, waits in enumerate((0.0, 0.3, 1.0)):
        assert runs_to_the_end(rows, waits, seed, length_on_arrival)


@settings(max_examples=60, suppress_health_check=HEALTHY)
@given(data=st.data(), length_on_arrival=st.booleans())
def test_no_wait_for_a_device_hangs(data: st.DataObject, length_on_arrival: bool) -> None:
    schedule = data.draw(catalogue_schedules(max_devices=6, max_microbatches=8))
    costs = data.draw(st.none() | costs_of(schedule.num_stages))
    timeline = data.draw(st.sampled_from([None, simulate(schedule, costs)]))
    check(
        lower(schedule, timeline, kernels=True, length_on_arrival=length_on_arrival),
        length_on_arrival,
    )


@settings(max_examples=30, suppress_health_check=HEALTHY)
@given(data=st.data())
def test_nor_in_an_order_that_nobody_has_planned(data: st.DataObject) -> None:
    """Passes in any order that their needs allow, on any placement."""
    devices, chunks, microbatches = (data.draw(st.integers(1, n)) for n in (5, 3, 5))
    placement = tuple(data.draw(st.permutations(list(range(devices)) * chunks)))
    wave = forward_wave(placement, devices, microbatches)
    check(lower(wave, kernels=True))
    draw = random.Random(data.draw(st.integers(0, 10**6)))
    rows: list[list[Pass]] = [[] for _ in range(devices)]
    done: set[Pass] = set()
    num_stages = len(placement)
    left = [
        Pass(kind, s, m) for kind in PARTS for s in range(num_stages) for m in range(microbatches)
    ]
    while left:
        able = [each for each in left if all(need in done for need in each.needs(num_stages))]
        work = draw.choice(able)
        left.remove(work)
        done.add(work)
        rows[placement[work.stage]].append(work)
    schedule = Schedule("drawn", devices, microbatches, placement, tuple(map(tuple, rows)))
    for length_on_arrival in (False, True):
        check(lower(schedule, kernels=True, length_on_arrival=length_on_arrival), length_on_arrival)


@settings(max_examples=40, suppress_health_check=HEALTHY)
@given(schedule=catalogue_schedules(8, 16))
def test_nor_in_a_step_that_begins_early(schedule: Schedule) -> None:
    program, ends = prefix_before_loss(lower(schedule, simulate(schedule), kernels=True))
    check(program)
    first = [row[:end] for row, end in zip(program.instructions, ends, strict=True)]
    sent, posted = (
        {each.message for row in first for each in row if isinstance(each, kind)}
        for kind in (Send, Receive)
    )
    assert sent == posted
    assert runs_to_the_end(tuple(first), 1.0, 0)


def test_posting_always_early_hangs() -> None:
    """The check can fail: the smallest program that does, and every V of any size."""
    small = one_pass_earlier(lower(make("v-half", 2, 2), kernels=True))
    stuck = deadlocks_under_device_sync(small)
    assert {device: str(each.work) for device, each in stuck.items()} == {0: "F0.1", 1: "F2.0"}
    assert not runs_to_the_end(small.instructions, 1.0, 0)
    for name in ("v-min", "v-half", "v-zb"):
        for devices, microbatches in ((2, 2), (4, 8), (8, 16)):
            program = lower(make(name, devices, microbatches), kernels=True)
            assert deadlocks_under_device_sync(one_pass_earlier(program))


def test_threads_that_copy_must_not_wait_for_the_device() -> None:
    """Where the program has a copy it may, as where host memory is made; anywhere else it hangs."""
    stuck = []
    for name in ("v-min", "v-half", "v-zb", "interleaved-1f1b", "zb-h1"):
        for devices, microbatches in ((2, 4), (4, 8), (8, 16)):
            schedule = offloaded(make(name, devices, microbatches))
            program = lower(schedule, simulate(schedule), kernels=True)
            assert not deadlocks_under_device_sync(program)
            assert any(each.work.kind is COPY_OUT for each in runs(program))
            stuck.append(bool(deadlocks_under_device_sync(with_device_waits_at_copies(program))))
    assert (sum(stuck), len(stuck)) == (12, 15)


def runs(program: Program) -> list[Run]:
    return [each for row in program.instructions for each in row if isinstance(each, Run)]


def test_a_receive_in_a_gap_after_its_sender_has_waited_hangs() -> None:
    """As where posting takes the message, or where its send has been posted for nobody."""
    rows = ("F0.0 F0.1 BW0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1")
    order = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    program = lower(Schedule("1f1b", 2, 2, (0, 1), order), kernels=True)
    first = list(program.instructions[0])
    gradient = next(each for each in first if isinstance(each, Receive))
    first.remove(gradient)
    late = Program(program.schedule, ((gradient, *first), program.instructions[1]), 1)
    assert not deadlocks_under_device_sync(program)
    assert deadlocks_under_device_sync(late)
    assert deadlocks_under_device_sync(late, length_on_arrival=True)


@pytest.mark.parametrize(("devices", "microbatches"), [(7, 8), (8, 9), (8, 10)])
def test_a_receive_holds_up_none_that_is_posted_with_it(devices: int, microbatches: int) -> None:
    """Where all streams share one queue: behind another of its stream it holds up all the rest."""
    program = lower(make("interleaved-1f1b", devices, microbatches), kernels=True)
    check(program)
    assert deadlocks_under_device_sync(with_gaps_by_stream(program))


@pytest.mark.parametrize("name", NAMES)
def test_little_is_posted_and_kept_at_a_time(name: str) -> None:
    """Each posted receive keeps some of the device's processors busy, and a message's memory."""
    for devices, microbatches in ((4, 12), (8, 32)):
        schedule = make(name, devices, microbatches)
        costs = Costs.uniform(devices, schedule.num_stages, 1, 1.15, 0.85, 0.05)
        program = lower(schedule, simulate(schedule, costs), kernels=True)
        posted = [program.most_posted(device) for device in range(devices)]
        kept = [program.most_kept(device) for device in range(devices)]
        assert max(posted) <= (devices if "grouped" in name else 5), posted
        assert max(kept) <= 5, kept


@pytest.mark.parametrize(("name", "share"), [("v-min", 0.65), ("v-half", 0.85), ("v-zb", 0.85)])
def test_most_receives_are_posted_early(name: str, share: float) -> None:
    for devices, microbatches in ((4, 8), (8, 24)):
        schedule = make(name, devices, microbatches)
        costs = Costs.uniform(devices, schedule.num_stages, 1, 1.15, 0.85, 0.05)
        program = lower(schedule, simulate(schedule, costs), kernels=True)
        assert share <= share_posted_early(program) <= 1


def test_the_instructions_of_a_small_program() -> None:
    schedule = make("v-half", 2, 1)
    program = lower(schedule, simulate(schedule), kernels=True)
    assert program.text() == (
        "F0.0, send F0.0, post F2.0, await F2.0, F3.0, release F0.0, B3.0, send B3.0, post B1.0, "
        "W3.0, release B3.0, await B1.0, BW0.0\n"
        "post F0.0, await F0.0, F1.0, F2.0, send F2.0, post B3.0, await B3.0, B2.0, release F2.0, "
        "B1.0, send B1.0, W1.0, release B1.0, W2.0"
    )
    assert program.planned is not None
    assert program.planned.schedule == program.schedule


def test_fused_passes_keep_their_times() -> None:
    schedule = make("v-half", 4, 8)
    timeline = simulate(schedule)
    planned = lower(schedule, timeline, kernels=True).planned
    assert planned is not None
    times = {slot.work: slot for d in range(4) for slot in timeline.slots(d)}
    fused = 0
    for device in range(4):
        for work, start, end in planned.slots(device):
            parts = [work._replace(kind=kind) for kind in work.parts()]
            assert (start, end) == (times[parts[0]].start, times[parts[-1]].end)
            fused += len(parts) - 1
    assert fused


def test_a_schedule_that_deadlocks_is_told() -> None:
    rows = ("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1")
    order = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    with pytest.raises(ScheduleError, match="the schedule deadlocks"):
        lower(Schedule("bad", 2, 2, (0, 1), order), kernels=True)


@pytest.mark.parametrize("placement", [looping(4, 2), v_shape(4)])
def test_evaluation_hangs_neither(placement: tuple[int, ...]) -> None:
    for length_on_arrival in (False, True):
        check(
            lower(
                forward_wave(placement, 4, 20), kernels=True, length_on_arrival=length_on_arrival
            ),
            length_on_arrival,
        )
