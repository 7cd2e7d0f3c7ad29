"""Stop points of programs: no device waits beyond them, and no message remains in flight."""

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import catalogue_schedules

from megatron_vshape import Schedule, lower, make
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.early_start import (
    StopPoint,
    drain,
    forward_stop_point,
    latest_stop_point,
    prefix_before_loss,
)
from megatron_vshape.core.program.instructions import (
    Await,
    Instruction,
    Message,
    Program,
    Receive,
    Release,
    Run,
    Send,
)

Edge = tuple[object, int, int]


class Network:
    """First-in-first-out streams that match each message sent with the next receive posted.

    With `sends_wait`, a send waits until its receive is posted.
    """

    def __init__(self, sends_wait: bool = False) -> None:
        self.sends_wait = sends_wait
        self.sent: dict[Edge, deque[Pass]] = defaultdict(deque)
        self.posted: dict[Edge, deque[Message]] = defaultdict(deque)
        self.delivered: dict[Message, Pass] = {}

    def run(self, instruction: Instruction) -> bool:
        """Run an instruction; return False if it must wait."""
        if isinstance(instruction, Run | Release):
            return True
        message = instruction.message
        edge = (message.stream, message.source, message.target)
        if isinstance(instruction, Await):
            if message in self.delivered:
                del self.delivered[message]
                return True
            return False
        if isinstance(instruction, Send):
            if self.sends_wait and not self.posted[edge]:
                return False
            self.sent[edge].append(message.work)
        else:
            self.posted[edge].append(message)
        while self.sent[edge] and self.posted[edge]:
            self.delivered[self.posted[edge].popleft()] = self.sent[edge].popleft()
        return True

    def run_all(self, rows: list[tuple[Instruction, ...]]) -> None:
        """Run the rows of all devices to completion; fail on a deadlock."""
        positions = [0] * len(rows)
        has_progressed = True
        while has_progressed:
            has_progressed = False
            for device, row in enumerate(rows):
                while positions[device] < len(row) and self.run(row[positions[device]]):
                    positions[device] += 1
                    has_progressed = True
        assert positions == [len(row) for row in rows], "they wait for each other"

    def is_idle(self) -> bool:
        return not any((*self.sent.values(), *self.posted.values(), self.delivered))


def check_drained(program: Program, ends: StopPoint) -> None:
    devices = range(len(program.instructions))
    network = Network()
    network.run_all([program.instructions[device][: ends[device]] for device in devices])
    network.run_all([drain(program, ends, device) for device in devices])
    assert network.is_idle()
    network.run_all(list(program.instructions))  # nothing remains that a new start would receive
    assert network.is_idle()


def passes_before(program: Program, ends: StopPoint) -> list[int]:
    rows = zip(program.instructions, ends, strict=True)
    return [sum(isinstance(instruction, Run) for instruction in row[:end]) for row, end in rows]


@settings(max_examples=60)
@given(catalogue_schedules(8, 16), st.data())
def test_any_stop_point_can_be_run_and_drained(schedule: Schedule, data: st.DataObject) -> None:
    program = lower(schedule)
    stops = data.draw(
        st.sets(st.sampled_from([instruction for row in schedule.order for instruction in row]))
    )
    ends = latest_stop_point(program, stops.__contains__)
    for row, end in zip(program.instructions, ends, strict=True):
        assert not any(
            isinstance(instruction, Run) and instruction.work in stops for instruction in row[:end]
        )
        assert end == 0 or isinstance(row[end - 1], Run | Send)
    check_drained(program, ends)


@settings(max_examples=60)
@given(catalogue_schedules(8, 16))
def test_forward_stop_point_follows_forwards_before_the_loss(schedule: Schedule) -> None:
    program = lower(schedule)
    ends = forward_stop_point(program)
    for row, end in zip(program.instructions, ends, strict=True):
        forward_passes = [
            instruction.work for instruction in row[:end] if isinstance(instruction, Run)
        ]
        assert all(
            work.kind is Kind.F and work.stage < schedule.num_stages - 1 for work in forward_passes
        )
    check_drained(program, ends)


def texts_without_releases(row: tuple[Instruction, ...]) -> list[str]:
    return sorted(repr(instruction) for instruction in row if not isinstance(instruction, Release))


@settings(max_examples=60)
@given(catalogue_schedules(8, 16), st.integers(1, 3), st.booleans())
def test_early_start_leaves_no_message_in_flight(
    schedule: Schedule, window: int, kernels: bool
) -> None:
    program = lower(schedule, window=window, kernels=kernels)
    early_program, ends = prefix_before_loss(program)
    assert passes_before(early_program, ends) == passes_before(program, forward_stop_point(program))
    for row, original in zip(early_program.instructions, program.instructions, strict=True):
        assert texts_without_releases(row) == texts_without_releases(original)
        runs, posts = ([e for e in row if isinstance(e, kind)] for kind in (Run, Receive))
        assert runs == [e for e in original if isinstance(e, Run)]
        assert len(posts) == len(set(posts))
    network = Network()
    network.run_all([row[:end] for row, end in zip(early_program.instructions, ends, strict=True)])
    assert not any((*network.sent.values(), *network.posted.values()))
    network.run_all([row[end:] for row, end in zip(early_program.instructions, ends, strict=True)])
    assert network.is_idle()
    check_drained(early_program, ends)


def test_receives_posted_before_late_sends_are_moved() -> None:
    """Gradients are posted first and arrive last, as `prefix_before_loss` assumes."""
    program = lower(make("v-zb", 2, 6), window=1)
    _, ends = result = prefix_before_loss(program)
    assert result[0].instructions != program.instructions
    assert [row[end] for row, end in zip(result[0].instructions, ends, strict=True)] == [
        next(e for e in row if isinstance(e, Receive) and e.message.work.kind is Kind.B)
        for row in program.instructions
    ]


@pytest.mark.parametrize("devices", [4, 8])
def test_v_zb_has_enough_forwards_until_the_last_device_finishes(devices: int) -> None:
    """Device p starts p passes after the first one and must fill d - 1 - p passes."""
    program = lower(make("v-zb", devices, 3 * devices))
    counts = passes_before(program, forward_stop_point(program))
    assert all(count >= devices - device for device, count in enumerate(counts))


def test_program_without_stop_runs_completely() -> None:
    program = lower(make("v-half", 3, 4))
    ends = latest_stop_point(program, lambda work: False)
    assert ends == tuple(map(len, program.instructions))
    assert [drain(program, ends, device) for device in range(3)] == [()] * 3


def test_no_device_waits_for_a_pass_that_is_not_run() -> None:
    program = lower(make("1f1b", 3, 4))
    ends = latest_stop_point(program, lambda work: work == Pass(Kind.F, 0, 1))
    # The last device also runs the backward of microbatch 0; then its input is missing.
    assert passes_before(program, ends) == [1, 1, 2]
