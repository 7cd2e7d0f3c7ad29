"""Schedule -> Program: the passes of every device with the messages between them.

Every stream of messages has process groups of its own at run time; what one device sends another
of it is first in, first out. Receives are posted in the order in which the sender sends, ahead of
their use but within a window. The order is proved under rendezvous semantics, with sends that
block their device until the receive is posted: what finishes then finishes under any progress of
a real transport.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_vshape.core.passes import Kind, Pass, ScheduleError
from megatron_vshape.core.placement import Placement, chunks_of
from megatron_vshape.core.schedule import Schedule, Timeline
from megatron_vshape.core.simulate import simulate

LISTED = 8
"""A deadlock of messages names at most so many devices."""

WINDOW = 2
"""Receives posted ahead per stream and sender.

Two hide the latency, each costs one activation's memory.
"""

KERNELS_AHEAD = 1
"""How many passes before its reader a receive is posted where it is a kernel, as on NCCL.

Such a kernel spins until its message is there. One pass hides the latency; more would keep the
device's processors busy with spinning, and hold more memory.
"""


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
Rows = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What every device does, in order; made by `lower`, run by `runtime.program_runner`."""

    schedule: Schedule
    instructions: Rows
    window: int

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Return the streams in use, sorted, the same on every device."""
        sent = {each.message.stream for each in self._all() if isinstance(each, Send)}
        return tuple(sorted(sent))

    def most_posted(self, device: int) -> int:
        """Return the most receives that a device has posted and not yet read at any time."""
        posted = most = 0
        for each in self.instructions[device]:
            posted += isinstance(each, Receive) - isinstance(each, Await)
            most = max(most, posted)
        return most

    def _all(self) -> Iterator[Instruction]:
        for row in self.instructions:
            yield from row


def lower(
    schedule: Schedule,
    timeline: Timeline | None = None,
    window: int = WINDOW,
    *,
    kernels: bool = False,
) -> Program:
    """Return the program of `schedule`, its message order proved.

    With a `timeline`, a B and the W right after it become one BW wherever nothing waits for B
    in the meantime: the split costs nothing then, and a whole backward hides collectives.
    `window` receives per stream and sender are posted ahead; more where the proof needs more.
    With `kernels` each is posted KERNELS_AHEAD passes before it is read, or where its sender would
    have to wait for it if that is earlier.

    Raises:
        ScheduleError: the messages deadlock however far ahead the receives are posted.
    """
    if timeline is not None:
        schedule = fuse(timeline)
    if kernels:
        return _lower_late(schedule)
    if window < 1:
        raise ScheduleError(f"the window is {window} receives; it must be at least 1")
    messages = _Messages(schedule)
    while True:
        rows, stuck = _rendezvous(
            [messages.instructions(device, window) for device in range(schedule.num_devices)]
        )
        if not stuck:
            return Program(schedule, rows, window)
        if window > 2 * schedule.num_microbatches:
            raise ScheduleError(_explain_stuck(stuck))
        window *= 2


def _lower_late(schedule: Schedule) -> Program:
    """Return the program whose receives are posted as late as no sender has to wait for them."""
    messages = _Messages(schedule)
    before = _own_passes_before(messages)
    posted: set[Pass] = set()
    rows, stuck = _rendezvous(
        [
            messages.late_instructions(device, before, posted)
            for device in range(schedule.num_devices)
        ],
        posted,
        posts_for_senders=True,
    )
    if stuck:
        raise ScheduleError(_explain_stuck(stuck))
    return Program(schedule, rows, KERNELS_AHEAD)


def _own_passes_before(messages: "_Messages") -> dict[Pass, int]:
    """Return, by message, how many passes of the device that reads it it comes after.

    A pass comes after what stands before it on its device and after what it reads; followed back,
    that leads to passes of the reader's own device.
    """
    schedule = messages.schedule
    # By device: how many passes of every device its latest pass comes after, itself included.
    reached = [[0] * schedule.num_devices for _ in schedule.order]
    under_way: dict[Pass, list[int]] = {}
    before: dict[Pass, int] = {}
    ends = simulate(schedule).ends  # every pass ends after all that it comes after
    for _, device, at in sorted(
        (e, d, at) for d, row in enumerate(ends) for at, e in enumerate(row)
    ):
        work = schedule.order[device][at]
        message = messages.read_by.get(work)
        if message is not None:
            reached[device] = list(map(max, reached[device], under_way.pop(message.work)))
        reached[device][device] = at + 1
        result = messages.made_by.get(_result(work))
        if result is not None:
            under_way[result.work] = list(reached[device])
            before[result.work] = reached[device][result.target]
    return before


def forward_wave(placement: Placement, num_devices: int, num_microbatches: int) -> Schedule:
    """Return what an evaluation runs: forwards alone, on each device as they can arrive.

    A device with c stages takes c passes per microbatch, so microbatch m reaches stage s at
    about c * m + s. A pass and what it reads stand in this order too, so it cannot deadlock.
    """
    chunks = len(placement) // num_devices
    passes = sorted(
        (Pass(Kind.F, s, m) for s in range(len(placement)) for m in range(num_microbatches)),
        key=lambda work: (chunks * work.microbatch + work.stage, work.stage),
    )
    rows = [[work for work in passes if placement[work.stage] == d] for d in range(num_devices)]
    return Schedule("evaluation", num_devices, num_microbatches, placement, tuple(map(tuple, rows)))


def fuse(timeline: Timeline) -> Schedule:
    """Return the schedule with B W made BW where B's reader starts late enough for all of BW.

    The times decide, so that fusing delays nobody: a BW hands its gradient on when all is done,
    and where it has a price of its own it ends no later than W did.
    """
    schedule, whole_us = timeline.schedule, timeline.whole_backward_us
    deadline = _deadlines(timeline)
    rows = []
    for device in range(schedule.num_devices):
        row: list[Pass] = []
        began = 0.0
        for work, start, end in timeline.slots(device):
            key = work[1:]
            follows = work.kind is Kind.W and row and row[-1] == (Kind.B, *key)
            whole_end = end if whole_us is None else began + whole_us[work.stage]
            began = start
            if follows and whole_end <= min(end, deadline.get(key, end)):
                row[-1] = Pass(Kind.BW, *key)
            else:
                row.append(work)
        rows.append(tuple(row))
    return replace(schedule, order=tuple(rows))


def _deadlines(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Return, by stage and microbatch, until when a gradient may be sent to be there in time."""
    placement = timeline.schedule.placement
    deadlines = {}
    for device in range(timeline.schedule.num_devices):
        for (kind, stage, microbatch), start, _ in timeline.slots(device):
            writer = stage + 1
            if kind in (Kind.B, Kind.BW) and writer < len(placement):
                send = 0.0 if placement[writer] == device else timeline.send_us
                deadlines[writer, microbatch] = start - send
    return deadlines


class _Messages:
    """The messages of a schedule: which pass reads which, and in which order they are sent."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.chunks = chunks_of(schedule.placement)
        self.read_by: dict[Pass, Message] = {}
        self.made_by: dict[Pass, Message] = {}
        self.sent: list[dict[_Source, list[Message]]] = [{} for _ in schedule.order]
        for row in schedule.order:
            for work in row:
                self._add_input(work)
        for row in schedule.order:
            for work in row:
                message = self.made_by.get(_result(work))
                if message is not None:
                    key = _source_of(message)
                    self.sent[message.target].setdefault(key, []).append(message)

    def _add_input(self, work: Pass) -> None:
        """Note the message that brings the pass what a stage on another device has made."""
        placement, chunks = self.schedule.placement, self.chunks
        target = placement[work.stage]
        for need in work.needs(self.schedule.num_stages):
            source = placement[need.stage]
            if source != target:
                stream = Stream(need.kind, chunks[need.stage], upward=source < target)
                self.read_by[work] = self.made_by[need] = Message(need, source, target, stream)

    def instructions(self, device: int, window: int) -> Iterator[Instruction]:
        """Yield the instructions of one device, with `window` receives posted ahead per source.

        Receives are posted in the sender's order; a pass that reads a later message than the
        window reaches has all the messages before it posted too.
        """
        incoming = dict(sorted(self.sent[device].items()))
        position = {
            message.work: at
            for messages in incoming.values()
            for at, message in enumerate(messages)
        }
        posted = dict.fromkeys(incoming, 0)

        def post(source: _Source, upto: int) -> Iterator[Receive]:
            for message in incoming[source][posted[source] : upto]:
                posted[source] += 1
                yield Receive(message)

        for source in incoming:
            yield from post(source, window)
        for work in self.schedule.order[device]:
            message = self.read_by.get(work)
            if message is not None:
                source, at = _source_of(message), position[message.work]
                yield from post(source, at + 1)
                yield Await(message)
                yield from post(source, at + 1 + window)
            yield Run(work)
            result = self.made_by.get(_result(work))
            if result is not None:
                yield Send(result)

    def late_instructions(
        self, device: int, before: Mapping[Pass, int], posted: Collection[Pass]
    ) -> Iterator[Instruction]:
        """Yield the instructions of one device, every receive KERNELS_AHEAD passes before its use.

        None stands before the passes that its message comes after. What is `posted` already when
        its place comes is left out.
        """
        row = self.schedule.order[device]
        places: dict[int, list[Message]] = {}
        reader = {self.read_by[w].work: at for at, w in enumerate(row) if w in self.read_by}
        for incoming in self.sent[device].values():
            place = len(row)
            for each in reversed(incoming):  # none is posted before those sent earlier
                wanted = min(place, reader[each.work] - KERNELS_AHEAD)
                place = max(before[each.work], wanted)
                places.setdefault(place, []).insert(0, each)

        def post(place: int) -> Iterator[Receive]:
            for message in places.get(place, ()):
                if message.work not in posted:
                    yield Receive(message)

        yield from post(0)
        for at, work in enumerate(row):
            message = self.read_by.get(work)
            if message is not None:
                yield Await(message)
            yield Run(work)
            yield from post(at + 1)
            result = self.made_by.get(_result(work))
            if result is not None:
                yield Send(result)


_Source = tuple[Stream, int]
"""A stream and the device that sends: what a device receives of it is first in, first out."""


def _source_of(message: Message) -> _Source:
    return message.stream, message.source


def _result(work: Pass) -> Pass:
    """Return the simple pass whose result others read: of a whole backward, its B."""
    return Pass(Kind.B, work.stage, work.microbatch) if work.kind is Kind.BW else work


def _rendezvous(
    sources: Sequence[Iterator[Instruction]],
    posted: set[Pass] | None = None,
    posts_for_senders: bool = False,
) -> tuple[Rows, dict[int, Instruction]]:
    """Return the instructions that run where sends wait for a receive, and who is stuck at what.

    `sources` yield the instructions of each device; they are not read further than they run. Into
    `posted` go the messages whose receive is. With `posts_for_senders`, where nobody can go on, the
    receives that senders wait for are posted at once, in front of what their device stands at.
    """
    rows: list[list[Instruction]] = [[] for _ in sources]
    at = [next(source, None) for source in sources]
    posted = set() if posted is None else posted
    sent: set[Pass] = set()
    awake = list(range(len(rows)))
    while awake:
        device = awake.pop()
        each = at[device]
        while each is not None:
            if isinstance(each, Receive):
                posted.add(each.message.work)
                awake.append(each.message.source)
            elif isinstance(each, Send):
                if each.message.work not in posted:
                    break
                sent.add(each.message.work)
                awake.append(each.message.target)
            elif isinstance(each, Await) and each.message.work not in sent:
                break
            rows[device].append(each)
            each = next(sources[device], None)
        at[device] = each
        if posts_for_senders and not awake:
            for sender, waits in enumerate(at):
                if isinstance(waits, Send):
                    rows[waits.message.target].append(Receive(waits.message))
                    posted.add(waits.message.work)
                    awake.append(sender)
    stuck = {device: each for device, each in enumerate(at) if each is not None}
    return tuple(map(tuple, rows)), stuck


def _explain_stuck(stuck: Mapping[int, Instruction]) -> str:
    """Return the message about messages that wait for each other, one line a device."""
    lines = [
        f"    device {device} {_tell(instruction)}"
        for device, instruction in itertools.islice(stuck.items(), LISTED)
    ]
    if len(stuck) > LISTED:
        lines.append(f"    ... and {len(stuck) - LISTED} more devices")
    return "the messages deadlock, however far ahead receives are posted:\n" + "\n".join(lines)


def _tell(instruction: Instruction) -> str:
    if isinstance(instruction, Send):
        message = instruction.message
        return f"sends {message.work} to device {message.target}, which has not posted its receive"
    if isinstance(instruction, Await):
        return f"waits for {instruction.message.work} from device {instruction.message.source}"
    return f"stands at {instruction}"


def never_sent(program: Program) -> Message | None:
    """Return a message that is never sent where a receive cannot be posted ahead, or None.

    That is where a message's size is not known before: `lower` proves less then. Here a Receive
    does nothing, an Await takes all messages of its stream up to its own, and a Send waits until
    the one before it, of the same stream between the same devices, has been taken.
    """
    rows = [deque(_sends_and_takes(row)) for row in program.instructions]
    untaken: set[tuple[Stream, int, int]] = set()
    awake = list(range(len(rows)))
    while awake:
        row = rows[awake.pop()]
        while row:
            sends, message = row[0]
            edge = message.stream, message.source, message.target
            if sends is (edge in untaken):
                break
            row.popleft()
            untaken ^= {edge}
            awake.append(message.target if sends else message.source)
    return next((row[0][1] for row in rows if row and row[0][0]), None)


def _sends_and_takes(row: Sequence[Instruction]) -> Iterator[tuple[bool, Message]]:
    """Yield what a device sends (True) and takes (False), one after the other."""
    ahead: dict[tuple[Stream, int, int], deque[Message]] = {}
    for each in row:
        if isinstance(each, Run):
            continue
        message = each.message
        posted = ahead.setdefault((message.stream, message.source, message.target), deque())
        if isinstance(each, Receive):
            posted.append(message)
        elif isinstance(each, Send):
            yield True, message
        else:
            while message in posted:
                yield False, posted.popleft()
