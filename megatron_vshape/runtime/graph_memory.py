"""Whose the memory is that torch has allocated: a captured CUDA graph's, or another stream's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Segments:
    """Some of the segments of memory that torch's allocator has taken from the device."""

    def __init__(self, is_wanted: Callable[[Mapping[str, Any]], bool] | None = None) -> None:
        """Ask the allocator for those that `is_wanted`, of what it tells of each; None: for none.

        It tells of `stream` the number, and of `segment_pool_id` (0, 0) where no graph has it.
        """
        found = [] if is_wanted is None else filter(is_wanted, torch.cuda.memory_snapshot())
        ranges = sorted((each["address"], each["address"] + each["total_size"]) for each in found)
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._starts)

    def __contains__(self, address: int) -> bool:
        """Return whether the address is in one of them."""
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


class GraphMemory:
    """Knows the memory that replays write to; none while nothing has been captured.

    A replay leaves its results in that memory, and the next one that has been captured there may
    use it again. When a result is read by is known to the capture only where a graph reads it. So
    what waits longer, a message to be sent or a weight gradient's job, is a copy.
    """

    def __init__(self) -> None:
        """Know of no graph."""
        self._segments = Segments()

    def look(self) -> None:
        """Ask the allocator which memory is graphs' own, once they have been captured."""
        self._segments = Segments(lambda each: tuple(each["segment_pool_id"]) != (0, 0))

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor's data is in a graph's memory."""
        return self.owns(tensor.data_ptr())

    def owns(self, address: int) -> bool:
        """Return whether an address is in a graph's memory."""
        return address in self._segments

    def kept(self, value: Any) -> Any:
        """Return what can be kept: a tensor, or a list of them, with a copy of what graphs hold."""
        if not self._segments:
            return value
        if isinstance(value, list | tuple):
            return [self.kept(each) for each in value]
        return value.clone() if isinstance(value, Tensor) and self.holds(value) else value
