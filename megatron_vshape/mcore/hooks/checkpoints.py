"""Checkpoints of Megatron-LM's trainer.

Megatron writes a checkpoint of `--ckpt-format torch` by rank and chunk, with layer numbers local to
the chunk, and loads it whatever this option is. A run with another placement would load each layer
as a different one, so schedules with several chunks per rank neither save nor load it. Weights in
distributed checkpoints have global layer numbers, so any schedule can load them; for the state of
distributed optimizers, see `optimizer_state`.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron_vshape.mcore.features.post_validation.early_step import early_start_of
from megatron_vshape.mcore.hook import Function, Hook, replaces
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.refusals import UnsupportedError, is_plain, refusing


@replaces
def save_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Save a checkpoint without the effects of a step that has started early.

    These effects are random-number states and consumed microbatches.
    """
    early_start = early_start_of(session)
    if early_start is not None:
        early_start.roll_back()
    return original(*args, **options)


@replaces
def load_base_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Reject a checkpoint by ranks (--ckpt-format torch) if a rank has several chunks."""
    state, *others, form = original(*args, **options)
    arguments = inspect.signature(original).bind(*args, **options).arguments
    # With rank0, only the arguments are read.
    if getattr(form, "name", None) == "LEGACY" and not arguments.get("rank0"):
        with refusing():
            _check_placement(session, arguments["load_dir"])
    return state, *others, form


def _check_placement(session: Session, folder: str) -> None:
    """Raise UnsupportedError unless the stages are in the order of the ranks, as in stock runs."""
    pipeline = session.pipeline
    if pipeline is None or is_plain(pipeline.stage_map.placement):
        return
    raise UnsupportedError(
        f"--load {folder} does not work with --pipeline-schedule {pipeline.choice.name}: the "
        "checkpoint was saved with --ckpt-format torch, which stores layers by rank and chunk. "
        "Convert it by a run with the flags that saved it, --ckpt-convert-format torch_dist and "
        "--ckpt-convert-save DIR; any schedule loads the result"
    )


HOOKS = (
    Hook(
        "megatron.training.checkpointing",
        "_load_base_checkpoint",
        ("load_dir", "rank0"),
        "rejects a checkpoint by ranks (--ckpt-format torch) if a rank has several chunks",
        load_base_checkpoint,
    ),
    Hook(
        "megatron.training.training",
        "save_checkpoint",
        ("iteration", "model", "optimizer"),
        "saves no trace of a step that has begun early",
        save_checkpoint,
    ),
)
"""The functions of the trainer that read and write checkpoints."""
