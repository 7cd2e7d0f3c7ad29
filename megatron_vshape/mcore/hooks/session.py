"""The state behind the hooks: which schedule runs, and by what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_vshape.mcore.early.post_validation import PostValidation, check_optimizer
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

    def own_runner(self, pipeline: Pipeline) -> PipelineRunner:
        """Return what runs the steps of this package's schedule; made when first asked for."""
        runner = self.runner or PipelineRunner(self.step, pipeline, self.logs)
        if not isinstance(runner, PipelineRunner):
            raise RuntimeError(
                "a schedule of this package is to run, and one of Megatron's own runs"
            )
        self.runner = runner
        return runner

    def metered_runner(self, function: Callable[..., Any], name: str) -> Any:
        """Return Megatron's `function` with a meter; made when first asked for."""
        if self.runner is None:
            self.runner = MeteredSchedule(self.step, self.logs, function, name)
        return self.runner

    def begin_log(self) -> None:
        """Have iterations logged from now on, with this package's figures."""
        self.iteration_log = IterationLog()

    def validate_late(self, pipeline: Pipeline, optimizer: Any) -> None:
        """Have optimizer steps made before they are validated, until `end_validation`.

        Raises:
            UnsupportedError: steps of this optimizer cannot be undone.
        """
        check_optimizer(optimizer)
        self.post_validation = PostValidation(self.own_runner(pipeline))

    def end_validation(self) -> str | None:
        """Validate at once from now on; return how it went, or None where that was so all along."""
        post_validation, self.post_validation = self.post_validation, None
        if post_validation is None:
            return None
        post_validation.end()
        return post_validation.closing_line()

    def logs(self) -> bool:
        """Return whether Megatron's trainer runs, which logs iterations."""
        return self.iteration_log is not None
