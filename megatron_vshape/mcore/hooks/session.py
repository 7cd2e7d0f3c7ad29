"""The state behind the hooks: which schedule runs, and by what."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_vshape.mcore.early.post_validation import PostValidation
from megatron_vshape.mcore.observe.iteration_log import IterationLog
from megatron_vshape.mcore.observe.megatrons_own import MeteredSchedule
from megatron_vshape.mcore.setup.pipeline import Pipeline
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step_state import StepState


@dataclass(slots=True)
class Session:
    """What the hooks of one `hooks.install` share.

    `pipeline` is None while Megatron's own schedules run: then every hook does what upstream does.
    """

    pipeline: Pipeline | None = None
    megatrons_own: str | None = None  # the schedule of Megatron's that the user has named
    # What the trainer calls for every step; made when it asks for that.
    runner: PipelineRunner | MeteredSchedule | None = None
    post_validation: PostValidation | None = None  # while a run that asks for it trains
    iteration_log: IterationLog | None = None  # once Megatron's trainer runs, which logs
    step: StepState = field(default_factory=StepState)

    def choose(self, pipeline: Pipeline | None, megatrons_own: str | None) -> None:
        """Take what the flags ask for; what has run by other flags is over."""
        self.pipeline, self.megatrons_own, self.runner = pipeline, megatrons_own, None
        self.step.splits_backward = pipeline is not None

    def logs(self) -> bool:
        """Return whether Megatron's trainer runs, which logs iterations."""
        return self.iteration_log is not None
