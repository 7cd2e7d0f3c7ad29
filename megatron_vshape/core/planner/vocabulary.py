"""A vocabulary that all devices share: its passes put into an order of F, B and W, and its costs.

What all devices join runs on each as soon as what it reads is there, and in one order everywhere,
that in which it comes to be. So a device that has not come to such a pass yet is in one that began
before, which reads nothing made after it by another: no order of this kind can deadlock, even where
each of these passes waits until all devices have come to it. T waits for nobody, so it fills idle
time, and follows the S of the next microbatch, with which the gradient of its loss comes along.

What it takes besides is a lag between the last stage's F and B: a message, the longest pass of a
device, S and two collectives. V-Half with an even number of devices, and V-Min, have room for it.
V-ZB as published has none, and with one chunk more it has; 1F1B takes two, a microbatch.
"""

import itertools
import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import add

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs, Piece
from megatron_vshape.core.model.kinds import (
    HEAD_WEIGHT,
    LOGITS,
    LOOKED_UP,
    LOOKUP,
    LOOKUP_WEIGHT,
    LOSS,
    PROCESSOR,
    VOCABULARY,
    Kind,
    ScheduleError,
)
from megatron_vshape.core.model.layers import LEAST, Pieces, without_ends
from megatron_vshape.core.model.passes import NeedTable, Pass
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Schedule

WAITING = (1, 3)
"""Microbatches of which a device holds its part of the logits for a T that finds no idle time."""

LATE = (0.0, 0.5, 1.0)
"""The share of a pass run sooner by which it may hold up the one whose turn it is.

In chunk passes at d = 8, m = 32, an output layer of 2.46 layers: V-ZB with one chunk more takes
216.5, 214.0 and 215.9, 1F1B with two 305, 293 and 301; V-Half at its own memory 223.8 by all.
"""

PATIENCE = (0.0, 1.0, 1.5)
"""How long the last stage's B is taken to wait on top while an order is made, in that stage's F.

So the F of the next microbatch goes first, and what all devices join fills the wait. It pays where
a device has one stage, and is tried there: at d = 8, m = 32, an output layer of 2.46 layers, 1F1B
takes 293, 256 and 256, of 0.62 layers 285, 244 and 251; ZB-H1 221, 243 and 236, and 239, 226, 228.
"""

MORE = {"1f1b": 1, "zb-h1": 1, "v-zb": 1}
"""Microbatches of a stage that a device may hold more of than without sharing, by schedule."""

FURTHER = 24
"""Passes of its order of which a device may run one sooner."""

SUM = 0.1
"""What a sum over all devices is taken to last where nobody says it, in F of a chunk."""

_ROUNDING = 1e-9

AHEAD = 2
"""Microbatches by which tokens are looked up before the first stage's F of them."""


def shared_pieces(
    pieces: Pieces, num_devices: int, sum_us: float, logits_bytes: float = 0.0, predicting: int = 0
) -> Pieces:
    """Return the pieces of a model whose embedding and head are shared out over all devices.

    Of the head S computes forward and input gradient, T the weight gradient, each device its part.
    `sum_us` is what putting the parts together takes, on all devices; `logits_bytes` what each
    holds of a microbatch from S to T.

    With layers of multi-token prediction, the output layer of each is shared, and the layer is the
    last stage's. Each looks its own tokens up too, and `sum_us` is of one hidden state.
    """
    first, last = pieces.first.times(1 + predicting), pieces.last.times(1 + predicting)
    sums_us = sum_us * (1 + predicting)
    amounts = _amounts(first, last, num_devices, sums_us, logits_bytes, pieces.layer.forward_us)
    ends = (pieces.first.state_bytes + pieces.last.state_bytes) / num_devices
    made = replace(without_ends(pieces), device_bytes=pieces.device_bytes + ends)
    return replace(made, others=(*pieces.others, *amounts))


def held_logits(pieces: Pieces, num_devices: int) -> float:
    """Return what a device may be taken to hold of a microbatch from S to T, if nobody says it.

    Its part of what the head keeps for its W, and a hidden state, of which a layer holds about 17.
    """
    return (
        pieces.last.held_after_backward_bytes / num_devices
        + pieces.layer.held_after_forward_bytes / 17
    )


def _amounts(
    first: Piece, last: Piece, num_devices: int, sum_us: float, logits_bytes: float, stage_us: float
) -> list[tuple[str, float]]:
    """Return what a device's passes take and hold, by name; each some kernels at least."""
    times_us = {
        LOOKUP.time: first.forward_us / num_devices,
        LOOKED_UP.time: sum_us,
        LOGITS.time: (last.forward_us + last.backward_us) / num_devices,
        LOSS.time: sum_us,
        HEAD_WEIGHT.time: last.weight_us / num_devices,
        LOOKUP_WEIGHT.time: (first.backward_us + first.weight_us) / num_devices,
    }
    least = LEAST * stage_us / num_devices
    amounts = [(name, max(least, value)) for name, value in times_us.items()]
    works = {
        LOGITS.works: max(last.forward_work_bytes, last.backward_work_bytes),
        HEAD_WEIGHT.works: last.weight_work_bytes,
    }
    given = ((name, value / num_devices) for name, value in works.items() if value)
    return [*amounts, (LOGITS.takes, logits_bytes), *given]


def without_shared(costs: Costs) -> Costs:
    """Return the costs of F, B and W, by which orders are made before they share."""
    there = (_names() | {kind.works for kind in VOCABULARY}).intersection(costs.lists())
    return costs.having(**dict.fromkeys(there)) if there else costs


def in_proportion(costs: Costs, like: Costs) -> Costs:
    """Return the costs with what `like` has of a shared vocabulary, where they lack it.

    Times are to all forwards as they are there, and bytes to what all hold.
    """
    if tells_shared(costs):
        return costs
    slower = sum(costs.forward_us) / sum(like.forward_us)
    larger = sum(costs.held_after_forward_bytes) / sum(like.held_after_forward_bytes)
    given = {
        name: tuple((larger if name == LOGITS.takes else slower) * each for each in amounts)
        for name, amounts in like.others
        if name in _names() - costs.lists().keys()
    }
    return costs.having(**given)


def uniform_shared(num_devices: int, num_stages: int) -> Costs:
    """Return equal costs, as `Costs.uniform` has them, with those of a shared vocabulary."""
    return Costs.uniform(num_devices, num_stages, kinds=VOCABULARY)


def holding_logits(costs: Costs, logits_bytes: float) -> Costs:
    """Return the costs where every device holds so much of a microbatch from S to T."""
    return costs.having(**{LOGITS.takes: (logits_bytes,) * costs.num_stages})


def tells_shared(costs: Costs) -> bool:
    """Return whether the costs say what passes of a shared vocabulary take."""
    return _names() <= {name for name, _ in costs.others}


def _names() -> set[str]:
    """Return by which names costs know what passes of a shared vocabulary take."""
    return {kind.time for kind in VOCABULARY} | {LOGITS.takes}


def more_room(name: str, costs: Costs) -> float:
    """Return how much more a device may hold when this schedule of the catalogue shares."""
    return MORE.get(name, 0) * max(costs.held_after_forward_bytes)


def most_logits_bytes(costs: Costs, waiting: int = max(WAITING)) -> float:
    """Return what a device holds of logits at most if so many microbatches' may wait for a T.

    With what passes work with that have to do with them.
    """
    works = max(max(costs.works(kind)) for kind in VOCABULARY)
    return (waiting + 1) * max(dict(costs.others).get(LOGITS.takes, (0.0,))) + works


def shared_if_told(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the schedule, in which all devices share the vocabulary if the costs tell of that."""
    if is_shared(schedule) or not tells_shared(costs):
        return schedule
    return share_vocabulary(schedule, costs, more_room(schedule.name, costs))


def is_shared(schedule: Schedule) -> bool:
    """Return whether the schedule has passes of a vocabulary that all devices share."""
    return not schedule.kinds.isdisjoint(VOCABULARY)


def share_forwards(wave: Schedule) -> Schedule:
    """Return the evaluation's schedule with a shared vocabulary's I, E, S and C.

    `wave` is that of `lowering.forward_wave`. All devices join I right before the first stage's F
    can run, and S right after the last one's, so that everything keeps one order on all of them.
    """
    last, devices = wave.num_stages - 1, wave.num_devices
    chunks = wave.num_stages // devices
    homes = [stages[0] for stages in stages_of(wave.placement, devices)]

    def place(work: Pass) -> tuple[float, int]:
        early = chunks * work.microbatch
        if work.kind in (LOOKUP, LOOKED_UP):
            return early - 0.5, VOCABULARY.index(work.kind)
        if work.kind in (LOGITS, LOSS):
            return early + last + 0.5, VOCABULARY.index(work.kind)
        return early + work.stage, work.stage

    rows = []
    for device, row in enumerate(wave.order):
        made = list(row)
        for microbatch in range(wave.num_microbatches):
            made += [Pass(kind, homes[device], microbatch) for kind in (LOOKUP, LOGITS)]
            if wave.placement[0] == device:
                made.append(Pass(LOOKED_UP, 0, microbatch))
            if wave.placement[last] == device:
                made.append(Pass(LOSS, last, microbatch))
        rows.append(tuple(sorted(made, key=place)))
    return replace(wave, order=tuple(rows))


def share_vocabulary(
    schedule: Schedule, costs: Costs, more: float = 0.0, waiting: Iterable[int] = WAITING
) -> Schedule:
    """Return the schedule with the passes of a vocabulary that all devices share.

    `costs` are those of `shared_costs`. Where a device would wait, it runs an F or a W that comes
    later, if without the logits it then holds at most so much `more` than ever in the schedule. The
    logits of so many microbatches as `waiting` says may wait for a T that finds no idle time. Of
    several ways the order that takes least time, and of these the one that holds least.

    >>> from megatron_vshape import Costs, make, simulate
    >>> from megatron_vshape.core.model.costs import Piece
    >>> from megatron_vshape.core.model.layers import with_ends
    >>> stages, nothing, head = Costs.uniform(4, 8), Piece(0, 0, 0, 0, 0), Piece(2, 2, 2, 0, 0)
    >>> schedule, costs = make("v-half", 4, 12), shared_costs(stages, nothing, head, 4, 0.1)
    >>> simulate(schedule, with_ends(stages, nothing, head)).makespan
    146.0
    >>> round(simulate(share_vocabulary(schedule, costs), costs).makespan, 1)
    95.2

    Raises:
        ScheduleError: the schedule has such passes already, is not complete, or deadlocks.
    """
    if any(kind.of for kind in schedule.kinds):
        raise ScheduleError(f"{schedule.name} has passes of a shared vocabulary already")
    verify(schedule)
    alone = costs.without_state()
    limits = [peak + more for peak in peak_held(schedule, alone)]
    patience = PATIENCE if schedule.num_stages == schedule.num_devices else PATIENCE[:1]
    ways = itertools.product(waiting, LATE, patience)
    made = [_Dealer(schedule, alone, limits, *way).deal() for way in ways]
    return min(made, key=lambda each: (simulate(each, costs).makespan, max(peak_held(each, costs))))


@dataclass(frozen=True, slots=True, order=True)
class _Joined:
    """A pass that all devices join: from when on, where the result that it reads is."""

    made_us: float
    microbatch: int
    kind: Kind
    device: int


@dataclass(frozen=True, slots=True)
class _Action:
    """What a device does next."""

    start_us: float
    step: tuple[Pass, ...]


class _Dealer:
    """Runs the schedule, and on each device whatever else there is to do in between."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        limits: list[float],
        waiting: int,
        late: float,
        patience: float = 0.0,
    ) -> None:
        self.schedule, self.costs, self.limits = schedule, costs, limits
        self.waiting, self.late = waiting, late
        stages = range(schedule.num_stages)
        self.takes_us = {
            kind: [costs.time_us(kind, stage) for stage in stages]
            for kind in (*schedule.kinds, *VOCABULARY)
        }
        self.wait_us = {LOSS: patience * self.takes_us[Kind.F][-1]}
        self.changes = {kind: costs.changes(kind) for kind in schedule.kinds}
        self.most = {  # that a pass holds more while it runs
            kind: tuple(map(add, takes, costs.works(kind)))
            for kind, (takes, _) in self.changes.items()
        }
        self.held = [0.0] * schedule.num_devices
        devices = schedule.num_devices
        self.homes = [stages[0] for stages in stages_of(schedule.placement, devices)]
        self.ends = schedule.placement[0], schedule.placement[-1]
        self.last = schedule.num_stages - 1
        self.table = NeedTable(schedule.num_stages, (*schedule.kinds, *VOCABULARY))
        self.left = [list(schedule.steps(device)) for device in range(devices)]
        self.links_us: dict[tuple[int, str], float] = {}  # until when resources are taken
        self.joins = [0] * devices  # of `joined`
        self.logits = [0] * devices  # so many S have run,
        self.weights = [0] * devices  # and T
        self.clock_us = [0.0] * devices
        self.made: list[list[Pass]] = [[] for _ in range(devices)]
        self.done_us = self._undone()
        self.reads = {  # what a pass reads: when it is done, by microbatch, and its message
            (kind, stage): [
                (self.done_us[self.table.parts[part], source], self._lag_us(source, stage))
                for part, source in needs[stage]
            ]
            for kind, needs in self.table.needs.items()
            for stage in stages
        }
        self.parts: dict[tuple[Kind, int], list[float]] = {}  # when they are there to be summed
        self.collectives_us = [0.0] * devices  # until when they are under way
        self.joined = [
            _Joined(0.0, microbatch, LOOKUP, self.ends[0])
            for microbatch in range(min(AHEAD, schedule.num_microbatches))
        ]
        self.everywhere = frozenset(range(devices))
        self.readers = self._read_by()
        self.changed = set(self.everywhere)  # devices that may do something else next than before

    def deal(self) -> Schedule:
        left = sum(map(len, self.left))
        left += 4 * self.schedule.num_devices * self.schedule.num_microbatches
        starts_us, actions = [0.0] * len(self.made), dict[int, _Action]()
        for _ in range(left):
            for device in self.changed:
                actions[device] = self._next(device)
                starts_us[device] = actions[device].start_us
            device = starts_us.index(min(starts_us))
            self.changed = {device}
            self._run(actions[device], device)
        return replace(self.schedule, order=tuple(map(tuple, self.made)))

    def _undone(self) -> dict[tuple[Kind, int], list[float]]:
        """Return when passes are done, by microbatch: never; at once, where there are none."""
        there = {work for row in self.schedule.order for work in row if not work.kind.everywhere}
        microbatches = range(
            1 + max(work.microbatch for row in self.schedule.order for work in row)
        )
        return {
            (part, stage): [
                math.inf
                if part.everywhere or part.of or Pass(part, stage, microbatch) in there
                else 0.0
                for microbatch in microbatches
            ]
            for part in self.table.parts
            for stage in range(self.schedule.num_stages)
        }

    def _lag_us(self, source: int, stage: int) -> float:
        placement = self.schedule.placement
        return self.costs.send_us if placement[source] != placement[stage] else 0.0

    def _read_by(self) -> dict[tuple[Kind, int], set[int]]:
        """Return the devices that read what a kind of pass makes on a stage."""
        found: dict[tuple[Kind, int], set[int]] = {}
        for needs in self.table.needs.values():
            for stage, reads in enumerate(needs):
                for part, source in reads:
                    readers = found.setdefault((self.table.parts[part], source), set())
                    readers.add(self.schedule.placement[stage])
        found[LOSS, self.last] = set(self.everywhere)  # the T of every device, too
        return found

    def _is_done(self, kind: Kind, stage: int, microbatch: int, end: float) -> None:
        self.done_us[kind, stage][microbatch] = end
        self.changed |= self.readers.get((kind, stage), set())

    def _next(self, device: int) -> _Action:
        """Return what the device does next, as far as is known by now."""
        now, options = self.clock_us[device], []
        if self.joins[device] < len(self.joined):
            item = self.joined[self.joins[device]]
            start = max(now, self._arrives(item.made_us, item.device, device))
            options.append(_Action(start, (Pass(item.kind, self.homes[device], item.microbatch),)))
        given = _Action(math.inf, (Pass(HEAD_WEIGHT, self.homes[device], -1),))
        if self.left[device]:
            given = self._action(self.left[device][0], device)
        filler = self._filler(device, now)
        if filler is not None and self._fits(filler, given, device):
            options.append(filler)
        if given.start_us > now:
            options += self._later(given, device)
        return min((*options, given), key=lambda each: each.start_us)

    def _action(self, step: tuple[Pass, ...], device: int) -> _Action:
        """Return the step as it comes; what runs beside the processor holds it up in nothing."""
        ready_us = max(map(self._ready_us, step))
        if step[0].kind.resource != PROCESSOR and ready_us < math.inf:
            return _Action(self.clock_us[device], step)
        return _Action(max(self.clock_us[device], ready_us), step)

    def _later(self, given: _Action, device: int) -> Iterator[_Action]:
        """Yield a W and an F that come later, and would not hold up the given pass by much."""
        seen = set()
        for step in self.left[device][:FURTHER]:
            kind, stage, _ = step[0]
            if kind in seen or kind not in (Kind.F, Kind.W) or len(step) > 1:
                continue
            seen.add(kind)
            action, most = self._action(step, device), self.most[kind][stage]
            if most and self.held[device] + most > self.limits[device] * (1 + _ROUNDING):
                continue
            least_us = (1 - self.late) * self.takes_us[kind][stage]
            if action.start_us < math.inf and action.start_us + least_us <= given.start_us:
                yield action

    def _fits(self, filler: _Action, given: _Action, device: int) -> bool:
        must = self.logits[device] - self.weights[device] > self.waiting
        takes_us = 0.0 if must else self.takes_us[HEAD_WEIGHT][self.homes[device]]
        return filler.start_us + takes_us <= given.start_us

    def _filler(self, device: int, now: float) -> _Action | None:
        """Return the next T, if it may run: the S of the next microbatch has."""
        microbatch = self.weights[device]
        ready = min(self.logits[device], microbatch + 2)
        if ready < min(microbatch + 2, self.schedule.num_microbatches) or ready == microbatch:
            return None
        done = self.done_us[LOSS, self.last][microbatch]
        if done == math.inf:
            return None
        start = max(now, self._arrives(done, self.ends[1], device))
        return _Action(start, (Pass(HEAD_WEIGHT, self.homes[device], microbatch),))

    def _arrives(self, made_us: float, source: int, device: int) -> float:
        return made_us + (self.costs.send_us if source != device else 0.0)

    def _ready_us(self, work: Pass) -> float:
        """Return when the pass has all that it reads; infinity where that is not known."""
        kind, stage, microbatch = work
        ready_us = 0.0
        for done_us, lag_us in self.reads[kind, stage]:
            ready_us = max(ready_us, done_us[microbatch] + lag_us)
        return ready_us

    def _run(self, action: _Action, device: int) -> None:
        step, first = action.step, action.step[0]
        end = action.start_us + self._length_us(step)
        if first.kind.resource == PROCESSOR:
            self.clock_us[device] = end
        else:
            link = device, first.kind.resource
            start = max(self._ready_us(first), self.links_us.get(link, 0.0))
            self.links_us[link] = end = start + self._length_us(step)
        for work in step:
            self.made[device].append(work)
            for part in work.parts():
                self._is_done(part, work.stage, work.microbatch, end)
            self._done(work, end, device)
        if not first.kind.of:
            self.left[device].remove(step)

    def _length_us(self, step: tuple[Pass, ...]) -> float:
        kind, stage, _ = step[0]
        if len(step) == 1:
            return self.takes_us[kind][stage]
        return self.costs.joint_us(stage, step[1].kind, step[1].stage)

    def _done(self, work: Pass, end: float, device: int) -> None:
        kind, stage, microbatch = work
        if kind.joins:
            self.joins[device] += 1
        if kind is LOGITS:
            self.logits[device] += 1
            self._sum(LOSS, self.last, microbatch, end, device)
        elif kind is LOOKUP:
            self._sum(LOOKED_UP, 0, microbatch, end, device)
        elif kind is HEAD_WEIGHT:
            self.weights[device] += 1
        else:
            self._call(work, end, device)
        if not kind.of:
            self.held[device] += sum(change[stage] for change in self.changes[kind])

    def _call(self, work: Pass, end: float, device: int) -> None:
        """Have all devices join what reads this pass's result, or makes that of a later one."""
        if work.kind is Kind.F and work.stage == 0:
            ahead = work.microbatch + AHEAD
            if ahead < self.schedule.num_microbatches:
                self._join(_Joined(end, ahead, LOOKUP, device))
        if work.kind is Kind.F and work.stage == self.last:
            self._join(_Joined(end, work.microbatch, LOGITS, device))
        if Kind.B in work.parts() and work.stage == 0:
            self._join(_Joined(end, work.microbatch, LOOKUP_WEIGHT, device))

    def _join(self, item: _Joined) -> None:
        insort(self.joined, item)
        self.changed |= self.everywhere

    def _sum(self, kind: Kind, stage: int, microbatch: int, end: float, device: int) -> None:
        """Put the parts together once all are there, where the sum is read."""
        home = self.schedule.placement[stage]
        parts = self.parts.setdefault((kind, microbatch), [])
        parts.append(self._arrives(end, device, home))
        if device == home:
            self.made[home].append(Pass(kind, stage, microbatch))
        if len(parts) == self.schedule.num_devices:
            begins = max(*parts, self.collectives_us[home])
            ends = begins + self.takes_us[kind][stage]
            self.collectives_us[home] = ends
            self._is_done(kind, stage, microbatch, ends + self.wait_us.get(kind, 0.0))
