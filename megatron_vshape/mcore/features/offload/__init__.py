"""Offloading of activations to host memory, in passes of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.check.bounds import fits
from megatron_vshape.core.check.simulate import filled, peak_in_host
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.request import AUTO
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError, captures_graphs, uses_stash
from megatron_vshape.mcore.setup.features import Feature, Settings

if TYPE_CHECKING:
    from megatron_vshape.mcore.setup.choice import ScheduleConfig
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.step_hooks import StepFeature

GIB = 2.0**30


class OffloadFeature(Feature):
    """Offloads the activations that the schedule file or the plan selects."""

    def configure(self, choice: ScheduleConfig, options: Options) -> ScheduleConfig:
        """Return the choice with the limit of host memory."""
        limit_bytes = _host_limit_bytes(options.host_memory_limit_gib, choice)
        return replace(choice, host_limit_bytes=limit_bytes)

    def check(self, settings: Settings) -> None:
        """Reject CUDA graphs and a paged stash of activations that may be offloaded."""
        choice = settings.choice
        may_copy = settings.may_offload and choice.name == AUTO
        check_copies(choice.copies or may_copy, settings.model, choice.name)

    def in_steps(self, runner: PipelineRunner) -> StepFeature:
        """Return the passes that offload and reload."""
        from megatron_vshape.mcore.features.offload.step import HostMemoryWaiting

        return HostMemoryWaiting(runner.report)


FEATURE = OffloadFeature()


def check_copies(copies: bool, model: Any, schedule: str) -> None:
    """Raise UnsupportedError if offloaded activations belong to a CUDA graph or a stash."""
    if copies and captures_graphs(model):
        raise UnsupportedError(
            f"schedule {schedule} offloads activations, which CUDA graphs do not support: use a "
            "schedule without offloading, or remove --cuda-graph-impl"
        )
    if copies and uses_stash(model):
        raise UnsupportedError(
            f"schedule {schedule} offloads activations, which --moe-paged-stash stores itself: "
            "use a schedule without offloading, or remove --moe-paged-stash"
        )


def _host_limit_bytes(limit_gib: float | None, choice: ScheduleConfig) -> float:
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
    if file is None or costs is None or not (choice.copies and costs.copies):
        return limit_bytes
    if costs.num_stages == file.num_stages:
        peaks = peak_in_host(file, costs)
        if not fits(peaks, [filled(limit_bytes)] * len(peaks)):
            raise ScheduleError(
                f"the schedule file {choice.name} has {max(peaks) / GIB:.3f} GiB of rank "
                f"{peaks.index(max(peaks))} wait in host memory at once, by --pipeline-costs, and "
                f"{option} {limit_gib:g} has room for {filled(limit_gib):.3f}: raise it, or plan "
                "with --host-memory-limit"
            )
    return limit_bytes
