"""Choose where a plan splits backwards into B and W, and where full backwards are cheaper.

B sends its gradient before W has run, and W fills idle time. BW costs less if it hides a collective
or saves launch overhead. So the better choice depends on the position: BW in the steady state, if
no pass waits for B; B in warm-up and cool-down, where a chain of B is the critical path.

A plan is the best of three: all backwards split; B and W fused where they are adjacent; no backward
split.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.program.lowering import fuse

WORTH = 0.002
"""Minimum share of the busiest device's work that full backwards must save to be planned; smaller
savings are only used where fusing delays no pass."""


def saves(costs: Costs) -> float:
    """Return the share of all passes' time that full backwards save; at least 0."""
    split = [sum(costs.time_us(kind, at) for kind in PARTS) for at in range(costs.num_stages)]
    forward = [costs.time_us(Kind.F, stage) for stage in range(costs.num_stages)]
    whole = costs.whole_us
    if whole is None:
        return 0.0
    return max(0.0, 1 - (sum(forward) + sum(whole)) / sum(split))


def where_split(schedule: Schedule) -> str:
    """Format where backwards are split: in all stages, none, or shares by phase.

    Warm-up and cool-down are the first and the last `num_devices` microbatches.
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


def fuse_backwards(schedule: Schedule, costs: Costs, objective: Objective) -> Schedule:
    """Fuse adjacent B and W to BW where that is not slower.

    Only if BW has a separate cost; otherwise `lower` fuses without any effect on times. First fuse
    where no pass is delayed, then everywhere, or stage by stage if that is slower.
    """
    if costs.whole_us is None:
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
    """Return the B that must stay split because fusing would take longer, or is in an F&B pair.

    The step time does not show this for passes off the critical path.
    """
    stages = {
        stage
        for stage in range(schedule.num_stages)
        if costs.time_us(Kind.BW, stage)
        > costs.time_us(Kind.B, stage) + costs.time_us(Kind.W, stage) + 1e-9
    }
    dear = {
        work
        for row in schedule.order
        for work in row
        if work.kind is Kind.B and work.stage in stages
    }
    return dear.union(schedule.overlapped_pairs().values())


def _join(schedule: Schedule, stages: Sequence[int], apart: set[Pass]) -> Schedule:
    """Fuse every W in these stages with the B right before it, except for the B in `apart`."""
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
