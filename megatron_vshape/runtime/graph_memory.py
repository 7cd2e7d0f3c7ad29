"""Attribute allocated memory to captured CUDA graphs or to other CUDA streams."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Segments:
    """Address ranges of selected segments of torch's caching allocator."""

    def __init__(self, is_wanted: Callable[[Mapping[str, Any]], bool] | None = None) -> None:
        """Select the allocator's segments for which `is_wanted` is true; None selects none.

        `is_wanted` receives an entry of `torch.cuda.memory_snapshot`: `stream` is the stream's
        number, and `segment_pool_id` is (0, 0) for memory outside CUDA graphs.
        """
        segments = [] if is_wanted is None else filter(is_wanted, torch.cuda.memory_snapshot())
        ranges = sorted(
            (segment["address"], segment["address"] + segment["total_size"]) for segment in segments
        )
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def __bool__(self) -> bool:
        """Return whether any segment is selected."""
        return bool(self._starts)

    def __contains__(self, address: int) -> bool:
        """Return whether the address is in a selected segment."""
        # The last segment that starts at or before the address; segments do not overlap.
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]


class GraphMemory:
    """Memory of captured CUDA graphs; empty before any capture.

    A replay leaves its results in graph memory, and the next graph captured in the same pool may
    overwrite them. The capture knows only readers inside graphs. So a result with a later reader,
    such as a P2P send or a weight-gradient job, has to be copied.
    """

    def __init__(self) -> None:
        """Start without graphs."""
        self._segments = Segments()

    def look(self) -> None:
        """Read the graphs' memory from the allocator, after capture."""
        self._segments = Segments(lambda segment: tuple(segment["segment_pool_id"]) != (0, 0))

    def owns(self, address: int) -> bool:
        """Return whether the address is in graph memory."""
        return address in self._segments

    def kept(self, value: Any) -> Any:
        """Return a tensor, or a list of tensors, with copies of those in graph memory."""
        if not self._segments:
            return value
        if isinstance(value, list | tuple):
            return [self.kept(part) for part in value]
        # On the current stream, so before any later replay there overwrites the original.
        is_owned = isinstance(value, Tensor) and self.owns(value.data_ptr())
        return value.clone() if is_owned else value
