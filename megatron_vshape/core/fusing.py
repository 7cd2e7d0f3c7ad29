"""Fuse adjacent B and W of a schedule to BW, where that is not slower."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.check.simulate import costs_of
from megatron_vshape.core.compiling import compiled
from megatron_vshape.core.model.costs import Costs, more_us
from megatron_vshape.core.model.kinds import KINDS, Kind, NeedTable
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline
from megatron_vshape.core.program.lowering import fuse

NONE = -1


class WaitGraph(NamedTuple):
    """Passes of a schedule, numbered queue by queue, with their inputs."""

    begin: np.ndarray  # [queue + 1] number of the queue's first pass
    device: np.ndarray  # [queue]
    before: np.ndarray  # [pass, input] number of a pass that it reads, or NONE
    delay_us: np.ndarray  # [pass, input] time of the message from that pass
    time_us: np.ndarray  # [pass]


def fuse_backwards(timeline: Timeline, costs: Costs, objective: Objective) -> Schedule:
    """Fuse B and the W right after it where the step does not become longer.

    Only if BW has a separate cost; otherwise `lower` fuses without any effect on times. First fuse
    where no pass is delayed, then everywhere, or stage by stage if that is slower.
    """
    if costs.whole_us is None:
        return timeline.schedule
    schedule = fuse(timeline)
    costs = costs_of(schedule, costs)
    passes = [work for lane in schedule.lanes() for work in lane.passes]
    number_of = {work: number for number, work in enumerate(passes)}
    candidates = [number_of[work] for work in _fusable(schedule, costs)]
    graph, joined = graph_of(schedule, passes, costs)
    value = run(graph, joined, objective is Objective.SPAN) if candidates else 0.0
    stages = range(schedule.num_stages)
    for tried in (stages, *((stage,) for stage in stages)):
        new = [at for at in candidates if passes[at].stage in tried and not joined[at]]
        if not new:  # they were fused everywhere
            continue
        joined[new] = True
        split_us = graph.time_us[new]
        fused = (passes[at]._replace(kind=Kind.BW) for at in new)
        graph.time_us[new] = list(_times_us(costs, fused))
        reached = run(graph, joined, objective is Objective.SPAN)
        if reached <= value:
            value = reached
        else:
            joined[new], graph.time_us[new] = False, split_us
    return _with_fused(schedule, {passes[at] for at in candidates if joined[at]})


def _fusable(schedule: Schedule, costs: Costs) -> Iterator[Pass]:
    """Yield every B with its W right after it; not those whose BW takes longer than both."""
    # The step time does not show a longer BW off the critical path.
    saving = [
        costs.time_us(Kind.BW, stage)
        <= costs.time_us(Kind.B, stage) + costs.time_us(Kind.W, stage) + 1e-9
        for stage in range(schedule.num_stages)
    ]
    paired = set(schedule.overlapped_pairs().values())
    for work, after in chain.from_iterable(map(pairwise, schedule.order)):
        follows = work.kind is Kind.B and after == work._replace(kind=Kind.W)
        if follows and saving[work.stage] and work not in paired:
            yield work


def graph_of(
    schedule: Schedule, passes: Sequence[Pass], costs: Costs
) -> tuple[WaitGraph, np.ndarray]:
    """Return the graph of the passes, and whether each is an F&B pair with the next."""
    lanes, pairs = schedule.lanes(), schedule.overlapped_pairs()
    table = NeedTable(schedule.num_stages, [kind for kind in KINDS if kind in schedule.kinds])
    numbers = {
        (part, work.stage, work.microbatch): number
        for number, work in enumerate(passes)
        for part in table.parts_of[work.kind]
    }
    most = max(len(needs) for by_stage in table.needs.values() for needs in by_stage)
    before = np.full((len(passes), most), NONE, np.int64)
    delay_us = np.zeros(before.shape)
    time_us = np.fromiter(_times_us(costs, passes), np.float64, len(passes))
    for number, work in enumerate(passes):
        for way, (part, stage) in enumerate(table.needs[work.kind][work.stage]):
            before[number, way] = numbers.get((part, stage, work.microbatch), NONE)
            if schedule.placement[stage] != schedule.placement[work.stage]:
                delay_us[number, way] = costs.message_us(work.stage, stage)
        if work in pairs:
            other = pairs[work]
            time_us[number] = costs.overlapped_us(work.stage, other.kind, other.stage)
    begin = np.cumsum([0, *(len(lane.passes) for lane in lanes)])
    device = np.array([lane.device for lane in lanes])
    joined = np.array([work in pairs for work in passes], np.bool_)
    return WaitGraph(begin, device, before, delay_us, time_us), joined


def _times_us(costs: Costs, passes: Iterable[Pass]) -> Iterator[float]:
    """Yield the time of each pass."""
    time_us = cache(costs.time_us)
    for work in passes:
        extra_us = more_us(costs, *work) if costs.by_microbatch else 0.0
        yield time_us(work.kind, work.stage) + extra_us


@compiled
def run(graph: WaitGraph, joined: np.ndarray, is_span: bool) -> float:
    """Return the time of a step as `simulate` does: of all devices, or the longest of one.

    A pass in `joined` runs together with the next of its queue, once the inputs of both are ready.
    """
    queues = len(graph.begin) - 1
    at, clock = graph.begin[:-1].copy(), np.zeros(queues)
    end = np.full(len(graph.time_us), np.inf)
    first, last = np.full(queues, np.inf), np.full(queues, -np.inf)  # by device
    has_run = True
    while has_run:
        has_run = False
        for queue in range(queues):
            device = graph.device[queue]
            while at[queue] < graph.begin[queue + 1]:
                number = at[queue]
                after = number + (2 if joined[number] else 1)
                start = _start_us(graph, number, after, end, clock[queue])
                if start == np.inf:
                    break  # an input is of a queue that has to run first
                first[device] = min(first[device], start)
                clock[queue] = start + graph.time_us[number]
                last[device] = max(last[device], clock[queue])
                end[number:after] = clock[queue]
                at[queue] = after
                has_run = True
    return float(np.max(last - first)) if is_span else float(np.max(last) - np.min(first))


@compiled
def _start_us(graph: WaitGraph, number: int, after: int, end: np.ndarray, start: float) -> float:
    """Return when the passes `number` to `after` can start; infinite if an input has not run."""
    for reader in range(number, after):
        for way in range(graph.before.shape[1]):
            source = graph.before[reader, way]
            if source != NONE and source != number:
                start = max(start, end[source] + graph.delay_us[reader, way])
    return start


def _with_fused(schedule: Schedule, fused: set[Pass]) -> Schedule:
    rows = []
    for own in schedule.order:
        row: list[Pass] = []
        for work in own:
            if work.kind is Kind.W and work._replace(kind=Kind.B) in fused:
                row[-1] = work._replace(kind=Kind.BW)
            else:
                row.append(work)
        rows.append(tuple(row))
    return replace(schedule, order=tuple(rows))
