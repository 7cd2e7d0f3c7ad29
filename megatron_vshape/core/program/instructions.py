"""Program: what every device does in order, its passes and the messages between them."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from megatron_vshape.core.model.kinds import BESIDE, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import Schedule, Timeline


class Stream(NamedTuple):
    """The messages of one kind from the stages of one chunk, in one direction along the devices.

    It holds no devices: the messages from one to another are its share, first in, first out. In
    any but the usual placements a device may have the same stream from several others. `upward`
    tells the two directions of a device pair apart, so that a stream's process group never
    carries messages both ways between the same two devices.
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
class Run:
    """Run a pass, or at once the two of a joint pass: `work`, an F, and the B or BW `beside` it.

    Both have been awaited before, and what both send follows: F's first.
    """

    work: Pass
    beside: Pass | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Return the pass, or both."""
        return (self.work,) if self.beside is None else (self.work, self.beside)

    def __str__(self) -> str:
        return BESIDE.join(map(str, self.passes))


@dataclass(frozen=True, slots=True)
class _OfMessage:
    """What is done with a message; `verb` is how a program's text says it."""

    message: Message
    verb: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.verb} {self.message.work}"


class Receive(_OfMessage):
    """Post the receive of a message; does not wait."""

    __slots__, verb = (), "post"


class Await(_OfMessage):
    """Wait until a posted message is there; the next pass reads it."""

    __slots__, verb = (), "await"


class Send(_OfMessage):
    """Start to send the result of the pass just run; does not wait."""

    __slots__, verb = (), "send"


class Release(_OfMessage):
    """Let go of what was sent: what the device runs from here on waits until it has been taken.

    Only where messages are kernels; elsewhere a sent result goes when it has left.
    """

    __slots__, verb = (), "release"


Instruction = Receive | Await | Run | Send | Release
Rows = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What every device does, in order; made by `lower`, run by `runtime.program_runner`."""

    schedule: Schedule
    instructions: Rows
    window: int
    planned: Timeline | None = (
        None  # of `schedule`; where messages are kernels, see program.kernels
    )

    def text(self) -> str:
        """Return the instructions, a line for each device."""
        return "\n".join(", ".join(map(str, row)) for row in self.instructions)

    def most_posted(self, device: int) -> int:
        """Return the most receives that a device has posted and not yet read at any time."""
        return self._most(device, Receive, Await)

    def most_kept(self, device: int) -> int:
        """Return the most results that a device has sent and not let go of at any time.

        That is a bound only where there is a Release, however far the host is ahead of the device.
        """
        return self._most(device, Send, Release)

    def most_messages(self, device: int) -> int:
        """Return for how many messages a device needs memory at most, besides what passes hold."""
        leaving = 1 if self.planned is None else self.most_kept(device)
        return self.most_posted(device) + leaving

    def _most(self, device: int, begins: type[Instruction], ends: type[Instruction]) -> int:
        under_way = most = 0
        for each in self.instructions[device]:
            under_way += isinstance(each, begins) - isinstance(each, ends)
            most = max(most, under_way)
        return most


Source = tuple[Stream, int]
"""Stream and sending device: a first-in, first-out channel."""


def source_of(message: Message) -> Source:
    """Return what the message's receiver tells it by: it is matched by its order there alone."""
    return message.stream, message.source


def result_of(work: Pass) -> Pass:
    """Return the simple pass whose result other stages read: of a whole backward, its B."""
    parts = work.kind.does
    if len(parts) == 1:
        return work
    return work._replace(kind=next((part for part in parts if part.sends), work.kind))


class Messages:
    """The messages of a schedule: which pass reads which, and in which order they are sent."""

    def __init__(self, schedule: Schedule) -> None:
        """Find them by what every pass reads from a stage on another device."""
        self.schedule = schedule
        self.chunks = chunks_of(schedule.placement)
        self.read_by: dict[Pass, Message] = {}
        self.made_by: dict[Pass, Message] = {}
        self.steps = [list(schedule.steps(device)) for device in range(schedule.num_devices)]
        self.sent: list[dict[Source, list[Message]]] = [{} for _ in schedule.order]
        for row in schedule.order:
            for work in row:
                self._add_input(work)
        for row in schedule.order:
            for work in row:
                message = self.sent_after(work)
                if message is not None:
                    self.sent[message.target].setdefault(source_of(message), []).append(message)

    def sent_after(self, work: Pass) -> Message | None:
        """Return the message that brings the pass's result to another device, if one does."""
        return self.made_by.get(result_of(work))

    def _add_input(self, work: Pass) -> None:
        """Note the message that brings the pass what a stage on another device has made."""
        if work.kind.of:  # what it reads of others comes by a collective
            return
        placement, chunks = self.schedule.placement, self.chunks
        target = placement[work.stage]
        for need in work.needs(self.schedule.num_stages):
            source = placement[need.stage]
            if source != target:
                stream = Stream(need.kind, chunks[need.stage], upward=source < target)
                self.read_by[work] = self.made_by[need] = Message(need, source, target, stream)
