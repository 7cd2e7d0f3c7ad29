"""The memory of captured CUDA graphs, of which nothing else may keep a result for long."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor


class GraphMemory:
    """Knows the memory that replays write to; none while nothing has been captured.

    A replay leaves its results in that memory, and the next one that has been captured there may
    use it again. When a result is read by is known to the capture only where a graph reads it. So
    what waits longer, a message to be sent or a weight gradient's job, is a copy.
    """

    def __init__(self) -> None:
        """Know of no graph."""
        self._starts: list[int] = []
        self._ends: list[int] = []

    def look(self) -> None:
        """Ask the allocator which memory is graphs' own, once they have been captured."""
        segments = torch.cuda.memory_snapshot()
        pools = sorted(
            (each["address"], each["address"] + each["total_size"])
            for each in segments
            if tuple(each["segment_pool_id"]) != (0, 0)  # that of everything else
        )
        self._starts = [start for start, _ in pools]
        self._ends = [end for _, end in pools]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor's data is in a graph's memory."""
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]

    def kept(self, value: Any) -> Any:
        """Return what can be kept: a tensor, or a list of them, with a copy of what graphs hold."""
        if not self._starts:
            return value
        if isinstance(value, list | tuple):
            return [self.kept(each) for each in value]
        return value.clone() if isinstance(value, Tensor) and self.holds(value) else value
