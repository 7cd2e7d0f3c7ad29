"""A plugin of the farm: only the first context rank gets the true variable lengths.

This occurs if a library gives every context-parallel rank its part of a mask, and only one part has
padding.
"""

from __future__ import annotations

from typing import Any

import of_any_length
from megatron.core import parallel_state

from megatron_vshape.mcore.features.variable_length import reorder


def start(rank: int, given: object) -> None:
    """Cut the samples of this process, and have other context ranks see others."""
    of_any_length.start(rank, None)
    original = reorder.lengths_of

    def lengths_of(item: Any, is_unpadded: bool) -> list[int] | None:
        lengths = original(item, is_unpadded)
        if lengths is None or parallel_state.get_context_parallel_rank() == 0:
            return lengths
        return [max(of_any_length.LENGTHS) + 1 - each for each in lengths]

    reorder.lengths_of = lengths_of
