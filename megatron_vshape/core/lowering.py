"""Schedule -> Program: the passes of every device with the messages between them.

Every stream of messages has its own process group at run time and is first in, first out.
Receives are posted in the order in which the sender sends, ahead of their use but within a
window. The order is proved under rendezvous semantics, with sends that block their device until
the receive is posted: what finishes then finishes under any progress of a real transport.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_vshape.core.passes import Kind, Pass, ScheduleError
from megatron_vshape.core.placement import chunks_of
from megatron_vshape.core.schedule import Schedule, Timeline

WINDOW = 2
"""Receives posted ahead per stream; two hide the latency, each costs one activation's memory."""


class Stream(NamedTuple):
    """The messages of one kind between two devices in one direction.

    `upward` tells the two directions of a device pair apart, so that a stream's process group
    never carries messages both ways between the same two devices.
    """

    kind: Kind  # F: activations, B: gradients
    chunk: int  # of the stage that sends
    upward: bool  # from a lower to a higher device


class Message(NamedTuple):
    """The result of pass `work`, sent from device `source` to device `target`."""

    work: Pass  # kind F: the stage's output; kind B: the gradient of its input
    source: int
    target: int
    stream: Stream


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of a message; does not wait."""

    message: Message


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until a posted message is there; the next pass reads it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Run:
    """Run a pass."""

    work: Pass


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send the result of the pass just run; does not wait."""

    message: Message


Instruction = Receive | Await | Run | Send


@dataclass(frozen=True, slots=True)
class Program:
    """What every device does, in order; made by `lower`, run by `runtime.program_runner`."""

    schedule: Schedule
    instructions: tuple[tuple[Instruction, ...], ...]
    window: int

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Return the streams in use, sorted, the same on every device."""
        sent = {each.message.stream for each in self._all() if isinstance(each, Send)}
        return tuple(sorted(sent))

    def _all(self) -> Iterator[Instruction]:
        for row in self.instructions:
            yield from row


def lower(schedule: Schedule, timeline: Timeline | None = None, window: int = WINDOW) -> Program:
    """Return the program of `schedule`, its message order proved.

    With a `timeline`, a B and the W right after it become one BW wherever nothing waits for B
    in the meantime: the split costs nothing then, and a whole backward hides collectives.
    `window` receives per stream are posted ahead; more where the proof needs more.

    Raises:
        ScheduleError: the messages deadlock however far ahead the receives are posted.
    """
    if timeline is not None:
        schedule = fuse(timeline)
    plain = _Lowering(schedule)
    while True:
        program = Program(schedule, plain.instructions(window), window)
        stuck = _find_stuck(program)
        if not stuck:
            return program
        if window > 2 * schedule.num_microbatches:
            raise ScheduleError("the messages deadlock: " + "; ".join(stuck))
        window *= 2


def forwards_only(schedule: Schedule) -> Schedule:
    """Return the schedule's forward passes alone, in its order: what an evaluation runs."""
    rows = (tuple(each for each in row if each.kind is Kind.F) for row in schedule.order)
    return Schedule(
        schedule.name,
        schedule.num_devices,
        schedule.num_microbatches,
        schedule.placement,
        tuple(rows),
    )


def fuse(timeline: Timeline) -> Schedule:
    """Return the schedule with B W made BW where the reader of B starts after W has ended.

    The times decide, so that fusing delays nobody: a BW hands its gradient on when all is done.
    """
    schedule = timeline.schedule
    start_of_reader: dict[tuple[int, int], float] = {}
    for device in range(schedule.num_devices):
        for work, start, _ in timeline.slots(device):
            if work.kind in (Kind.B, Kind.BW):
                start_of_reader[work.stage + 1, work.microbatch] = start
    rows = []
    for device in range(schedule.num_devices):
        row: list[Pass] = []
        for work, _, end in timeline.slots(device):
            key = (work.stage, work.microbatch)
            mate = Pass(Kind.B, *key)
            if work.kind is Kind.W and row and row[-1] == mate:
                if start_of_reader.get(key, end) >= end:
                    row[-1] = Pass(Kind.BW, *key)
                    continue
            row.append(work)
        rows.append(tuple(row))
    return Schedule(
        schedule.name,
        schedule.num_devices,
        schedule.num_microbatches,
        schedule.placement,
        tuple(rows),
    )


class _Lowering:
    """The messages of a schedule, and for every device where they are made and read."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.chunks = chunks_of(schedule.placement)
        self.sent: dict[tuple[Stream, int], list[Message]] = {}
        for device, passes in enumerate(schedule.order):
            for work in passes:
                message = self.result_of(work, device)
                if message is not None:
                    self.sent.setdefault((message.stream, message.target), []).append(message)

    def result_of(self, work: Pass, device: int) -> Message | None:
        """Return the message that carries the pass's result; None if it stays on the device."""
        kind, stage, microbatch = work
        if kind is Kind.W:
            return None
        reader = stage + 1 if kind is Kind.F else stage - 1
        if not 0 <= reader < self.schedule.num_stages:
            return None
        target = self.schedule.placement[reader]
        if target == device:
            return None
        kind = Kind.F if kind is Kind.F else Kind.B
        stream = Stream(kind, self.chunks[stage], upward=device < target)
        return Message(Pass(kind, stage, microbatch), device, target, stream)

    def input_of(self, work: Pass, device: int) -> Message | None:
        """Return the message that the pass reads; None if its input is local or it has none."""
        kind, stage, microbatch = work
        if kind is Kind.W:
            return None
        writer = stage - 1 if kind is Kind.F else stage + 1
        if not 0 <= writer < self.schedule.num_stages:
            return None
        source = Pass(Kind.F if kind is Kind.F else Kind.B, writer, microbatch)
        return self.result_of(source, self.schedule.placement[writer])

    def instructions(self, window: int) -> tuple[tuple[Instruction, ...], ...]:
        """Return every device's instructions with `window` receives posted ahead per stream."""
        return tuple(
            tuple(self._device(device, passes, window))
            for device, passes in enumerate(self.schedule.order)
        )

    def _device(self, device: int, passes: Sequence[Pass], window: int) -> Iterator[Instruction]:
        """Yield the instructions of one device.

        Receives are posted in the sender's order; a pass that reads a later message than the
        window reaches has all the messages before it posted too.
        """
        incoming = {
            stream: messages
            for (stream, target), messages in sorted(self.sent.items())
            if target == device
        }
        position = {
            message: at for messages in incoming.values() for at, message in enumerate(messages)
        }
        posted = dict.fromkeys(incoming, 0)

        def post(stream: Stream, upto: int) -> Iterator[Receive]:
            for message in incoming[stream][posted[stream] : upto]:
                posted[stream] += 1
                yield Receive(message)

        for stream in incoming:
            yield from post(stream, window)
        for work in passes:
            message = self.input_of(work, device)
            if message is not None:
                at = position[message]
                yield from post(message.stream, at + 1)
                yield Await(message)
                yield from post(message.stream, at + 1 + window)
            yield Run(work)
            result = self.result_of(work, device)
            if result is not None:
                yield Send(result)


def _find_stuck(program: Program) -> list[str]:
    """Return, under sends that wait for their receive, what each stuck device waits for."""
    rows = program.instructions
    at = [0] * len(rows)
    posted: set[Message] = set()
    sent: set[Message] = set()
    awake = list(range(len(rows)))
    while awake:
        device = awake.pop()
        row = rows[device]
        while at[device] < len(row):
            each = row[at[device]]
            if isinstance(each, Receive):
                posted.add(each.message)
                awake.append(each.message.source)
            elif isinstance(each, Send):
                if each.message not in posted:
                    break
                sent.add(each.message)
                awake.append(each.message.target)
            elif isinstance(each, Await) and each.message not in sent:
                break
            at[device] += 1
    return [_tell(device, rows[device][at[device]]) for device in _unfinished(rows, at)]


def _unfinished(rows: Sequence[Sequence[Instruction]], at: Sequence[int]) -> Iterator[int]:
    return (device for device, row in enumerate(rows) if at[device] < len(row))


def _tell(device: int, instruction: Instruction) -> str:
    if isinstance(instruction, Send):
        message = instruction.message
        return f"device {device} sends {message.work} to device {message.target}"
    if isinstance(instruction, Await):
        message = instruction.message
        return f"device {device} waits for {message.work} from device {message.source}"
    return f"device {device} stands at {instruction}"
