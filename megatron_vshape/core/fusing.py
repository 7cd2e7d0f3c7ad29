"""Fuse adjacent B and W of a schedule to BW, where that is not slower."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.check.simulate import costs_of
from megatron_vshape.core.compiling import compiled
from megatron_vshape.core.model.costs import Costs, extra_us_of_microbatch
from megatron_vshape.core.model.kinds import KINDS, Kind, NeedTable
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline
from megatron_vshape.core.program.lowering import fuse

NONE = -1


class _WaitGraph(NamedTuple):
    """Passes of a schedule, numbered queue by queue, with their inputs."""

    begin: np.ndarray  # [queue + 1] number of the queue's first pass
    device: np.ndarray  # [queue]
    inputs: np.ndarray  # [pass, input] number of a pass that it reads, or NONE
    delay_us: np.ndarray  # [pass, input] time of the message from that pass
    time_us: np.ndarray  # [pass]


def fuse_backwards(timeline: Timeline, costs: Costs, objective: Objective) -> Schedule:
    """Fuse B and the W right after it where the step does not become longer.

    Only if BW has a separate cost; otherwise `lower` fuses without any effect on times. First fuse
    where no pass is delayed, then everywhere, or stage by stage if that is slower.
    """
    if costs.full_us is None:
        return timeline.schedule
    schedule = fuse(timeline)
    costs = costs_of(schedule, costs)
    passes = [work for queue in schedule.queues() for work in queue.passes]
    number_of = {work: number for number, work in enumerate(passes)}
    candidates = [number_of[work] for work in _fusable(schedule, costs)]
    graph, is_fused = make_wait_graph(schedule, passes, costs)
    value = run_step(graph, is_fused, objective is Objective.SPAN) if candidates else 0.0
    stages = range(schedule.num_stages)
    for stages_to_fuse in (stages, *((stage,) for stage in stages)):
        new = [
            candidate
            for candidate in candidates
            if passes[candidate].stage in stages_to_fuse and not is_fused[candidate]
        ]
        if not new:  # they were fused everywhere
            continue
        is_fused[new] = True
        split_us = graph.time_us[new]
        fused = (passes[candidate]._replace(kind=Kind.BW) for candidate in new)
        graph.time_us[new] = list(_times_us(costs, fused))
        new_value = run_step(graph, is_fused, objective is Objective.SPAN)
        if new_value <= value:
            value = new_value
        else:
            is_fused[new], graph.time_us[new] = False, split_us
    return _with_fused(
        schedule, {passes[candidate] for candidate in candidates if is_fused[candidate]}
    )


def _fusable(schedule: Schedule, costs: Costs) -> Iterator[Pass]:
    """Yield every B with its W right after it, unless its BW is slower than both."""
    # The step time does not show a longer BW off the critical path.
    saving = [
        costs.time_us(Kind.BW, stage)
        <= costs.time_us(Kind.B, stage) + costs.time_us(Kind.W, stage) + 1e-9
        for stage in range(schedule.num_stages)
    ]
    paired = set(schedule.overlapped_pairs().values())
    for work, follower in chain.from_iterable(map(pairwise, schedule.order)):
        follows = work.kind is Kind.B and follower == work._replace(kind=Kind.W)
        if follows and saving[work.stage] and work not in paired:
            yield work


def make_wait_graph(
    schedule: Schedule, passes: Sequence[Pass], costs: Costs
) -> tuple[_WaitGraph, np.ndarray]:
    """Return the graph of the passes, and whether each is an F&B pair with the next."""
    queues, pairs = schedule.queues(), schedule.overlapped_pairs()
    table = NeedTable(schedule.num_stages, [kind for kind in KINDS if kind in schedule.kinds])
    numbers = {
        (part, work.stage, work.microbatch): number
        for number, work in enumerate(passes)
        for part in table.parts_of[work.kind]
    }
    max_inputs = max(len(needs) for by_stage in table.needs.values() for needs in by_stage)
    inputs = np.full((len(passes), max_inputs), NONE, np.int64)
    delay_us = np.zeros(inputs.shape)
    time_us = np.fromiter(_times_us(costs, passes), np.float64, len(passes))
    for number, work in enumerate(passes):
        for index, (part, stage) in enumerate(table.needs[work.kind][work.stage]):
            inputs[number, index] = numbers.get((part, stage, work.microbatch), NONE)
            if schedule.placement[stage] != schedule.placement[work.stage]:
                delay_us[number, index] = costs.message_us(work.stage, stage)
        if work in pairs:
            second = pairs[work]
            time_us[number] = costs.overlapped_us(work.stage, second.kind, second.stage)
    begin = np.cumsum([0, *(len(queue.passes) for queue in queues)])
    device = np.array([queue.device for queue in queues])
    is_fused = np.array([work in pairs for work in passes], np.bool_)
    return _WaitGraph(begin, device, inputs, delay_us, time_us), is_fused


def _times_us(costs: Costs, passes: Iterable[Pass]) -> Iterator[float]:
    """Yield the time of each pass."""
    time_us = cache(costs.time_us)
    for work in passes:
        extra_us = extra_us_of_microbatch(costs, *work) if costs.by_microbatch else 0.0
        yield time_us(work.kind, work.stage) + extra_us


@compiled
def run_step(graph: _WaitGraph, is_fused: np.ndarray, is_span: bool) -> float:
    """Return the time of a step as `simulate` does: of all devices, or the longest of one.

    A pass in `is_fused` runs together with the next of its queue, once both have their inputs.
    """
    queues = len(graph.begin) - 1
    next_pass, clock = graph.begin[:-1].copy(), np.zeros(queues)
    ends = np.full(len(graph.time_us), np.inf)
    first, last = np.full(queues, np.inf), np.full(queues, -np.inf)  # by device
    has_run = True
    while has_run:
        has_run = False
        for queue in range(queues):
            device = graph.device[queue]
            while next_pass[queue] < graph.begin[queue + 1]:
                number = next_pass[queue]
                end_number = number + (2 if is_fused[number] else 1)
                start = _start_us(graph, number, end_number, ends, clock[queue])
                if start == np.inf:
                    break  # an input is of a queue that has to run first
                first[device] = min(first[device], start)
                clock[queue] = start + graph.time_us[number]
                last[device] = max(last[device], clock[queue])
                ends[number:end_number] = clock[queue]
                next_pass[queue] = end_number
                has_run = True
    return float(np.max(last - first)) if is_span else float(np.max(last) - np.min(first))


@compiled
def _start_us(
    graph: _WaitGraph, number: int, end_number: int, ends: np.ndarray, start: float
) -> float:
    """Return when the passes from `number` up to `end_number` can start; infinite if unknown."""
    for reader in range(number, end_number):
        for index in range(graph.inputs.shape[1]):
            source = graph.inputs[reader, index]
            if source != NONE and source != number:
                start = max(start, ends[source] + graph.delay_us[reader, index])
    return start


def _with_fused(schedule: Schedule, fused: set[Pass]) -> Schedule:
    rows = []
    for passes in schedule.order:
        row: list[Pass] = []
        for work in passes:
            if work.kind is Kind.W and work._replace(kind=Kind.B) in fused:
                row[-1] = work._replace(kind=Kind.BW)
            else:
                row.append(work)
        rows.append(tuple(row))
    return replace(schedule, order=tuple(rows))
