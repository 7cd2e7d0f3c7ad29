"""A plugin of the farm: two validation sets of eight samples and no test set."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import Split
from torch.utils.data import Subset

SIZE = 8


class ValidationSet(Subset[Any]):
    """Samples of the mock validation set."""

    split = Split.valid


def start(rank: int, settings: dict[str, bool]) -> None:
    """Replace the validation set; with `everywhere`, every chunk builds the datasets."""
    original: Any = BlendedMegatronDatasetBuilder.build

    @functools.wraps(original)
    def build(builder: Any) -> list[Any]:
        if settings["everywhere"]:
            builder.is_built_on_rank = lambda: True
        builder.sizes = [builder.sizes[0], 2 * SIZE, 0]
        train, valid, _ = original(builder)
        # Without data, Megatron returns a list of None.
        parts = [range(SIZE), range(SIZE, 2 * SIZE)]
        return [train, [valid and ValidationSet(valid, part) for part in parts], None]

    BlendedMegatronDatasetBuilder.build = build  # type: ignore[method-assign]
