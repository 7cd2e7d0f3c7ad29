"""Variants of programs for kernels: times of posted receives and of releases."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from megatron_vshape.core.model.kinds import COPY_OUT
from megatron_vshape.core.program.instructions import (
    Await,
    Instruction,
    Program,
    Receive,
    Release,
    Run,
    Send,
    Stream,
    source_of,
)


def streams_of(program: Program) -> list[Stream]:
    """Return the used streams, sorted."""
    sends = (
        instruction
        for row in program.instructions
        for instruction in row
        if isinstance(instruction, Send)
    )
    return sorted({send.message.stream for send in sends})


def with_receives_one_pass_earlier(program: Program) -> Program:
    """Return the program with every receive posted at least one pass before its reader."""
    rows = []
    for row in program.instructions:
        new_row = list(row)
        for instruction in row:
            if not isinstance(instruction, Await):
                continue
            receive_index, reader_index = (
                new_row.index(Receive(instruction.message)),
                new_row.index(instruction),
            )
            passes = [index for index in range(reader_index) if isinstance(new_row[index], Run)]
            if passes and receive_index > passes[-1]:
                new_row.insert(passes[-1], new_row.pop(receive_index))
        rows.append(tuple(new_row))
    return Program(program.schedule, tuple(rows), 1)


def with_gaps_by_stream(program: Program) -> Program:
    """Return the program with the receives of every gap sorted by stream."""
    rows = []
    for row in program.instructions:
        new_row: list[Instruction] = []
        for kind, gap in groupby(row, type):
            instructions = list(gap)
            if kind is Receive:
                instructions.sort(
                    key=lambda receive: (receive.message.stream, receive.message.source)
                )
            new_row += instructions
        rows.append(tuple(new_row))
    return replace(program, instructions=tuple(rows))


def with_receives_first(program: Program) -> Program:
    """Return the program with all receives at its start, and without releases."""
    rows = []
    for row in program.instructions:
        receives = [instruction for instruction in row if isinstance(instruction, Receive)]
        remaining = [
            instruction for instruction in row if not isinstance(instruction, Receive | Release)
        ]
        rows.append((*receives, *remaining))
    return replace(program, instructions=tuple(rows))


def without_releases(program: Program) -> Program:
    """Return the program without releases."""
    rows = (
        tuple(instruction for instruction in row if not isinstance(instruction, Release))
        for row in program.instructions
    )
    return replace(program, instructions=tuple(rows))


def with_device_waits_at_copies(program: Program) -> Program:
    """Return the program with device synchronization wherever a copy could run.

    A thread that synchronizes starts its copy at D or later.
    """
    rows = []
    for row in program.instructions:
        copies = [
            instruction
            for instruction in row
            if isinstance(instruction, Run) and instruction.work.kind is COPY_OUT
        ]
        start = row.index(copies[0]) if copies else len(row)
        delayed_row = [
            delayed for instruction in row[start:] for delayed in (copies[0], instruction)
        ]
        rows.append((*row[:start], *delayed_row))
    return replace(program, instructions=tuple(rows))


def programs_with_one_receive_moved(program: Program) -> Iterator[Program]:
    """Yield a program for each position of each receive that the order of its stream permits."""
    for device, row in enumerate(program.instructions):
        for receive in row:
            if not isinstance(receive, Receive):
                continue
            remaining = [instruction for instruction in row if instruction != receive]
            for index in _allowed_positions(receive, row, remaining):
                new_row = (*remaining[:index], receive, *remaining[index:])
                rows = (
                    *program.instructions[:device],
                    new_row,
                    *program.instructions[device + 1 :],
                )
                yield replace(program, instructions=rows)


def _allowed_positions(
    receive: Receive, row: tuple[Instruction, ...], remaining: list[Instruction]
) -> Iterator[int]:
    stream = [
        instruction
        for instruction in row
        if isinstance(instruction, Receive)
        and source_of(instruction.message) == source_of(receive.message)
    ]
    index = stream.index(receive)
    first = remaining.index(stream[index - 1]) + 1 if index else 0
    last = remaining.index(Await(receive.message))
    if index + 1 < len(stream):
        last = min(last, remaining.index(stream[index + 1]))
    for position in range(first, last + 1):
        if not isinstance(remaining[position], Send):  # a pass and its sends stay adjacent
            yield position
