"""The layers of every pipeline rank and chunk, which a checkpoint may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, looping, stages_of
from megatron_vshape.core.schedule_names import is_megatrons_own
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.layout.given_layout import (
    DECODER,
    EMBEDDING,
    LOSS,
    MTP,
    OPTION,
    of_ranks,
    stages_in,
)
from megatron_vshape.mcore.layout.multi_token import num_predicting
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.setup.translate import FIRST, LAST, count_layers, first_given

RECORD = "pipeline_rank_layers"
"""Name of the layers in a checkpoint: in its arguments, or in its content metadata."""

Layers = list[list[list[int]]]
"""Layer numbers per rank and chunk, or one of the numbers in `WORDS`.

Layers of multi-token prediction are counted after the other layers.
"""

_EMBEDDING, _OUTPUT, _VOCABULARY_ROWS = 0, -1, -2

WORDS = {_EMBEDDING: "embedding", _OUTPUT: "output", _VOCABULARY_ROWS: "vocabulary rows"}
"""Names of the entries that are no layers."""

LAYER_OPTIONS = "the schedule, --pipeline-layer-split and --pipeline-vocab-parallel"
"""Options that determine the layers of the ranks."""


def layers_of_stages(stage_map: StageMap, has_vocabulary_rows: bool = False) -> Layers:
    """Return the layers of the ranks; with vocabulary rows, all ranks have parts of both ends."""
    stages = _with_ends(stage_map.layers, stage_map.predicting)
    ranks = _numbered(stages, stage_map.placement)
    for rank in ranks if has_vocabulary_rows else ():
        rank[0].append(_VOCABULARY_ROWS)
        if len(rank) > 1:
            rank[-1].append(_VOCABULARY_ROWS)
    return ranks


def saved_layers(args: Any) -> Layers | None:
    """Return the layers according to a checkpoint's arguments; None if unknown.

    A checkpoint without a record is from Megatron's schedules or from an earlier version of this
    package.
    """
    record: Layers | None = getattr(args, RECORD, None)
    name = getattr(args, "pipeline_schedule", None)
    if record is not None or (name is not None and not is_megatrons_own(name)):
        return record
    return layers_of_megatron(args)


def layers_of_megatron(options: Any) -> Layers | None:
    """Return the layers of the ranks under a schedule of Megatron; None if unknown.

    `options` are Megatron's arguments after validation, or the values of a config.
    """
    ranks = getattr(options, "pipeline_model_parallel_size", None)
    if ranks is None or count_layers(options) is None:
        return None
    try:
        stages = _stages_of_megatron(options, ranks)
    except ScheduleError:
        return None
    if not stages or len(stages) % ranks:
        return None
    return _numbered(stages, looping(ranks, len(stages) // ranks))


def _stages_of_megatron(options: Any, ranks: int) -> list[list[str]] | None:
    """Return the names of the layers of every stage, as Megatron splits the model.

    Source: get_num_layers_to_build in megatron/core/transformer/transformer_block.py.

    Raises:
        ScheduleError: The options do not fit the model.
    """
    layout = getattr(options, OPTION, None)
    if layout is not None:
        return stages_in(layout)
    predicting = num_predicting(options)
    if hybrid.marks_stages(options):
        return _with_ends(hybrid.parts(options.hybrid_layer_pattern), predicting)
    chunks = getattr(options, "virtual_pipeline_model_parallel_size", None) or 1
    total = count_layers(options)
    first, last = first_given(options, FIRST), first_given(options, LAST)
    if total is None:  # the layers of the checkpoint are unknown
        return None
    if first is not None or last is not None:
        counts = of_ranks(total, ranks, first, last)
        return _with_ends([count // chunks for count in counts] * chunks, predicting)
    less_first = bool(getattr(options, "account_for_embedding_in_pipeline_split", False))
    less_last = bool(getattr(options, "account_for_loss_in_pipeline_split", False))
    stage_size, remainder = divmod(total + less_first + less_last, ranks * chunks)
    if remainder:
        return None
    layers = [stage_size] * (ranks * chunks)
    layers[0] -= less_first
    layers[-1] -= less_last
    return _with_ends(layers, predicting)


def _with_ends(layers: Sequence[int], predicting: int) -> list[list[str]]:
    stages = [[DECODER] * count for count in layers]
    stages[0].insert(0, EMBEDDING)
    stages[-1] += [MTP] * predicting + [LOSS]
    return stages


def _numbered(stages: Sequence[Sequence[str]], placement: Placement) -> Layers:
    """Return the numbers of the named layers of all stages, by rank and chunk."""
    ends = {EMBEDDING: _EMBEDDING, LOSS: _OUTPUT}
    number = 0
    numbers: list[list[int]] = []
    for stage in stages:
        numbers.append([])
        for name in stage:
            number += name not in ends
            numbers[-1].append(ends.get(name, number))
    ranks = stages_of(placement, max(placement) + 1)
    return [[numbers[stage] for stage in rank_stages] for rank_stages in ranks]


def difference(saved: Layers, current: Layers) -> str | None:
    """Describe the first rank whose layers differ; None if all are equal."""
    if saved == current:
        return None
    if len(saved) != len(current):
        return f"it has {len(saved)} pipeline ranks and this run {len(current)}"
    rank = next(rank for rank, chunks in enumerate(saved) if chunks != current[rank])
    return f"rank {rank} had {_text(saved[rank])} and has {_text(current[rank])} here"


def _text(chunks: Sequence[Sequence[int]]) -> str:
    return " | ".join(
        ", ".join(WORDS.get(layer, str(layer)) for layer in chunk) or "no layers"
        for chunk in chunks
    )
