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
from megatron_vshape.core.schedule_names import megatrons_name
from megatron_vshape.rehearsal.command import SCHEDULE, Command
from megatron_vshape.rehearsal.costs_from_reports import pass_times
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.rank_report import RankReport
from megatron_vshape.rehearsal.step_time import send_us

_PLAIN = {Kind.F, Kind.B, Kind.W, Kind.BW}
_MAX_PASSES = 200_000

Rank = RankReport


class StepTime(NamedTuple):
    """Estimated seconds of a step, and how they were estimated, for the user."""

    seconds: float
    how: str


def estimate_step(
    reports: Sequence[Rank], command: Command, gpu: Gpu, gpu_distance: int
) -> StepTime:
    """Estimate the seconds of a step: its schedule, simulated with the estimated passes.

    Args:
        reports: Results of the estimated ranks, by pipeline rank.
        command: The training command.
        gpu: GPU and links.
        gpu_distance: Distance between neighboring pipeline ranks in GPUs.
    """
    sizes, microbatches = reports[0].sizes, reports[0].step.microbatches_text
    slowest = max(report.step.time["step_s"] for report in reports)
    missing = sizes.pp - len(reports)
    like = f"; {missing} of {sizes.pp} ranks assumed like their neighbors" if missing else ""
    if sizes.pp == 1:
        return StepTime(slowest, microbatches)
    name = command.value(SCHEDULE) or megatrons_name(sizes.vp)
    try:
        if reports[0].step.scale.experts_hidden and not command.has(SCHEDULE):
            raise ScheduleError("parts of overlapped passes alternate")
        seconds = _simulated(reports, name, gpu, gpu_distance)
    except ScheduleError as error:
        how = f"{microbatches} with the textbook bubble, not simulated: {error}{like}"
        return StepTime(slowest, how)
    return StepTime(seconds, f"{microbatches}, {name} simulated{like}")


def _simulated(reports: Sequence[Rank], name: str, gpu: Gpu, gpu_distance: int) -> float:
    sizes, microbatches = reports[0].sizes, reports[0].step.microbatches
    if 3 * microbatches * sizes.pp * sizes.vp > _MAX_PASSES:
        raise ScheduleError("too many passes")
    ranks = _with_full_backwards(reports)
    other_kinds = {pass_report.kind for rank in ranks for pass_report in rank.step.kinds} - _PLAIN
    if other_kinds:
        raise ScheduleError(
            f"it has other passes than F, B and W ({', '.join(sorted(other_kinds))})"
        )

    schedule = published_schedule(name, sizes.pp, microbatches)
    costs = _costs(ranks, schedule.placement, gpu, gpu_distance)
    times = [rank.step.time for rank in reports]
    after_passes_s = max(time["optimizer"] + time["data parallel"] for time in times)
    return 1e-6 * simulate(schedule, costs).makespan + float(after_passes_s)


def _with_full_backwards(ranks: Sequence[Rank]) -> list[Rank]:
    """Rename the backwards of Megatron's schedules to BW: they also compute weight gradients."""
    converted: list[Rank] = []
    for rank in ranks:
        kinds = rank.step.kinds
        if not any(pass_report.kind in (Kind.W, Kind.BW) for pass_report in kinds):
            kinds = [
                replace(pass_report, kind=Kind.BW) if pass_report.kind == Kind.B else pass_report
                for pass_report in kinds
            ]
        converted.append(replace(rank, step=replace(rank.step, kinds=kinds)))
    return converted


def _costs(ranks: Sequence[Rank], placement: Placement, gpu: Gpu, gpu_distance: int) -> Costs:
    stages = [(device, placement[:stage].count(device)) for stage, device in enumerate(placement)]
    times = pass_times(ranks, stages, max(placement) + 1, gpu)
    first = ranks[0]
    return Costs.of(
        **times,
        held_after_forward_bytes=(1.0,) * len(stages),
        held_after_backward_bytes=(0.0,) * len(stages),
        send_us=send_us(float(first.model.message_bytes), gpu, gpu_distance),
    )
