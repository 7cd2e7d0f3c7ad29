"""Programs whose messages are kernels, as on NCCL: when to post a receive, and why none can hang.

A posted receive, and a send, occupy their device until the other end is there. Whatever waits for
the whole device inside a pass waits for them too: the allocator's cudaFree, the first launch of a
kernel that is loaded lazily, a tuner that measures. Two devices that wait so for each other's next
pass wait for ever. So a program must end even where every device waits, in every pass, until
nothing of its own is outstanding; `waits_for_ever` walks through it so. What ends then ends under
any waits, for fewer waits leave more orders open. Threads that run copies beside must not wait so,
since they would anywhere: host memory is page-locked, for which the device is waited for, where the
program has the copy (`Offload.prepare`), a place like any pass. Ranks side by side (data, tensor or
expert parallel) run the same program and meet in its passes, so that what holds for one pipeline
holds for all of them together.

Between two passes of a device is a *gap*, numbered by the pass after it. There it sends what the
pass before has made, posts receives, and lets go of what has been taken. A message joins a gap of
its sender and one of its receiver: where all wait, neither device's next pass begins before both
gaps are reached.

A receive is posted in the first gap after its message is sent, by the plan, so that it waits for
nothing, or one pass before its reader where that is sooner and safe. What is posted later than it
is sent holds its sender up where all wait, and so rules out posting others early: with receives
posted as late as can be but for those, messages of .3 of a pass cost V-ZB on 8 devices 7 % of its
step; so they cost nothing beside a transport that need not post (`benchmarks/bench_posting.py`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.core.program.instructions import (
    Await,
    Instruction,
    Message,
    Messages,
    Program,
    Receive,
    Release,
    Run,
    Send,
    Source,
    source_of,
)
from megatron_vshape.core.program.stuck import Meetings, explain_stuck_messages

AHEAD = 1
"""How many passes before its reader a receive is posted, where that is safe.

Such a kernel spins until its message is there. One pass hides the latency; more would keep the
device's processors busy with spinning, and hold more memory.
"""

SLACK = 1
"""Passes by which a device may be early, or its neighbour late, before a Release waits."""


@dataclass(slots=True)
class _Transfer:
    """A message and its two gaps."""

    message: Message
    sent: int  # the gap of its source
    read: int  # the pass of its target that reads it
    least: int  # the first gap of its target in which it may be posted
    posted: int  # the gap of its target
    order: int = -1  # its send's place among all sends, where all devices wait


def lower_to_kernels(
    planned: Timeline, early: Sequence[int] | None = None, *, takes: bool = False
) -> Program:
    """Return the program of the planned schedule in which no wait for a device can hang.

    With `takes` a message's length is not known before it is there, so that posting takes it, and
    waits for it: then none is posted before it is sent, but for the next pass. With `early`, how
    many passes every device runs before all of them stop together, what is sent before that is
    posted before it, and nothing else is.

    Raises:
        ScheduleError: the schedule itself deadlocks.
    """
    placed = _Placed(planned, early)
    if not takes:
        placed.post_early()
    program = placed.program()
    stuck = waits_for_ever(program, takes=takes)
    if stuck:
        raise ScheduleError(explain_stuck_messages(stuck))
    return program


def waits_for_ever(program: Program, *, takes: bool = False) -> dict[int, Instruction]:
    """Return who never ends, and where, if every device waits in every pass for its own kernels.

    Those are the receives that it has posted and the sends that it has begun. All streams share one
    queue of the hardware (CUDA_DEVICE_MAX_CONNECTIONS=1, as tensor parallelism has it): what comes
    after another of its stream holds up all that is launched later until that has ended. Empty for
    a program that may run where messages are kernels. It reads the instructions alone.
    """
    at = [0] * len(program.instructions)
    is_open: list[set[Message]] = [set() for _ in at]  # of which a device has reached its end alone
    sent: set[Message] = set()
    meetings = Meetings(len(at))
    awake = list(range(len(at)))
    while awake:
        device = awake.pop()
        row = program.instructions[device]
        while at[device] < len(row):
            each = row[at[device]]
            if isinstance(each, Run):
                if is_open[device] or not meetings.comes(device, each.work, awake):
                    break
            elif isinstance(each, Send | Receive):
                if takes and isinstance(each, Receive) and each.message not in sent:
                    break
                if any(_share_a_stream(each.message, other) for other in is_open[device]):
                    break
                sent |= {each.message} if isinstance(each, Send) else set()
                other = each.message.source + each.message.target - device
                if each.message in is_open[other]:
                    is_open[other].remove(each.message)
                else:
                    is_open[device].add(each.message)
                awake.append(other)
            elif each.message in is_open[device]:  # an Await, or a Release
                break
            at[device] += 1
    rows = zip(at, program.instructions, strict=True)
    return {device: row[place] for device, (place, row) in enumerate(rows) if place < len(row)}


def _share_a_stream(one: Message, other: Message) -> bool:
    return (one.source, one.target, one.stream) == (other.source, other.target, other.stream)


class _Placed:
    """The gaps of all messages; `program` writes them down."""

    def __init__(self, planned: Timeline, early: Sequence[int] | None) -> None:
        self._given, self._planned = planned, _by_step(planned)
        self._messages = Messages(planned.schedule)
        self._transfers = _transfers(self._messages, self._planned, early)
        self._walk = _Walk(self._messages, self._transfers)
        self._walk.run()

    def post_early(self) -> None:
        """Post every receive AHEAD of its use unless a wait for its device could then hang.

        Those first that gain most by it: in a crossing, one of two receives can be posted.
        """
        order = _EventOrder(self._planned, self._walk.ran, self._transfers)
        before = {
            id(each): sooner
            for stream in _by_stream(self._transfers)
            for sooner, each in zip([None, *stream], stream, strict=False)
        }
        left = [
            each
            for each in self._transfers
            if each.posted == each.read and each.read - AHEAD >= each.least
        ]
        left.sort(key=lambda each: (-self._gain_us(each), each.order))
        moved = True
        while moved:  # again, for those whose stream had an earlier one posted later
            still = []
            for each in left:
                sooner, wanted = before[id(each)], each.read - AHEAD
                if sooner is not None and sooner.posted > wanted:
                    still.append(each)
                elif order.posts_at(each, wanted):
                    each.posted = wanted
            moved = len(still) < len(left)
            left = still
        for each in self._transfers:
            each.order = order.place_of_send(each)

    def _gain_us(self, each: _Transfer) -> float:
        """Return how much of the message's way the pass before its reader would hide."""
        planned, (_, source, target, _) = self._planned, each.message
        at = each.read - AHEAD
        begins = max(planned.starts[target][at], planned.ends[source][each.sent - 1])
        return min(planned.send_us, max(planned.ends[target][at] - begins, 0.0))

    def program(self) -> Program:
        """Return the program that sends and posts so."""
        rows = self._messages.steps
        posts: list[dict[int, list[Message]]] = [{} for _ in rows]
        releases: list[dict[int, list[Message]]] = [{} for _ in rows]
        # Where devices stop together, what was sent before that is posted before it.
        for each in sorted(self._transfers, key=lambda each: (each.least, each.order)):
            message = each.message
            posts[message.target].setdefault(each.posted, []).append(message)
            releases[message.source].setdefault(self._released(each), []).append(message)
        instructions = tuple(
            tuple(self._row(device, posts[device], releases[device])) for device in range(len(rows))
        )
        return Program(self._messages.schedule, instructions, AHEAD, self._given)

    def _released(self, each: _Transfer) -> int:
        """Return the gap of its source in which what was sent is surely gone, by the plan."""
        planned, (_, source, target, _) = self._planned, each.message
        posted_us = planned.ends[target][each.posted - 1] if each.posted else 0.0
        gone_us = max(posted_us, planned.ends[source][each.sent - 1]) + planned.send_us
        starts, gap = planned.starts[source], each.sent + SLACK
        while gap < len(starts) and starts[gap - SLACK] < gone_us:
            gap += 1
        return gap

    def _row(
        self,
        device: int,
        posts: Mapping[int, Sequence[Message]],
        releases: Mapping[int, Sequence[Message]],
    ) -> Iterator[Instruction]:
        """Yield the instructions of a device.

        In a gap the send comes first, and the receives in the order in which all is sent where all
        wait: where all streams share one queue of the hardware, a receive that waits behind another
        of its stream holds up all that is launched after it.
        """
        steps, messages = self._messages.steps[device], self._messages
        for gap in range(len(steps) + 1):
            if gap:
                yield from map(Send, filter(None, map(messages.sent_after, steps[gap - 1])))
            yield from map(Receive, posts.get(gap, ()))
            if gap == len(steps):
                return  # the end of the step waits for all that is sent
            yield from map(Release, releases.get(gap, ()))
            yield from map(Await, filter(None, map(messages.read_by.get, steps[gap])))
            yield Run(*steps[gap])


def _by_step(planned: Timeline) -> Timeline:
    """Return the timeline with the times of a joint pass once: its gaps are around both."""
    if not planned.schedule.joint:
        return planned
    rows = [
        [at for at, work in enumerate(row) if work not in planned.schedule.joint]
        for row in planned.schedule.order
    ]
    starts, ends = (
        tuple(tuple(times[device][at] for at in row) for device, row in enumerate(rows))
        for times in (planned.starts, planned.ends)
    )
    return replace(planned, starts=starts, ends=ends)


def _transfers(
    messages: Messages, planned: Timeline, early: Sequence[int] | None
) -> list[_Transfer]:
    """Return every message with its receive posted in the first gap after it is sent, by the plan.

    That is right before its reader at the latest. Waits then agree with the plan's times, but for
    those of senders, which the walk settles. What is sent between two passes that all devices join
    is posted between these, too.
    """
    sent, read = {}, {}
    joins = [[at for at, step in enumerate(row) if step[0].kind.joins] for row in messages.steps]
    for row in messages.steps:
        for at, work in ((at, work) for at, step in enumerate(row) for work in step):
            result, message = messages.sent_after(work), messages.read_by.get(work)
            if result is not None:
                sent[result] = at + 1
            if message is not None:
                read[message] = at
    transfers: list[_Transfer] = []
    for row, streams in zip(messages.steps, messages.sent, strict=True):
        for stream in streams.values():
            posted, found = len(row), []
            for message in reversed(stream):  # none is posted before those sent earlier
                sent_us = planned.ends[message.source][sent[message] - 1]
                gap = bisect_left(planned.starts[message.target], sent_us)
                joined = bisect_left(joins[message.source], sent[message])
                past = [-1, *joins[message.target], len(planned.starts[message.target])]
                posted, least = min(posted, gap, read[message], past[joined + 1]), past[joined] + 1
                posted = max(posted, least)
                if early is not None:
                    stop = early[message.target]
                    is_early = sent[message] <= early[message.source]
                    posted = min(posted, stop) if is_early else max(posted, stop)
                    least = 0 if is_early else stop
                found.append(_Transfer(message, sent[message], read[message], least, posted))
            transfers += reversed(found)
    return transfers


def _by_stream(transfers: Sequence[_Transfer]) -> Iterator[list[_Transfer]]:
    """Yield the transfers of one stream between two devices after the other, in their order."""
    found: dict[tuple[Source, int], list[_Transfer]] = {}
    for each in transfers:
        key = source_of(each.message), each.message.target
        found.setdefault(key, []).append(each)
    yield from found.values()


class _Walk:
    """Runs all devices where each waits before every pass until nothing of its own is outstanding.

    Where none can go on, the receives that a device's sends wait for are posted where their device
    stands. So it ends for every schedule that does not itself deadlock: a device is in a pass,
    which ends, or in a gap, where it can take whatever is sent to it.
    """

    def __init__(self, messages: Messages, transfers: Sequence[_Transfer]) -> None:
        rows = messages.steps
        self._lengths = [len(row) for row in rows]
        self._gap = [-1] * len(rows)
        self._open = [0] * len(rows)  # messages of which a device has reached its end alone
        self._sends: list[dict[int, list[_Transfer]]] = [{} for _ in rows]
        self._posts: list[dict[int, list[_Transfer]]] = [{} for _ in rows]
        self._untaken: list[dict[int, _Transfer]] = [{} for _ in rows]  # by device, in send order
        self._awaited: list[dict[int, _Transfer]] = [{} for _ in rows]
        self._num_sent = 0
        self.ran: list[tuple[int, int]] = []  # device and pass, in an order in which they can run
        for each in transfers:
            self._sends[each.message.source].setdefault(each.sent, []).append(each)
            self._posts[each.message.target].setdefault(each.posted, []).append(each)

    def run(self) -> None:
        awake = list(range(len(self._gap)))
        for device in awake:
            self._arrive(device)
        while awake:
            device = awake.pop()
            while not self._open[device] and self._gap[device] < self._lengths[device]:
                self.ran.append((device, self._gap[device]))
                awake += self._arrive(device)
            if not awake:
                awake += self._post_for_a_sender()

    def _arrive(self, device: int) -> list[int]:
        """Go to the device's next gap; return the devices that this lets go on."""
        self._gap[device] += 1
        gap, freed = self._gap[device], []
        for sent in self._sends[device].get(gap, ()):
            sent.order, self._num_sent = self._num_sent, self._num_sent + 1
            freed += self._meet(sent, device, self._awaited[sent.message.target])
        for each in self._posts[device].get(gap, ()):
            if each.posted == gap:  # and not sooner, for its sender
                freed += self._meet(each, device, self._untaken[each.message.source])
        return freed

    def _meet(self, each: _Transfer, device: int, others: dict[int, _Transfer]) -> list[int]:
        """Reach one end of a message; return the device that has waited for it at the other."""
        other = each.message.source + each.message.target - device
        if others.pop(id(each), None) is None:
            self._open[device] += 1
            own = self._untaken if device == each.message.source else self._awaited
            own[device][id(each)] = each
            return []
        self._open[other] -= 1
        return [] if self._open[other] else [other]

    def _post_for_a_sender(self) -> list[int]:
        """Post the receives that one device's sends wait for; return who can go on then."""
        for device, untaken in enumerate(self._untaken):
            if self._gap[device] == self._lengths[device]:
                continue  # it has run all, and its last sends end with the others' last passes
            freed: list[int] = []
            for each in list(untaken.values()):
                at = self._gap[each.message.target]
                if each.least <= at < each.posted:
                    each.posted = at
                    freed += self._meet(each, each.message.target, untaken)
            if freed:
                return freed
        return []


class _EventOrder:
    """The gaps and the passes of all devices in an order that every wait agrees with.

    It is kept while receives are moved, each move refused that would close a cycle (the order is
    mended locally, as D. J. Pearce and P. H. J. Kelly do it, doi:10.1145/1187436.1210590).
    """

    def __init__(
        self, planned: Timeline, ran: Sequence[tuple[int, int]], transfers: Sequence[_Transfer]
    ) -> None:
        first = 0
        self._first: list[int] = []  # by device: its gap 0; its pass 0, gap 1, ... follow
        for row in planned.starts:
            self._first.append(first)
            first += 2 * len(row) + 1
        self._ends = {self._gap(d, len(row)) for d, row in enumerate(planned.starts)}
        self._starts = set(self._first)
        self._after: dict[int, list[int]] = {}
        self._ahead: dict[int, list[int]] = {}
        for each in transfers:
            for gap, work in self._waits(each, each.posted):
                self._add(gap, work)
        self._at = self._in_time(planned, ran, first)

    def posts_at(self, each: _Transfer, gap: int) -> bool:
        """Note that the message is posted in this gap, if all can then wait; return whether so."""
        sent, *posted = self._waits(each, gap)
        if not self._orders(*sent):
            return False
        for each_wait in posted:
            self._add(*each_wait)  # for an earlier gap than before; it closes no cycle
        return True

    def place_of_send(self, each: _Transfer) -> int:
        """Return where the message is sent, among all events."""
        return self._at[self._gap(each.message.source, each.sent)]

    def _gap(self, device: int, gap: int) -> int:
        return self._first[device] + 2 * gap

    def _waits(self, each: _Transfer, posted: int) -> list[tuple[int, int]]:
        """Return (gap, pass): the passes at either end wait for the other's gap."""
        _, source, target, _ = each.message
        sends, posts = self._gap(source, each.sent), self._gap(target, posted)
        waits = [(sends, posts + 1)]
        if sends not in self._ends:
            waits.append((posts, sends + 1))
        return waits

    def _add(self, sooner: int, later: int) -> None:
        self._after.setdefault(sooner, []).append(later)
        self._ahead.setdefault(later, []).append(sooner)

    def _followers(self, event: int) -> Iterator[int]:
        if event not in self._ends:
            yield event + 1
        yield from self._after.get(event, ())

    def _leaders(self, event: int) -> Iterator[int]:
        if event not in self._starts:
            yield event - 1
        yield from self._ahead.get(event, ())

    def _in_time(
        self, planned: Timeline, ran: Sequence[tuple[int, int]], num_events: int
    ) -> list[int]:
        """Return the place of every event: by its time where all wait, so that moves are local."""
        times = [0.0] * num_events
        for device, at in ran:
            work = self._gap(device, at) + 1
            took = planned.ends[device][at] - planned.starts[device][at]
            times[work] = max(times[each] for each in self._leaders(work))
            times[work + 1] = times[work] + took
        rank = {self._gap(*each) + 1: number for number, each in enumerate(ran)}
        gaps = {event + 1: number for event, number in rank.items()}
        number = {**rank, **gaps, **dict.fromkeys(self._first, -1)}
        in_time = sorted(range(num_events), key=lambda event: (times[event], number[event], event))
        places = [0] * num_events
        for place, event in enumerate(in_time):
            places[event] = place
        return places

    def _orders(self, sooner: int, later: int) -> bool:
        """Have `sooner` come before `later`; return False where it comes after, and must."""
        at = self._at
        low, high = at[later], at[sooner]
        if low < high:
            follow = self._reach(later, self._followers, lambda place: place <= high)
            if sooner in follow:
                return False
            lead = self._reach(sooner, self._leaders, lambda place: place >= low)
            events = [*sorted(lead, key=at.__getitem__), *sorted(follow, key=at.__getitem__)]
            for event, place in zip(events, sorted(at[each] for each in events), strict=True):
                at[event] = place
        self._add(sooner, later)
        return True

    def _reach(
        self, event: int, step: Callable[[int], Iterable[int]], is_near: Callable[[int], bool]
    ) -> set[int]:
        found, open_ends = {event}, [event]
        while open_ends:
            for each in step(open_ends.pop()):
                if each not in found and is_near(self._at[each]):
                    found.add(each)
                    open_ends.append(each)
        return found
