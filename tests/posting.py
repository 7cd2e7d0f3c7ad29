"""Programs for kernels changed where it matters: when receives are posted, what is let go of."""

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
    """Return the streams in use, sorted."""
    sent = (each for row in program.instructions for each in row if isinstance(each, Send))
    return sorted({each.message.stream for each in sent})


def one_pass_earlier(program: Program) -> Program:
    """Return the program with the receive of every message at least one pass before its reader."""
    rows = []
    for row in program.instructions:
        new = list(row)
        for each in row:
            if not isinstance(each, Await):
                continue
            at, read = new.index(Receive(each.message)), new.index(each)
            passes = [place for place in range(read) if isinstance(new[place], Run)]
            if passes and at > passes[-1]:
                new.insert(passes[-1], new.pop(at))
        rows.append(tuple(new))
    return Program(program.schedule, tuple(rows), 1)


def with_gaps_by_stream(program: Program) -> Program:
    """Return the program with the receives of every gap stream by stream."""
    rows = []
    for row in program.instructions:
        new: list[Instruction] = []
        for kind, gap in groupby(row, type):
            found = list(gap)
            if kind is Receive:
                found.sort(key=lambda each: (each.message.stream, each.message.source))
            new += found
        rows.append(tuple(new))
    return replace(program, instructions=tuple(rows))


def all_at_once(program: Program) -> Program:
    """Return the program with all receives at its start, and nothing let go of."""
    rows = []
    for row in program.instructions:
        first = [each for each in row if isinstance(each, Receive)]
        rest = [each for each in row if not isinstance(each, Receive | Release)]
        rows.append((*first, *rest))
    return replace(program, instructions=tuple(rows))


def without_releases(program: Program) -> Program:
    """Return the program with nothing let go of before its end."""
    rows = (
        tuple(each for each in row if not isinstance(each, Release)) for row in program.instructions
    )
    return replace(program, instructions=tuple(rows))


def waiting_beside(program: Program) -> Program:
    """Return the program with a wait for the device wherever a copy beside it could be.

    As if its thread waited so, whose copy begins at D at the soonest.
    """
    rows = []
    for row in program.instructions:
        copies = [each for each in row if isinstance(each, Run) and each.work.kind is COPY_OUT]
        begun = row.index(copies[0]) if copies else len(row)
        rest = [new for each in row[begun:] for new in (copies[0], each)]
        rows.append((*row[:begun], *rest))
    return replace(program, instructions=tuple(rows))


def one_receive_moved(program: Program) -> Iterator[Program]:
    """Yield the program with each receive wherever the order of its stream allows it."""
    for device, row in enumerate(program.instructions):
        for each in row:
            if not isinstance(each, Receive):
                continue
            rest = [other for other in row if other != each]
            for at in _places(each, row, rest):
                new = (*rest[:at], each, *rest[at:])
                rows = (*program.instructions[:device], new, *program.instructions[device + 1 :])
                yield replace(program, instructions=rows)


def _places(each: Receive, row: tuple[Instruction, ...], rest: list[Instruction]) -> Iterator[int]:
    stream = [
        other
        for other in row
        if isinstance(other, Receive) and source_of(other.message) == source_of(each.message)
    ]
    at = stream.index(each)
    first = rest.index(stream[at - 1]) + 1 if at else 0
    last = rest.index(Await(each.message))
    if at + 1 < len(stream):
        last = min(last, rest.index(stream[at + 1]))
    for place in range(first, last + 1):
        if not isinstance(rest[place], Send):  # nothing comes between a pass and what it sends
            yield place
