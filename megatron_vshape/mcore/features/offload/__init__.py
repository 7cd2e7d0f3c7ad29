"""Offloading of activations to host memory, in passes of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.check.bounds import fits
from megatron_vshape.core.check.simulate import peak_moved, usable_host_bytes
from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.mcore.layout.shared_vocabulary import FLAG
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError, captures_graphs, uses_stash
from megatron_vshape.mcore.setup.features import Feature, Maturity, Support
from megatron_vshape.mcore.setup.run_config import Settings

if TYPE_CHECKING:
    from megatron_vshape.mcore.setup.plans import PlannedStep
    from megatron_vshape.mcore.setup.run_config import RunConfig, ScheduleChoice
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.stage import StepFeature

NAME = "offload"


class OffloadFeature(Feature):
    """Offloads the activations that the schedule file or the plan selects."""

    support = Support("offloading", "--pipeline-schedule auto or FILE", Maturity.ONE_RANK)

    def label(self, settings: Settings) -> str | None:
        """Return a description if the run measures offloading."""
        return "offloading that the run measures" if NAME in settings.choice.enabled else None

    def configure(self, choice: ScheduleChoice, options: Options) -> ScheduleChoice:
        """Return the choice with the limit of host memory."""
        limit_bytes = _host_limit_bytes(options.host_memory_limit_gib, choice)
        return replace(choice, moved_limit_bytes=limit_bytes)

    def check(self, settings: Settings) -> ScheduleChoice:
        """Reject CUDA graphs and a paged stash of activations that may be offloaded.

        Plans cannot combine the passes of vocabulary parallelism with copies.
        """
        choice = settings.choice
        may_copy = choice.moves_memory or (NAME in choice.enabled and choice.name == AUTO)
        check_offloading(may_copy, settings.model, choice.name)
        if choice.shards_output_layer and (choice.moves_memory or NAME in choice.enabled):
            raise UnsupportedError(
                f"{FLAG} does not work with offloading of activations: the combination is not "
                "implemented. Remove one of the two"
            )
        return choice

    def notes(self, pipeline: RunConfig, plan: PlannedStep, local_ranks: int | None) -> str:
        """Return the offloaded memory and, if known, whether the host has enough memory."""
        schedule, costs = plan.schedule, plan.costs
        num_offloaded = sum(1 for _ in schedule.moving_passes())
        if not num_offloaded:
            return ""
        total = schedule.num_stages * schedule.num_microbatches
        line = f"\nactivations of {num_offloaded} of {total} microbatches and stages are offloaded"
        # Imported here because it imports torch, and the checks run without it.
        from megatron_vshape.runtime.host_memory import free_host_bytes

        free_bytes = free_host_bytes(local_ranks)
        if free_bytes is None or costs is None:
            return line
        if not costs.copies or costs.num_stages != schedule.num_stages:
            return line
        needed_bytes = max(peak_moved(schedule, costs))
        line += (
            f": at most {needed_bytes / GIB:.3f} GiB per rank of {free_bytes / GIB:.3f} GiB free "
            "per rank"
        )
        return line + ("" if needed_bytes <= free_bytes else "; the rest stays in GPU memory")

    def in_steps(self, runner: PipelineRunner) -> StepFeature:
        """Return the passes that offload and reload."""
        from megatron_vshape.mcore.features.offload.step import OffloadSteps

        return OffloadSteps(runner.report)


FEATURE = OffloadFeature()


def check_offloading(moves_memory: bool, model: Any, schedule: str) -> None:
    """Raise UnsupportedError if offloaded activations belong to a CUDA graph or a stash."""
    if moves_memory and captures_graphs(model):
        raise UnsupportedError(
            f"schedule {schedule} offloads activations, which CUDA graphs do not support: use a "
            "schedule without offloading, or remove --cuda-graph-impl"
        )
    if moves_memory and uses_stash(model):
        raise UnsupportedError(
            f"schedule {schedule} offloads activations, which --moe-paged-stash stores itself: "
            "use a schedule without offloading, or remove --moe-paged-stash"
        )


def _host_limit_bytes(limit_gib: float | None, choice: ScheduleChoice) -> float:
    """Return the limit of host memory per device for offloading, in bytes.

    Raises:
        ScheduleError: The schedule does not offload, or according to the costs it exceeds the
            limit.
    """
    option, file, costs = "--pipeline-host-memory-limit", choice.from_file, choice.costs
    if limit_gib is None:
        return math.inf
    if file is None and choice.name != AUTO:
        raise ScheduleError(
            f"{option} requires --pipeline-schedule auto, or a schedule file with offloading; "
            f"{choice.name} has none. Remove {option}"
        )
    limit_bytes = limit_gib * GIB
    if file is None or costs is None or not (choice.moves_memory and costs.copies):
        return limit_bytes
    if costs.num_stages == file.num_stages:
        peaks = peak_moved(file, costs)
        if not fits(peaks, [usable_host_bytes(limit_bytes)] * len(peaks)):
            raise ScheduleError(
                f"the schedule file {choice.name} has {max(peaks) / GIB:.3f} GiB of rank "
                f"{peaks.index(max(peaks))} wait in host memory at once, by --pipeline-costs, and "
                f"{option} {limit_gib:g} has room for {usable_host_bytes(limit_gib):.3f}: raise "
                "it, or plan with --host-memory-limit"
            )
    return limit_bytes
