"""Rewinding of microbatches and random numbers, for passes whose effects are undone."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_vshape.mcore.step.microbatches import ForwardingIterator


class Replay(ForwardingIterator):
    """An iterator that can return again all items since a mark."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._replayed: deque[Any] = deque()
        self._recorded: list[Any] | None = None

    def __next__(self) -> Any:
        batch = self._replayed.popleft() if self._replayed else next(self.source)
        if self._recorded is not None:
            # A copy, because a forward step may modify its batch.
            self._recorded.append(copy.copy(batch))
        return batch

    def mark(self) -> None:
        """Start recording items."""
        self._recorded = []

    def forget(self) -> None:
        """Stop recording; the recorded items are consumed."""
        self._recorded = None

    def rewind(self) -> None:
        """Return all items since the mark again."""
        self._replayed.extendleft(reversed(self._recorded or []))
        self._recorded = None


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of all random number generators that the model uses."""

    host: Tensor
    device: Tensor
    tracked: dict[str, Any]  # states of Megatron's RNG tracker, by name

    @classmethod
    def now(cls) -> RandomState:
        """Return the current state."""
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracked = {
            name: _freeze_state(tracked_state)
            for name, tracked_state in tracker.get_states().items()
        }
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(), tracked)

    def restore(self) -> None:
        """Set all generators to this state."""
        torch.set_rng_state(self.host)
        torch.cuda.set_rng_state(self.device)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.set_states(
            {name: _restore_state(frozen_state) for name, frozen_state in self.tracked.items()}
        )


class _FrozenGenerator(NamedTuple):
    """A generator with its state; RNG trackers for CUDA graphs and TE track generators."""

    generator: torch.Generator
    state: Tensor


def _freeze_state(tracked: Any) -> Any:
    """Return an immutable copy: draws replace a tracked state tensor but modify a generator."""
    is_generator = isinstance(tracked, torch.Generator)
    return _FrozenGenerator(tracked, tracked.get_state()) if is_generator else tracked


def _restore_state(state: Any) -> Any:
    if not isinstance(state, _FrozenGenerator):
        return state
    state.generator.set_state(state.state)
    return state.generator


def finish_gathering(chunks: Sequence[Any]) -> None:
    """Wait for running parameter all-gathers, and mark all parameters to be gathered again."""
    names = ("bucket_groups", "expert_parallel_bucket_groups")
    for group in chain(*(getattr(chunk, name, ()) for chunk in chunks for name in names)):
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            group.param_gather_handle = None
        group.param_gather_dispatched = False
