"""Step time of a dry run: its schedule simulated with the estimated passes of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.plan import published_schedule
from megatron_vshape.core.request import megatrons_name
from megatron_vshape.rehearsal.counted import pass_times
from megatron_vshape.rehearsal.flags import SCHEDULE, Command
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.rank_report import RankReport
from megatron_vshape.rehearsal.step_time import pass_us, send_us

_PLAIN = {Kind.F, Kind.B, Kind.W, Kind.BW}
MOST_PASSES = 200_000

Rank = RankReport


class StepTime(NamedTuple):
    """Estimated seconds of a step, and how they were estimated, for the user."""

    seconds: float
    how: str


def step_of(found: Sequence[Rank], command: Command, gpu: Gpu, apart: int) -> StepTime:
    """Estimate the seconds of a step: its schedule, simulated with the estimated passes.

    Args:
        found: Results of the estimated ranks, by pipeline rank.
        command: The training command.
        gpu: GPU and links.
        apart: Distance between neighboring pipeline ranks in GPUs.
    """
    sizes, microbatches = found[0].sizes, found[0].microbatches
    slowest = max(each.time["step_s"] for each in found)
    missing = sizes.pp - len(found)
    like = f"; {missing} of {sizes.pp} ranks assumed like their neighbors" if missing else ""
    if sizes.pp == 1:
        return StepTime(slowest, f"{microbatches} microbatches")
    name = command.value(SCHEDULE) or megatrons_name(sizes.vp)
    try:
        seconds = _simulated(found, name, gpu, apart)
    except ScheduleError as error:
        how = f"{microbatches} microbatches with the textbook bubble, not simulated: {error}{like}"
        return StepTime(slowest, how)
    return StepTime(seconds, f"{microbatches} microbatches, {name} simulated{like}")


def _simulated(found: Sequence[Rank], name: str, gpu: Gpu, apart: int) -> float:
    sizes, microbatches = found[0].sizes, found[0].microbatches
    if 3 * microbatches * sizes.pp * sizes.vp > MOST_PASSES:
        raise ScheduleError("too many passes")
    ranks = _with_whole_backwards(found)
    others = {each.kind for rank in ranks for each in rank.kinds} - _PLAIN
    if others:
        raise ScheduleError(f"it has other passes than F, B and W ({', '.join(sorted(others))})")

    schedule = published_schedule(name, sizes.pp, microbatches)
    costs = _costs(ranks, schedule.placement, gpu, apart)
    after = max(rank.time["optimizer"] + rank.time["data parallel"] for rank in found)
    return 1e-6 * simulate(schedule, costs).makespan + float(after)


def _with_whole_backwards(found: Sequence[Rank]) -> list[Rank]:
    """Rename the backwards of Megatron's schedules to BW: they also compute weight gradients."""
    made: list[Rank] = []
    for rank in found:
        kinds = rank.kinds
        if not any(each.kind in (Kind.W, Kind.BW) for each in kinds):
            kinds = [replace(each, kind=Kind.BW) if each.kind == Kind.B else each for each in kinds]
        made.append(replace(rank, kinds=kinds))
    return made


def _costs(ranks: Sequence[Rank], placement: Placement, gpu: Gpu, apart: int) -> Costs:
    stages = [(device, placement[:at].count(device)) for at, device in enumerate(placement)]
    times = pass_times(ranks, stages, max(placement) + 1, gpu)
    first = ranks[0]
    return Costs(
        **times,
        held_after_forward_bytes=(1.0,) * len(stages),
        held_after_backward_bytes=(0.0,) * len(stages),
        send_us=send_us(float(first.message_bytes), gpu, apart),
        host_us=pass_us(gpu, first.scale) / 2,
    )
