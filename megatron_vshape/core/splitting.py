"""Where a plan splits a backward into B and W, and where it runs whole, where that is cheaper.

B hands its gradient on before W has run, and W fills idle time; BW costs less where it hides an
exchange or spares the host a pass. So what pays depends on the place: in the steady state, where
nobody waits, BW may; at the ends, where a chain of B is all that runs, B.

Orders begin from three plans: everything split, B and W joined where that delays nobody, nothing
split. `planner.steps` goes on from each: it splits at the ends, in the steady state, in one chunk
alone, walks over orders of such steps, and then joins and parts stage by stage and in ever smaller
groups of microbatches what makes the step shorter. With F/B/W/message 1/1.15/.85/.05:

    devices, microbatches, limit, saved | split everywhere | B, W joined | nowhere | chosen
    4, 8, 8 chunks, 10 %                |             51.9 |        51.9 |    54.6 |   50.0
    8, 24, 10 chunks, 15 %              |            166.4 |       166.1 |   188.2 |  164.5
    8, 24, 16 chunks, 30 %              |            153.1 |       149.5 |   136.2 |  133.7
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

from megatron_vshape.core.check.bounds import fits
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.planner.steps import best_steps
from megatron_vshape.core.program.lowering import fuse

WORTH = 0.002
"""Whole backwards that save less of the busiest device's work are joined and not planned with."""


def saves(costs: Costs) -> float:
    """Return the share of all passes' time that whole backwards save; 0 where they save nothing."""
    split = [sum(costs.time_us(kind, at) for kind in PARTS) for at in range(costs.num_stages)]
    forward = [costs.time_us(Kind.F, stage) for stage in range(costs.num_stages)]
    whole = costs.whole_us
    if whole is None:
        return 0.0
    return max(0.0, 1 - (sum(forward) + sum(whole)) / sum(split))


def where_split(schedule: Schedule) -> str:
    """Return in words where backwards are split: everywhere, nowhere, in the middle, at the ends.

    The ends are as many microbatches as devices at the beginning, and as many at the end.
    """
    devices, microbatches = schedule.num_devices, schedule.num_microbatches
    inside = range(devices, microbatches - devices)
    counts = {True: [0, 0], False: [0, 0]}  # by "inside": split, all
    for kind, _, microbatch in (work for row in schedule.order for work in row):
        if Kind.B in kind.does:
            own = counts[microbatch in inside]
            own[0] += kind is Kind.B
            own[1] += 1
    split, total = map(sum, zip(*counts.values(), strict=True))
    if split in (0, total):
        return "all stages" if split else "none"
    shares = [own[0] / own[1] if own[1] else 0.0 for own in (counts[True], counts[False])]
    middle, ends = (f"{100 * share:.0f} %" for share in shares)
    if not counts[True][1]:
        return f"{ends} of the backward passes"
    return f"{middle} in the steady state, {ends} in warm-up and cool-down"


def joined(schedule: Schedule, costs: Costs, objective: Objective) -> Schedule:
    """Return the schedule with B and W that stand together run as BW where that is not slower.

    Only where BW has a price of its own, alone or beside an F; else `lower` does it, and it changes
    no time. First those that delay nobody, then all, and if that is too much, those of one stage
    after the other.
    """
    if costs.whole_us is None and not costs.joint:
        return schedule
    best = fuse(simulate(schedule, costs))
    value = objective.of(simulate(best, costs))
    everywhere, apart = range(best.num_stages), _better_apart(best, costs)
    for stages in (everywhere, *((stage,) for stage in everywhere)):
        tried = _join(best, stages, apart)
        reached = objective.of(simulate(tried, costs))
        if reached <= value:
            best, value = tried, reached
    return best


def _better_apart(schedule: Schedule, costs: Costs) -> set[Pass]:
    """Return the B whose W takes longer with them than behind, where joint passes have them too.

    Where nobody waits for them the time would not tell.
    """
    stages = {
        stage
        for stage in range(schedule.num_stages)
        if costs.time_us(Kind.BW, stage)
        > costs.time_us(Kind.B, stage) + costs.time_us(Kind.W, stage) + 1e-9
    }
    dear = cache(
        lambda f, b: (
            costs.joint_us(f, Kind.BW, b) >= costs.joint_us(f, Kind.B, b) + costs.time_us(Kind.W, b)
        )
    )
    beside = schedule.beside()
    alone = {
        work
        for row in schedule.order
        for work in row
        if work.kind is Kind.B and work.stage in stages
    }
    return {b for f, b in beside.items() if dear(f.stage, b.stage)} | alone.difference(
        beside.values()
    )


def _join(schedule: Schedule, stages: Sequence[int], apart: set[Pass]) -> Schedule:
    """Return the schedule with every W of these stages that follows its B run with it.

    But for those of the B that are `apart`.
    """
    rows = []
    for own in schedule.order:
        row: list[Pass] = []
        for work in own:
            before = row[-1] if row else None
            follows = before == (Kind.B, *work[1:]) and before not in apart
            if work.kind is Kind.W and work.stage in stages and follows:
                row[-1] = work._replace(kind=Kind.BW)
            else:
                row.append(work)
        rows.append(tuple(row))
    return replace(schedule, order=tuple(rows))


def split_where_it_pays(
    starts: Sequence[Schedule],
    costs: Costs,
    limits: Sequence[float],
    objective: Objective,
    steps: int,
    in_host: float = inf,
) -> Schedule:
    """Return the best order found from these, of one placement, with as many walking steps.

    None of these, which fit the limits, is faster.

    Raises:
        ScheduleError: the costs are of other stages.
    """
    made = best_steps(starts, costs, limits, objective, steps, in_host)
    found = [each for each in (*starts, made) if each and fits(peak_held(each, costs), limits)]
    return min(found, key=lambda each: objective.of(simulate(each, costs)))
