"""Hooks of post-validation: the optimizer step, and two barriers of the trainer after it."""

from __future__ import annotations

from typing import Any

import torch

from megatron_vshape.mcore.features.post_validation.early_step import EarlyStart
from megatron_vshape.mcore.features.post_validation.optimizer import PostValidation
from megatron_vshape.mcore.hook import Function, Hook, Session, replaces
from megatron_vshape.mcore.step.forward_backward import PipelineRunner


def _validation(session: Session) -> PostValidation | None:
    """Return the validation of the running training, or None."""
    runner = session.runner
    early = runner.step_feature(EarlyStart) if isinstance(runner, PipelineRunner) else None
    return None if early is None else early.validation


@replaces
def optimizer_step(
    session: Session, original: Function, optimizer: Any, *args: Any, **options: Any
) -> Any:
    """Run the optimizer step without a barrier if post-validation is enabled."""
    validation = _validation(session)
    if validation is None:
        return original(optimizer, *args, **options)
    return validation.step(optimizer, original)


@replaces
def logical_and_across_model_parallel_group(
    session: Session, original: Function, input: bool, *args: Any, **options: Any
) -> bool:
    """Skip the all-reduce: the validated step has given all ranks the same value."""
    if _validation(session) is None or not input:
        return bool(original(input, *args, **options))
    return True


@replaces
def reduce_max_stat_across_model_parallel_group(
    session: Session, original: Function, stat: Any, *args: Any, **options: Any
) -> Any:
    """Skip the all-reduce of a value that all ranks have; round to fp32 as the all-reduce does."""
    if _validation(session) is None or stat is None:
        return original(stat, *args, **options)
    return torch.tensor([stat], dtype=torch.float32).item()


_TRAINING = "megatron.training.training"

HOOKS = (
    Hook(
        "megatron.core.optimizer.optimizer",
        "ChainedOptimizer.step",
        ("self",),
        "steps before the gradient norm of all ranks is known (--optimizer-post-validation)",
        optimizer_step,
    ),
    Hook(
        _TRAINING,
        "logical_and_across_model_parallel_group",
        ("input",),
        "puts no barrier after a step that is validated (--optimizer-post-validation)",
        logical_and_across_model_parallel_group,
    ),
    Hook(
        _TRAINING,
        "reduce_max_stat_across_model_parallel_group",
        ("stat",),
        "puts no barrier after a step that is validated (--optimizer-post-validation)",
        reduce_max_stat_across_model_parallel_group,
    ),
)
