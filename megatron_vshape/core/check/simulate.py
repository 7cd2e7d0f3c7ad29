"""The event simulator: a schedule and costs become a timeline."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise, product
from typing import NamedTuple, NoReturn

from megatron_vshape.core.check.deadlock import explain_deadlock
from megatron_vshape.core.model.costs import Costs, joint_name
from megatron_vshape.core.model.kinds import COPY_OUT, RELOAD, Kind, ScheduleError
from megatron_vshape.core.model.numbering import (
    NONE,
    Lists,
    Numbered,
    Numbers,
    Times,
    in_lists,
    lists_of,
    number,
    soonest,
)
from megatron_vshape.core.model.passes import NeedTable, Pass
from megatron_vshape.core.model.schedule import Lane, Schedule, Timeline

HOST_BLOCKS = 16
"""Host memory is made in blocks, of which what waits there takes at least so many: little of its
last one is unused."""

NOT_YET = -1.0
"""The end of a pass that has not run."""


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Return when every pass runs if each starts as soon as its device and its inputs allow.

    A resource of a device runs its passes in order, one at a time; where the schedule or the costs
    say half duplex, both links to the host are one. A joint pass starts when the inputs of both of
    its passes are there, and both end when it does. A result that crosses devices
    arrives `send_us` after its pass has ended; sending occupies no device. Without `costs` every
    chunk pass takes one unit and messages take none.

    >>> from megatron_vshape import Costs, make, simulate
    >>> timeline = simulate(make("1f1b", 4, 8), Costs.uniform(4, 4, backward=1.2, weight=0.8))
    >>> timeline.makespan, f"{timeline.bubble:.0%}"
    (66.0, '27%')

    Raises:
        ScheduleError: the costs are for another number of stages, or the order deadlocks.
    """
    return _Simulation(schedule, costs_of(schedule, costs)).run()


def costs_of(schedule: Schedule, costs: Costs | None = None) -> Costs:
    """Return what the stages cost with the schedule's settings of recompute; or unit costs.

    Raises:
        ScheduleError: the costs are for another number of stages, or lack a setting.
    """
    if costs is None:
        return unit_costs(schedule)
    check_costs(costs, schedule.num_stages)
    return costs.at(schedule.recompute)


def unit_costs(schedule: Schedule) -> Costs:
    """Return costs of one unit for a pass of one of 2 * num_devices stages, as the paper has it.

    What passes of other kinds than the paper's take and hold is one unit, too.
    """
    return Costs.uniform(schedule.num_devices, schedule.num_stages, kinds=schedule.kinds)


def check_costs(costs: Costs, num_stages: int) -> None:
    """Raise ScheduleError unless the costs are for `num_stages` stages."""
    if costs.num_stages != num_stages:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, the schedule has {num_stages}"
        )


class _Lanes(NamedTuple):
    """The passes of all lanes, by their places, and what each reads and takes."""

    begin: Numbers  # of a lane; at last where all end
    sort: Numbers
    microbatch: Numbers
    place_of: Numbers  # [sort * num_microbatches + microbatch]; NONE if it never runs
    needs: Lists  # sorts that one reads
    sent_us: Times  # how long the result of a need is on its way
    time_us: Times  # of a sort
    joint_us: Times  # of a joint pass, at the place of its F; NONE of any other
    num_microbatches: int


class _Running(NamedTuple):
    """How far the lanes are, changed in place. Of what is not there, the end is the last: 0."""

    starts: Times
    ends: Times  # NOT_YET of what has not run
    reached: Numbers  # of a lane: its first pass left
    awake: Numbers  # lanes that may go on; those that do are the first
    waiting: Numbers  # of a place: the lane that waits for it, NONE if none does
    following: Numbers  # of a lane: the next that waits for the same place


def _run_lanes(lanes: _Lanes, run: _Running) -> int:
    """Run every lane until it must wait, and wake it when what it waits for is there.

    Returns how many passes have run.
    """
    left = len(lanes.begin) - 1
    for lane in range(left):
        run.awake[lane] = lane
        run.reached[lane] = lanes.begin[lane]
    done = 0
    while left:
        left -= 1
        lane = run.awake[left]
        place = run.reached[lane]
        clock = run.ends[place - 1] if place > lanes.begin[lane] else 0.0
        while place < lanes.begin[lane + 1]:
            joint = lanes.joint_us[place] != NONE
            start = _start(lanes, run, lane, place, clock)
            if joint and start != NOT_YET:
                start = _start(lanes, run, lane, place + 1, start)
            if start == NOT_YET:
                break
            length_us = lanes.joint_us[place] if joint else lanes.time_us[lanes.sort[place]]
            clock = start + length_us
            for each in range(place, place + 1 + joint):
                run.starts[each], run.ends[each] = start, clock
                left = _wake(run, each, left)
            place += 1 + joint
        done += place - run.reached[lane]
        run.reached[lane] = place
    return done


def _start(lanes: _Lanes, run: _Running, lane: int, place: int, start: float) -> float:
    """Return when the lane's pass can start, from `start` on; NOT_YET while that is not known."""
    sort, microbatch = lanes.sort[place], lanes.microbatch[place]
    for at in range(lanes.needs.begin[sort], lanes.needs.begin[sort + 1]):
        need = lanes.place_of[lanes.needs.of[at] * lanes.num_microbatches + microbatch]
        if need == NONE:
            return NOT_YET
        end = run.ends[need]
        if end == NOT_YET:
            run.following[lane] = run.waiting[need]
            run.waiting[need] = lane
            return NOT_YET
        if end + lanes.sent_us[at] > start:
            start = end + lanes.sent_us[at]
    return start


def _wake(run: _Running, place: int, left: int) -> int:
    """Wake the lanes that wait for a pass, and return how many are awake then."""
    lane = run.waiting[place]
    while lane != NONE:
        run.awake[left] = lane
        left += 1
        lane = run.following[lane]
    return left


class _Simulation:
    """A schedule at some costs, in numbers."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        one_way = costs.half_duplex and not schedule.half_duplex
        self.lanes = (replace(schedule, half_duplex=True) if one_way else schedule).lanes()
        self.table = NeedTable(schedule.num_stages, schedule.kinds)
        composed = schedule.kinds.difference(self.table.parts)
        self.kinds = (*self.table.parts, *sorted(composed))
        self.stages = range(schedule.num_stages)

    def run(self) -> Timeline:
        passes = number(
            [lane.passes for lane in self.lanes],
            self.kinds,
            self.schedule.num_stages,
            self.schedule.num_microbatches,
        )
        size, lanes = len(passes.sort), len(self.lanes)
        running = _Running(
            starts=[0.0] * size,
            ends=[NOT_YET] * size + [0.0],
            reached=[0] * lanes,
            awake=[0] * lanes,
            waiting=[NONE] * (size + 1),
            following=[NONE] * lanes,
        )
        run, numbers, running = soonest(
            size, _run_lanes, (_start, _wake), self._numbers(passes), running
        )
        done, running = run(numbers, running), in_lists(running)
        if done < size:
            self._explain(passes, running)
        cut = list(pairwise(passes.begin))
        starts, ends = (
            _by_device(self.schedule, self.lanes, [times[begin:end] for begin, end in cut])
            for times in (running.starts, running.ends)
        )
        return Timeline(self.schedule, starts, ends, self.costs.send_us, self.costs.whole_us)

    def _numbers(self, passes: Numbered) -> _Lanes:
        """Return the lanes with what their passes read, and how long that and they take."""
        placement, count = self.schedule.placement, len(self.kinds)
        self._end_what_is_not_there(passes)
        needs, sent_us, time_us = [], [], []
        for stage, kind in product(self.stages, self.kinds):
            own = self.table.needs[kind][stage]
            needs.append([count * other + part for part, other in own])
            sent_us += [
                self.costs.send_us * (placement[other] != placement[stage]) for _, other in own
            ]
            time_us.append(self.costs.time_us(kind, stage) if kind in self.schedule.kinds else 0.0)
        return _Lanes(
            **passes._asdict(),
            needs=lists_of(needs),
            sent_us=sent_us,
            time_us=time_us,
            joint_us=self._joint_us(len(passes.sort)),
            num_microbatches=self.schedule.num_microbatches,
        )

    def _end_what_is_not_there(self, passes: Numbered) -> None:
        """Let nobody wait for passes that a microbatch may do without, and does."""
        m = self.schedule.num_microbatches
        for stage, part in product(self.stages, self.table.at_will):
            first = (len(self.kinds) * stage + part) * m
            for at in range(first, first + m):
                if passes.place_of[at] == NONE:
                    passes.place_of[at] = len(passes.sort)

    def _joint_us(self, size: int) -> list[float]:
        """Return what joint passes take, at the places of their F."""
        found, price = [float(NONE)] * size, cache(self.costs.joint_us)
        rows = chain.from_iterable(lane.passes for lane in self.lanes)
        for place, (work, beside) in enumerate(pairwise(rows) if self.schedule.joint else ()):
            if work in self.schedule.joint:
                found[place] = price(work.stage, beside.kind, beside.stage)
        return found

    def _explain(self, passes: Numbered, running: _Running) -> NoReturn:
        ends = pairwise(passes.begin)
        stuck = {
            at: reached - begin
            for at, (reached, (begin, end)) in enumerate(zip(running.reached, ends, strict=True))
            if reached < end
        }
        beside = self.schedule.beside()
        raise ScheduleError(explain_deadlock(self.lanes, self.table, stuck, beside))


def _by_device(
    schedule: Schedule, lanes: Sequence[Lane], times: Iterable[Sequence[float]]
) -> tuple[tuple[float, ...], ...]:
    """Return the times of all lanes in the order of the devices' passes."""
    if len(lanes) == len(schedule.order):  # every device has its processor's alone
        return tuple(map(tuple, times))
    rows = [[0.0] * len(passes) for passes in schedule.order]
    for lane, own in zip(lanes, times, strict=True):
        for at, time in zip(lane.places, own, strict=True):
            rows[lane.device][at] = time
    return tuple(map(tuple, rows))


def held_curve(schedule: Schedule, costs: Costs, device: int) -> list[float]:
    """Return what the device holds while each of its passes runs, in the unit of the costs."""
    passes, costs = schedule.order[device], costs_of(schedule, costs)
    return _held(passes, costs, {work.kind for work in passes})


def peak_held(schedule: Schedule, costs: Costs | None = None) -> tuple[float, ...]:
    """Return the most that each device holds, in chunks or in the unit of the costs' memory.

    A chunk is 1 / (2 * num_devices) of the model's activations of one microbatch.

    >>> from megatron_vshape import make, peak_held
    >>> peak_held(make("1f1b", 4, 8)), peak_held(make("v-half", 4, 8))
    ((8.0, 6.0, 4.0, 2.0), (6.0, 6.0, 6.0, 6.0))
    """
    costs = costs_of(schedule, costs)
    kinds = schedule.kinds
    return tuple(max(_held(passes, costs, kinds), default=0.0) for passes in schedule.order)


def peak_in_host(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the most that host memory holds of each device, in the unit of the costs' memory.

    It follows from the device's row, like what the device holds, so that slower copies never make
    it more: a microbatch is there from where its copy may begin until its backward, for which it
    must be back.
    """
    moved = costs_of(schedule, costs).held(RELOAD)[0]
    return tuple(_peak_in_host(passes, moved) for passes in schedule.order)


def filled(num_bytes: float) -> float:
    """Return how much may wait in so much host memory, as the last block is not always full."""
    return num_bytes / (1 + 1 / HOST_BLOCKS)


def _peak_in_host(passes: Sequence[Pass], moved: Sequence[float]) -> float:
    held, peak = dict[tuple[int, int], float](), 0.0
    for work in passes:
        if work.kind is COPY_OUT:
            held[work[1:]] = moved[work.stage]
            peak = max(peak, sum(held.values()))
        elif Kind.B in work.kind.does:
            held.pop(work[1:], None)
    return peak


def _held(passes: Sequence[Pass], costs: Costs, kinds: Iterable[Kind]) -> list[float]:
    changes = {kind: costs.changes(kind) for kind in kinds}
    held, curve = 0.0, []
    for kind, stage, _ in passes:
        at_start, at_end = changes[kind]
        held += at_start[stage]
        curve.append(held)
        held += at_end[stage]
    return curve


def times_in(
    timelines: Iterable[Timeline],
) -> tuple[dict[tuple[Kind, int], list[float]], dict[str, list[float]]]:
    """Return what passes took, by kind and stage, and joint passes, by name."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    joint: dict[str, list[float]] = defaultdict(list)
    for timeline in timelines:
        beside = timeline.schedule.beside()
        joined = set(beside.values())
        for device in range(timeline.schedule.num_devices):
            for work, start, end in timeline.slots(device):
                if (other := beside.get(work)) is not None:
                    joint[joint_name(work.stage, other.kind, other.stage)].append(end - start)
                elif work not in joined:
                    times[work.kind, work.stage].append(end - start)
    return times, joint
