"""Where a step's time went that was not predicted: passes, the host, messages, one slow rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from megatron_vshape.core.check.simulate import costs_of, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.runtime.measure import slowdowns

LATE = 0.02
"""A share of the predicted passes from which on it is told where they took longer."""

SLOWER = 1.05
"""How many times its peers' time a rank's passes take at least where it is named."""


def where_told(timelines: Sequence[Timeline], planned: Costs, measured: Costs) -> list[str]:
    """Return why steps took longer than `planned` costs say, in sentences; none if they did not.

    `measured` are the costs of these very steps. Each part is what the step gets longer by if that
    alone is as measured, one after the other; what is left was waited for messages.
    """
    schedule = timelines[0].schedule
    predicted_us = simulate(schedule, planned).makespan
    with_passes_us = simulate(schedule, replace(measured, host_us=planned.host_us)).makespan
    with_host_us = simulate(schedule, measured).makespan
    whole_us = median(each.makespan for each in timelines)
    late_us = whole_us - predicted_us
    if late_us <= LATE * predicted_us:
        return []
    parts = {
        "passes": with_passes_us - predicted_us,
        "the host between passes": with_host_us - with_passes_us,
        "messages waited for": whole_us - with_host_us,
    }
    told = ", ".join(f"{name} {us / 1e3:+.2f} ms" for name, us in parts.items())
    lines = [f"steps took {late_us / 1e3:.2f} ms longer than predicted: {told}"]
    planned = costs_of(schedule, planned)
    usual = {
        (kind, stage): planned.time_us(kind, stage)
        for kind in (*PARTS, Kind.BW)
        for stage in range(planned.num_stages)
    }
    by_step = slowdowns(timelines, usual)
    return lines + slowest_told([median(each) for each in zip(*by_step, strict=True)])


def slowest_told(times: Sequence[float]) -> list[str]:
    """Return a sentence on the pipeline rank that takes more times the predicted than its peers."""
    worst = max(range(len(times)), key=lambda rank: times[rank])
    peers = [each for rank, each in enumerate(times) if rank != worst]
    if not peers or times[worst] < SLOWER * max(median(peers), 1.0):
        return []
    return [
        f"pipeline rank {worst} is the slowest: its passes take {times[worst]:.2f} times what was "
        f"predicted, those of its peers {median(peers):.2f}"
    ]


def slow_among_replicas(
    pipelines: Sequence[tuple[Sequence[int], Costs]], placement: Placement
) -> list[str]:
    """Return a sentence for every rank whose passes take longer than those of its replicas.

    `pipelines` are the ranks of each, in the order of the pipeline, with the costs that they have
    measured. Where there is one pipeline alone, a rank is compared with those whose stages have as
    many layers, but for the model's ends.
    """
    times = [_by_rank(costs, placement, len(ranks)) for ranks, costs in pipelines]
    if len(times) == 1:
        return _slow_in_pipeline(*pipelines[0], placement)
    told = []
    for at, row in enumerate(zip(*times, strict=True)):
        for own, (ranks, _) in enumerate(pipelines):
            others = median(us for other, us in enumerate(row) if other != own)
            if row[own] > SLOWER * others:
                told.append(_slow(ranks[at], row[own] / others, "its replicas"))
    return told


def _by_rank(costs: Costs, placement: Placement, num_ranks: int) -> list[float]:
    """Return the time of a microbatch's passes on every rank."""
    times = [0.0] * num_ranks
    for piece, rank in zip(costs.stages(), placement, strict=True):
        times[rank] += piece.time_us
    return times


def _slow_in_pipeline(ranks: Sequence[int], costs: Costs, placement: Placement) -> list[str]:
    if costs.layers is None:
        return []
    inner = range(1, costs.num_stages - 1)
    pieces, layers = costs.stages(), costs.layers
    own = {stage: pieces[stage].time_us / layers[stage] for stage in inner if layers[stage]}
    told = []
    for rank, name in enumerate(ranks):
        mine = [us for stage, us in own.items() if placement[stage] == rank]
        others = [us for stage, us in own.items() if placement[stage] != rank]
        if mine and len(others) > 1 and min(mine) > SLOWER * median(others):
            told.append(_slow(name, median(mine) / median(others), "the other ranks' layers"))
    return told


def _slow(rank: int, factor: float, peers: str) -> str:
    return (
        f"rank {rank} is slow: its passes take {factor:.2f} times those of {peers} (a hot GPU, a "
        "node that others use)"
    )
