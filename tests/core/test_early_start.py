"""Cutting a program: nobody waits beyond the cut, and all messages come to rest."""

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import made

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.early_start import (
    Cut,
    cut,
    drain,
    forward_cut,
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
from megatron_vshape.core.program.lowering import lower

Edge = tuple[object, int, int]


class Network:
    """First-in-first-out streams that match each message sent with the next receive posted."""

    def __init__(self) -> None:
        self.sent: dict[Edge, deque[Pass]] = defaultdict(deque)
        self.posted: dict[Edge, deque[Message]] = defaultdict(deque)
        self.there: dict[Message, Pass] = {}

    def run(self, each: Instruction) -> bool:
        """Run an instruction; return False if it has to wait."""
        if isinstance(each, Run | Release):
            return True
        message = each.message
        edge = (message.stream, message.source, message.target)
        if isinstance(each, Await):
            if message in self.there:
                del self.there[message]
                return True
            return False
        if isinstance(each, Send):
            self.sent[edge].append(message.work)
        else:
            self.posted[edge].append(message)
        while self.sent[edge] and self.posted[edge]:
            self.there[self.posted[edge].popleft()] = self.sent[edge].popleft()
        return True

    def run_all(self, rows: list[tuple[Instruction, ...]]) -> None:
        """Run every device's row to its end; fail if they wait for each other."""
        at = [0] * len(rows)
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(rows):
                while at[device] < len(row) and self.run(row[at[device]]):
                    at[device] += 1
                    moved = True
        assert at == [len(row) for row in rows], "they wait for each other"

    def at_rest(self) -> bool:
        return not any((*self.sent.values(), *self.posted.values(), self.there))


def check(program: Program, ends: Cut) -> None:
    devices = range(len(program.instructions))
    network = Network()
    network.run_all([program.instructions[device][: ends[device]] for device in devices])
    network.run_all([drain(program, ends, device) for device in devices])
    assert network.at_rest()
    network.run_all(list(program.instructions))  # nothing is left that a new start would meet
    assert network.at_rest()


def passes_before(program: Program, ends: Cut) -> list[int]:
    rows = zip(program.instructions, ends, strict=True)
    return [sum(isinstance(each, Run) for each in row[:end]) for row, end in rows]


@settings(max_examples=60)
@given(made(8, 16), st.data())
def test_any_cut_can_be_run_and_undone(schedule: Schedule, data: st.DataObject) -> None:
    program = lower(schedule)
    stops = data.draw(st.sets(st.sampled_from([each for row in schedule.order for each in row])))
    ends = cut(program, stops.__contains__)
    for row, end in zip(program.instructions, ends, strict=True):
        assert not any(isinstance(each, Run) and each.work in stops for each in row[:end])
        assert end == 0 or isinstance(row[end - 1], Run | Send)
    check(program, ends)


@settings(max_examples=60)
@given(made(8, 16))
def test_before_the_forward_cut_are_forwards_before_the_loss(schedule: Schedule) -> None:
    program = lower(schedule)
    ends = forward_cut(program)
    for row, end in zip(program.instructions, ends, strict=True):
        early = [each.work for each in row[:end] if isinstance(each, Run)]
        assert all(work.kind is Kind.F and work.stage < schedule.num_stages - 1 for work in early)
    check(program, ends)


def all_but_releases(row: tuple[Instruction, ...]) -> list[str]:
    return sorted(repr(each) for each in row if not isinstance(each, Release))


@settings(max_examples=60)
@given(made(8, 16), st.integers(1, 3), st.booleans())
def test_begun_early_nothing_is_under_way_at_the_cut(
    schedule: Schedule, window: int, kernels: bool
) -> None:
    program = lower(schedule, window=window, kernels=kernels)
    early, ends = prefix_before_loss(program)
    assert passes_before(early, ends) == passes_before(program, forward_cut(program))
    for row, original in zip(early.instructions, program.instructions, strict=True):
        assert all_but_releases(row) == all_but_releases(original)
        runs, posts = ([e for e in row if isinstance(e, kind)] for kind in (Run, Receive))
        assert runs == [e for e in original if isinstance(e, Run)]
        assert len(posts) == len(set(posts))
    network = Network()
    network.run_all([row[:end] for row, end in zip(early.instructions, ends, strict=True)])
    assert not any((*network.sent.values(), *network.posted.values()))
    network.run_all([row[end:] for row, end in zip(early.instructions, ends, strict=True)])
    assert network.at_rest()
    check(early, ends)


def test_a_program_of_which_a_receive_is_posted_early_and_sent_late() -> None:
    """What `prefix_before_loss` is for is there: gradients are posted first and come last."""
    program = lower(make("v-zb", 2, 6), window=1)
    _, ends = early = prefix_before_loss(program)
    assert early[0].instructions != program.instructions
    assert [row[end] for row, end in zip(early[0].instructions, ends, strict=True)] == [
        next(e for e in row if isinstance(e, Receive) and e.message.work.kind is Kind.B)
        for row in program.instructions
    ]


@pytest.mark.parametrize("devices", [4, 8])
def test_v_zb_has_enough_to_do_until_the_last_device_is_done(devices: int) -> None:
    """Device p starts p passes after the first, so it has to fill d - 1 - p."""
    program = lower(make("v-zb", devices, 3 * devices))
    early = passes_before(program, forward_cut(program))
    assert all(count >= devices - device for device, count in enumerate(early))


def test_nothing_stops_the_whole_program_runs() -> None:
    program = lower(make("v-half", 3, 4))
    ends = cut(program, lambda work: False)
    assert ends == tuple(map(len, program.instructions))
    assert [drain(program, ends, device) for device in range(3)] == [()] * 3


def test_a_device_waits_for_no_pass_that_another_has_not_run() -> None:
    program = lower(make("1f1b", 3, 4))
    ends = cut(program, lambda work: work == Pass(Kind.F, 0, 1))
    # The last device has the backward of microbatch 0 too, and then no input.
    assert passes_before(program, ends) == [1, 1, 2]
