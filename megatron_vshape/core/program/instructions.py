"""Program: instructions of every device in order, its passes and P2P messages."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

from megatron_vshape.core.model.kinds import PAIR_SIGN, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import Schedule, Timeline


class Stream(NamedTuple):
    """Messages of one kind from the stages of one chunk, in one direction along the devices.

    A stream does not name devices: the messages between two devices are a FIFO part of it. Except
    in the usual placements, a device may receive the same stream from several others. `upward`
    separates the two directions of a pair, so that a process group never carries messages both
    ways.
    """

    kind: Kind  # F: activations, B: gradients
    chunk: int  # of the sending stage
    upward: bool  # from a lower to a higher device


class Message(NamedTuple):
    """Result of the pass `work`, sent from device `source` to device `target`."""

    work: Pass  # kind F: the stage's output; kind B: the gradient of its input
    source: int
    target: int
    stream: Stream


@dataclass(frozen=True, slots=True)
class Run:
    """Run a pass, or an overlapped forward-backward (F&B) pair: F `work` and B or BW `partner`.

    Both inputs have been awaited before. The sends of both follow, F's first.
    """

    work: Pass
    partner: Pass | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Passes of this instruction."""
        return (self.work,) if self.partner is None else (self.work, self.partner)

    def __str__(self) -> str:
        return PAIR_SIGN.join(map(str, self.passes))


@dataclass(frozen=True, slots=True)
class _OfMessage:
    """Instruction on a message; `verb` is its name in the program's text."""

    message: Message
    verb: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.verb} {self.message.work}"


class Receive(_OfMessage):
    """Post the receive of a message without waiting."""

    __slots__, verb = (), "post"


class Await(_OfMessage):
    """Wait for a posted message, which the next pass reads."""

    __slots__, verb = (), "await"


class Send(_OfMessage):
    """Start to send the result of the previous pass, without waiting."""

    __slots__, verb = (), "send"


class Release(_OfMessage):
    """Free a sent result; later passes of the device wait until it has been received.

    Used only if messages are kernels. Otherwise a sent result is freed when its send has ended.
    """

    __slots__, verb = (), "release"


Instruction = Receive | Await | Run | Send | Release
Rows = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions of every device; made by `lower`, run by `runtime.program_runner`."""

    schedule: Schedule
    instructions: Rows
    window: int
    # Of `schedule`; where messages are kernels, see program.kernels.
    planned: Timeline | None = None

    def text(self) -> str:
        """Format the instructions, one line per device."""
        # A message is part of four instructions, so format it once.
        text_of = cache(Pass.__str__)
        return "\n".join(
            ", ".join(
                PAIR_SIGN.join(map(text_of, instruction.passes))
                if isinstance(instruction, Run)
                else f"{instruction.verb} {text_of(instruction.message.work)}"
                for instruction in row
            )
            for row in self.instructions
        )

    def peak_posted(self, device: int) -> int:
        """Return the peak number of posted and unread receives of a device."""
        return self._peak_count(device, Receive, Await)

    def peak_unreleased(self, device: int) -> int:
        """Return the peak number of sent and not released results of a device.

        This is a bound only for programs with Release, however far the host runs ahead.
        """
        return self._peak_count(device, Send, Release)

    def peak_messages(self, device: int) -> int:
        """Return the peak number of message buffers of a device, besides the passes' memory."""
        # Without Release, the plan knows no end of a send: count the one that is being sent.
        num_sending = 1 if self.planned is None else self.peak_unreleased(device)
        return self.peak_posted(device) + num_sending

    def _peak_count(
        self, device: int, start_type: type[Instruction], end_type: type[Instruction]
    ) -> int:
        count = peak = 0
        for instruction in self.instructions[device]:
            count += isinstance(instruction, start_type) - isinstance(instruction, end_type)
            peak = max(peak, count)
        return peak


Source = tuple[Stream, int]
"""Stream and sending device: a FIFO channel."""


def source_of(message: Message) -> Source:
    """Return the channel of a message; within a channel, messages are matched by order alone."""
    return message.stream, message.source


def result_of(work: Pass) -> Pass:
    """Return the simple pass whose result other stages read; for a full backward, its B."""
    parts = work.kind.does
    if len(parts) == 1:
        return work
    return work._replace(kind=next((part for part in parts if part.sends), work.kind))


class Messages:
    """Messages of a schedule: their readers, and the order of sends."""

    def __init__(self, schedule: Schedule) -> None:
        """Derive the messages from inputs of passes on other devices."""
        self.schedule = schedule
        self.chunks = chunks_of(schedule.placement)
        self.read_by: dict[Pass, Message] = {}
        self.sent_by: dict[Pass, Message] = {}
        self.steps = [list(schedule.steps(device)) for device in range(schedule.num_devices)]
        self.sent: list[dict[Source, list[Message]]] = [{} for _ in schedule.order]
        messages_by_result = self._find()
        results = {kind: result_of(Pass(kind, 0, 0)).kind for kind in schedule.kinds}
        for row in schedule.order:
            for work in row:
                kind, stage, microbatch = work
                # A BW sends the result of its B.
                message = messages_by_result.get((results[kind], stage, microbatch))
                if message is not None:
                    self.sent_by[work] = message
                    self.sent[message.target].setdefault(source_of(message), []).append(message)

    def _find(self) -> dict[tuple[Kind, int, int], Message]:
        """Find the messages that passes read, and return them by the sending pass."""
        messages_by_result: dict[tuple[Kind, int, int], Message] = {}
        links: dict[tuple[Kind, int], list[Message]] = {}
        for row in self.schedule.order:
            for work in row:
                kind, stage, microbatch = work
                # Computed once for all microbatches, because a step has thousands of passes.
                if (kind, stage) not in links:
                    links[kind, stage] = self._links(work)
                for (result_kind, result_stage, _), source, target, stream in links[kind, stage]:
                    result = Pass(result_kind, result_stage, microbatch)
                    message = Message(result, source, target, stream)
                    # At most one per pass: an F reads the previous stage and a B the next; the rest
                    # is local.
                    self.read_by[work] = messages_by_result[result] = message
        return messages_by_result

    def _links(self, work: Pass) -> list[Message]:
        """Return the messages that a pass reads."""
        if work.kind.of:  # inputs from other devices arrive by a collective
            return []
        placement, chunks = self.schedule.placement, self.chunks
        target = placement[work.stage]
        messages = []
        for dependency in work.needs(self.schedule.num_stages):
            source = placement[dependency.stage]
            if source != target:
                stream = Stream(dependency.kind, chunks[dependency.stage], upward=source < target)
                messages.append(Message(dependency, source, target, stream))
        return messages


_MAX_LISTED_DEVICES = 8
"""Maximum devices in an error about a deadlock of messages."""


class Meetings:
    """Devices that have reached each collective, in a simulation of all devices."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._arrived: dict[tuple[str, int], set[int]] = {}

    def comes(self, device: int, work: Pass, ready: list[int]) -> bool:
        """Register the device at this pass; if it may go on, return True and wake the others."""
        if not work.kind.is_collective:
            return True
        arrived = self._arrived.setdefault((work.kind, work.microbatch), set())
        arrived.add(device)
        if len(arrived) < self._num_devices:
            return False
        ready.extend(arrived - {device})
        return True


def explain_stuck_messages(stuck: Mapping[int, Instruction]) -> str:
    """Format the error for messages that wait for each other, one line per device."""
    lines = [
        f"    device {device} {_format_instruction(instruction)}"
        for device, instruction in itertools.islice(stuck.items(), _MAX_LISTED_DEVICES)
    ]
    if len(stuck) > _MAX_LISTED_DEVICES:
        lines.append(f"    ... and {len(stuck) - _MAX_LISTED_DEVICES} more devices")
    return "the messages deadlock, however far ahead receives are posted:\n" + "\n".join(lines)


def _format_instruction(instruction: Instruction) -> str:
    if isinstance(instruction, Run) and instruction.work.kind.is_collective:
        return f"waits in {instruction.work} for the other devices"
    if isinstance(instruction, Run):
        return f"waits for all of its messages in {instruction.work}"
    message = instruction.message
    if isinstance(instruction, Send):
        return f"sends {message.work} to device {message.target}, which has not posted its receive"
    if isinstance(instruction, Await):
        return f"waits for {message.work} from device {message.source}"
    return f"stands at {instruction}"
