"""Checkpoints of Megatron-LM's trainer: their tracker file, and the layers of each rank.

Megatron writes a checkpoint of `--ckpt-format torch` by rank and chunk, with layer numbers local to
the chunk. A run with another placement or layer split would load each layer as a different one. If
the names differ too, Megatron loads matching names and prints the others. Distributed checkpoints
use global layer numbers, so any schedule can load them.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args
from torch import nn

from megatron_vshape.core.model.placement import looping, stages_of
from megatron_vshape.core.request import is_megatrons_own
from megatron_vshape.mcore.hook import Function, Hook, Replaced, replaces, replaces_always
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.refusals import UnsupportedError, refusing
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step_state import unwrapped

logger = logging.getLogger(__name__)


RECORD = "pipeline_rank_layers"
"""Attribute of the saved arguments with the layers, as plain lists."""


Layers = list[list[list[int]]]
"""Layer numbers per rank and chunk. A leading 0 is the embedding, a trailing -1 the output
layer."""


_UNEVEN = (
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def layers_of_ranks(model: Iterable[nn.Module], group: dist.ProcessGroup) -> Layers | None:
    """Gather the layers of all pipeline ranks; None if the model is not a stack of layers.

    All ranks of the pipeline call this with their chunks.
    """
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, [_layers(unwrapped(chunk)) for chunk in model], group)
    known = all(chunk is not None for rank in everyones for chunk in rank)
    return everyones if known else None


def _layers(chunk: Any) -> list[int] | None:
    layers = getattr(getattr(chunk, "decoder", None), "layers", None)
    if layers is None:
        return None
    numbers = [int(layer.layer_number) for layer in layers]
    return [*[0] * bool(chunk.pre_process), *numbers, *[-1] * bool(chunk.post_process)]


def saved_layers(args: Any) -> Layers | None:
    """Return the layers according to a checkpoint's arguments; None if unknown.

    A checkpoint without a record is from Megatron's schedules or from an earlier version of this
    package.
    """
    record: Layers | None = getattr(args, RECORD, None)
    name = getattr(args, "pipeline_schedule", None)
    has_own = name is not None and not is_megatrons_own(name)
    if record is not None or has_own or any(getattr(args, each, None) for each in _UNEVEN):
        return record
    ranks = getattr(args, "pipeline_model_parallel_size", None)
    if ranks is None:
        return None
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    placement, each = looping(ranks, chunks), args.num_layers // (ranks * chunks)
    last = len(placement) - 1

    def stage(at: int) -> list[int]:
        numbers = range(at * each + 1, (at + 1) * each + 1)
        return [*[0] * (at == 0), *numbers, *[-1] * (at == last)]

    return [[stage(at) for at in own] for own in stages_of(placement, ranks)]


def check_layers(saved: Layers | None, here: Layers | None, folder: str) -> None:
    """Compare a checkpoint's layers with those of this run, both for all ranks.

    Raises:
        UnsupportedError: The layers are on other ranks or chunks.
    """
    if here is None:
        return
    if saved is None:
        logger.warning(
            "the checkpoint in %s does not state which rank had which layers: make sure that this "
            "run has the same pipeline schedule and layer split",
            folder,
        )
        return
    if saved == here:
        return
    differs = f"it has {len(saved)} pipeline ranks and this run {len(here)}"
    if len(saved) == len(here):
        rank = next(at for at, own in enumerate(saved) if own != here[at])
        differs = f"rank {rank} had {_told(saved[rank])} and has {_told(here[rank])} here"
    raise UnsupportedError(
        f"--load {folder} does not work with this schedule: the checkpoint was saved with "
        f"--ckpt-format torch, which keeps layers by rank, and {differs}. Use the schedule and the "
        "--pipeline-layer-split of the run that saved it. Or let that run convert it: with its "
        "flags, --ckpt-convert-format torch_dist and --ckpt-convert-save DIR; any schedule loads "
        "the result"
    )


def _told(chunks: Sequence[Sequence[int]]) -> str:
    words = {0: "embedding", -1: "output"}
    return " | ".join(
        ", ".join(words.get(each, str(each)) for each in chunk) or "no layers" for chunk in chunks
    )


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

    These effects are random-number states and consumed microbatches. A checkpoint by ranks
    (--ckpt-format torch) also records the layers of each rank.
    """
    if isinstance(session.runner, PipelineRunner):
        session.runner.roll_back()
    with Replaced() as replaced:
        if get_args().ckpt_format == "torch":
            model = inspect.signature(original).bind(*args, **options).arguments["model"]
            layers = layers_of_ranks(model, parallel_state.get_pipeline_model_parallel_group())
            replaced.put(get_args(), RECORD, layers)
        return original(*args, **options)


@replaces_always
def load_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Remember the model while its checkpoint is loaded, to compare the layers of both."""
    bound = inspect.signature(original).bind(*args, **options)
    session.loading_model = bound.arguments["ddp_model"]
    try:
        return original(*args, **options)
    finally:
        session.loading_model = None


@replaces_always
def load_base_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Reject a checkpoint by ranks (--ckpt-format torch) whose layers are on other ranks."""
    read = original(*args, **options)
    if session.loading_model is not None:
        given = inspect.signature(original).bind(*args, **options).arguments
        if not given.get("rank0"):  # with rank0, only the arguments are read
            _compare_layers(session, read, given["load_dir"])
    return read


def _compare_layers(session: Session, read: Any, folder: Any) -> None:
    """Raise RefusedError on all ranks if a checkpoint by ranks does not match the stages."""
    state, *_, form = read
    saved_by = state and state.get("args")
    # Distributed formats find a layer by its name, so only legacy checkpoints depend on the rank.
    if getattr(form, "name", None) != "LEGACY":
        return
    if session.is_idle and not hasattr(saved_by, RECORD):  # no schedule, neither then nor now
        return
    here = layers_of_ranks(
        session.loading_model, parallel_state.get_pipeline_model_parallel_group()
    )
    with refusing():
        check_layers(saved_by and saved_layers(saved_by), here, str(folder))


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
    beside = tracker.with_name(f".{tracker.name}.{os.environ.get('RANK', '0')}.{os.getpid()}")
    try:
        beside.write_text(str(iteration), encoding="utf-8")
        beside.replace(tracker)
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
    found = [
        int(match[1])
        for each in folder.iterdir()
        if (match := _FOLDER.fullmatch(each.name)) and _is_whole(each)
    ]
    return max(found, default=None)


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
        "compares where a checkpoint by ranks (--ckpt-format torch) and the model have each layer",
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
