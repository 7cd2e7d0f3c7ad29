"""Points at which all devices can stop a program together, with messages drained.

With post-validation, a step starts before the previous optimizer step is validated. If validation
fails, all devices must be able to discard the passes that ran early. So these are a prefix of every
device's instructions that waits for nothing beyond the prefixes.
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
"""Number of instructions that every device has run."""


def cut(program: Program, stops: Callable[[Pass], bool]) -> Cut:
    """Return the latest cut before all passes for which `stops` is true.

    Every message awaited before the cut is sent before it, so devices never wait beyond the cut.
    The cut of a device comes right after a pass and its sends, so no result is pending.
    """
    ends = tuple(len(row) for row in program.instructions)
    # Shortening one row removes sends, which may shorten other rows, so repeat until it is stable.
    while True:
        parts = [row[:end] for row, end in zip(program.instructions, ends, strict=True)]
        sent = {each.message.work for row in parts for each in row if isinstance(each, Send)}
        shorter = tuple(_end(row, stops, sent) for row in parts)
        if shorter == ends:
            return ends
        ends = shorter


def forward_cut(program: Program) -> Cut:
    """Return the latest cut before any non-forward pass and any forward of the last stage.

    So no pass before it changes a gradient or reports a loss, and no copy to the host is in
    progress.
    """
    last = program.schedule.num_stages - 1
    return cut(program, lambda work: work.kind is not Kind.F or work.stage == last)


def prefix_before_loss(program: Program) -> tuple[Program, Cut]:
    """Rearrange the program so that no message is in flight at its forward cut; return both.

    Messages sent before the cut are posted before it, and no others. On a GPU, a message is a
    kernel at both ends that runs until the peer arrives. Megatron's timers synchronize all kernels
    between two steps, so no kernel may depend on the next step.
    """
    # Gradients, losses and copies of a discarded pass could not be undone.
    ends = forward_cut(program)
    if program.planned is not None:
        passes = [
            sum(isinstance(each, Run) for each in row[:end])
            for row, end in zip(program.instructions, ends, strict=True)
        ]
        # Receives are placed again, because a kernel posted early may wait for a send after the
        # cut.
        program = lower_to_kernels(program.planned, passes)
        return program, _after_passes(program, passes)
    # Instructions of one message are equal, so these select receives at any position.
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
    """Return the cut after these passes of every device, with their sends and the receives.

    No later message is posted before it; `lower_to_kernels` ensures that.
    """
    found = []
    for row, number in zip(program.instructions, passes, strict=True):
        runs = [0, *(at + 1 for at, each in enumerate(row) if isinstance(each, Run))]
        found.append(runs[number])
    rows = zip(program.instructions, passes, found, strict=True)
    sent = {
        each.message
        for row, number, end in rows
        # One more than `end`: a forward's only Send follows its Run at once.
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
    """Return the instructions that complete the messages of `device` that `ends` cuts through.

    If only one end of a message is before the cut, the other end follows in the stream's order. The
    data of a Send here is never read. All devices of the pipeline must run their instructions.
    """
    sent = set(_messages(program, ends, Send))
    posted = set(_messages(program, ends, Receive))
    awaited = set(_messages(program, ends, Await))
    receives: list[Instruction] = []
    sends: list[Instruction] = []
    awaits: list[Instruction] = []
    everything = tuple(map(len, program.instructions))
    # Receives are posted in the order of their sends, so this is the order at both ends.
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
        # Not after an Await or Receive: their pass is still to come.
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
