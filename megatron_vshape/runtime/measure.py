"""Measured timeline of a training step, and the costs derived from it.

Measurement does not synchronize: each pass records two stamps (the clock on a CPU, CUDA events on a
GPU), which are read after the step.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Lock, get_ident

import torch
import torch.distributed as dist

from megatron_vshape.core.check.simulate import times_in
from megatron_vshape.core.model.amounts import SAVED_US, Amount
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import KINDS, PROCESSOR, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule, Slot, Timeline
from megatron_vshape.core.model.stage_costs import StageCosts, stages_of_parts
from megatron_vshape.core.program.instructions import Message, Program, Send
from megatron_vshape.runtime.hosts import gather_objects
from megatron_vshape.runtime.program_runner import Carrier

US = 1e6

Held = Mapping[int, tuple[float, float]]
"""By stage: bytes of a microbatch after F and after B."""


class PassTimer:
    """Observer that records its creation time and the start and end of every pass.

    With `aligned=False`, the stamps give durations but no times on the host's clock; then the
    constructor does not synchronize the GPU.
    """

    def __init__(self, torch_device: torch.device, aligned: bool = True) -> None:
        on_gpu = torch_device.type == "cuda"
        self._clock: _CudaClock | _HostClock = _CudaClock(aligned) if on_gpu else _HostClock()
        self._passes: list[Pass] = []
        self._starts: list[object] = []
        self._ends: list[object] = []
        self._open: dict[int, list[int]] = {}  # by thread: indices of its running passes
        self._lock = Lock()  # one pass has the same index in all lists
        self._made = self._clock.stamp()

    def begins(self, *works: Pass) -> None:
        """Record the start."""
        with self._lock:
            # The end of a pass is found by its thread: one thread runs one pass at a time.
            first = len(self._passes)
            self._open[get_ident()] = [*range(first, first + len(works))]
            self._passes += works
            self._ends += [None] * len(works)
            self._starts += [self._clock.stamp()] * len(works)

    def ends(self, *works: Pass) -> None:
        """Record the end."""
        end = self._clock.stamp()
        for slot_index in self._open[get_ident()]:
            self._ends[slot_index] = end

    def busy_and_whole(self) -> tuple[float, float]:
        """Return the processor's busy time and the time from creation to the last end, in us."""
        slots = self.slots()
        # The two passes of an F&B pair have the same times; count them once.
        processor_slots = {slot[1:] for slot in slots if slot.work.kind.resource == PROCESSOR}
        busy = sum(end - start for start, end in processor_slots)
        (start_us,) = self._clock.read([self._made])
        return busy, max(slot.end for slot in slots) - start_us if slots else 0.0

    def slots(self) -> list[Slot]:
        """Return every pass with its times, in us on this process's clock; synchronizes the GPU."""
        starts, ends = self._clock.read(self._starts), self._clock.read(self._ends)
        return list(map(Slot, self._passes, starts, ends))


class _HostClock:
    """Stamps of the host's clock, in us when read."""

    def stamp(self) -> float:
        return time.perf_counter()

    def read(self, stamps: Sequence[object]) -> list[float]:
        return [stamp * US for stamp in stamps if isinstance(stamp, float)]


class _CudaClock:
    """CUDA events, optionally aligned with the host's clock by one synchronized event."""

    def __init__(self, aligned: bool) -> None:
        if aligned:
            torch.cuda.synchronize()
        self._origin = self._event()
        self._origin_us = 0.0
        if aligned:
            torch.cuda.synchronize()
            # With nothing before or after the event on the GPU, event and clock are of the same
            # moment.
            self._origin_us = time.perf_counter() * US

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stamp(self) -> torch.cuda.Event:
        return self._event()

    def read(self, stamps: Sequence[object]) -> list[float]:
        torch.cuda.synchronize()
        events = [stamp for stamp in stamps if isinstance(stamp, torch.cuda.Event)]
        return [self._origin_us + 1e3 * self._origin.elapsed_time(event) for event in events]


def merge(
    schedule: Schedule, rows: Sequence[Sequence[Slot]], ahead_us: Sequence[float] | None = None
) -> Timeline:
    """Merge the slots of all pipeline ranks into the timeline of a step that starts at zero.

    `ahead_us` is the offset of each rank's clock (see `clocks_ahead_us`); the default is a common
    clock, as on one host.
    """
    ahead = (0.0,) * len(rows) if ahead_us is None else ahead_us
    # On the first rank's clock.
    first = min(row[0].start - by for row, by in zip(rows, ahead, strict=True) if row)
    zeros = [first + by for by in ahead]
    starts = tuple(
        tuple(s.start - zero for s in row) for row, zero in zip(rows, zeros, strict=True)
    )
    ends = tuple(tuple(s.end - zero for s in row) for row, zero in zip(rows, zeros, strict=True))
    order = tuple(tuple(slot.work for slot in row) for row in rows)
    return Timeline(replace(schedule, order=order), starts, ends)


DISTURBED = 1.1
"""Slowdown of a rank's passes from which a step counts as disturbed."""


def slowdowns(
    timelines: Sequence[Timeline], usual: Mapping[tuple[Kind, int], float]
) -> list[tuple[float, ...]]:
    """Return the slowdown of every step per rank: the time of its passes relative to `usual`.

    Overlapped F&B passes and passes without a usual time do not count.
    """
    factors = []
    for timeline in timelines:
        actual_us, expected_us = [[0.0] * timeline.schedule.num_devices for _ in range(2)]
        times = times_in([timeline])
        # A pass that each device has (`of`) may include waits for other devices in its collective.
        for key, values in times.items():
            if key in usual and not key[0].of:
                device = timeline.schedule.placement[key[1]]
                actual_us[device] += sum(values)
                expected_us[device] += usual[key] * len(values)
        factors.append(
            tuple(a / b if b else 1.0 for a, b in zip(actual_us, expected_us, strict=True))
        )
    return factors


def undisturbed(
    timelines: Sequence[Timeline],
) -> tuple[Sequence[Timeline], list[tuple[int, int, float]]]:
    """Split steps into those to derive costs from, and disturbed ones (step, rank, slowdown).

    A step is disturbed if a rank's passes exceed those of the median step by a factor of
    `DISTURBED`. At least half of the steps are used.
    """
    by_step = [
        {key: statistics.median(values) for key, values in times_in([timeline]).items()}
        for timeline in timelines
    ]
    keys = set().union(*by_step)
    usual = {key: statistics.median([e[key] for e in by_step if key in e]) for key in keys}
    worst = [
        (max(row), row.index(max(row)), step)
        for step, row in enumerate(slowdowns(timelines, usual))
    ]
    left_out = sorted((deviation for deviation in worst if deviation[0] > DISTURBED), reverse=True)
    # Bad measurements are better than none, so at most half of the steps are dropped.
    del left_out[len(timelines) // 2 :]
    numbers = {step for _, _, step in left_out}
    undisturbed_timelines = [
        timeline for step, timeline in enumerate(timelines) if step not in numbers
    ]
    return undisturbed_timelines, sorted(
        (step, device, factor) for factor, device, step in left_out
    )


def measured_costs(
    timelines: Sequence[Timeline],
    send_us: float,
    held: Held,
) -> Costs:
    """Derive costs from measured steps: median pass times of each stage, and its bytes.

    - A stage with both full and split backwards has a cost for each.
    - A stage with full backwards only is divided in the ratio of all stages; without any split
      backward, in half.
    - Overlapped F&B passes are ignored. A stage that ran a pass type only in pairs has the median
      cost of the other stages.
    - The host time per pass is the gap between a W and the pass before it, because a W waits for no
      message.
    """
    gaps: list[float] = []
    times = times_in(timelines)
    for timeline in timelines:
        for device in range(timeline.schedule.num_devices):
            pairs = itertools.pairwise(
                slot for slot in timeline.slots(device) if slot.work.kind.resource == PROCESSOR
            )
            gaps += [slot.start - last.end for last, slot in pairs if slot.work.kind is Kind.W]
    # Medians, because single passes may be disturbed.
    middle = {key: statistics.median(values) for key, values in times.items()}
    paired = {
        work[:2]
        for timeline in timelines
        for pair in timeline.schedule.overlapped_pairs().items()
        for work in pair
    }
    # Pass types that ran only in F&B pairs have no separate time.
    middle |= {
        (kind, stage): statistics.median(alone)
        for kind, stage in paired - set(middle)
        if (alone := [us for key, us in middle.items() if key[0] is kind])
    }
    stages = range(timelines[0].schedule.num_stages)
    share = _share_of_b(middle)
    parts = [
        StageCosts.of(middle[Kind.F, stage], *_divide(middle, stage, share), *held[stage]).changed(
            {SAVED_US: _saved(middle, stage)}
        )
        for stage in stages
    ]
    host_us = max(0.0, statistics.median(gaps)) if gaps else 0.0
    costs = Costs(stages_of_parts(parts), send_us, host_us=host_us)
    return costs.having(dict(_shared_times(times, stages)))


def _shared_times(
    times: Mapping[tuple[Kind, int], Sequence[float]], stages: Sequence[int]
) -> Iterator[tuple[Amount, tuple[float, ...]]]:
    """Yield the times of passes without a stage, for every stage.

    This is the median over a rank's passes, and the mean over ranks for stages of other ranks. A
    collective starts at this rank's part, so its minimum has the shortest wait for other ranks.
    """
    for kind in (listed_kind for listed_kind in KINDS if listed_kind.of):
        middle = statistics.median if kind.resource == PROCESSOR else min
        times_by_stage = {
            stage: middle(times[kind, stage]) for stage in stages if (kind, stage) in times
        }
        if times_by_stage:
            mean = statistics.fmean(times_by_stage.values())
            yield kind.time, tuple(times_by_stage.get(stage, mean) for stage in stages)


def _share_of_b(middle: Mapping[tuple[Kind, int], float]) -> float:
    """Return B's share of B + W over all stages that ran both."""
    pairs = [
        (middle[Kind.B, stage], middle[Kind.W, stage])
        for kind, stage in middle
        if kind is Kind.B and (Kind.W, stage) in middle
    ]
    if not pairs:
        return 0.5
    return sum(b for b, _ in pairs) / sum(b + w for b, w in pairs)


def _saved(middle: Mapping[tuple[Kind, int], float], stage: int) -> float:
    """Return the time that a full backward saves over B + W; 0 unless all three have run.

    A negative value would be noise, because a full backward can run B and W one after the other.
    """
    if not all((kind, stage) in middle for kind in (Kind.B, Kind.W, Kind.BW)):
        return 0.0
    sum_us = middle[Kind.B, stage] + middle[Kind.W, stage]
    return max(sum_us - middle[Kind.BW, stage], 0.0)


def _divide(
    middle: Mapping[tuple[Kind, int], float], stage: int, share: float
) -> tuple[float, float]:
    if (Kind.B, stage) in middle and (Kind.W, stage) in middle:
        return middle[Kind.B, stage], middle[Kind.W, stage]
    full_us = middle[Kind.BW, stage]
    return full_us * share, full_us * (1 - share)


def measure_send_us(
    program: Program, device: int, mail: Carrier, tensor: torch.Tensor, rounds: int = 8
) -> float | None:
    """Measure the median time of a P2P message of this size to a neighbor, in us; None without one.

    Each pair of neighbors with streams in both directions exchanges `rounds` messages there and
    back, one pair after the other; the time is half of a round trip. All ranks of the pipeline must
    call this together, between steps.
    """
    durations_us: list[float] = []
    for there, back in _round_trips(program):
        if device == there.source:
            for round_index in range(rounds):
                start = time.perf_counter()
                mail.send(there, tensor)
                mail.post(back)  # after the send: a variable-length receive blocks here
                mail.wait(back)
                if tensor.is_cuda:
                    torch.cuda.synchronize()
                if round_index:  # the first round has cold caches
                    durations_us.append((time.perf_counter() - start) * US / 2)
        elif device == there.target:
            for _ in range(rounds):
                mail.post(there)
                mail.send(back, mail.wait(there))
    mail.drain()
    return statistics.median(durations_us) if durations_us else None


def clocks_ahead_us(
    program: Program,
    device: int,
    mail: Carrier,
    tensor: torch.Tensor,
    group: "dist.ProcessGroup",
    rounds: int = 32,
) -> list[float]:
    """Measure how far each rank's clock is ahead of the first rank's, in us.

    A process's clock starts with its host. For each pair of neighbors, a message goes there and
    another comes back; the neighbor's stamp is taken as the middle of the fastest of `rounds` round
    trips. The error is half of the difference between the two directions. All ranks of the pipeline
    must call this together, between steps. A small tensor gives the best accuracy.
    """
    stamps: dict[tuple[int, int], list[float]] = {}
    for there, back in _round_trips(program):
        trip_stamps = stamps[there.source, there.target] = []
        for _ in range(rounds):
            if device == there.source:
                trip_stamps.append(time.perf_counter() * US)
                mail.send(there, tensor)
                mail.post(back)
                trip_stamps.append(_arrived_us(mail.wait(back)))
            elif device == there.target:
                mail.post(there)
                trip_stamps.append(_arrived_us(mail.wait(there)))
                mail.send(back, tensor)
    mail.drain()
    everyones = gather_objects(stamps, group)
    return _ahead_of_first(everyones)


def _arrived_us(received: torch.Tensor) -> float:
    """Return the time at which the received tensor is complete, on a GPU too."""
    if received.is_cuda:
        # Synchronizing the whole device would also wait for receives that are posted ahead.
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() * US


def _ahead_of_first(everyones: Sequence[Mapping[tuple[int, int], list[float]]]) -> list[float]:
    """Return how far each clock is ahead, from the stamps of both ranks of every pair."""
    apart = {}
    for source, target in everyones[0]:
        begun_and_ended = everyones[source][source, target]
        trips = zip(
            begun_and_ended[::2],
            everyones[target][source, target],
            begun_and_ended[1::2],
            strict=True,
        )
        # The fastest trip waited least, so its middle is the most accurate.
        start_us, arrival_us, end_us = min(trips, key=lambda trip: trip[2] - trip[0])
        # If both directions take equally long, the message arrives halfway.
        apart[source, target] = arrival_us - (start_us + end_us) / 2
    ahead = {0: 0.0}
    for _ in everyones:  # each round reaches at least one more rank
        for (source, target), by in apart.items():
            if source in ahead:
                ahead.setdefault(target, ahead[source] + by)
            elif target in ahead:
                ahead[source] = ahead[target] - by
    return [ahead[device] for device in range(len(everyones))]


def _round_trips(program: Program) -> list[tuple[Message, Message]]:
    """Return a message in each direction for every pair of ranks that has both."""
    messages: dict[tuple[int, int], Message] = {}
    for row in program.instructions:
        for instruction in row:
            if isinstance(instruction, Send):
                message = instruction.message
                messages.setdefault((message.source, message.target), message)
    return [
        (message, messages[target, source])
        for (source, target), message in sorted(messages.items())
        if source < target and (target, source) in messages
    ]


def gather_slots(local_slots: Sequence[Slot], group: "dist.ProcessGroup") -> list[list[Slot]]:
    """Gather the slots of every pipeline rank, on all ranks; collective over `group`."""
    return gather_objects(list(local_slots), group)
