"""Early start of the next training step, before the current one is validated.

Only forwards before the first loss run early (`early_start.forward_cut`). If the parameters change
afterwards, all effects are rolled back: tensors are dropped, P2P messages are drained, and
microbatches and random numbers are replayed.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from torch import Tensor


class Replay:
    """An iterator that can return again all items since a mark."""

    def __init__(self, source: Any) -> None:
        """Set the trainer's iterator; all attributes except `next` are forwarded to it."""
        self.source = source
        self._again: deque[Any] = deque()
        self._given: list[Any] | None = None

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        item = self._again.popleft() if self._again else next(self.source)
        if self._given is not None:
            # A copy, because a forward step may modify its batch.
            self._given.append(copy.copy(item))
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def mark(self) -> None:
        """Start recording items."""
        self._given = []

    def forget(self) -> None:
        """Stop recording; the recorded items are consumed."""
        self._given = None

    def rewind(self) -> None:
        """Return all items since the mark again."""
        self._again.extendleft(reversed(self._given or []))
        self._given = None


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
        tracked = {name: _frozen(each) for name, each in tracker.get_states().items()}
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(), tracked)

    def restore(self) -> None:
        """Set all generators to this state."""
        torch.set_rng_state(self.host)
        torch.cuda.set_rng_state(self.device)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.set_states({name: _thawed(each) for name, each in self.tracked.items()})


class _Frozen(NamedTuple):
    """A generator with its state; RNG trackers for CUDA graphs and TE track generators."""

    generator: torch.Generator
    state: Tensor


def _frozen(tracked: Any) -> Any:
    """Return an immutable copy: draws replace a tracked state tensor but modify a generator."""
    is_generator = isinstance(tracked, torch.Generator)
    return _Frozen(tracked, tracked.get_state()) if is_generator else tracked


def _thawed(kept: Any) -> Any:
    if not isinstance(kept, _Frozen):
        return kept
    kept.generator.set_state(kept.state)
    return kept.generator
