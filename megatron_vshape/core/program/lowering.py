"""Lower a Schedule to a Program: the passes of every device with the messages between them.

Every stream of messages has its process groups at run time, and is FIFO between two devices.
Receives are posted in the sender's order, ahead of their use but within a window. The order is
proved under rendezvous semantics, in which a send blocks its device until the receive is posted: a
program that completes then completes under any progress of a real transport. If messages are
kernels, as on NCCL, `program.kernels` places the receives.

Before lowering, adjacent F and B can be overlapped (`pair_adjacent`); after it, weight gradients
can run inside a B that waits for other ranks of its stage (`deferred_weight_overlap`).
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from megatron_vshape.core.check.simulate import costs_of, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import (
    COLLECTIVE_TIMES,
    KINDS,
    PROCESSOR,
    Kind,
    ScheduleError,
    find_kind,
)
from megatron_vshape.core.model.passes import Pass, can_overlap
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.program.instructions import (
    Await,
    Instruction,
    Meetings,
    Messages,
    Program,
    Receive,
    Rows,
    Run,
    Send,
    Source,
    explain_stuck_messages,
    source_of,
)
from megatron_vshape.core.program.kernels import lower_to_kernels

_WINDOW = 2
"""Receives posted ahead per stream and sender.

Two hide the latency; each costs the memory of one activation tensor.
"""


def lower(
    schedule: Schedule,
    timeline: Timeline | None = None,
    window: int = _WINDOW,
    *,
    kernels: bool = False,
    length_on_arrival: bool = False,
) -> Program:
    """Add P2P messages to a schedule and prove that their order cannot deadlock.

    Args:
        schedule: the schedule.
        timeline: if given, a B and the W right after it become one BW wherever nothing waits for B
            in the meantime: splitting has no benefit there, and a full backward hides collectives.
        window: receives posted ahead per stream and sender; increased if the proof requires it.
        kernels: messages are kernels, so place receives as in `program.kernels`.
        length_on_arrival: the length of a message is unknown until it arrives, so it is received
            once sent.

    >>> from megatron_vshape import lower, make
    >>> print(lower(make("1f1b", 2, 1)).text())
    post B1.0, F0.0, send F0.0, await B1.0, BW0.0
    post F0.0, await F0.0, F1.0, BW1.0, send B1.0

    Raises:
        ScheduleError: the messages deadlock however far ahead the receives are posted.
    """
    if kernels:
        planned = simulate(schedule) if timeline is None else _fuse_timeline(timeline)
        # `lower_to_kernels` proves that its program completes; it needs no search for a window.
        return lower_to_kernels(_end_at_launch(planned), length_on_arrival=length_on_arrival)
    if timeline is not None:
        schedule = fuse(timeline)
    if window < 1:
        raise ScheduleError(f"the window is {window} receives; it must be at least 1")
    messages = Messages(schedule)
    while True:
        rows = tuple(
            tuple(_instructions(messages, device, window)) for device in range(schedule.num_devices)
        )
        stuck = _stuck_devices(rows)
        if not stuck:
            return Program(schedule, rows, window)
        # A channel has at most one message per microbatch: from there on, all receives are posted
        # first.
        if window > 2 * schedule.num_microbatches:
            raise ScheduleError(explain_stuck_messages(stuck))
        window *= 2


def forward_wave(placement: Placement, num_devices: int, num_microbatches: int) -> Schedule:
    """Return the schedule of an evaluation: forwards only, each device in arrival order.

    A device with c stages runs c passes per microbatch, so microbatch m reaches stage s at about c
    * m + s. A pass comes after its inputs in this order too, so it cannot deadlock.
    """
    chunks = len(placement) // num_devices
    passes = sorted(
        (Pass(Kind.F, s, m) for s in range(len(placement)) for m in range(num_microbatches)),
        key=lambda work: (chunks * work.microbatch + work.stage, work.stage),
    )
    rows = [[work for work in passes if placement[work.stage] == d] for d in range(num_devices)]
    return Schedule("evaluation", num_devices, num_microbatches, placement, tuple(map(tuple, rows)))


def with_full_backwards(schedule: Schedule, stages: Container[int] | None = None) -> Schedule:
    """Replace B and W by BW, for these stages or for all.

    For schedules planned with full backwards, and for recomputed layers: a split would keep all
    recomputed activations of a layer from B to W. No pass waits for a W, so the order stays valid.
    """

    def is_selected(work: Pass) -> bool:
        return stages is None or work.stage in stages

    rows = tuple(
        tuple(
            work._replace(kind=Kind.BW) if work.kind is Kind.B and is_selected(work) else work
            for work in row
            if not (work.kind is Kind.W and is_selected(work))
        )
        for row in schedule.order
    )
    return replace(schedule, order=rows)


def fuse(timeline: Timeline) -> Schedule:
    """Fuse B and W to BW wherever the reader of B starts late enough.

    The times decide, so that fusing delays no pass: a BW sends its gradient at its end, and with a
    separate cost it ends no later than W. Overlapped F&B pairs do not change, as they have costs
    for either.
    """
    return _fuse_timeline(timeline).schedule


def _latest_ends_us(timeline: Timeline) -> dict[Pass, float]:
    """Return the latest end of each result with readers on other stages, without any delay."""
    schedule = timeline.schedule
    reads: dict[tuple[Kind, int], list[tuple[Kind, int, float]]] = {}
    latest_ends: dict[Pass, float] = {}
    for device, row in enumerate(schedule.order):
        for (kind, stage, microbatch), start in zip(row, timeline.starts[device], strict=True):
            # Computed once for all microbatches, because a step has thousands of passes.
            if (kind, stage) not in reads:
                reads[kind, stage] = list(_remote_reads(timeline, kind, stage))
            for source_kind, source_stage, send_us in reads[kind, stage]:
                result = Pass(source_kind, source_stage, microbatch)
                latest_ends[result] = min(start - send_us, latest_ends.get(result, math.inf))
    return latest_ends


def _remote_reads(timeline: Timeline, kind: Kind, stage: int) -> Iterator[tuple[Kind, int, float]]:
    """Yield the inputs of such passes from other stages: kind, stage and message time."""
    placement = timeline.schedule.placement
    for read in kind.reads:
        for source_stage in read.stages(stage, len(placement)):
            # A local input needs no message; with `at`, the pass may be on another device despite
            # its stage number, because each device has such a pass.
            if source_stage != stage or read.at:
                is_remote = placement[source_stage] != placement[stage]
                send_us = timeline.message_us(source_stage, stage) if is_remote else 0.0
                yield find_kind(read.kind), source_stage, send_us


def _fuse_timeline(timeline: Timeline) -> Timeline:
    """Return the timeline of the fused schedule; a BW spans the times of its B and W.

    This is later than a BW could end, but no pass waits for it.
    """
    schedule, full_us = timeline.schedule, timeline.whole_backward_us
    deadline = _latest_ends_us(timeline)
    fused_kinds = {kind.does: kind for kind in KINDS if len(kind.does) > 1}
    # The B of an overlapped pair is the second pass of a step, which has no place for its W.
    paired_backwards = set(schedule.overlapped_pairs().values())
    rows, all_starts, all_ends = [], [], []
    for device in range(schedule.num_devices):
        row, starts, ends = list[Pass](), list[float](), list[float]()
        for work, start, end in timeline.slots(device):
            last = row[-1] if row else None
            fused_kind = fused_kinds.get((last.kind, work.kind)) if last else None
            if fused_kind and last and last[1:] == work[1:] and last not in paired_backwards:
                # A BW with a separate cost can be shorter than B + W.
                fused_end = end if full_us is None else starts[-1] + full_us[work.stage]
                if fused_end <= min(end, deadline.get(last, end)):
                    row[-1], ends[-1] = work._replace(kind=fused_kind), end
                    continue
            row.append(work)
            starts.append(start)
            ends.append(end)
        rows.append(tuple(row))
        all_starts.append(tuple(starts))
        all_ends.append(tuple(ends))
    fused = replace(schedule, order=tuple(rows))
    return replace(timeline, schedule=fused, starts=tuple(all_starts), ends=tuple(all_ends))


def _end_at_launch(timeline: Timeline) -> Timeline:
    """Return the timeline in which passes of other resources end when they are launched."""
    if all(kind.resource == PROCESSOR for kind in timeline.schedule.kinds):
        return timeline
    starts, ends = [], []
    for device in range(timeline.schedule.num_devices):
        times, clock = [], 0.0
        for work, start, end in timeline.slots(device):
            # The host launches copies and collectives on other streams and goes on to the next
            # pass.
            times.append((start, end) if work.kind.resource == PROCESSOR else (clock, clock))
            clock = times[-1][1]
        starts.append(tuple(start for start, _ in times))
        ends.append(tuple(end for _, end in times))
    return replace(timeline, starts=tuple(starts), ends=tuple(ends))


def _instructions(messages: Messages, device: int, window: int) -> Iterator[Instruction]:
    """Yield the instructions of one device, with `window` receives posted ahead per source.

    Receives are posted in the sender's order. A pass that reads a message beyond the window also
    posts all messages before it.
    """
    incoming = dict(sorted(messages.sent[device].items()))
    position = {
        message.work: index for stream in incoming.values() for index, message in enumerate(stream)
    }
    posted = dict.fromkeys(incoming, 0)

    def post(source: Source, stop: int) -> Iterator[Receive]:
        for message in incoming[source][posted[source] : stop]:
            posted[source] += 1
            yield Receive(message)

    # The window is filled before the first pass.
    for source in incoming:
        yield from post(source, window)
    for step in messages.steps[device]:
        for message in filter(None, map(messages.read_by.get, step)):
            source, index = source_of(message), position[message.work]
            # A pass may read beyond the window: post all earlier messages too, for FIFO order.
            yield from post(source, index + 1)
            yield Await(message)
            yield from post(source, index + 1 + window)
        yield Run(*step)
        yield from map(Send, filter(None, map(messages.sent_by.get, step)))


def _stuck_devices(rows: Rows) -> dict[int, Instruction]:
    """Return the blocked devices with their instructions, if sends wait for their receives."""
    positions = [0] * len(rows)
    posted: set[Pass] = set()
    sent_passes: set[Pass] = set()
    meetings = Meetings(len(rows))
    ready = list(range(len(rows)))
    while ready:
        device = ready.pop()
        for instruction in rows[device][positions[device] :]:
            if isinstance(instruction, Receive):
                posted.add(instruction.message.work)
                # The sender may be blocked in its Send by this receive.
                ready.append(instruction.message.source)
            elif isinstance(instruction, Send):
                if instruction.message.work not in posted:
                    break
                sent_passes.add(instruction.message.work)
                ready.append(instruction.message.target)
            elif isinstance(instruction, Run):
                if not meetings.comes(device, instruction.work, ready):
                    break
            elif isinstance(instruction, Await) and instruction.message.work not in sent_passes:
                break
            positions[device] += 1
    remaining = ((device, row[positions[device] :]) for device, row in enumerate(rows))
    return {device: instructions[0] for device, instructions in remaining if instructions}


class DeferredWgradOverlap(NamedTuple):
    """The W right after a B, and the share of its jobs that B can run without delay."""

    weights: Pass
    share: float  # above 0, at most 1


def deferred_weight_overlap(
    timeline: Timeline, has_tied_embeddings: bool = False
) -> dict[Pass, DeferredWgradOverlap]:
    """Return for each B the next W whose jobs it can run between its own kernels.

    With tensor parallelism, B waits in every layer for an all-reduce, which a full backward hides
    behind its weight gradients. The W is of another microbatch or stage, so its jobs exist. B ends
    later by the jobs that it runs, but according to the timeline its reader does not wait. So no
    pass is delayed, and W ends earlier.

    Every sum keeps its order: B adds to gradients of norms and biases, W to those of linear layers.
    With `has_tied_embeddings`, B of the first stage and W of the last both add to the
    embedding's gradient, so these two are not combined.

    The W right before a B is not used: it runs there because B's input has not arrived yet.
    """
    schedule = timeline.schedule
    outer_stages = (0, schedule.num_stages - 1)
    latest_ends = _latest_ends_us(timeline)
    overlapped = set(schedule.overlapped_pairs().values())
    overlaps: dict[Pass, DeferredWgradOverlap] = {}
    for device in range(schedule.num_devices):
        slots = list(timeline.slots(device))
        for slot, next_slot in itertools.pairwise(slots):
            work, next_work = slot.work, next_slot.work
            if (work.kind, next_work.kind) != (Kind.B, Kind.W) or work[1:] == next_work[1:]:
                continue
            if work in overlapped:  # its F already fills the wait
                continue
            if has_tied_embeddings and (work.stage, next_work.stage) == outer_stages:
                continue
            slack_us = latest_ends.get(work, math.inf) - slot.end
            length_us = next_slot.end - next_slot.start
            # A share, because W runs as jobs, one per linear layer: B runs those that fit before
            # its reader waits.
            if slack_us > 0:
                share = 1.0 if slack_us >= length_us else slack_us / length_us
                overlaps[work] = DeferredWgradOverlap(next_work, share)
    return overlaps


_SIMPLE = {Kind.F, Kind.B, Kind.W, Kind.BW}


EXCHANGED = 0.3
"""Share of collectives in the time of an F and a B of an MoE model, if the costs lack it."""


def pair_adjacent(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Run an F and the next pass, a B or BW, as one pass if neither waits for the other.

    An overlapped pair starts when the inputs of both are ready, and sends both results at its end.
    If all neighbours were paired, V-Half and V-Min would deadlock. Therefore pairs are chosen
    during a simulation: an F is paired if the input of its backward is ready when the F can start.
    All passes can run in the order of the simulated starts, so the pairs cannot deadlock. Nothing
    is paired if the later results cost more time than the overlapped communication can save.

    A schedule with overlapped pairs, such as `dualpipev`, or with passes other than F, B, W and BW
    is returned unchanged.
    """
    if schedule.overlapped or not schedule.kinds <= _SIMPLE:
        return schedule
    scaled_costs = costs_of(schedule, costs)
    paired = replace(schedule, overlapped=_Pairing(schedule, scaled_costs).paired())
    lost_us = simulate(paired, costs).makespan - simulate(schedule, costs).makespan
    # With known collectives, `overlapped_us` already includes the saving.
    saved_us = 0.0  # not in the simulated times
    if scaled_costs.by_stage.keys().isdisjoint(COLLECTIVE_TIMES[:2]):
        in_pairs_us = [_length_us(scaled_costs, pair) for pair in paired.overlapped_pairs().items()]
        saved_us = EXCHANGED * sum(in_pairs_us) / schedule.num_devices
    return paired if lost_us <= saved_us else schedule


def _length_us(costs: Costs, step: tuple[Pass, ...]) -> float:
    """Return the time of a pass or of a pair."""
    kind, stage, _ = step[-1]
    if len(step) == 1:
        return costs.time_us(kind, stage)
    return costs.overlapped_us(step[0].stage, kind, stage)


class _Pairing:
    """Simulates the devices, always the step that starts first."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.at = [0] * schedule.num_devices
        self.clock_us = [0.0] * schedule.num_devices
        self.done_us: dict[Pass, float] = {}
        self.starts: list[tuple[float, int]] = []  # a heap of starts and devices
        # Pass -> devices that wait for it.
        self.waiting_devices: dict[Pass, list[int]] = defaultdict(list)

    def paired(self) -> frozenset[Pass]:
        """Return the F that run with the pass behind them."""
        overlapped = set[Pass]()
        for device in range(self.schedule.num_devices):
            self._wait(device)
        while self.starts:
            start_us, device = heappop(self.starts)
            position = self.at[device]
            step = self.schedule.order[device][position : position + 2]
            # Steps leave the heap in the order of their starts: an input that is ready by now has
            # run.
            if can_overlap(step) and self._inputs_us(step[1]) <= start_us:
                overlapped.add(step[0])
            else:
                step = step[:1]
            self._run(step, device, start_us)
        return frozenset(overlapped)

    def _wait(self, device: int) -> None:
        """Record the earliest start of the device's next pass, or the pass that it waits for."""
        row, position = self.schedule.order[device], self.at[device]
        if position == len(row):
            return
        # The first missing input is enough: when it is made, `_run` calls this function again.
        for dependency in row[position].needs(self.schedule.num_stages):
            if dependency not in self.done_us:
                self.waiting_devices[dependency].append(device)
                return
        heappush(self.starts, (max(self.clock_us[device], self._inputs_us(row[position])), device))

    def _inputs_us(self, work: Pass) -> float:
        """Return when the inputs of a pass are on its device; infinity if one has not run."""
        latest_us, placement = 0.0, self.schedule.placement
        for dependency in work.needs(self.schedule.num_stages):
            is_remote = placement[dependency.stage] != placement[work.stage]
            send_us = self.costs.message_us(work.stage, dependency.stage) if is_remote else 0.0
            latest_us = max(latest_us, self.done_us.get(dependency, float("inf")) + send_us)
        return latest_us

    def _run(self, step: tuple[Pass, ...], device: int, start_us: float) -> None:
        end_us = start_us + _length_us(self.costs, step)
        self.clock_us[device] = end_us
        self.at[device] += len(step)
        # Readers wait for a B, which is part of a BW.
        results = [work._replace(kind=part) for work in step for part in work.parts()]
        self.done_us |= dict.fromkeys(results, end_us)
        for result in results:
            for waiting_device in self.waiting_devices.pop(result, ()):
                self._wait(waiting_device)
        self._wait(device)
