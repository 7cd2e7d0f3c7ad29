"""Where all devices can stop a program together, and how its messages come to rest there.

With post-validation a step begins before the step before it is known to stand. What runs that
early must be such that it can be thrown away on every device alike, if the parameters turn out
to be wrong: a prefix of every device's instructions that waits for nothing beyond the prefixes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import (
    Await,
    Instruction,
    Message,
    Program,
    Receive,
    Run,
    Send,
)
from megatron_vshape.core.program.kernels import lower_to_kernels

Cut = tuple[int, ...]
"""How many instructions every device has run."""


def cut(program: Program, stops: Callable[[Pass], bool]) -> Cut:
    """Return the latest cut before all passes that `stops`.

    Every message that is awaited before it is sent before it, so devices that run up to it never
    wait for each other beyond it; it follows a pass and what that sends, so no result is in hand.
    """
    ends = tuple(len(row) for row in program.instructions)
    while True:
        parts = [row[:end] for row, end in zip(program.instructions, ends, strict=True)]
        sent = {each.message.work for row in parts for each in row if isinstance(each, Send)}
        shorter = tuple(_end(row, stops, sent) for row in parts)
        if shorter == ends:
            return ends
        ends = shorter


def forward_cut(program: Program) -> Cut:
    """Return the latest cut before all that is no forward and every forward of the last stage.

    So nothing before it adds to a gradient or reports a loss, and no copy to the host is under way.
    """
    last = program.schedule.num_stages - 1
    return cut(program, lambda work: work.kind is not Kind.F or work.stage == last)


def begun_early(program: Program) -> tuple[Program, Cut]:
    """Return the program so that no message is under way at its forward cut, and that cut.

    What is sent before the cut is posted before it, and nothing else is. On a GPU a message is a
    kernel at either end that lasts until the other end is there. Megatron waits for all kernels
    between two steps (its timers do), and so may wait for none that the next step has to end.
    """
    ends = forward_cut(program)
    if program.planned is not None:
        passes = [
            sum(isinstance(each, Run) for each in row[:end])
            for row, end in zip(program.instructions, ends, strict=True)
        ]
        program = lower_to_kernels(program.planned, passes)
        return program, _after_passes(program, passes)
    wanted = set(map(Receive, _messages(program, ends, Send)))
    rows: list[tuple[Instruction, ...]] = []
    early_ends: list[int] = []
    for row, end in zip(program.instructions, ends, strict=True):
        early, late = row[:end], row[end:]
        held_back = tuple(e for e in early if isinstance(e, Receive) and e not in wanted)
        brought = tuple(each for each in late if each in wanted)
        first = (*(each for each in early if each not in held_back), *brought)
        rows.append((*first, *held_back, *(each for each in late if each not in wanted)))
        early_ends.append(len(first))
    return replace(program, instructions=tuple(rows)), tuple(early_ends)


def _after_passes(program: Program, passes: Sequence[int]) -> Cut:
    """Return the cut after so many passes of every device, what they send and the receives of that.

    Nothing that is sent later is posted before it; `lower_to_kernels` has seen to that.
    """
    found = []
    for row, number in zip(program.instructions, passes, strict=True):
        runs = [0, *(at + 1 for at, each in enumerate(row) if isinstance(each, Run))]
        found.append(runs[number])
    rows = zip(program.instructions, passes, found, strict=True)
    sent = {
        each.message
        for row, number, end in rows
        for each in row[: end + 1 if number else 0]
        if isinstance(each, Send)
    }
    for device, row in enumerate(program.instructions):
        while found[device] < len(row):
            each = row[found[device]]
            if not isinstance(each, Send | Receive) or each.message not in sent:
                break
            found[device] += 1
    return tuple(found)


def drain(program: Program, ends: Cut, device: int) -> tuple[Instruction, ...]:
    """Return what brings every stream of `device` to rest that `ends` has cut through.

    A message of which only one end is before the cut gets its other end, in the stream's order;
    what a Send here carries is never read. All devices of the pipeline run theirs.
    """
    sent = set(_messages(program, ends, Send))
    posted = set(_messages(program, ends, Receive))
    awaited = set(_messages(program, ends, Await))
    receives: list[Instruction] = []
    sends: list[Instruction] = []
    awaits: list[Instruction] = []
    everything = tuple(map(len, program.instructions))
    # Receives are posted in the order in which their sender sends, so this is both ends' order.
    for message in _messages(program, everything, Send):
        if message not in sent and message not in posted:
            continue
        if message.source == device and message not in sent:
            sends.append(Send(message))
        if message.target == device and message not in awaited:
            awaits.append(Await(message))
            if message not in posted:
                receives.append(Receive(message))
    return (*receives, *sends, *awaits)


def _end(row: Sequence[Instruction], stops: Callable[[Pass], bool], sent: set[Pass]) -> int:
    end = 0
    for at, each in enumerate(row):
        if isinstance(each, Await) and each.message.work not in sent:
            break
        if isinstance(each, Run) and any(map(stops, each.passes)):
            break
        if isinstance(each, Run | Send):
            end = at + 1
    return end


def _messages(
    program: Program, ends: Cut, kind: type[Send] | type[Receive] | type[Await]
) -> Iterator[Message]:
    for row, end in zip(program.instructions, ends, strict=True):
        for each in row[:end]:
            if isinstance(each, kind):
                yield each.message
