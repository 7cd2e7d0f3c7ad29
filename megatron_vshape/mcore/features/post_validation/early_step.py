"""The early start of the next step, whose passes before the first loss can be rolled back."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

from megatron_vshape.core.program.early_start import StopPoint, drain, prefix_before_loss
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.mcore.features.post_validation import check_config
from megatron_vshape.mcore.features.post_validation.optimizer import (
    PostValidation,
    check_optimizer,
    why_no_gain,
)
from megatron_vshape.mcore.hook import Function, Hook, Replaced, Session, replaces
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.rewind import RandomState, Replay, finish_gathering
from megatron_vshape.mcore.step.stage import (
    PreparedStep,
    StepContext,
    StepData,
    StepFeature,
    StepRequest,
    TrainerCall,
)
from megatron_vshape.runtime.program_runner import run_drain


@dataclass(frozen=True, slots=True)
class _EarlyStep:
    """The next step, started early, and the state to roll it back."""

    step: PreparedStep
    stop_point: StopPoint  # number of instructions per rank that have run
    random_state: RandomState


class EarlyStart(StepFeature):
    """Starts the next step before the optimizer step of the current one is validated."""

    def __init__(self, runner: PipelineRunner) -> None:
        """Set the runner, which prepares the step."""
        self._runner = runner
        self._last: TrainerCall | None = None  # arguments of the last training step
        self._early_step: _EarlyStep | None = None
        self._cached_prefix: tuple[Program, tuple[Program, StopPoint]] | None = None
        self._replays: list[Replay] = []
        self.validation: PostValidation | None = None  # set during training
        self._replaced = Replaced()  # functions of the trainer, during training

    def begin_training(self, optimizer: Any, args: Namespace) -> str | None:
        """Validate steps after they are made; return a warning if this gains nothing."""
        check_optimizer(optimizer)
        self.validation = PostValidation(self.start_next, self.roll_back)
        self._skip_barriers()
        return why_no_gain(args)

    def _skip_barriers(self) -> None:
        """Skip the trainer's all-reduces of values that a validated step gives all ranks."""
        from megatron.training import training  # libraries without it load this module, too

        all_true = training.logical_and_across_model_parallel_group
        largest = training.reduce_max_stat_across_model_parallel_group

        def logical_and(value: bool, *args: Any, **options: Any) -> bool:
            return bool(value or all_true(value, *args, **options))

        def max_stat(stat: Any, *args: Any, **options: Any) -> Any:
            if stat is None:
                return largest(stat, *args, **options)
            return torch.tensor([stat], dtype=torch.float32).item()  # as the all-reduce rounds

        set_attribute = self._replaced.put
        set_attribute(training, "logical_and_across_model_parallel_group", logical_and)
        set_attribute(training, "reduce_max_stat_across_model_parallel_group", max_stat)

    def end_training(self) -> str | None:
        """Drop a step that was started early, and return a summary of the predictions."""
        validation, self.validation = self.validation, None
        self._replaced.undo()
        if validation is None:
            return None
        validation.end()
        return validation.closing_line()

    def start_next(self) -> None:
        """Start the next training step as far as it can be rolled back.

        Does nothing before the first step, or if the next step is measured from its start.
        """
        if self._last is None or self._runner.observes_next:
            return
        for replay in self._replays:
            replay.mark()
        # Early forwards consume data and random numbers; both must be restored on a rollback.
        random_state = RandomState.now()
        step = self._runner.prepare_step(self._last, cut_program=self._prefix_of)
        assert self._cached_prefix is not None
        _, stop_point = self._cached_prefix[1]
        self._early_step = _EarlyStep(step, stop_point, random_state)
        step.run.advance(stop_point[step.context.groups.pp.rank()])

    def roll_back(self) -> None:
        """Roll back the early part of the next step; does nothing if nothing has run early."""
        early_step, self._early_step = self._early_step, None
        if early_step is None:
            return
        context = early_step.step.context
        # Early forwards may have sent messages without a matching receive yet. Complete them first,
        # so that the transport is consistent for the next step.
        instructions = drain(context.program, early_step.stop_point, context.groups.pp.rank())
        run_drain(instructions, context.transport, context.transport.blank())
        # The early forwards have started all-gathers, which may still write to the parameters, and
        # the next step starts them again.
        finish_gathering(context.chunks)
        context.hooks.clear()  # as at the end of a step
        for replay in self._replays:
            replay.rewind()
        early_step.random_state.restore()

    def prepare(self, request: StepRequest) -> StepRequest:
        """Return the requested step if it was started early; roll back another one that was.

        An evaluation may follow a step that was started early: its microbatches, random numbers and
        messages belong to the next training step. Options that a script has set only in the config
        are rejected here.
        """
        check_config(request.call.config)
        early_step = self._early_step
        if request.call.forward_only or (
            early_step is not None and early_step.step.context.call != request.call
        ):
            self.roll_back()
            return request
        self._early_step = None
        for replay in self._replays:
            replay.forget()
        return request if early_step is None else request._replace(started=early_step.step)

    def change_data(self, call: TrainerCall, groups: Any, data: StepData) -> StepData:
        """Wrap the iterators so that they can replay microbatches of a step that is rolled back."""
        replays = {id(replay.source): replay for replay in self._replays}
        for iterator in data.iterators:
            if iterator is not None and id(iterator) not in replays:
                replays[id(iterator)] = Replay(iterator)
        self._replays = list(replays.values())
        iterators = [None if source is None else replays[id(source)] for source in data.iterators]
        return data._replace(iterators=iterators)

    def end(self, context: StepContext) -> None:
        """Remember the trainer's arguments, which are equal in all training steps of a run."""
        self._last = context.call

    def clear(self) -> None:
        """Drop the data of the last step and of the next one."""
        self._replaced.undo()
        self._last, self._early_step, self._replays = None, None, []

    def _prefix_of(self, program: Program) -> Program:
        """Return `prefix_before_loss(program)`, cached because most steps run the same program."""
        if self._cached_prefix is None or self._cached_prefix[0] is not program:
            self._cached_prefix = program, prefix_before_loss(program)
        prefix, _ = self._cached_prefix[1]
        return prefix


def early_start_of(session: Session) -> EarlyStart | None:
    """Return the early start of the steps of a run, or None if the run has none."""
    runner = session.training.runner
    return runner.step_feature(EarlyStart) if isinstance(runner, PipelineRunner) else None


@replaces
def optimizer_step(
    session: Session, original: Function, optimizer: Any, *args: Any, **options: Any
) -> Any:
    """Run the optimizer step without a barrier if post-validation is enabled."""
    early_start = early_start_of(session)
    if early_start is None or early_start.validation is None:
        return original(optimizer, *args, **options)
    return early_start.validation.step(optimizer, original)


@replaces
def save_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Save a checkpoint without the effects of a step that has started early.

    These effects are random-number states and consumed microbatches.
    """
    early_start = early_start_of(session)
    if early_start is not None:
        early_start.roll_back()
    return original(*args, **options)


HOOKS = (
    Hook(
        "megatron.core.optimizer.optimizer",
        "ChainedOptimizer.step",
        ("self",),
        "steps before the gradient norm of all ranks is known (--optimizer-post-validation)",
        optimizer_step,
    ),
    Hook(
        "megatron.training.training",
        "save_checkpoint",
        ("iteration", "model", "optimizer"),
        "saves no trace of a step that has begun early",
        save_checkpoint,
    ),
)
