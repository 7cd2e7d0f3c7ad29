"""The timeline of a real step, and the costs that follow from it.

Nothing waits while a step runs: a pass leaves two stamps (the clock's on a CPU, events of the
CUDA stream on a GPU), which are read when the step is over.
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
from megatron_vshape.core.model.costs import Costs, Piece, joint_name
from megatron_vshape.core.model.kinds import KINDS, PROCESSOR, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule, Slot, Timeline
from megatron_vshape.core.program.instructions import Message, Program, Send
from megatron_vshape.runtime.program_runner import Carrier

US = 1e6

Held = Mapping[int, tuple[float, float]]
"""By stage: bytes of a microbatch after F and after B."""


class PassTimer:
    """An observer of the program runner that stamps its own making and every pass.

    Stamps that are not aligned with the host's clock say how long, and not when: a GPU then need
    not be waited for to begin.
    """

    def __init__(self, torch_device: torch.device, aligned: bool = True) -> None:
        on_gpu = torch_device.type == "cuda"
        self._clock: _CudaClock | _HostClock = _CudaClock(aligned) if on_gpu else _HostClock()
        self._passes: list[Pass] = []
        self._starts: list[object] = []
        self._ends: list[object] = []
        self._spent: list[tuple[float, float]] = []  # of its thread's processor, before and after
        self._open: dict[int, list[int]] = {}  # by thread: which of its passes run, as one
        self._lock = Lock()  # what belongs to one pass stands at one place of all lists
        self._made = self._clock.stamp()

    def begins(self, *works: Pass) -> None:
        """Stamp the start."""
        with self._lock:
            first, spent = len(self._passes), time.thread_time()
            self._open[get_ident()] = [*range(first, first + len(works))]
            self._passes += works
            self._ends += [None] * len(works)
            self._spent += [(spent, 0.0)] * len(works)
            self._starts += [self._clock.stamp()] * len(works)

    def ends(self, *works: Pass) -> None:
        """Stamp the end."""
        end, spent = self._clock.stamp(), time.thread_time()
        for at in self._open[get_ident()]:
            self._ends[at] = end
            self._spent[at] = (self._spent[at][0], spent)

    def busy_and_whole(self) -> tuple[float, float]:
        """Return the processor's time, and from making this to the last pass's end, in us."""
        slots = self.slots()
        # Two that run as one have the same times.
        own = {slot[1:] for slot in slots if slot.work.kind.resource == PROCESSOR}
        busy = sum(end - start for start, end in own)
        (made,) = self._clock.read([self._made])
        return busy, max(slot.end for slot in slots) - made if slots else 0.0

    def slots(self) -> list[Slot]:
        """Return every pass with its times, in us on this process's clock; waits for a GPU."""
        starts, ends = self._clock.read(self._starts), self._clock.read(self._ends)
        return list(map(Slot, self._passes, starts, ends))

    def processor_slots(self) -> list[Slot]:
        """Return every pass with its times on its thread's own clock, which waits run not on.

        Only their lengths mean something. Of passes on a GPU it is the time to launch them, and of
        passes that use several threads only the first one's.
        """
        times = [(start * US, end * US) for start, end in self._spent]
        return [Slot(work, *pair) for work, pair in zip(self._passes, times, strict=True)]


class _HostClock:
    """Stamps moments; a stamp becomes a time, in us on this process's clock, when it is read."""

    def stamp(self) -> float:
        return time.perf_counter()

    def read(self, stamps: Sequence[object]) -> list[float]:
        return [stamp * US for stamp in stamps if isinstance(stamp, float)]


class _CudaClock:
    """Events; if aligned, tied to the host's clock by one event that both have seen end."""

    def __init__(self, aligned: bool) -> None:
        if aligned:
            torch.cuda.synchronize()
        self._origin = self._event()
        self._origin_us = 0.0
        if aligned:
            torch.cuda.synchronize()
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
    """Return the timeline of a step from every device's slots; it begins at zero.

    `ahead_us` is how far each device's clock is ahead (see `clocks_ahead_us`); by default the
    clocks are one, as on one host.
    """
    ahead = (0.0,) * len(rows) if ahead_us is None else ahead_us
    first = min(row[0].start - by for row, by in zip(rows, ahead, strict=True) if row)
    zeros = [first + by for by in ahead]
    starts = tuple(
        tuple(s.start - zero for s in row) for row, zero in zip(rows, zeros, strict=True)
    )
    ends = tuple(tuple(s.end - zero for s in row) for row, zero in zip(rows, zeros, strict=True))
    order = tuple(tuple(slot.work for slot in row) for row in rows)
    return Timeline(replace(schedule, order=order), starts, ends)


DISTURBED = 1.1
"""Slowdown of a device's passes from which a step counts as disturbed."""


def slowdowns(
    timelines: Sequence[Timeline], usual: Mapping[tuple[Kind, int], float]
) -> list[tuple[float, ...]]:
    """Return of every step, by device, how many times the `usual` of its passes these took.

    Joint passes do not count, nor what has no usual time.
    """
    found = []
    for each in timelines:
        took, due = [[0.0] * each.schedule.num_devices for _ in range(2)]
        times, _ = times_in([each])
        for key, values in times.items():
            if key in usual and not key[0].of:
                device = each.schedule.placement[key[1]]
                took[device] += sum(values)
                due[device] += usual[key] * len(values)
        found.append(tuple(a / b if b else 1.0 for a, b in zip(took, due, strict=True)))
    return found


def undisturbed(
    timelines: Sequence[Timeline],
) -> tuple[Sequence[Timeline], list[tuple[int, int, float]]]:
    """Return the steps to take costs from, and those left out: number, device, how many times.

    A step is left out where a device's passes took longer than in the median step by more than
    `DISTURBED`; half of the steps are kept whatever they took.
    """
    by_step = [
        {key: statistics.median(values) for key, values in times_in([each])[0].items()}
        for each in timelines
    ]
    keys = set().union(*by_step)
    usual = {key: statistics.median([e[key] for e in by_step if key in e]) for key in keys}
    worst = [
        (max(row), row.index(max(row)), step)
        for step, row in enumerate(slowdowns(timelines, usual))
    ]
    left_out = sorted((each for each in worst if each[0] > DISTURBED), reverse=True)
    del left_out[len(timelines) // 2 :]
    numbers = {step for _, _, step in left_out}
    kept = [each for step, each in enumerate(timelines) if step not in numbers]
    return kept, sorted((step, device, factor) for factor, device, step in left_out)


def measured_costs(
    timelines: Sequence[Timeline],
    send_us: float,
    held: Held,
) -> Costs:
    """Return each stage's median pass times over measured steps, with its bytes.

    A stage that ran whole backwards beside split ones has a price for either. Where it ran none
    split, a whole one is divided as those of all stages together are; where there are none at
    all, in half. A joint pass has a price by its stages; a stage that ran a kind of pass in such
    alone has that of the other stages. What the host takes for a pass is what lies between a W and
    the pass before it: a W waits for no message.
    """
    gaps: list[float] = []
    times, joint = times_in(timelines)
    for timeline in timelines:
        for device in range(timeline.schedule.num_devices):
            pairs = itertools.pairwise(
                slot for slot in timeline.slots(device) if slot.work.kind.resource == PROCESSOR
            )
            gaps += [each.start - before.end for before, each in pairs if each.work.kind is Kind.W]
    middle = {key: statistics.median(values) for key, values in times.items()}
    middle |= {
        (kind, at): statistics.median(alone)
        for kind, at in {key for each in timelines for key in _in_joint_passes(each)} - set(middle)
        if (alone := [us for key, us in middle.items() if key[0] is kind])
    }
    stages = range(timelines[0].schedule.num_stages)
    share = _share_of_b(middle)
    costs = Costs.of(
        [
            Piece(middle[Kind.F, at], *_divide(middle, at, share), *held[at], _saved(middle, at))
            for at in stages
        ],
        send_us,
        host_us=max(0.0, statistics.median(gaps)) if gaps else 0.0,
    )
    prices = {name: statistics.median(values) for name, values in joint.items()}
    joint_prices = _joint_prices(timelines[0].schedule, costs, prices)
    return replace(costs, joint=joint_prices).having(**dict(_shared_times(times, stages)))


def _joint_prices(
    schedule: Schedule, costs: Costs, known: Mapping[str, float]
) -> tuple[tuple[str, float], ...]:
    """Return the prices of all pairs on a device, of the kinds that ran.

    A pair that did not run takes as much of its two passes' time as those that did.
    """
    placement, joint = schedule.placement, dict(known)
    for kind in (Kind.B, Kind.BW):
        pairs = {
            joint_name(f, kind, b): costs.time_us(Kind.F, f) + costs.time_us(kind, b)
            for f, holder in enumerate(placement)
            for b, other in enumerate(placement)
            if holder == other
        }
        ratios = [known[name] / apart for name, apart in pairs.items() if name in known]
        if ratios:
            share = statistics.median(ratios)
            joint = {name: share * apart for name, apart in pairs.items()} | joint
    return tuple(sorted(joint.items()))


def _in_joint_passes(timeline: Timeline) -> set[tuple[Kind, int]]:
    """Return the kinds and stages of what ran as part of a joint pass."""
    pairs = timeline.schedule.beside().items()
    return {work[:2] for pair in pairs for work in pair}


def _shared_times(
    times: Mapping[tuple[Kind, int], Sequence[float]], stages: Sequence[int]
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield what passes of a shared vocabulary took, by name and for every stage.

    The median of a device's passes; of others' stages, the devices' mean. A sum counts from this
    device's own part on, so that the shortest is the one that waited least for others' parts.
    """
    for kind in (each for each in KINDS if each.of):
        middle = statistics.median if kind.resource == PROCESSOR else min
        known = {at: middle(times[kind, at]) for at in stages if (kind, at) in times}
        if known:
            mean = statistics.fmean(known.values())
            yield kind.time, tuple(known.get(at, mean) for at in stages)


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
    """Return what a whole backward saves of B + W; 0 where not all three have run.

    Below 0 it would be noise: it may do both in turn.
    """
    if not all((kind, stage) in middle for kind in (Kind.B, Kind.W, Kind.BW)):
        return 0.0
    both = middle[Kind.B, stage] + middle[Kind.W, stage]
    return max(both - middle[Kind.BW, stage], 0.0)


def _divide(
    middle: Mapping[tuple[Kind, int], float], stage: int, share: float
) -> tuple[float, float]:
    if (Kind.B, stage) in middle and (Kind.W, stage) in middle:
        return middle[Kind.B, stage], middle[Kind.W, stage]
    whole = middle[Kind.BW, stage]
    return whole * share, whole * (1 - share)


def measure_send_us(
    program: Program, device: int, mail: Carrier, tensor: torch.Tensor, rounds: int = 8
) -> float | None:
    """Return the median time of a message of this size to a neighbour, in us, or None.

    For every pair of neighbours with streams both ways, a message goes there and another comes
    back, `rounds` times, the pairs one after the other; half a round counts. All ranks of the
    pipeline call this together, between steps. None where this device has no such neighbour.
    """
    found: list[float] = []
    for there, back in _round_trips(program):
        if device == there.source:
            for at in range(rounds):
                start = time.perf_counter()
                mail.send(there, tensor)
                mail.post(back)  # after the send: a message of any length is taken here
                mail.wait(back)
                if tensor.is_cuda:
                    torch.cuda.synchronize()
                if at:  # the first finds caches cold
                    found.append((time.perf_counter() - start) * US / 2)
        elif device == there.target:
            for _ in range(rounds):
                mail.post(there)
                mail.send(back, mail.wait(there))
    mail.drain()
    return statistics.median(found) if found else None


def clocks_ahead_us(
    program: Program,
    device: int,
    mail: Carrier,
    tensor: torch.Tensor,
    group: "dist.ProcessGroup",
    rounds: int = 32,
) -> list[float]:
    """Return how far the clock of every device is ahead of the first one's, in us.

    A process's clock counts from the start of its host. Between two neighbours a message goes
    there and another comes back; the neighbour stamps in between, and in the quickest of `rounds`
    that was the middle, but for half of what the two ways differ. All ranks of the pipeline call
    this together, between steps; a small tensor is the most accurate.
    """
    stamps: dict[tuple[int, int], list[float]] = {}
    for there, back in _round_trips(program):
        own = stamps[there.source, there.target] = []
        for _ in range(rounds):
            if device == there.source:
                own.append(time.perf_counter() * US)
                mail.send(there, tensor)
                mail.post(back)
                own.append(_arrived_us(mail.wait(back)))
            elif device == there.target:
                mail.post(there)
                own.append(_arrived_us(mail.wait(there)))
                mail.send(back, tensor)
    mail.drain()
    everyones: list[dict[tuple[int, int], list[float]]] = [{}] * group.size()
    dist.all_gather_object(everyones, stamps, group=group)
    return _ahead_of_first(everyones)


def _arrived_us(received: torch.Tensor) -> float:
    """Return when what this rank has waited for is there, on a GPU too."""
    if received.is_cuda:
        # Not the whole device: there a receive that is posted ahead would be waited for as well.
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() * US


def _ahead_of_first(everyones: Sequence[Mapping[tuple[int, int], list[float]]]) -> list[float]:
    """Return how far each clock is ahead, from what both ends of every pair have stamped."""
    apart = {}
    for source, target in everyones[0]:
        begun_and_ended = everyones[source][source, target]
        trips = zip(
            begun_and_ended[::2],
            everyones[target][source, target],
            begun_and_ended[1::2],
            strict=True,
        )
        begun, met, ended = min(trips, key=lambda trip: trip[2] - trip[0])
        apart[source, target] = met - (begun + ended) / 2
    ahead = {0: 0.0}
    for _ in everyones:  # each time at least one device more, by a neighbour that is known
        for (source, target), by in apart.items():
            if source in ahead:
                ahead.setdefault(target, ahead[source] + by)
            elif target in ahead:
                ahead[source] = ahead[target] - by
    return [ahead[device] for device in range(len(everyones))]


def _round_trips(program: Program) -> list[tuple[Message, Message]]:
    """Return a message and one that comes back, for every pair of devices that has both."""
    messages: dict[tuple[int, int], Message] = {}
    for row in program.instructions:
        for each in row:
            if isinstance(each, Send):
                message = each.message
                messages.setdefault((message.source, message.target), message)
    return [
        (message, messages[target, source])
        for (source, target), message in sorted(messages.items())
        if source < target and (target, source) in messages
    ]


def gather_slots(own: Sequence[Slot], group: "dist.ProcessGroup") -> list[list[Slot]]:
    """Return the slots of every device of the pipeline, on every one of its ranks."""
    rows: list[list[Slot]] = [[]] * group.size()
    dist.all_gather_object(rows, list(own), group=group)
    return rows
