"""Checkpoints of Megatron-LM's trainer: their tracker file, and the layers of each rank.

Megatron writes a checkpoint of `--ckpt-format torch` by rank and chunk, with layer numbers local to
the chunk. A run with another placement or layer split would load each layer as a different one. If
the names differ too, Megatron loads matching names and prints the others. Weights in distributed
checkpoints have global layer numbers, so any schedule can load them; for the state of distributed
optimizers, see `optimizer_state`.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from megatron.training import get_args

from megatron_vshape.mcore.hook import Function, Hook, Replaced, replaces, replaces_always
from megatron_vshape.mcore.hooks.optimizer_state import UNKNOWN_LAYERS, layers_of_pipeline
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.refusals import UnsupportedError, refusing
from megatron_vshape.mcore.setup.rank_layers import (
    LAYER_OPTIONS,
    RECORD,
    Layers,
    difference,
    layers_of_megatron,
    saved_layers,
)
from megatron_vshape.mcore.step.forward_backward import PipelineRunner

logger = logging.getLogger(__name__)


def check_layers(saved: Layers | None, current: Layers | None, folder: str) -> None:
    """Compare the layers of a checkpoint by ranks with those of this run.

    Raises:
        UnsupportedError: The layers are on other ranks or chunks.
    """
    if current is None:
        return
    if saved is None:
        logger.warning(UNKNOWN_LAYERS, folder)
        return
    differs = difference(saved, current)
    if differs is None:
        return
    raise UnsupportedError(
        f"--load {folder} does not work with this schedule: the checkpoint was saved with "
        f"--ckpt-format torch, which keeps layers by rank, and {differs}. Use "
        f"{LAYER_OPTIONS} of the run that saved it. Or let that run convert it: with its flags, "
        "--ckpt-convert-format torch_dist and "
        "--ckpt-convert-save DIR; any schedule loads the result"
    )


def layers_of_run(session: Session) -> Layers | None:
    """Return the layers of all ranks under the schedule of this run; None if unknown."""
    if session.pipeline is None:
        return layers_of_megatron(get_args())
    return layers_of_pipeline(session.pipeline)


@replaces_always
def read_metadata(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Read the latest checkpoint number after repairing an interrupted tracker file."""
    # `names_schedule`: --use-checkpoint-args reads the tracker before the flags are validated.
    # Every rank repairs: all write the same content, so no rank has to wait for another.
    if session.names_schedule or not session.is_idle:
        bound = inspect.signature(original).bind(*args, **options)
        repair_tracker(Path(bound.arguments["tracker_filename"]))
    return original(*args, **options)


@replaces
def save_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Save a checkpoint without the effects of a step that has started early.

    These effects are random-number states and consumed microbatches. The arguments in a checkpoint
    by ranks (--ckpt-format torch) also record the layers of each rank.
    """
    if isinstance(session.runner, PipelineRunner):
        session.runner.roll_back()
    with Replaced() as replaced:
        if get_args().ckpt_format == "torch":
            replaced.put(get_args(), RECORD, layers_of_run(session))
        return original(*args, **options)


@replaces_always
def load_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Provide the layers of this run while a checkpoint is loaded, to compare both."""
    session.loading_layers = functools.partial(layers_of_run, session)
    try:
        return original(*args, **options)
    finally:
        session.loading_layers = None


@replaces_always
def load_base_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Reject a checkpoint by ranks (--ckpt-format torch) whose layers are on other ranks."""
    read = original(*args, **options)
    if session.loading_layers is not None:
        arguments = inspect.signature(original).bind(*args, **options).arguments
        if not arguments.get("rank0"):  # with rank0, only the arguments are read
            _compare_layers(session, read, arguments["load_dir"])
    return read


def _compare_layers(session: Session, read: Any, folder: Any) -> None:
    """Raise RefusedError on all ranks if a checkpoint by ranks does not match the stages."""
    state, *_, form = read
    saved_by = state and state.get("args")
    # Distributed formats find a layer by its name. `optimizer_state` checks their optimizer state.
    if getattr(form, "name", None) != "LEGACY":
        return
    if session.is_idle and not hasattr(saved_by, RECORD):  # no schedule, neither then nor now
        return
    with refusing():
        check_layers(saved_by and saved_layers(saved_by), layers_of_run(session), str(folder))


_FOLDER = re.compile(r"iter_([0-9]{7,})")


def repair_tracker(tracker: Path) -> None:
    """Write the newest complete checkpoint to a tracker file without a valid entry.

    Megatron empties the file before it writes the number. If the disk is full or the process is
    killed in between, the file stays empty. The next run would then end without training, with exit
    status 0. If the folder has no checkpoint that is known to be complete, the file stays
    unchanged.
    """
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return
    if text.isascii() and text.isdigit() or text == "release":
        return
    iteration = newest_whole(tracker.parent)
    if iteration is None:
        return
    # Ranks in separate containers may have equal process ids, so the name includes the rank.
    new_tracker = tracker.with_name(f".{tracker.name}.{os.environ.get('RANK', '0')}.{os.getpid()}")
    try:
        new_tracker.write_text(str(iteration), encoding="utf-8")
        new_tracker.replace(tracker)
    except OSError as error:
        logger.warning("%s names no checkpoint and cannot be written: %s", tracker, error)
        return
    logger.warning(
        "%s contained %r, as after a full disk or a kill; it names iteration %d now, the newest "
        "complete checkpoint there",
        tracker,
        text[:40],
        iteration,
    )


def newest_whole(folder: Path) -> int | None:
    """Return the latest iteration with a complete checkpoint, or None.

    `--ckpt-format torch_dist` writes metadata.json last, so a valid metadata.json means complete.
    """
    iterations = [
        int(match[1])
        for checkpoint in folder.iterdir()
        if (match := _FOLDER.fullmatch(checkpoint.name)) and _is_whole(checkpoint)
    ]
    return max(iterations, default=None)


def _is_whole(checkpoint: Path) -> bool:
    try:
        return isinstance(json.loads((checkpoint / "metadata.json").read_bytes()), dict)
    except (OSError, ValueError):
        return False


_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"

HOOKS = (
    Hook(
        _CHECKPOINTING,
        "read_metadata",
        ("tracker_filename",),
        "makes good the file that names the last checkpoint, where a full disk left it empty",
        read_metadata,
    ),
    Hook(
        _CHECKPOINTING,
        "load_checkpoint",
        ("ddp_model",),
        "compares the layers of every rank in a checkpoint and in this run",
        load_checkpoint,
        everywhere=True,
    ),
    Hook(
        _CHECKPOINTING,
        "_load_base_checkpoint",
        ("load_dir", "rank0"),
        "rejects a checkpoint by ranks (--ckpt-format torch) that has layers in other places",
        load_base_checkpoint,
    ),
    Hook(
        _TRAINING,
        "save_checkpoint",
        ("iteration", "model", "optimizer"),
        "saves no trace of a step that has begun early, and where each layer is",
        save_checkpoint,
    ),
)
"""The functions of the trainer that read and write checkpoints."""
