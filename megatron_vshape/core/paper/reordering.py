"""Step 4: passes move into the idle slots of warm-up and cool-down, within the memory."""

import heapq
from collections.abc import Iterator
from dataclasses import replace

from megatron_vshape.core.check.simulate import simulate, unit_costs
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.passes import NeedTable, Pass
from megatron_vshape.core.model.schedule import Schedule

_CHANGE = {Kind.F: 1, Kind.B: 0, Kind.W: -1, Kind.BW: -1}
"""How many stage activations a pass adds to those that its device holds."""

_FITS = 1e-9
"""Slots are compared with this slack, so that sums of fractions still meet."""


def reorder(schedule: Schedule, max_held: int) -> Schedule:
    """Return the schedule with idle slots filled from later in each device's order.

    The devices run in simulated time, with equal passes. One that would idle takes a later pass
    that is ready, if this delays nothing and never makes it hold more than `max_held` stage
    activations. Once a device has at most `max_held` forwards left, so few that all could be held
    at once, it cools down: W waits until nothing else can run or memory is needed. Where there is
    no idle time, as in a stable phase that repeats cleanly, nothing moves.

    Raises:
        ScheduleError: a forward does not fit `max_held`, or a pass waits for one that never runs.
    """
    order = _Reordering(schedule, max_held).run()
    return replace(schedule, order=order)


def fill_warm_up(schedule: Schedule, max_held: int, ahead: int) -> Schedule:
    """Return the schedule with idle slots filled until a device first lets go of its first stage.

    As in `reorder`, but forwards of the first stage move up only while fewer than `ahead` of
    them are held: they would take the memory that the forwards of the last stage need.

    Raises:
        ScheduleError: a forward does not fit `max_held`, or a pass waits for one that never runs.
    """
    order = _Reordering(schedule, max_held, ahead).run()
    return replace(schedule, order=order)


class _Device:
    """What one device still has to run, by kind and stage, and what it holds."""

    def __init__(self, passes: tuple[Pass, ...]) -> None:
        self.passes = passes
        self.taken = bytearray(len(passes))
        self.head = 0
        self.queues: dict[tuple[Kind, int], list[int]] = {}
        for at, work in enumerate(passes):
            self.queues.setdefault((work.kind, work.stage), []).append(at)
        for queue in self.queues.values():
            queue.reverse()  # so that pop() takes the earliest
        self.forwards = sum(work.kind is Kind.F for work in passes)
        self.held = 0
        self.clock = 0.0
        self.first_stage = passes[0].stage if passes else 0
        self.first_held = 0
        self.warm = False  # whether it has let go of an activation of its first stage

    def take(self, at: int) -> Pass:
        """Remove the pass at `at`, which must be the first of its kind and stage."""
        work = self.passes[at]
        queue = self.queues[work.kind, work.stage]
        queue.pop()
        if not queue:
            del self.queues[work.kind, work.stage]
        self.taken[at] = 1
        while self.head < len(self.passes) and self.taken[self.head]:
            self.head += 1
        change = _CHANGE[work.kind]
        self.held += change
        self.forwards -= work.kind is Kind.F
        if work.stage == self.first_stage:
            self.first_held += change
            self.warm |= change < 0
        return work

    def left_before(self, at: int) -> Iterator[Pass]:
        """Yield the passes still to run that stand before position `at`."""
        for place in range(self.head, at):
            if not self.taken[place]:
                yield self.passes[place]

    def fits(self, at: int, max_held: int) -> bool:
        """Return whether a forward moved here from `at` keeps every moment until then in memory."""
        held = self.held + 1
        if held > max_held:
            return False
        for work in self.left_before(at):
            held += _CHANGE[work.kind]
            if held > max_held:
                return False
        return True


Choice = tuple[float, int, int]
"""A start, the rank among passes of that start (lower first), a position in the order."""


class _Reordering:
    def __init__(self, schedule: Schedule, max_held: int, ahead: int | None = None) -> None:
        stages, costs = schedule.num_stages, unit_costs(schedule)
        self.ahead = ahead
        self.schedule = schedule
        self.max_held = max_held
        self.table = NeedTable(stages)
        self.time = {
            kind: [costs.time_us(kind, s) for s in range(stages)] for kind in schedule.kinds
        }
        self.end: list[list[list[float | None]]] = [
            [[None] * schedule.num_microbatches for _ in range(stages)] for _ in PARTS
        ]
        self.devices = [_Device(passes) for passes in schedule.order]

    def run(self) -> tuple[tuple[Pass, ...], ...]:
        """Run the devices in the order of their next starts; what is chosen first starts first."""
        rows: list[list[Pass]] = [[] for _ in self.devices]
        version = [0] * len(self.devices)
        heap: list[tuple[float, int, int, int]] = []

        def push(device: int) -> None:
            version[device] += 1
            choice = self._choose(device)
            if choice is not None:
                heapq.heappush(heap, (choice[0], device, version[device], choice[2]))

        for device in range(len(self.devices)):
            push(device)
        while heap:
            start, device, made, at = heapq.heappop(heap)
            if made != version[device]:
                continue
            work = self.devices[device].take(at)
            rows[device].append(work)
            self._finish(device, work, start)
            push(device)
            for reader in self._readers(work):
                if reader != device:
                    push(reader)
        self._check_all_ran()
        return tuple(map(tuple, rows))

    def _check_all_ran(self) -> None:
        """Raise ScheduleError if a device is stuck: only the memory stops what has its inputs."""
        heads = [
            (device, own.passes[own.head])
            for device, own in enumerate(self.devices)
            if own.head < len(own.passes)
        ]
        full = [each for each in heads if self._ready(*each) is not None]
        if full:
            device, work = min(full, key=lambda each: each[1].microbatch)  # others wait for it
            raise ScheduleError(
                f"{work} does not fit on device {device}, which holds {self.devices[device].held} "
                f"stage activations then and may hold {self.max_held}"
            )
        if heads:
            simulate(self.schedule)  # raises: what a pass waits for never runs

    def _finish(self, device: int, work: Pass, start: float) -> None:
        clock = start + self.time[work.kind][work.stage]
        self.devices[device].clock = clock
        for part in self.table.parts_of[work.kind]:
            self.end[part][work.stage][work.microbatch] = clock

    def _readers(self, work: Pass) -> Iterator[int]:
        """Yield the devices of the stages before and after; only they can read the result."""
        for stage in (work.stage - 1, work.stage + 1):
            if 0 <= stage < self.schedule.num_stages:
                yield self.schedule.placement[stage]

    def _ready(self, device: int, work: Pass) -> float | None:
        """Return when the pass's inputs are there; None while a pass before it has not run."""
        ready = self.devices[device].clock
        for part, stage in self.table.needs[work.kind][work.stage]:
            done = self.end[part][stage][work.microbatch]
            if done is None:
                return None
            ready = max(ready, done)
        return ready

    def _choose(self, device: int) -> Choice | None:
        """Return what the device runs next: the head of its order, or what fits in before it."""
        own = self.devices[device]
        if own.head == len(own.passes):
            return None
        cooling = self.ahead is None and own.forwards <= self.max_held
        head = own.passes[own.head]
        start = self._ready(device, head)
        if head.kind is Kind.F and own.held + 1 > self.max_held:
            start = None
        if start is not None and start <= own.clock and not (cooling and head.kind is Kind.W):
            return (start, 0, own.head)
        return min(self._candidates(device, cooling, start), default=None)

    def _candidates(self, device: int, cooling: bool, head_start: float | None) -> Iterator[Choice]:
        """Yield the first pass of every kind and stage that may run next."""
        own = self.devices[device]
        for (kind, stage), queue in own.queues.items():
            at = queue[-1]
            if at != own.head and not self._may_move(own, kind, stage):
                continue
            start = self._ready(device, own.passes[at])
            if start is None or (kind is Kind.F and not own.fits(at, self.max_held)):
                continue
            if cooling and kind is Kind.W:
                yield (start, 3, at)
            elif at == own.head or (cooling and self._only_weights_before(own, at)):
                yield (start, 0, at)
            elif head_start is None or start + self.time[kind][stage] <= head_start + _FITS:
                yield (start, 1 if kind in (Kind.B, Kind.BW) else 2, at)

    def _may_move(self, own: _Device, kind: Kind, stage: int) -> bool:
        """Return whether a pass may move up; where only the warm-up is filled, not all may."""
        if self.ahead is None:
            return True
        leads = kind is Kind.F and stage == own.first_stage
        return not own.warm and not (leads and own.first_held >= self.ahead)

    @staticmethod
    def _only_weights_before(own: _Device, at: int) -> bool:
        return all(work.kind is Kind.W for work in own.left_before(at))
