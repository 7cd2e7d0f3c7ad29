"""Stages that Megatron's options describe, and their conversion to stages of a schedule.

This module does not import Megatron: `doctor` reads the layout of a recipe without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import check_layers, check_stages

OPTION = "pipeline_model_parallel_layout"
EMBEDDING, DECODER, MTP, LOSS = "embedding", "decoder", "mtp", "loss"
LETTERS = {"E": EMBEDDING, "t": DECODER, "m": MTP, "L": LOSS}


def is_own(layout: Any) -> bool:
    """Return whether a layout is this package's `StageLayout`, which must not be parsed again."""
    return getattr(layout, "stage_map", None) is not None


def layers_in(layout: Any) -> tuple[tuple[int, ...], int]:
    """Return the decoder layers per stage in model order, and the number of MTP layers.

    In the given layout, multi-token prediction can have its own stage; in ours it is on the last
    stage with the loss. `layout` is a text such as `Et|(tt|)*30L`, a list of lists of names, or
    Megatron's object. Megatron numbers stages by chunk, then by rank within a chunk. This is the
    order of the model for every placement.

    Raises:
        ScheduleError: The layout is invalid, or its layers are in another order.
    """
    stages = stages_in(layout)
    text = as_written(layout)
    names = [name for stage in stages for name in stage]
    counts = names.count(DECODER), names.count(MTP)
    if names != [EMBEDDING, *[DECODER] * counts[0], *[MTP] * counts[1], LOSS]:
        raise ScheduleError(
            f"{OPTION} {text} must begin with the embedding and end with the loss, with decoder "
            "layers between them, and then those of multi-token prediction if there are any"
        )
    return tuple(stage.count(DECODER) for stage in stages), counts[1]


def layout_of(layers: Sequence[int], predicting: int = 0) -> str:
    """Return the text of a layout with these layers per stage, in model order.

    >>> layout_of((3, 4, 4, 2))
    'Ettt|(t*4|)*2ttL'
    """
    first, *inner, last = ("t" * n if n < 4 else f"t*{n}" for n in layers)
    runs = [(body, len(list(bodies))) for body, bodies in groupby(inner)]
    between = (f"({body}|)*{count}" if count > 1 else f"{body}|" for body, count in runs)
    return f"E{first}|{''.join(between)}{last}{'m' * predicting}L"


def as_written(layout: Any) -> str:
    """Return the layout as the user wrote it, at most 80 characters."""
    return f"{getattr(layout, 'input_data', layout)!s:.80}"


def stages_in(layout: Any) -> list[list[str]]:
    """Return the names of the layers of every stage, in model order.

    Raises:
        ScheduleError: The text of the layout is invalid.
    """
    if isinstance(layout, str):
        return _parsed(layout)
    ranks = getattr(layout, "layout", None)
    if ranks is not None:  # Megatron's object has the stages of every rank, by chunk
        layout = [rank[chunk] for chunk in range(len(ranks[0])) for rank in ranks]
    return [[str(getattr(layer, "name", layer)).strip().lower() for layer in row] for row in layout]


def _parsed(text: str) -> list[list[str]]:
    """Parse a layout text: `(...)*n` and `t*n` repeat, commas are ignored."""
    text_without_repeats = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text_without_repeats = re.sub(
            repeated, lambda match: match[1] * int(match[2]), text_without_repeats
        )
    unknown = sorted(set(text_without_repeats) - set(LETTERS) - {"|"})
    if unknown:
        raise ScheduleError(
            f"{OPTION} {text:.80} has {unknown[0]!r}: a layout is made of E, t, m, L and |, with "
            "(...)*n for repetition"
        )
    return [[LETTERS[letter] for letter in stage] for stage in text_without_repeats.split("|")]


def regrouped(layers: Sequence[int], num_stages: int) -> tuple[int, ...] | None:
    """Return the layers of `num_stages` stages with the same borders as far as possible.

    Neighboring stages are merged, or every stage is cut into equal parts. If the layers of a stage
    do not divide evenly, the shorter parts come first in the first stage and last in all others,
    since the first and last stage also have the embedding and the loss. None if neither works, or
    if a stage in the middle would have no layers.
    """
    num_given = len(layers)
    if num_given % num_stages == 0:
        group_size = num_given // num_stages
        stages = [
            sum(layers[start : start + group_size]) for start in range(0, num_given, group_size)
        ]
    elif num_stages % num_given == 0:
        parts = num_stages // num_given
        stages = []
        for stage, num_layers in enumerate(layers):
            min_layers, num_longer = divmod(num_layers, parts)
            counts = [min_layers] * (parts - num_longer) + [min_layers + 1] * num_longer
            stages += counts if stage == 0 else counts[::-1]
    else:
        return None
    return tuple(stages) if all(stages[1:-1]) else None


def nearest(
    num_layers: int, num_stages: int, embedding: float = 0.0, loss: float = 0.0
) -> tuple[int, ...]:
    """Return the most even split if embedding and loss count as these numbers of layers.

    Assigns layer by layer to the stage with the smallest load; ties go to the latest stage, because
    activations of early stages are retained longest.

    Raises:
        ScheduleError: There are fewer layers than middle stages.
    """
    layers = [int(0 < stage < num_stages - 1) for stage in range(num_stages)]
    check_stages(num_layers, sum(layers), num_stages)
    extra_layers = [0.0] * num_stages
    extra_layers[0] += embedding
    extra_layers[-1] += loss
    for _ in range(num_layers - sum(layers)):
        stage = min(
            range(num_stages),
            key=lambda stage_index: (layers[stage_index] + extra_layers[stage_index], -stage_index),
        )
        layers[stage] += 1
    return tuple(layers)


def of_ranks(
    num_layers: int, num_ranks: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Return the layers of every rank with the given numbers on the first and the last rank.

    Raises:
        ScheduleError: Too few or too many layers are left for the other ranks.
    """
    layers_by_rank = {0: first, num_ranks - 1: last}
    fixed = {rank: count for rank, count in layers_by_rank.items() if count is not None}
    other_ranks = [rank for rank in range(num_ranks) if rank not in fixed]
    num_remaining = num_layers - sum(fixed.values())
    if (
        min(fixed.values(), default=0) < 0
        or num_remaining < len(other_ranks)
        or (num_remaining and not other_ranks)
    ):
        raise ScheduleError(
            f"of {num_layers} layers, {first} on the first and {last} on the last of {num_ranks} "
            f"pipeline ranks leave {num_remaining} for the others"
        )
    min_layers, num_longer = divmod(num_remaining, max(len(other_ranks), 1))
    counts = dict(fixed)
    for position, rank in enumerate(other_ranks):  # the remainder goes to the latest ranks
        counts[rank] = min_layers + (position >= len(other_ranks) - num_longer)
    layers = tuple(counts[rank] for rank in range(num_ranks))
    check_layers(f"{first} and {last} layers on the first and the last rank", layers)
    return layers


def less_at_ends(layers: Sequence[int]) -> tuple[float, float]:
    """Return by how many layers the first and the last entry are below the mean of the others."""
    inner = layers[1:-1]
    if not inner:
        return 0.0, 0.0
    mean = sum(inner) / len(inner)
    return max(0.0, mean - layers[0]), max(0.0, mean - layers[-1])
