"""What passes have in use while they run, by the allocator's count.

A schedule is planned with what is held between passes. An allocator's peak also has what lives
inside a pass only: logits, the gradients between two layers. Its figures change when the host
allocates and frees, not when a GPU computes, so reading them waits for nothing.
"""

from typing import Protocol

from megatron_vshape.core.model.kinds import PROCESSOR, Kind
from megatron_vshape.core.model.passes import Pass


class Allocator(Protocol):
    """The part of `torch.cuda` that counts; on a CPU, `live_bytes.LivePeak`."""

    def memory_allocated(self) -> int:
        """Return the bytes in use."""

    def max_memory_allocated(self) -> int:
        """Return the most in use since the peak was reset."""

    def reset_peak_memory_stats(self) -> None:
        """Let the peak be what is in use now."""


class PassNeeds:
    """An observer of passes that run alone: the most each has in use, above what was before it.

    Counted from the end of the pass before, so that the input counts as the result does.
    """

    def __init__(self, allocator: Allocator) -> None:
        """Begin to count."""
        self._allocator = allocator
        self.in_use_bytes: dict[Kind, int] = {}
        self._start()

    def _start(self) -> None:
        self._allocator.reset_peak_memory_stats()
        self._before = self._allocator.memory_allocated()

    def begins(self, work: Pass) -> None:
        """Do nothing."""

    def ends(self, work: Pass) -> None:
        """Take the peak, and begin again."""
        need = self._allocator.max_memory_allocated() - self._before
        self.in_use_bytes[work.kind] = max(need, self.in_use_bytes.get(work.kind, 0))
        self._start()


class StepPeaks:
    """An observer of a step: the most in use after a pass, and at any moment, above the start."""

    def __init__(self, allocator: Allocator) -> None:
        """Begin to count."""
        self._allocator = allocator
        allocator.reset_peak_memory_stats()
        self._start_bytes = allocator.memory_allocated()
        self.after_pass_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """Return the most that was in use at any moment."""
        return self._allocator.max_memory_allocated() - self._start_bytes

    def begins(self, work: Pass) -> None:
        """Do nothing."""

    def ends(self, work: Pass) -> None:
        """Count what the pass has left, its result included."""
        if work.kind.resource != PROCESSOR:
            return  # a copy, in a thread of its own, leaves nothing
        now = self._allocator.memory_allocated() - self._start_bytes
        self.after_pass_bytes = max(self.after_pass_bytes, now)
