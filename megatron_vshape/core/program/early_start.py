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

StopPoint = tuple[int, ...]
"""Number of instructions that every device has run."""


def latest_stop_point(program: Program, stops: Callable[[Pass], bool]) -> StopPoint:
    """Return the latest cut before all passes for which `stops` is true.

    Every message awaited before the cut is sent before it, so devices never wait beyond the cut.
    The cut of a device comes right after a pass and its sends, so no result is pending.
    """
    ends = tuple(len(row) for row in program.instructions)
    # Shortening one row removes sends, which may shorten other rows, so repeat until it is stable.
    while True:
        parts = [row[:end] for row, end in zip(program.instructions, ends, strict=True)]
        sent_passes = {
            instruction.message.work
            for row in parts
            for instruction in row
            if isinstance(instruction, Send)
        }
        new_ends = tuple(_end_of_prefix(row, stops, sent_passes) for row in parts)
        if new_ends == ends:
            return ends
        ends = new_ends


def forward_stop_point(program: Program) -> StopPoint:
    """Return the latest cut before any non-forward pass and any forward of the last stage.

    So no pass before it changes a gradient or reports a loss, and no copy to the host is in
    progress.
    """
    last = program.schedule.num_stages - 1
    return latest_stop_point(program, lambda work: work.kind is not Kind.F or work.stage == last)


def prefix_before_loss(program: Program) -> tuple[Program, StopPoint]:
    """Rearrange the program so that no message is in flight at its forward cut; return both.

    Messages sent before the cut are posted before it, and no others. On a GPU, a message is a
    kernel at both ends that runs until the peer arrives. Megatron's timers synchronize all kernels
    between two steps, so no kernel may depend on the next step.
    """
    # Gradients, losses and copies of a discarded pass could not be undone.
    ends = forward_stop_point(program)
    if program.planned is not None:
        passes = [
            sum(isinstance(instruction, Run) for instruction in row[:end])
            for row, end in zip(program.instructions, ends, strict=True)
        ]
        # Receives are placed again, because a kernel posted early may wait for a send after the
        # cut.
        program = lower_to_kernels(program.planned, passes)
        return program, _after_passes(program, passes)
    # Instructions of one message are equal, so these select receives at any position.
    early_receives = set(map(Receive, _messages(program, ends, Send)))
    rows: list[tuple[Instruction, ...]] = []
    early_ends: list[int] = []
    for row, end in zip(program.instructions, ends, strict=True):
        prefix, suffix = row[:end], row[end:]
        postponed = tuple(
            instruction
            for instruction in prefix
            if isinstance(instruction, Receive) and instruction not in early_receives
        )
        moved_receives = tuple(
            instruction for instruction in suffix if instruction in early_receives
        )
        new_prefix = (
            *(instruction for instruction in prefix if instruction not in postponed),
            *moved_receives,
        )
        rows.append(
            (
                *new_prefix,
                *postponed,
                *(instruction for instruction in suffix if instruction not in early_receives),
            )
        )
        early_ends.append(len(new_prefix))
    return replace(program, instructions=tuple(rows)), tuple(early_ends)


def _after_passes(program: Program, passes: Sequence[int]) -> StopPoint:
    """Return the cut after these passes of every device, with their sends and the receives.

    No later message is posted before it; `lower_to_kernels` ensures that.
    """
    ends = []
    for row, number in zip(program.instructions, passes, strict=True):
        runs = [
            0,
            *(index + 1 for index, instruction in enumerate(row) if isinstance(instruction, Run)),
        ]
        ends.append(runs[number])
    rows = zip(program.instructions, passes, ends, strict=True)
    sent_messages = {
        instruction.message
        for row, number, end in rows
        # One more than `end`: a forward's only Send follows its Run at once.
        for instruction in row[: end + 1 if number else 0]
        if isinstance(instruction, Send)
    }
    for device, row in enumerate(program.instructions):
        while ends[device] < len(row):
            instruction = row[ends[device]]
            if (
                not isinstance(instruction, Send | Receive)
                or instruction.message not in sent_messages
            ):
                break
            ends[device] += 1
    return tuple(ends)


def drain(program: Program, ends: StopPoint, device: int) -> tuple[Instruction, ...]:
    """Return the instructions that complete the messages of `device` that `ends` cuts through.

    If only one end of a message is before the cut, the other end follows in the stream's order. The
    data of a Send here is never read. All devices of the pipeline must run their instructions.
    """
    sent_messages = set(_messages(program, ends, Send))
    posted_messages = set(_messages(program, ends, Receive))
    awaited_messages = set(_messages(program, ends, Await))
    receives: list[Instruction] = []
    sends: list[Instruction] = []
    awaits: list[Instruction] = []
    row_lengths = tuple(map(len, program.instructions))
    # Receives are posted in the order of their sends, so this is the order at both ends.
    for message in _messages(program, row_lengths, Send):
        if message not in sent_messages and message not in posted_messages:
            continue
        if message.source == device and message not in sent_messages:
            sends.append(Send(message))
        if message.target == device and message not in awaited_messages:
            awaits.append(Await(message))
            if message not in posted_messages:
                receives.append(Receive(message))
    return (*receives, *sends, *awaits)


def _end_of_prefix(
    row: Sequence[Instruction], stops: Callable[[Pass], bool], sent_passes: set[Pass]
) -> int:
    end = 0
    for index, instruction in enumerate(row):
        if isinstance(instruction, Await) and instruction.message.work not in sent_passes:
            break
        if isinstance(instruction, Run) and any(map(stops, instruction.passes)):
            break
        # Not after an Await or Receive: their pass is still to come.
        if isinstance(instruction, Run | Send):
            end = index + 1
    return end


def _messages(
    program: Program, ends: StopPoint, kind: type[Send] | type[Receive] | type[Await]
) -> Iterator[Message]:
    for row, end in zip(program.instructions, ends, strict=True):
        for instruction in row[:end]:
            if isinstance(instruction, kind):
                yield instruction.message
