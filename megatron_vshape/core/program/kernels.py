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
    send_gap: int  # gap of the sender
    read_pass: int  # pass of the receiver that reads it
    send_us: float  # its time according to the plan
    first_gap: int  # first gap of the receiver in which it can be posted
    post_gap: int  # gap of the receiver
    order: int = -1  # index of its send among all sends, if all devices wait


def lower_to_kernels(
    planned: Timeline,
    passes_before_stop: Sequence[int] | None = None,
    *,
    length_on_arrival: bool = False,
) -> Program:
    """Lower the planned schedule to a program in which no synchronization of a device can deadlock.

    Args:
        planned: timeline of the schedule.
        passes_before_stop: number of passes that every device runs before all devices stop
            together. Messages sent before that point are posted before it, and no others.
        length_on_arrival: the length of a message is unknown until it arrives, so that posting also
            receives it and blocks. Then no receive is posted before its send, except for the next
            pass.

    Raises:
        ScheduleError: the schedule itself deadlocks.
    """
    placed = _Placed(planned, passes_before_stop)
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
    positions = [0] * len(program.instructions)
    # By the sending pass: transfers that only this device has reached.
    open_transfers: list[dict[Pass, Message]] = [{} for _ in positions]
    sent_passes: set[Pass] = set()
    meetings = Meetings(len(positions))
    ready = list(range(len(positions)))
    while ready:
        device = ready.pop()
        row, local_transfers = program.instructions[device], open_transfers[device]
        while positions[device] < len(row):
            instruction = row[positions[device]]
            # A pass may synchronize the device, so all transfers of the device must have ended.
            if isinstance(instruction, Run):
                if local_transfers or not meetings.comes(device, instruction.work, ready):
                    break
            elif isinstance(instruction, (Send, Receive)):
                message = instruction.message
                # The peer: the sum of both ends minus this one.
                work, peer = message.work, message.source + message.target - device
                # The receive blocks until the length arrives, so its send must come first.
                is_too_soon = (
                    length_on_arrival
                    and isinstance(instruction, Receive)
                    and work not in sent_passes
                )
                # Behind another transfer of its stream, this one would block the hardware queue.
                is_behind = any(
                    message[1:] == transfer[1:] for transfer in local_transfers.values()
                )
                if is_too_soon or is_behind:
                    break
                if isinstance(instruction, Send):
                    sent_passes.add(work)
                # If the peer has arrived, the transfer ends for both devices.
                if open_transfers[peer].pop(work, None) is None:
                    local_transfers[work] = message
                # The peer may have waited for this transfer.
                ready.append(peer)
            elif (
                local_transfers and instruction.message.work in local_transfers
            ):  # an Await, or a Release
                break
            positions[device] += 1
    rows = zip(positions, program.instructions, strict=True)
    return {
        device: row[position] for device, (position, row) in enumerate(rows) if position < len(row)
    }


class _Placed:
    """Placement of all messages in gaps; `program` converts it to instructions."""

    def __init__(self, planned: Timeline, passes_before_stop: Sequence[int] | None) -> None:
        self._timeline, self._planned = planned, _by_step(planned)
        self._messages = Messages(planned.schedule)
        self._transfers = _transfers(self._messages, self._planned, passes_before_stop)
        self._walk = _Walk(self._messages, self._transfers)
        self._walk.run()

    def post_early(self) -> None:
        """Post every receive AHEAD passes early unless a synchronization could then deadlock.

        Receives with the greatest gain go first, because two receives that cross exclude each
        other.
        """
        order = _EventOrder(self._planned, self._walk.ran, self._transfers)
        predecessors = {
            id(transfer): predecessor
            for stream in _by_stream(self._transfers)
            # Messages of a channel match in order, so no receive may be posted before its
            # predecessor.
            for predecessor, transfer in zip([None, *stream], stream, strict=False)
        }
        candidates = [
            transfer
            for transfer in self._transfers
            if transfer.post_gap == transfer.read_pass
            and transfer.read_pass - AHEAD >= transfer.first_gap
        ]
        # If two receives cross, only the first in this order can move.
        candidates.sort(key=lambda transfer: (-self._gain_us(transfer), transfer.order))
        has_moved = True
        while has_moved:  # repeat for receives whose stream predecessor has moved
            blocked = []
            for transfer in candidates:
                predecessor, earlier_gap = predecessors[id(transfer)], transfer.read_pass - AHEAD
                if predecessor is not None and predecessor.post_gap > earlier_gap:
                    blocked.append(transfer)
                # A rejected receive stays where it is: later moves only add waits.
                elif order.posts_at(transfer, earlier_gap):
                    transfer.post_gap = earlier_gap
            has_moved = len(blocked) < len(candidates)
            candidates = blocked
        for transfer in self._transfers:
            transfer.order = order.place_of_send(transfer)

    def _gain_us(self, transfer: _Transfer) -> float:
        """Return the part of the message time that the pass before its reader can hide."""
        planned, (_, source, target, _) = self._planned, transfer.message
        pass_index = transfer.read_pass - AHEAD
        # The transfer runs from here to the end of that pass without delaying anything.
        start_us = max(
            planned.starts[target][pass_index], planned.ends[source][transfer.send_gap - 1]
        )
        return min(transfer.send_us, max(planned.ends[target][pass_index] - start_us, 0.0))

    def program(self) -> Program:
        """Return the program with this placement."""
        rows = self._messages.steps
        posts: list[dict[int, list[Instruction]]] = [{} for _ in rows]
        releases: list[dict[int, list[Instruction]]] = [{} for _ in rows]
        # If devices stop together, messages sent before the stop are posted before it.
        for transfer in sorted(
            self._transfers, key=lambda transfer: (transfer.first_gap, transfer.order)
        ):
            message = transfer.message
            posts[message.target].setdefault(transfer.post_gap, []).append(Receive(message))
            releases[message.source].setdefault(self._released(transfer), []).append(
                Release(message)
            )
        instructions = tuple(
            self._row(device, posts[device], releases[device]) for device in range(len(rows))
        )
        return Program(self._messages.schedule, instructions, AHEAD, self._timeline)

    def _released(self, transfer: _Transfer) -> int:
        """Return the first gap of the sender by which the send has ended according to the plan."""
        planned, (_, source, target, _) = self._planned, transfer.message
        post_us = planned.ends[target][transfer.post_gap - 1] if transfer.post_gap else 0.0
        end_us = max(post_us, planned.ends[source][transfer.send_gap - 1]) + transfer.send_us
        starts, gap = planned.starts[source], transfer.send_gap + SLACK
        # Release where the plan has SLACK passes after the end of the send, so that it never waits.
        while gap < len(starts) and starts[gap - SLACK] < end_us:
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
        [index for index, work in enumerate(row) if work not in planned.schedule.overlapped]
        for row in planned.schedule.order
    ]
    starts, ends = (
        tuple(tuple(times[device][index] for index in row) for device, row in enumerate(rows))
        for times in (planned.starts, planned.ends)
    )
    return replace(planned, starts=starts, ends=ends)


def _transfers(
    messages: Messages, planned: Timeline, passes_before_stop: Sequence[int] | None
) -> list[_Transfer]:
    """Place each receive in the first gap after its send according to the plan.

    That is at the latest right before its reader. Waits then agree with the planned times, except
    waits of senders, which `_Walk` resolves. A message sent between two collectives is also posted
    between them.
    """
    send_gaps, read_passes = dict[Pass, int](), dict[Pass, int]()  # by the sending pass
    message_us = dict[Pass, float]()
    collectives = [
        [index for index, step in enumerate(row) if step[0].kind.is_collective]
        for row in messages.steps
    ]
    # Gap g is before pass g, so gaps past[k] + 1 to past[k + 1] come after k collectives.
    past_collectives = [
        [-1, *indices, len(row)] for indices, row in zip(collectives, planned.starts, strict=True)
    ]
    for row in messages.steps:
        for index, step in enumerate(row):
            for work in step:
                result, message = messages.sent_by.get(work), messages.read_by.get(work)
                if result is not None:
                    send_gaps[result.work] = index + 1
                if message is not None:
                    read_passes[message.work] = index
                    message_us[message.work] = planned.message_us(message.work.stage, work.stage)
    transfers: list[_Transfer] = []
    for row, streams in zip(messages.steps, messages.sent, strict=True):
        for stream in streams.values():
            post_gap, stream_transfers = len(row), []
            for message in reversed(stream):  # not before receives of earlier sends
                work, source, target, _ = message
                send_gap, read_pass = send_gaps[work], read_passes[work]
                # The first gap after the send, in which the receive waits for nothing.
                gap = bisect_left(planned.starts[target], planned.ends[source][send_gap - 1])
                # Between the same collectives as the send: no device passes a collective alone.
                num_collectives = bisect_left(collectives[source], send_gap)
                past = past_collectives[target]
                post_gap = min(post_gap, gap, read_pass, past[num_collectives + 1])
                first_gap = past[num_collectives] + 1
                post_gap = max(post_gap, first_gap)
                # All devices stop there together, so no message may be under way at that point.
                if passes_before_stop is not None:
                    stop = passes_before_stop[target]
                    is_early = send_gap <= passes_before_stop[source]
                    post_gap = min(post_gap, stop) if is_early else max(post_gap, stop)
                    first_gap = 0 if is_early else stop
                stream_transfers.append(
                    _Transfer(message, send_gap, read_pass, message_us[work], first_gap, post_gap)
                )
            transfers += reversed(stream_transfers)
    return transfers


def _by_stream(transfers: Sequence[_Transfer]) -> Iterator[list[_Transfer]]:
    """Yield the transfers of each stream between two devices, in order."""
    streams: dict[tuple[Source, int], list[_Transfer]] = {}
    for transfer in transfers:
        key = source_of(transfer.message), transfer.message.target
        streams.setdefault(key, []).append(transfer)
    yield from streams.values()


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
        self._pending_sends: list[dict[int, _Transfer]] = [
            {} for _ in rows
        ]  # by device, in send order
        self._pending_receives: list[dict[int, _Transfer]] = [{} for _ in rows]
        self._num_sent = 0
        self.ran: list[tuple[int, int]] = []  # device and pass, in a feasible order
        for transfer in transfers:
            self._sends[transfer.message.source].setdefault(transfer.send_gap, []).append(transfer)
            self._posts[transfer.message.target].setdefault(transfer.post_gap, []).append(transfer)

    def run(self) -> None:
        ready = list(range(len(self._gap)))
        # All devices are awake already, so those that this frees need no second entry.
        for device in ready:
            self._arrive(device)
        while ready:
            device = ready.pop()
            while not self._open[device] and self._gap[device] < self._lengths[device]:
                self.ran.append((device, self._gap[device]))
                ready += self._arrive(device)
            if not ready:
                # Nothing moves with the planned posts, so post receives earlier for one sender.
                ready += self._post_for_a_sender()

    def _arrive(self, device: int) -> list[int]:
        """Move a device to its next gap; return the devices that can go on."""
        self._gap[device] += 1
        gap, freed = self._gap[device], []
        # Sends are numbered over all devices; `_Placed.program` posts receives in this order.
        for transfer in self._sends[device].get(gap, ()):
            transfer.order, self._num_sent = self._num_sent, self._num_sent + 1
            freed += self._meet(transfer, device, self._pending_receives[transfer.message.target])
        for transfer in self._posts[device].get(gap, ()):
            if transfer.post_gap == gap:  # not posted earlier for its sender
                freed += self._meet(transfer, device, self._pending_sends[transfer.message.source])
        return freed

    def _meet(
        self, transfer: _Transfer, device: int, peer_transfers: dict[int, _Transfer]
    ) -> list[int]:
        """Reach one end of a transfer; return the peer if it can go on."""
        peer = transfer.message.source + transfer.message.target - device
        if peer_transfers.pop(id(transfer), None) is None:
            # The peer has not arrived: the transfer blocks this device until it does.
            self._open[device] += 1
            pending_transfers = (
                self._pending_sends if device == transfer.message.source else self._pending_receives
            )
            pending_transfers[device][id(transfer)] = transfer
            return []
        self._open[peer] -= 1
        return [] if self._open[peer] else [peer]

    def _post_for_a_sender(self) -> list[int]:
        """Post the receives that one device's sends wait for; return the devices that can go on."""
        for device, pending_sends in enumerate(self._pending_sends):
            if self._gap[device] == self._lengths[device]:
                continue  # has run all; its last sends end with the others' last passes
            freed: list[int] = []
            # Receives in earlier gaps are posted already; only later ones can move here.
            for transfer in list(pending_sends.values()):
                gap = self._gap[transfer.message.target]
                if transfer.first_gap <= gap < transfer.post_gap:
                    transfer.post_gap = gap
                    freed += self._meet(transfer, transfer.message.target, pending_sends)
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
        self._ends = {first_event - 1 for first_event in (*self._first[1:], first)}
        self._after = [[event + 1] for event in range(first)]
        self._ahead = [[event - 1] for event in range(first)]
        for last, start in zip(self._ends, self._first, strict=True):
            # No arc from the end of a device to the start of the next: only messages connect them.
            self._after[last], self._ahead[start] = [], []
        for transfer in transfers:
            # The pass after the receive waits for the send, and the sender's next pass for the
            # receive.
            self._join(*self._gaps(transfer, transfer.post_gap))
        self._at = self._in_time(planned, ran)

    def posts_at(self, transfer: _Transfer, gap: int) -> bool:
        """Try to post the message in this gap; return False if it could deadlock."""
        sends, posts = self._gaps(transfer, gap)
        if not self._orders(sends, posts + 1):
            return False
        self._join(sends, posts)  # the post is earlier than before, so it closes no cycle
        return True

    def place_of_send(self, transfer: _Transfer) -> int:
        """Return the index of the message's send among all events."""
        return self._at[self._gaps(transfer, transfer.post_gap)[0]]

    def _gaps(self, transfer: _Transfer, posted: int) -> tuple[int, int]:
        """Return the gaps of a message's ends; the pass after either waits for the other's gap."""
        _, source, target, _ = transfer.message
        return self._first[source] + 2 * transfer.send_gap, self._first[target] + 2 * posted

    def _join(self, sends: int, posts: int) -> None:
        """Have the next pass on either side, if there is one, wait for the other side's gap."""
        successors, predecessors = self._after, self._ahead
        successors[sends].append(posts + 1)
        predecessors[posts + 1].append(sends)
        # The last gap of a device has no next pass; a receive always has one, its reader or an
        # earlier.
        if sends not in self._ends:
            successors[posts].append(sends + 1)
            predecessors[sends + 1].append(posts)

    def _in_time(self, planned: Timeline, ran: Sequence[tuple[int, int]]) -> list[int]:
        """Return the index of every event by its time, so that moves stay local."""
        times, predecessors = [0.0] * len(self._after), self._ahead
        rows = list(zip(self._first, planned.starts, planned.ends, strict=True))
        ran_events = list[int]()
        for device, pass_index in ran:
            first, starts, ends = rows[device]
            run_event = first + 2 * pass_index + 1
            times[run_event] = start = max([times[event] for event in predecessors[run_event]])
            times[run_event + 1] = start + (ends[pass_index] - starts[pass_index])
            ran_events += (run_event, run_event + 1)
        initial_events = set(range(len(times))).difference(ran_events)  # no pass precedes them
        # The sort is stable, so events of the same time stay in the order in which they ran.
        in_time = sorted([*sorted(initial_events), *ran_events], key=times.__getitem__)
        indices = [0] * len(times)
        for index, event in enumerate(in_time):
            indices[event] = index
        return indices

    def _orders(self, sooner: int, later: int) -> bool:
        """Move `sooner` before `later`; return False if that closes a cycle."""
        indices = self._at
        low, high = indices[later], indices[sooner]
        if low < high:
            # Events between the two indices that must come after `later`; with `sooner` among them,
            # the new order would be a cycle.
            followers = self._reach(later, self._after, low, high)
            if sooner in followers:
                return False
            leaders = self._reach(sooner, self._ahead, low, high)
            events = [
                *sorted(leaders, key=indices.__getitem__),
                *sorted(followers, key=indices.__getitem__),
            ]
            # Only the events between the two change their indices.
            for event, index in zip(
                events, sorted([indices[event] for event in events]), strict=True
            ):
                indices[event] = index
        return True

    def _reach(self, event: int, step: Sequence[Sequence[int]], low: int, high: int) -> set[int]:
        """Return the events reachable by `step` from `event`, with indices from `low` to `high`."""
        reachable, open_ends, indices = {event}, [event], self._at
        while open_ends:
            for next_event in step[open_ends.pop()]:
                if low <= indices[next_event] <= high and next_event not in reachable:
                    reachable.add(next_event)
                    open_ends.append(next_event)
        return reachable
