"""HybridModel: its layers are a pattern of symbols, in which `|` begins the next stage.

After them, each behind a `/`, come the layers of multi-token prediction, all in the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import AUTO_SPLIT, check_layers, even_layers, parse_layers
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.mcore.refusals import UnsupportedError

FLAG = "--hybrid-layer-pattern"
BEGINS_STAGE, BEGINS_MTP = "|", "/"

PLACES = (
    ("megatron.core.models.hybrid.hybrid_layer_allocation", (0, 18), (999, 0)),
    ("megatron.core.ssm.mamba_hybrid_layer_allocation", (0, 0), (0, 19)),  # from 0.18 on a copy
)
"""Where Megatron decides which part of the pattern a stage has, and from which release to which."""


def pattern_of(model: Any) -> str | None:
    """Return the pattern of arguments or a config; None where all layers are alike.

    Where only the model's constructor is told the pattern, any one of so many layers does.
    """
    pattern: str | None = getattr(model, "hybrid_layer_pattern", None)
    count, is_hybrid = getattr(model, "num_layers", None), getattr(model, "is_hybrid_model", False)
    return "*" * count if not pattern and count and is_hybrid else pattern


def layers_of_stages(pattern: str, placement: Placement, split: str | None) -> tuple[int, ...]:
    """Return how many of the pattern's layers every stage has.

    Where the pattern has no `|`, `split` says, as `--pipeline-layer-split`, or all have equally
    many. What a layer takes depends on its symbol, so auto has nothing to balance by.

    Raises:
        ScheduleError: the pattern does not fit the stages.
        UnsupportedError: the flags contradict it.
    """
    segments = pattern.partition(BEGINS_MTP)[0].split(BEGINS_STAGE)
    if len(segments) > 1:
        _check_segments(pattern, segments, placement, split)
        return tuple(map(len, segments))
    if split == AUTO_SPLIT:
        raise UnsupportedError(
            f"--pipeline-layer-split {AUTO_SPLIT} requires identical layers, and those of "
            f"{FLAG} differ: mark the start of each stage in the pattern with {BEGINS_STAGE}"
        )
    if split is not None:
        return parse_layers(split, num_layers(pattern), placement)
    return even_layers(num_layers(pattern), placement)


def _check_segments(
    pattern: str, segments: Sequence[str], placement: Placement, split: str | None
) -> None:
    if split is not None:
        raise UnsupportedError(
            f"{FLAG} {pattern:.80} defines the layers of each stage with {BEGINS_STAGE}, as "
            "--pipeline-layer-split does: remove one of them"
        )
    if len(segments) != len(placement):
        raise ScheduleError(
            f"{FLAG} {pattern:.80} has {len(segments)} parts and the schedule {len(placement)} "
            f"stages: put {len(placement) - 1} times {BEGINS_STAGE} into it, or none"
        )
    check_layers(f"{FLAG} {pattern:.80}", [len(segment) for segment in segments])


def num_layers(pattern: str) -> int:
    """Return how many layers the pattern has besides those of multi-token prediction."""
    return len(pattern.partition(BEGINS_MTP)[0].replace(BEGINS_STAGE, ""))


def num_predicting(pattern: str) -> int:
    """Return how many parts for multi-token prediction the pattern has."""
    return sum(bool(part) for part in pattern.split(BEGINS_MTP)[1:])


def cut(pattern: str, layers: Sequence[int]) -> str:
    """Return the pattern with `|` between stages of so many layers.

    Raises:
        ScheduleError: it has another number of layers.
    """
    main, slash, predicting = pattern.partition(BEGINS_MTP)
    symbols = main.replace(BEGINS_STAGE, "")
    if len(symbols) != sum(layers):
        raise ScheduleError(
            f"the model's pattern {pattern:.80} has {len(symbols)} layers and its config "
            f"{sum(layers)}: make num_layers fit"
        )
    ends = accumulate(layers, initial=0)
    stages = BEGINS_STAGE.join(symbols[first:end] for first, end in pairwise(ends))
    return stages + slash + predicting
