"""Programs for transports whose messages are kernels (NCCL): placement of receives.

A posted receive, like a send, occupies its device until the peer arrives. An operation inside a
pass that synchronizes the device waits for them too: cudaFree of the allocator, the first launch of
a lazily loaded kernel, an autotuner. If two devices synchronize while each waits for the other's
next pass, they deadlock. So a program must complete even if every device, in every pass, waits for
all of its own transfers; `deadlocks_under_device_sync` simulates this. A program that completes
then completes with any subset of these waits, since fewer waits allow more orders.

Threads that run copies must not synchronize the device, since they would do it at any position.
Page-locking host memory does, so it happens at the position of the copy in the program
(`Offload.prepare`), as in a pass. Data, tensor and expert parallel ranks run the same program and
meet in its passes, so the proof for one pipeline applies to all of them together.

Between two passes of a device is a *gap*, numbered by the pass after it. In a gap, the device sends
the result of the previous pass, posts receives, and frees completed sends. A message connects a gap
of its sender and a gap of its receiver: if all devices wait, neither device starts its next pass
before both gaps are reached.

A receive is posted in the first gap after its message is sent according to the plan, so that it
waits for nothing; or one pass before its reader, if that is earlier and safe. A receive that is
posted after the send delays the sender if all devices wait, and so prevents early posting of
others. With all other receives posted as late as possible, messages of 0.3 of a pass cost V-ZB on 8
devices 7% of its step (simulated). Posted as described, they cost nothing relative to a transport
without posting (`benchmarks/bench_posting.py`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.core.program.instructions import (
    Await,
    Instruction,
    Meetings,
    Message,
    Messages,
    Program,
    Receive,
    Release,
    Run,
    Send,
    Source,
    explain_stuck_messages,
    source_of,
)

AHEAD = 1
"""How many passes before its reader a receive is posted, where that is safe.

Such a kernel spins until its message is there. One pass hides the latency; more would keep the
device's processors busy with spinning, and hold more memory.
"""

SLACK = 1
"""Passes by which a device may be early, or its neighbour late, before a Release waits."""


@dataclass(slots=True)
class _Transfer:
    """A message with its gaps."""

    message: Message
    sent: int  # gap of the sender
    read: int  # pass of the receiver that reads it
    send_us: float  # its time according to the plan
    least: int  # first gap of the receiver in which it can be posted
    posted: int  # gap of the receiver
    order: int = -1  # index of its send among all sends, if all devices wait


def lower_to_kernels(
    planned: Timeline, early: Sequence[int] | None = None, *, length_on_arrival: bool = False
) -> Program:
    """Lower the planned schedule to a program in which no synchronization of a device can deadlock.

    Args:
        planned: timeline of the schedule.
        early: number of passes that every device runs before all devices stop together. Messages
            sent before that point are posted before it, and no others.
        length_on_arrival: the length of a message is unknown until it arrives, so that posting also
            receives it and blocks. Then no receive is posted before its send, except for the next
            pass.

    Raises:
        ScheduleError: the schedule itself deadlocks.
    """
    placed = _Placed(planned, early)
    if not length_on_arrival:
        placed.post_early()
    program = placed.program()
    stuck = deadlocks_under_device_sync(program, length_on_arrival=length_on_arrival)
    if stuck:
        raise ScheduleError(explain_stuck_messages(stuck))
    return program


def deadlocks_under_device_sync(
    program: Program, *, length_on_arrival: bool = False
) -> dict[int, Instruction]:
    """Return the blocked devices, with their instructions, if every device waits in every pass.

    Each device waits for its own posted receives and started sends. All streams share one hardware
    queue (CUDA_DEVICE_MAX_CONNECTIONS=1, as for tensor parallelism): a transfer behind another of
    its stream blocks all later launches until that one has ended. The result is empty for a program
    that may run with messages as kernels. Only the instructions are used.
    """
    at = [0] * len(program.instructions)
    # By the sending pass: transfers that only this device has reached.
    is_open: list[dict[Pass, Message]] = [{} for _ in at]
    sent: set[Pass] = set()
    meetings = Meetings(len(at))
    awake = list(range(len(at)))
    while awake:
        device = awake.pop()
        row, own = program.instructions[device], is_open[device]
        while at[device] < len(row):
            each = row[at[device]]
            # A pass may synchronize the device, so all transfers of the device must have ended.
            if isinstance(each, Run):
                if own or not meetings.comes(device, each.work, awake):
                    break
            elif isinstance(each, (Send, Receive)):
                message = each.message
                # `other` is the peer: the sum of both ends minus this one.
                work, other = message.work, message.source + message.target - device
                # The receive blocks until the length arrives, so its send must come first.
                is_too_soon = length_on_arrival and isinstance(each, Receive) and work not in sent
                # Behind another transfer of its stream, this one would block the hardware queue.
                if is_too_soon or _is_behind(message, own):
                    break
                if isinstance(each, Send):
                    sent.add(work)
                # If the peer has arrived, the transfer ends for both devices.
                if is_open[other].pop(work, None) is None:
                    own[work] = message
                # The peer may have waited for this transfer.
                awake.append(other)
            elif own and each.message.work in own:  # an Await, or a Release
                break
            at[device] += 1
    rows = zip(at, program.instructions, strict=True)
    return {device: row[place] for device, (place, row) in enumerate(rows) if place < len(row)}


def _is_behind(message: Message, is_open: Mapping[Pass, Message]) -> bool:
    """Check whether another message of the same stream and devices is open."""
    return bool(is_open) and any(message[1:] == other[1:] for other in is_open.values())


class _Placed:
    """Placement of all messages in gaps; `program` converts it to instructions."""

    def __init__(self, planned: Timeline, early: Sequence[int] | None) -> None:
        self._given, self._planned = planned, _by_step(planned)
        self._messages = Messages(planned.schedule)
        self._transfers = _transfers(self._messages, self._planned, early)
        self._walk = _Walk(self._messages, self._transfers)
        self._walk.run()

    def post_early(self) -> None:
        """Post every receive AHEAD passes early unless a synchronization could then deadlock.

        Receives with the greatest gain go first, because two receives that cross exclude each
        other.
        """
        order = _EventOrder(self._planned, self._walk.ran, self._transfers)
        before = {
            id(each): sooner
            for stream in _by_stream(self._transfers)
            # Messages of a channel match in order, so no receive may be posted before its
            # predecessor.
            for sooner, each in zip([None, *stream], stream, strict=False)
        }
        left = [
            each
            for each in self._transfers
            if each.posted == each.read and each.read - AHEAD >= each.least
        ]
        # If two receives cross, only the first in this order can move.
        left.sort(key=lambda each: (-self._gain_us(each), each.order))
        moved = True
        while moved:  # repeat for receives whose stream predecessor has moved
            still = []
            for each in left:
                sooner, wanted = before[id(each)], each.read - AHEAD
                if sooner is not None and sooner.posted > wanted:
                    still.append(each)
                # A rejected receive stays where it is: later moves only add waits.
                elif order.posts_at(each, wanted):
                    each.posted = wanted
            moved = len(still) < len(left)
            left = still
        for each in self._transfers:
            each.order = order.place_of_send(each)

    def _gain_us(self, each: _Transfer) -> float:
        """Return the part of the message time that the pass before its reader can hide."""
        planned, (_, source, target, _) = self._planned, each.message
        at = each.read - AHEAD
        # The transfer runs from here to the end of that pass without delaying anything.
        begins = max(planned.starts[target][at], planned.ends[source][each.sent - 1])
        return min(each.send_us, max(planned.ends[target][at] - begins, 0.0))

    def program(self) -> Program:
        """Return the program with this placement."""
        rows = self._messages.steps
        posts: list[dict[int, list[Instruction]]] = [{} for _ in rows]
        releases: list[dict[int, list[Instruction]]] = [{} for _ in rows]
        # If devices stop together, messages sent before the stop are posted before it.
        for each in sorted(self._transfers, key=lambda each: (each.least, each.order)):
            message = each.message
            posts[message.target].setdefault(each.posted, []).append(Receive(message))
            releases[message.source].setdefault(self._released(each), []).append(Release(message))
        instructions = tuple(
            self._row(device, posts[device], releases[device]) for device in range(len(rows))
        )
        return Program(self._messages.schedule, instructions, AHEAD, self._given)

    def _released(self, each: _Transfer) -> int:
        """Return the first gap of the sender by which the send has ended according to the plan."""
        planned, (_, source, target, _) = self._planned, each.message
        posted_us = planned.ends[target][each.posted - 1] if each.posted else 0.0
        gone_us = max(posted_us, planned.ends[source][each.sent - 1]) + each.send_us
        starts, gap = planned.starts[source], each.sent + SLACK
        # Release where the plan has SLACK passes after the end of the send, so that it never waits.
        while gap < len(starts) and starts[gap - SLACK] < gone_us:
            gap += 1
        return gap

    def _row(
        self,
        device: int,
        posts: Mapping[int, Sequence[Instruction]],
        releases: Mapping[int, Sequence[Instruction]],
    ) -> tuple[Instruction, ...]:
        """Return the instructions of a device.

        In a gap the sends come first, then the receives in the order of their sends (if all devices
        wait). Since all streams share one hardware queue, a receive behind another one of its
        stream blocks all later launches.
        """
        messages, row = self._messages, list[Instruction]()
        read_by, sent_after = messages.read_by.get, messages.sent_by.get
        for gap, step in enumerate(messages.steps[device]):
            row += posts.get(gap, ())
            row += releases.get(gap, ())
            for work in step:
                if (message := read_by(work)) is not None:
                    row.append(Await(message))
            row.append(Run(*step))
            # These sends open the next gap, so they come before its receives and releases.
            for work in step:
                if (message := sent_after(work)) is not None:
                    row.append(Send(message))
        # The end of the step waits for all sends, so it needs no Release.
        row += posts.get(len(messages.steps[device]), ())
        return tuple(row)


def _by_step(planned: Timeline) -> Timeline:
    """Merge the times of each overlapped forward-backward (F&B) pair: gaps are around pairs."""
    if not planned.schedule.overlapped:
        return planned
    rows = [
        # Drop each F of a pair: its partner has the same times.
        [at for at, work in enumerate(row) if work not in planned.schedule.overlapped]
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
    """Place each receive in the first gap after its send according to the plan.

    That is at the latest right before its reader. Waits then agree with the planned times, except
    waits of senders, which `_Walk` resolves. A message sent between two collectives is also posted
    between them.
    """
    sent, read = dict[Pass, int](), dict[Pass, int]()  # by the sending pass
    sends_us = dict[Pass, float]()
    joins = [
        [at for at, step in enumerate(row) if step[0].kind.is_collective] for row in messages.steps
    ]
    # Gap g is before pass g, so gaps past[k] + 1 to past[k + 1] come after k collectives.
    past_joins = [[-1, *own, len(row)] for own, row in zip(joins, planned.starts, strict=True)]
    for row in messages.steps:
        for at, step in enumerate(row):
            for work in step:
                result, message = messages.sent_by.get(work), messages.read_by.get(work)
                if result is not None:
                    sent[result.work] = at + 1
                if message is not None:
                    read[message.work] = at
                    sends_us[message.work] = planned.message_us(message.work.stage, work.stage)
    transfers: list[_Transfer] = []
    for row, streams in zip(messages.steps, messages.sent, strict=True):
        for stream in streams.values():
            posted, found = len(row), []
            for message in reversed(stream):  # not before receives of earlier sends
                work, source, target, _ = message
                after, before = sent[work], read[work]
                # The first gap after the send, in which the receive waits for nothing.
                gap = bisect_left(planned.starts[target], planned.ends[source][after - 1])
                # Between the same collectives as the send: no device passes a collective alone.
                joined, past = bisect_left(joins[source], after), past_joins[target]
                posted, least = min(posted, gap, before, past[joined + 1]), past[joined] + 1
                posted = max(posted, least)
                # All devices stop there together, so no message may be under way at that point.
                if early is not None:
                    stop = early[target]
                    is_early = after <= early[source]
                    posted = min(posted, stop) if is_early else max(posted, stop)
                    least = 0 if is_early else stop
                found.append(_Transfer(message, after, before, sends_us[work], least, posted))
            transfers += reversed(found)
    return transfers


def _by_stream(transfers: Sequence[_Transfer]) -> Iterator[list[_Transfer]]:
    """Yield the transfers of each stream between two devices, in order."""
    found: dict[tuple[Source, int], list[_Transfer]] = {}
    for each in transfers:
        key = source_of(each.message), each.message.target
        found.setdefault(key, []).append(each)
    yield from found.values()


class _Walk:
    """Simulate all devices; each waits before every pass until all of its transfers have ended.

    If no device can go on, the receives that a device's sends wait for are posted in the current
    gaps of their devices. So the simulation completes for every schedule that does not itself
    deadlock: a device is in a pass, which ends, or in a gap, where it can receive any message.
    """

    def __init__(self, messages: Messages, transfers: Sequence[_Transfer]) -> None:
        rows = messages.steps
        self._lengths = [len(row) for row in rows]
        self._gap = [-1] * len(rows)
        self._open = [0] * len(rows)  # transfers that only this device has reached
        self._sends: list[dict[int, list[_Transfer]]] = [{} for _ in rows]
        self._posts: list[dict[int, list[_Transfer]]] = [{} for _ in rows]
        self._untaken: list[dict[int, _Transfer]] = [{} for _ in rows]  # by device, in send order
        self._awaited: list[dict[int, _Transfer]] = [{} for _ in rows]
        self._num_sent = 0
        self.ran: list[tuple[int, int]] = []  # device and pass, in a feasible order
        for each in transfers:
            self._sends[each.message.source].setdefault(each.sent, []).append(each)
            self._posts[each.message.target].setdefault(each.posted, []).append(each)

    def run(self) -> None:
        awake = list(range(len(self._gap)))
        # All devices are awake already, so those that this frees need no second entry.
        for device in awake:
            self._arrive(device)
        while awake:
            device = awake.pop()
            while not self._open[device] and self._gap[device] < self._lengths[device]:
                self.ran.append((device, self._gap[device]))
                awake += self._arrive(device)
            if not awake:
                # Nothing moves with the planned posts, so post receives earlier for one sender.
                awake += self._post_for_a_sender()

    def _arrive(self, device: int) -> list[int]:
        """Move a device to its next gap; return the devices that can go on."""
        self._gap[device] += 1
        gap, freed = self._gap[device], []
        # Sends are numbered over all devices; `_Placed.program` posts receives in this order.
        for sent in self._sends[device].get(gap, ()):
            sent.order, self._num_sent = self._num_sent, self._num_sent + 1
            freed += self._meet(sent, device, self._awaited[sent.message.target])
        for each in self._posts[device].get(gap, ()):
            if each.posted == gap:  # not posted earlier for its sender
                freed += self._meet(each, device, self._untaken[each.message.source])
        return freed

    def _meet(self, each: _Transfer, device: int, others: dict[int, _Transfer]) -> list[int]:
        """Reach one end of a transfer; return the peer if it can go on."""
        other = each.message.source + each.message.target - device
        if others.pop(id(each), None) is None:
            # The peer has not arrived: the transfer blocks this device until it does.
            self._open[device] += 1
            own = self._untaken if device == each.message.source else self._awaited
            own[device][id(each)] = each
            return []
        self._open[other] -= 1
        return [] if self._open[other] else [other]

    def _post_for_a_sender(self) -> list[int]:
        """Post the receives that one device's sends wait for; return the devices that can go on."""
        for device, untaken in enumerate(self._untaken):
            if self._gap[device] == self._lengths[device]:
                continue  # has run all; its last sends end with the others' last passes
            freed: list[int] = []
            # Receives in earlier gaps are posted already; only later ones can move here.
            for each in list(untaken.values()):
                at = self._gap[each.message.target]
                if each.least <= at < each.posted:
                    each.posted = at
                    freed += self._meet(each, each.message.target, untaken)
            if freed:
                return freed
        return []


class _EventOrder:
    """Gaps and passes of all devices in an order that is consistent with every wait.

    The order is maintained while receives are moved; a move that would close a cycle is rejected.
    The incremental topological sort is by D. J. Pearce and P. H. J. Kelly
    (doi:10.1145/1187436.1210590).
    """

    def __init__(
        self, planned: Timeline, ran: Sequence[tuple[int, int]], transfers: Sequence[_Transfer]
    ) -> None:
        first = 0
        self._first: list[int] = []  # by device: gap 0; then pass 0, gap 1, ...
        for row in planned.starts:
            self._first.append(first)
            first += 2 * len(row) + 1
        self._ends = {each - 1 for each in (*self._first[1:], first)}
        self._after = [[each + 1] for each in range(first)]
        self._ahead = [[each - 1] for each in range(first)]
        for last, start in zip(self._ends, self._first, strict=True):
            # No arc from the end of a device to the start of the next: only messages connect them.
            self._after[last], self._ahead[start] = [], []
        for each in transfers:
            # The pass after the receive waits for the send, and the sender's next pass for the
            # receive.
            self._join(*self._gaps(each, each.posted))
        self._at = self._in_time(planned, ran)

    def posts_at(self, each: _Transfer, gap: int) -> bool:
        """Try to post the message in this gap; return False if it could deadlock."""
        sends, posts = self._gaps(each, gap)
        if not self._orders(sends, posts + 1):
            return False
        self._join(sends, posts)  # the post is earlier than before, so it closes no cycle
        return True

    def place_of_send(self, each: _Transfer) -> int:
        """Return the index of the message's send among all events."""
        return self._at[self._gaps(each, each.posted)[0]]

    def _gaps(self, each: _Transfer, posted: int) -> tuple[int, int]:
        """Return the gaps of a message's ends; the pass after either waits for the other's gap."""
        _, source, target, _ = each.message
        return self._first[source] + 2 * each.sent, self._first[target] + 2 * posted

    def _join(self, sends: int, posts: int) -> None:
        """Have the next pass on either side, if there is one, wait for the other side's gap."""
        after, ahead = self._after, self._ahead
        after[sends].append(posts + 1)
        ahead[posts + 1].append(sends)
        # The last gap of a device has no next pass; a receive always has one, its reader or an
        # earlier.
        if sends not in self._ends:
            after[posts].append(sends + 1)
            ahead[sends + 1].append(posts)

    def _in_time(self, planned: Timeline, ran: Sequence[tuple[int, int]]) -> list[int]:
        """Return the index of every event by its time, so that moves stay local."""
        times, ahead = [0.0] * len(self._after), self._ahead
        rows = list(zip(self._first, planned.starts, planned.ends, strict=True))
        ran_events = list[int]()
        for device, at in ran:
            first, starts, ends = rows[device]
            work = first + 2 * at + 1
            times[work] = start = max([times[each] for each in ahead[work]])
            times[work + 1] = start + (ends[at] - starts[at])
            ran_events += (work, work + 1)
        rest = set(range(len(times))).difference(ran_events)  # no pass precedes them
        # The sort is stable, so events of the same time stay in the order in which they ran.
        in_time = sorted([*sorted(rest), *ran_events], key=times.__getitem__)
        places = [0] * len(times)
        for place, event in enumerate(in_time):
            places[event] = place
        return places

    def _orders(self, sooner: int, later: int) -> bool:
        """Move `sooner` before `later`; return False if that closes a cycle."""
        at = self._at
        low, high = at[later], at[sooner]
        if low < high:
            # Events between the two indices that must come after `later`; with `sooner` among them,
            # the new order would be a cycle.
            follow = self._reach(later, self._after, low, high)
            if sooner in follow:
                return False
            lead = self._reach(sooner, self._ahead, low, high)
            events = [*sorted(lead, key=at.__getitem__), *sorted(follow, key=at.__getitem__)]
            # Only the events between the two change their indices.
            for event, place in zip(events, sorted([at[each] for each in events]), strict=True):
                at[event] = place
        return True

    def _reach(self, event: int, step: Sequence[Sequence[int]], low: int, high: int) -> set[int]:
        """Return the events reachable by `step` from `event`, with indices from `low` to `high`."""
        found, open_ends, at = {event}, [event], self._at
        while open_ends:
            for each in step[open_ends.pop()]:
                if low <= at[each] <= high and each not in found:
                    found.add(each)
                    open_ends.append(each)
        return found
