"""The real runtime on devices where messages are kernels: it ends, in bounds and without races."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from operator import gt, le

import pytest
from posting import (
    programs_with_one_receive_moved,
    with_gaps_by_stream,
    with_receives_first,
    with_receives_one_pass_earlier,
    without_releases,
)
from runtime import fake_device
from runtime.fake_device import Hangs, MessageKernel, World, WrongData
from runtime.fake_pipeline import (
    MESSAGE_BYTES,
    TO_THE_END,
    WAITS,
    Train,
    Waits,
    always,
    any_world,
    at_first_kernels,
    never,
    program_of,
)

from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.paper.catalogue import JOINT_NAMES, NAMES, make
from megatron_vshape.core.program.early_start import prefix_before_loss
from megatron_vshape.core.program.instructions import Program, Send
from megatron_vshape.core.program.kernels import deadlocks_under_device_sync
from megatron_vshape.core.program.lowering import forward_wave, lower
from megatron_vshape.runtime import nccl

SMALL = [(2, 3), (4, 5)]
LARGE = [(devices, 2 * devices + devices % 3) for devices in range(2, 9)]


def blocks_hold(world: World, train: Train) -> bool:
    """Return whether no device has had more kernels of messages at a time than are planned.

    And no more than it has communicators, each of which runs one after the other. Shapes, which
    wait for no pass, come on top: one that the host waits for, and one that leaves.
    """
    program, shapes = train.program, 2 * train.length_on_arrival
    messages = {
        instruction.message
        for row in program.instructions
        for instruction in row
        if isinstance(instruction, Send)
    }
    ends = {(device, *m[1:]) for m in messages for device in (m.source, m.target)}
    used = Counter(device for device, *_ in ends)
    return all(
        device.most_blocks
        <= nccl.THREAD_BLOCKS
        * min(
            program.peak_posted(device.rank) + program.peak_unreleased(device.rank) + shapes,
            used[device.rank],
        )
        < fake_device.MULTIPROCESSORS / 2
        for device in world.devices
    )


def completes(train: Train, seeds: Iterable[int]) -> None:
    """Assert that the program ends, delivers every message, and uses few thread blocks."""
    for seed in seeds:
        world = any_world(train.program.schedule.num_devices, seed)
        train.waits = WAITS[seed % len(WAITS)]
        world.run(train)
        assert blocks_hold(world, train)


def check(name: str, devices: int, microbatches: int) -> None:
    program = program_of(name, devices, microbatches)
    completes(Train(program, steps=2), range(4))
    taking = program_of(name, devices, microbatches, length_on_arrival=True)
    completes(Train(taking, steps=2, length_on_arrival=True), range(4, 7))
    prefix, ends = prefix_before_loss(program)
    completes(Train(prefix, steps=2, ends=ends), range(7, 9))


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("name", NAMES)
def test_every_program_ends(name: str, size: tuple[int, int]) -> None:
    check(name, *size)


@pytest.mark.parametrize("size", [(2, 4), (3, 7)])
@pytest.mark.parametrize("name", JOINT_NAMES)
def test_every_program_with_overlapped_passes_ends(name: str, size: tuple[int, int]) -> None:
    assert program_of(name, *size).schedule.overlapped
    check(name, *size)


@pytest.mark.slow
@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("name", NAMES)
def test_every_large_program_ends(name: str, size: tuple[int, int]) -> None:
    check(name, *size)


@pytest.mark.parametrize("placement", [looping(3, 2), v_shape(4)])
def test_every_evaluation_ends(placement: tuple[int, ...]) -> None:
    devices = max(placement) + 1
    for length_on_arrival in (False, True):
        program = lower(
            forward_wave(placement, devices, 9), kernels=True, length_on_arrival=length_on_arrival
        )
        completes(Train(program, steps=2, length_on_arrival=length_on_arrival), range(4))


def test_no_host_waits_for_its_passes_to_learn_the_length_of_a_message() -> None:
    program = program_of("v-half", 4, 6, length_on_arrival=True)
    for seed in range(6):
        world = any_world(4, seed)
        world.run(Train(program, steps=2, length_on_arrival=True))
        assert [device.waits_for_compute for device in world.devices] == [0] * 4


def hangs(program: Program, connections: int, waits: Waits) -> bool:
    world = World(program.schedule.num_devices, 0, connections)
    try:
        world.run(Train(program, waits))
    except Hangs:
        return True
    return False


@pytest.mark.parametrize("name", ["v-min", "v-half", "v-zb"])
@pytest.mark.parametrize("connections", [1, 32])
def test_receives_posted_one_pass_early_hang(name: str, connections: int) -> None:
    for size in ((2, 2), (4, 8)):
        assert hangs(with_receives_one_pass_earlier(program_of(name, *size)), connections, always)
    if name == "v-min":
        assert hangs(
            with_receives_one_pass_earlier(program_of(name, 4, 8)), connections, at_first_kernels
        )


def test_reordered_receives_hang_if_streams_share_a_queue() -> None:
    """In the smallest program of the catalogue in which they could wait for each other."""
    program = lower(make("interleaved-1f1b", 7, 8), kernels=True)
    assert not hangs(program, 1, always)
    assert hangs(with_gaps_by_stream(program), 1, always)
    assert not hangs(with_gaps_by_stream(program), 32, always)


@pytest.mark.parametrize(
    ("name", "size"), [("v-half", (2, 2)), ("1f1b", (3, 3)), ("interleaved-1f1b", (2, 2))]
)
def test_proof_predicts_the_valid_positions_of_a_receive(name: str, size: tuple[int, int]) -> None:
    """Exactly the programs hang that `deadlocks_under_device_sync` finds, too early or too late."""
    moved = list(programs_with_one_receive_moved(program_of(name, *size)))
    rejected = [bool(deadlocks_under_device_sync(program)) for program in moved]
    assert [hangs(program, 1, always) for program in moved] == rejected
    assert 0 < sum(rejected) < len(rejected)


def test_messages_of_any_length_rely_on_a_buffer_in_one_queue_only() -> None:
    """The claim of `VariableTransport` that a length is sent before its message is received."""
    program = program_of("1f1b", 2, 3, length_on_arrival=True)
    for connections in (1, 32):
        world = World(2, 0, connections)
        world.buffered_bytes = 0
        if connections == 1:
            with pytest.raises(Hangs):
                world.run(Train(program, always, length_on_arrival=True))
        else:
            world.run(Train(program, always, length_on_arrival=True))


def test_posting_all_at_once_needs_more_blocks_than_planned() -> None:
    program = program_of("v-half", 4, 6)
    world = World(4, 0)
    world.run(Train(with_receives_first(program)))
    assert not blocks_hold(world, Train(program))


def test_blocks_that_fill_a_device_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why few blocks matter: a pass finds no free block while a message waits for its peer."""
    program = with_receives_one_pass_earlier(program_of("v-half", 2, 2))
    assert not hangs(program, 32, never)
    monkeypatch.setattr(MessageKernel, "thread_blocks", fake_device.MULTIPROCESSORS)
    assert hangs(program, 32, never)


def test_receives_out_of_order_bring_wrong_data() -> None:
    program = with_receives_first(program_of("gpipe", 2, 3))
    first, (one, second, *remaining) = program.instructions
    swapped = replace(program, instructions=(first, (second, one, *remaining)))
    World(2, 0).run(Train(program))
    with pytest.raises(WrongData, match=r"F1\.\d was to read"):
        World(2, 0).run(Train(swapped))


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("name", NAMES)
def test_message_memory_equals_the_plan(name: str, size: tuple[int, int]) -> None:
    """However far the host is ahead; and all of it where it is farthest ahead."""
    program = program_of(name, *size)
    devices = range(program.schedule.num_devices)
    max_retained, posted, max_messages = (
        [count(device) for device in devices]
        for count in (program.peak_unreleased, program.peak_posted, program.peak_messages)
    )
    for lead in (0, 1, 2, 5, None, TO_THE_END):
        world, train = World(program.schedule.num_devices, 0, lead=lead), Train(program, steps=2)
        world.run(train)
        num_retained, received, messages = (
            [device.most[role] / MESSAGE_BYTES for device in world.devices]
            for role in ("sent", "received", "messages")
        )
        assert all(map(le, num_retained, max_retained))
        assert all(map(le, received, posted))
        assert all(map(le, messages, max_messages))
        assert train.transports
        assert all(device.held["messages"] == 0 for device in world.devices)
    assert num_retained == max_retained
    assert received == posted


def test_host_ahead_without_a_release_exceeds_planned_memory() -> None:
    program = program_of("v-half", 4, 8)
    retained = []
    for lead in (2, TO_THE_END):
        world = World(4, 0, lead=lead)
        world.run(Train(without_releases(program)))
        retained.append([device.most["sent"] / MESSAGE_BYTES for device in world.devices])
    assert all(peak > program.peak_unreleased(device) for device, peak in enumerate(retained[1]))
    assert all(map(gt, retained[1], retained[0]))
