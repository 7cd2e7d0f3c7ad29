"""HybridModel: its layers are a pattern of symbols, in which `|` begins the next stage.

After them, each behind a `/`, come the layers of multi-token prediction, all in the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError

FLAG, OPTION = "--hybrid-layer-pattern", "hybrid_layer_pattern"
BEGINS_STAGE, BEGINS_MTP = "|", "/"


def parts(pattern: str) -> tuple[int, ...]:
    """Count the layers between the `|` of a pattern; of all of them, if it has none."""
    return tuple(map(len, pattern.partition(BEGINS_MTP)[0].split(BEGINS_STAGE)))


def marks_stages(model: Any) -> bool:
    """Check whether the pattern of arguments or a config has `|` between stages."""
    return BEGINS_STAGE in (getattr(model, "hybrid_layer_pattern", None) or "")


def num_layers(pattern: str) -> int:
    """Return how many layers the pattern has besides those of multi-token prediction."""
    return len(pattern.partition(BEGINS_MTP)[0].replace(BEGINS_STAGE, ""))


def num_predicting(pattern: str) -> int:
    """Return how many parts for multi-token prediction the pattern has."""
    return sum(bool(part) for part in pattern.split(BEGINS_MTP)[1:])


def without_stages(pattern: str) -> str:
    """Remove the `|` of a pattern."""
    return pattern.replace(BEGINS_STAGE, "")


def cut_pattern(pattern: str, layers: Sequence[int]) -> str:
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
