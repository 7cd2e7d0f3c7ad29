"""A forward with the backward right behind it as one pass, to hide the exchanges of experts.

Megatron's combined 1F1B does so with --overlap-moe-expert-parallel-comm; here any schedule may.
"""

from collections import defaultdict
from dataclasses import replace
from heapq import heappop, heappush

from megatron_vshape.core.check.simulate import costs_of, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass, can_overlap
from megatron_vshape.core.model.schedule import Schedule

_SIMPLE = {Kind.F, Kind.B, Kind.W, Kind.BW}


EXCHANGED = 0.3
"""Share of an F and a B that exchanges take in a model of experts, if the costs do not know it."""


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
    own = costs_of(schedule, costs)
    paired = replace(schedule, overlapped=_Pairing(schedule, own).paired())
    lost_us = simulate(paired, costs).makespan - simulate(schedule, costs).makespan
    saved_us = 0.0  # beyond what the simulation knows
    if own.forward_exchange_us is None and own.backward_exchange_us is None:
        in_pairs_us = [_length_us(own, pair) for pair in paired.overlapped_pairs().items()]
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
        self.waiting: dict[Pass, list[int]] = defaultdict(list)  # devices, by what they wait for

    def paired(self) -> frozenset[Pass]:
        """Return the F that run with the pass behind them."""
        overlapped = set[Pass]()
        for device in range(self.schedule.num_devices):
            self._wait(device)
        while self.starts:
            start_us, device = heappop(self.starts)
            at = self.at[device]
            step = self.schedule.order[device][at : at + 2]
            if can_overlap(step) and self._inputs_us(step[1]) <= start_us:
                overlapped.add(step[0])
            else:
                step = step[:1]
            self._run(step, device, start_us)
        return frozenset(overlapped)

    def _wait(self, device: int) -> None:
        """Note when the device's next pass can start, or what it waits for."""
        row, at = self.schedule.order[device], self.at[device]
        if at == len(row):
            return
        for need in row[at].needs(self.schedule.num_stages):
            if need not in self.done_us:
                self.waiting[need].append(device)
                return
        heappush(self.starts, (max(self.clock_us[device], self._inputs_us(row[at])), device))

    def _inputs_us(self, work: Pass) -> float:
        """Return when the inputs of a pass are on its device; infinity if one has not run."""
        latest_us, placement = 0.0, self.schedule.placement
        for need in work.needs(self.schedule.num_stages):
            away = placement[need.stage] != placement[work.stage]
            send_us = self.costs.message_us(work.stage, need.stage) if away else 0.0
            latest_us = max(latest_us, self.done_us.get(need, float("inf")) + send_us)
        return latest_us

    def _run(self, step: tuple[Pass, ...], device: int, start_us: float) -> None:
        end_us = start_us + _length_us(self.costs, step)
        self.clock_us[device] = end_us
        self.at[device] += len(step)
        made = [work._replace(kind=part) for work in step for part in work.parts()]
        self.done_us |= dict.fromkeys(made, end_us)
        for each in made:
            for other in self.waiting.pop(each, ()):
                self._wait(other)
        self._wait(device)
