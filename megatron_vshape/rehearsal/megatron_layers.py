"""Layers per stage of Megatron's own schedules: those of a command, and the flags for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_vshape.core.model.layers import even_with_ends
from megatron_vshape.core.schedule_names import megatrons_name
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.layout.given_layout import layers_in, layout_of
from megatron_vshape.rehearsal.command import ENDS_ARE_LAYERS, Command, flag_changes
from megatron_vshape.rehearsal.saved_config import LAYOUT

_FLAGS_OF_OUTER_RANKS = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
"""Megatron's flags for the layers of the first and the last pipeline rank."""

_FLAGS_OF_ENDS = tuple("--" + name.replace("_", "-") for name in ENDS_ARE_LAYERS)
"""Megatron's flags to count the embedding and the loss as one layer each."""


class MegatronLayers(NamedTuple):
    """Megatron's schedule for a command, and the layers of its stages."""

    schedule: str
    layers: tuple[int, ...] | None  # None: Megatron rejects the layer split
    reason: str = ""


def layers_of_command(command: Command, num_layers: int, ranks: int) -> MegatronLayers:
    """Return Megatron's schedule for a command, and the layers of its stages.

    Raises:
        ScheduleError: the pipeline layout of the command cannot be read.
    """
    stages: Sequence[int] = ()
    if command.pattern:
        parts = hybrid.parts(command.pattern)
        stages = parts if len(parts) > 1 else ()
    elif layout := command.value(LAYOUT):
        stages, _ = layers_in(layout)
    if stages:
        schedule = megatrons_name(max(1, len(stages) // ranks))
        if len(stages) % ranks:
            reason = f"{len(stages)} stages do not divide among {ranks} pipeline ranks"
            return MegatronLayers(schedule, None, reason)
        if num_layers not in (0, sum(stages)):
            reason = f"the pipeline layout has {sum(stages)} layers, and the model {num_layers}"
            return MegatronLayers(schedule, None, reason)
        return MegatronLayers(schedule, tuple(stages))
    ends = [command.has(flag) for flag in _FLAGS_OF_ENDS]
    counted = num_layers + sum(ends)
    chunks = command.number("--num-virtual-stages-per-pipeline-rank", 1)
    stage_text = f" with {chunks} stages each" if chunks > 1 else ""
    remainder = 0
    if size := command.number("--num-layers-per-virtual-pipeline-stage", 0):
        chunks, remainder = max(1, counted // (size * ranks)), counted % (size * ranks)
        stage_text = f" with stages of {size} layers"
    per_rank = _layers_of_ranks(command, counted, ranks)
    if remainder or not per_rank or any(count % chunks for count in per_rank):
        with_ends = ", with embedding and loss," if any(ends) else ""
        reason = f"{counted} layers{with_ends} do not divide among {ranks} pipeline ranks"
        return MegatronLayers(megatrons_name(chunks), None, reason + stage_text)
    layers = [count // chunks for _ in range(chunks) for count in per_rank]
    layers[0] -= ends[0]
    layers[-1] -= ends[1]
    return MegatronLayers(megatrons_name(chunks), tuple(layers))


def _layers_of_ranks(command: Command, num_layers: int, ranks: int) -> list[int]:
    """Divide the layers among pipeline ranks as Megatron does; empty if it rejects them."""
    first, last = (command.number(flag, 0) for flag in _FLAGS_OF_OUTER_RANKS)
    middle_ranks = ranks - (first > 0) - (last > 0)
    layers_per_rank, remainder = divmod(num_layers - first - last, middle_ranks or 1)
    if remainder or layers_per_rank < 0 or (layers_per_rank and not middle_ranks):
        return []
    return [first or layers_per_rank, *[layers_per_rank] * (ranks - 2), last or layers_per_rank]


def with_layers(command: Command, layers: Sequence[int], ranks: int) -> Command:
    """Return the command with which Megatron runs stages of these layers."""
    plain = command.without_chunks()
    if command.pattern:
        return plain.having(**{hybrid.OPTION: hybrid.cut_pattern(command.pattern, layers)})
    plain = plain.without({*_FLAGS_OF_OUTER_RANKS, *_FLAGS_OF_ENDS}.__contains__)
    if not is_even(layers):
        layout = layout_of(layers, command.mtp_layers)
        return plain.having(pipeline_model_parallel_layout=layout)
    chunks = len(layers) // ranks
    if chunks > 1:
        plain = plain.having(num_virtual_stages_per_pipeline_rank=chunks)
    counts_ends = len(set(layers)) > 1
    return replace(plain, flags=(*plain.flags, *(_FLAGS_OF_ENDS if counts_ends else ())))


def is_even(layers: Sequence[int]) -> bool:
    """Return whether layers, or layers with embedding and output layer, are equal in all stages."""
    return len(set(layers)) < 2 or tuple(layers) == even_with_ends(sum(layers), len(layers))


def flags_text(layers: Sequence[int], ranks: int, command: Command) -> str:
    """Format layers per stage and the flags with which Megatron runs them, removals last."""
    changes = flag_changes(command, with_layers(command, layers, ranks))
    removed = [change for change in changes if change.startswith("remove ")]
    flags = " ".join(change for change in changes if change not in removed)
    return f"{', '.join(map(str, layers))}: {' and '.join(filter(None, (flags, *removed)))}"
