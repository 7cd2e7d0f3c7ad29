"""The event simulator: a schedule and costs become a timeline."""

from collections.abc import Sequence

from megatron_vshape.core.check.deadlock import explain_deadlock
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.passes import (
    PART_OF,
    PARTS,
    PARTS_OF,
    Kind,
    Pass,
    ScheduleError,
    need_table,
)
from megatron_vshape.core.model.schedule import Schedule, Timeline


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Return when every pass runs if each starts as soon as its device and its inputs allow.

    A device runs its passes in order, one at a time. A result that crosses devices arrives
    `send_us` after its pass has ended; sending occupies no device. Without `costs` every chunk
    pass takes one unit and messages take none.

    Raises:
        ScheduleError: the costs are for another number of stages, or the order deadlocks.
    """
    costs = unit_costs(schedule) if costs is None else costs
    check_costs(costs, schedule.num_stages)
    return _Simulation(schedule, costs).run()


def unit_costs(schedule: Schedule) -> Costs:
    """Return costs of one unit for a pass of one of 2 * num_devices stages, as the paper has it."""
    return Costs.uniform(schedule.num_devices, schedule.num_stages)


def check_costs(costs: Costs, num_stages: int) -> None:
    """Raise ScheduleError unless the costs are for `num_stages` stages."""
    if costs.num_stages != num_stages:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, the schedule has {num_stages}"
        )


class _Simulation:
    """Runs every device until it must wait, and wakes it when what it waits for is there."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        stages, microbatches = schedule.num_stages, schedule.num_microbatches
        self.schedule = schedule
        self.needs = need_table(stages)
        self.time_us = {kind: [costs.time_us(kind, s) for s in range(stages)] for kind in Kind}
        self.send_us = costs.send_us
        self.whole_backward_us = costs.whole_backward_us
        self.end: list[list[list[float | None]]] = [
            [[None] * microbatches for _ in range(stages)] for _ in PARTS
        ]
        self.starts: list[list[float]] = [[] for _ in schedule.order]
        self.ends: list[list[float]] = [[] for _ in schedule.order]
        self.waiting: dict[tuple[int, int, int], list[int]] = {}

    def run(self) -> Timeline:
        awake = list(range(self.schedule.num_devices))
        while awake:
            self._advance(awake.pop(), awake)
        stuck = {
            device: len(self.ends[device])
            for device, passes in enumerate(self.schedule.order)
            if len(self.ends[device]) < len(passes)
        }
        if stuck:
            raise ScheduleError(explain_deadlock(self.schedule, stuck))
        starts, ends = tuple(map(tuple, self.starts)), tuple(map(tuple, self.ends))
        return Timeline(self.schedule, starts, ends, self.send_us, self.whole_backward_us)

    def _advance(self, device: int, awake: list[int]) -> None:
        """Run the device's passes up to the first whose inputs are not there yet."""
        placement = self.schedule.placement
        starts, ends = self.starts[device], self.ends[device]
        clock = ends[-1] if ends else 0.0
        passes = self.schedule.order[device]
        for at in range(len(ends), len(passes)):
            kind, stage, microbatch = work = passes[at]
            start = clock
            for part, other in self.needs[PART_OF[kind]][stage]:
                done = self.end[part][other][microbatch]
                if done is None:
                    self.waiting.setdefault((part, other, microbatch), []).append(device)
                    return
                if placement[other] != device:
                    done += self.send_us
                start = max(start, done)
            clock = start + self.time_us[kind][stage]
            starts.append(start)
            ends.append(clock)
            self._finish(work, clock, awake)

    def _finish(self, work: Pass, clock: float, awake: list[int]) -> None:
        for part in PARTS_OF[work.kind]:
            self.end[part][work.stage][work.microbatch] = clock
            if self.waiting:
                awake.extend(self.waiting.pop((part, work.stage, work.microbatch), ()))


def held_curve(schedule: Schedule, costs: Costs, device: int) -> list[float]:
    """Return what the device holds while each of its passes runs, in the unit of the costs."""
    return _held(schedule.order[device], costs)


def peak_held(schedule: Schedule, costs: Costs | None = None) -> tuple[float, ...]:
    """Return the most that each device holds, in chunks or in the unit of the costs' memory."""
    costs = unit_costs(schedule) if costs is None else costs
    check_costs(costs, schedule.num_stages)
    return tuple(max(_held(passes, costs), default=0.0) for passes in schedule.order)


def _held(passes: Sequence[Pass], costs: Costs) -> list[float]:
    after_forward, after_backward = costs.held_after_forward_bytes, costs.held_after_backward_bytes
    held, curve = 0.0, []
    for kind, stage, _ in passes:
        if kind is Kind.F:
            held += after_forward[stage]
        curve.append(held)
        if kind is Kind.B:
            held += after_backward[stage] - after_forward[stage]
        elif kind is Kind.W:
            held -= after_backward[stage]
        elif kind is Kind.BW:
            held -= after_forward[stage]
    return curve
