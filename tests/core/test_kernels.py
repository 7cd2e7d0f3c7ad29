"""Messages as kernels: device synchronization never hangs, and receives are posted early."""

import random
from itertools import product
from typing import Any

import pytest
from bench_posting import share_posted_early
from core.test_lowering import messages_by_stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offloaded import with_offloads
from posting import with_device_waits_at_copies, with_gaps_by_stream, with_receives_one_pass_earlier
from strategies import catalogue_schedules, costs_of

from megatron_vshape import Costs, Schedule, lower, make, simulate
from megatron_vshape.core.model.kinds import COPY_OUT, PARTS
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper.catalogue import NAMES
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
from megatron_vshape.core.program.kernels import _EventOrder, deadlocks_under_device_sync
from megatron_vshape.core.program.lowering import forward_wave

HEALTHY = list(HealthCheck)


def runs_to_completion(
    rows: Rows, waits: float, seed: int, length_on_arrival: bool = False
) -> bool:
    """Return whether all devices finish if a share of the passes synchronizes with its device.

    Devices advance in random order. A message kernel ends when sender and receiver have started it.
    A synchronizing pass waits for all kernels that its device has started. With
    `length_on_arrival`, a receive waits for its message.
    """
    draw = random.Random(seed)
    blocks = {
        (device, index): draw.random() < waits
        for device, row in enumerate(rows)
        for index, instruction in enumerate(row)
        if isinstance(instruction, Run)
    }
    positions = [0] * len(rows)
    started: dict[Message, set[int]] = {}
    while True:
        runnable = []
        for device, row in enumerate(rows):
            if positions[device] == len(row):
                continue
            instruction = row[positions[device]]
            if isinstance(instruction, Run):
                pending = [m for m, ends in started.items() if ends == {device}]
                is_able = not pending or not blocks[device, positions[device]]
            elif isinstance(instruction, Await | Release):
                is_able = len(started.get(instruction.message, ())) == 2
            else:
                is_able = (
                    not length_on_arrival
                    or isinstance(instruction, Send)
                    or instruction.message in started
                )
            if is_able:
                runnable.append(device)
        if not runnable:
            return all(position == len(row) for position, row in zip(positions, rows, strict=True))
        device = draw.choice(runnable)
        instruction = rows[device][positions[device]]
        if isinstance(instruction, Send | Receive):
            started.setdefault(instruction.message, set()).add(device)
        positions[device] += 1


def check_program(program: Program, length_on_arrival: bool = False) -> None:
    """Check all requirements on a program for kernels."""
    rows = program.instructions
    assert not deadlocks_under_device_sync(program, length_on_arrival=length_on_arrival)
    assert messages_by_stream(program, Send) == messages_by_stream(program, Receive)
    for device, row in enumerate(rows):
        passes = [instruction.work for instruction in row if isinstance(instruction, Run)]
        assert tuple(passes) == program.schedule.order[device]
        posted: set[Message] = set()
        unreleased: set[Message] = set()
        for previous, instruction in zip([None, *row], row, strict=False):
            if isinstance(instruction, Receive):
                posted.add(instruction.message)
            elif isinstance(instruction, Await):
                posted.remove(instruction.message)
            elif isinstance(instruction, Send):
                assert isinstance(previous, Run)
                unreleased.add(instruction.message)
            elif isinstance(instruction, Release):
                unreleased.remove(instruction.message)
        assert not posted
    for seed, waits in enumerate((0.0, 0.3, 1.0)):
        assert runs_to_completion(rows, waits, seed, length_on_arrival)


@settings(max_examples=60, suppress_health_check=HEALTHY)
@given(data=st.data(), length_on_arrival=st.booleans())
def test_no_device_synchronization_hangs(data: st.DataObject, length_on_arrival: bool) -> None:
    schedule = data.draw(catalogue_schedules(max_devices=6, max_microbatches=8))
    costs = data.draw(st.none() | costs_of(schedule.num_stages))
    timeline = data.draw(st.sampled_from([None, simulate(schedule, costs)]))
    check_program(
        lower(schedule, timeline, kernels=True, length_on_arrival=length_on_arrival),
        length_on_arrival,
    )


@settings(max_examples=30, suppress_health_check=HEALTHY)
@given(data=st.data())
def test_random_orders_do_not_hang(data: st.DataObject) -> None:
    """Passes run in any valid order on any placement."""
    devices, chunks, microbatches = (data.draw(st.integers(1, n)) for n in (5, 3, 5))
    placement = tuple(data.draw(st.permutations(list(range(devices)) * chunks)))
    draw = random.Random(data.draw(st.integers(0, 10**6)))
    rows: list[list[Pass]] = [[] for _ in range(devices)]
    finished: set[Pass] = set()
    num_stages = len(placement)
    remaining = [
        Pass(kind, s, m) for kind in PARTS for s in range(num_stages) for m in range(microbatches)
    ]
    while remaining:
        runnable = [
            work
            for work in remaining
            if all(dependency in finished for dependency in work.needs(num_stages))
        ]
        work = draw.choice(runnable)
        remaining.remove(work)
        finished.add(work)
        rows[placement[work.stage]].append(work)
    wave = forward_wave(placement, devices, microbatches)
    drawn = Schedule("drawn", devices, microbatches, placement, tuple(map(tuple, rows)))
    for schedule, on_arrival in product((wave, drawn), (False, True)):
        check_program(lower(schedule, kernels=True, length_on_arrival=on_arrival), on_arrival)


@settings(max_examples=40, suppress_health_check=HEALTHY)
@given(schedule=catalogue_schedules(8, 16))
def test_early_started_steps_do_not_hang(schedule: Schedule) -> None:
    program, ends = prefix_before_loss(lower(schedule, simulate(schedule), kernels=True))
    check_program(program)
    first = [row[:end] for row, end in zip(program.instructions, ends, strict=True)]
    sent_messages, posted_messages = (
        {
            instruction.message
            for row in first
            for instruction in row
            if isinstance(instruction, kind)
        }
        for kind in (Send, Receive)
    )
    assert sent_messages == posted_messages
    assert runs_to_completion(tuple(first), 1.0, 0)


@pytest.mark.parametrize("name", ["v-half", "v-zb", "interleaved-1f1b"])
def test_events_stay_in_the_order_of_their_waits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This order shows whether a receive that is posted earlier can deadlock."""
    post = _EventOrder.posts_at

    def post_and_check(order: _EventOrder, *arguments: Any) -> bool:
        is_posted = post(order, *arguments)
        for event, awaited_events in enumerate(order._ahead):
            assert all(order._at[awaited] < order._at[event] for awaited in awaited_events)
        return is_posted

    monkeypatch.setattr(_EventOrder, "posts_at", post_and_check)
    schedule = make(name, 4, 8)
    lower(schedule, simulate(schedule), kernels=True)


def test_always_posting_earlier_hangs() -> None:
    """The smallest program that hangs, and V-shaped schedules of any size."""
    small = with_receives_one_pass_earlier(lower(make("v-half", 2, 2), kernels=True))
    stuck = deadlocks_under_device_sync(small)
    assert {device: str(run.work) for device, run in stuck.items()} == {0: "F0.1", 1: "F2.0"}
    assert not runs_to_completion(small.instructions, 1.0, 0)
    for name in ("v-min", "v-half", "v-zb"):
        for devices, microbatches in ((2, 2), (4, 8), (8, 16)):
            program = lower(make(name, devices, microbatches), kernels=True)
            assert deadlocks_under_device_sync(with_receives_one_pass_earlier(program))


def test_waiting_copy_threads_hang() -> None:
    """A copy may synchronize at its place in the program, but not elsewhere."""
    stuck = []
    for name in ("v-min", "v-half", "v-zb", "interleaved-1f1b", "zb-h1"):
        for devices, microbatches in ((2, 4), (4, 8), (8, 16)):
            schedule = with_offloads(make(name, devices, microbatches))
            program = lower(schedule, simulate(schedule), kernels=True)
            assert not deadlocks_under_device_sync(program)
            assert COPY_OUT in program.schedule.kinds
            stuck.append(bool(deadlocks_under_device_sync(with_device_waits_at_copies(program))))
    assert (sum(stuck), len(stuck)) == (12, 15)


def test_receives_posted_together_do_not_block_each_other() -> None:
    """If all streams share one queue, a blocked receive delays all later ones."""
    program = lower(make("interleaved-1f1b", 8, 10), kernels=True)
    check_program(program)
    assert deadlocks_under_device_sync(with_gaps_by_stream(program))


@pytest.mark.parametrize("name", NAMES)
def test_few_messages_are_posted_and_unreleased(name: str) -> None:
    """Each posted receive occupies processors of the device and memory of a message."""
    for devices, microbatches in ((4, 12), (8, 32)):
        schedule = make(name, devices, microbatches)
        costs = Costs.uniform(devices, schedule.num_stages, 1, 1.15, 0.85, 0.05)
        program = lower(schedule, simulate(schedule, costs), kernels=True)
        posted = [program.peak_posted(device) for device in range(devices)]
        unreleased = [program.peak_unreleased(device) for device in range(devices)]
        assert max(posted) <= (devices if "grouped" in name else 5), posted
        assert max(unreleased) <= 5, unreleased


@pytest.mark.parametrize(("name", "share"), [("v-min", 0.65), ("v-half", 0.85), ("v-zb", 0.85)])
def test_most_receives_are_posted_early(name: str, share: float) -> None:
    for devices, microbatches in ((4, 8), (8, 24)):
        schedule = make(name, devices, microbatches)
        costs = Costs.uniform(devices, schedule.num_stages, 1, 1.15, 0.85, 0.05)
        program = lower(schedule, simulate(schedule, costs), kernels=True)
        assert share <= share_posted_early(program) <= 1


def test_instructions_of_a_small_program() -> None:
    schedule = make("v-half", 2, 1)
    program = lower(schedule, simulate(schedule), kernels=True)
    assert program.text() == (
        "F0.0, send F0.0, post F2.0, await F2.0, F3.0, release F0.0, B3.0, send B3.0, post B1.0, "
        "W3.0, release B3.0, await B1.0, BW0.0\n"
        "post F0.0, await F0.0, F1.0, F2.0, send F2.0, post B3.0, await B3.0, B2.0, release F2.0, "
        "B1.0, send B1.0, W1.0, release B1.0, W2.0"
    )
    assert program.planned.schedule == program.schedule


def test_fused_passes_keep_their_times() -> None:
    schedule = make("v-half", 4, 8)
    timeline = simulate(schedule)
    planned = lower(schedule, timeline, kernels=True).planned
    times = {slot.work: slot for d in range(4) for slot in timeline.slots(d)}
    fused = 0
    for device in range(4):
        for work, start, end in planned.slots(device):
            parts = [work._replace(kind=kind) for kind in work.parts()]
            assert (start, end) == (times[parts[0]].start, times[parts[-1]].end)
            fused += len(parts) - 1
    assert fused
