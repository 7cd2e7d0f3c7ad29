"""The layers of each rank in a checkpoint of `--ckpt-format torch`, checked when it is loaded.

Megatron writes such a checkpoint by rank and chunk, with layer numbers local to the chunk. A run
with another placement or layer split would load each layer as a different one. If the names differ
too, Megatron loads matching names and prints the others. Distributed checkpoints use global layer
numbers, so any schedule can load them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_vshape.core.baselines import is_megatrons_own
from megatron_vshape.core.model.placement import looping, stages_of
from megatron_vshape.mcore.refusals import UnsupportedError
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
            "the checkpoint in %s does not tell which rank had which layers: make sure that this "
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
