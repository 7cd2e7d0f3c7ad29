"""The start of the next training step, run before this one is known to stand.

Only forwards before any loss run early (`early_start.forward_cut`). If the parameters turn out to
be others, everything that they left is undone: tensors are dropped, messages brought to rest,
microbatches given again, random numbers drawn anew.
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
    """An iterator that can give again what it has given since a mark."""

    def __init__(self, source: Any) -> None:
        """Take the trainer's iterator; everything but `next` is passed on to it."""
        self.source = source
        self._again: deque[Any] = deque()
        self._given: list[Any] | None = None

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        item = self._again.popleft() if self._again else next(self.source)
        if self._given is not None:
            # A copy, since a forward step may take the batch it gets apart.
            self._given.append(copy.copy(item))
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def mark(self) -> None:
        """Keep what is given from now on."""
        self._given = []

    def forget(self) -> None:
        """Keep nothing: what has been given is used."""
        self._given = None

    def rewind(self) -> None:
        """Give everything since the mark again."""
        self._again.extendleft(reversed(self._given or []))
        self._given = None


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random numbers that the model is going to draw."""

    host: Tensor
    device: Tensor
    tracked: dict[str, Any]  # of Megatron's tracker, by name

    @classmethod
    def now(cls) -> RandomState:
        """Return the present state."""
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracked = {name: _frozen(each) for name, each in tracker.get_states().items()}
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(), tracked)

    def restore(self) -> None:
        """Have the same numbers drawn again."""
        torch.set_rng_state(self.host)
        torch.cuda.set_rng_state(self.device)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.set_states({name: _thawed(each) for name, each in self.tracked.items()})


class _Frozen(NamedTuple):
    """A generator, as trackers for CUDA graphs and Transformer Engine's have, and its state."""

    generator: torch.Generator
    state: Tensor


def _frozen(tracked: Any) -> Any:
    """Return what does not change when numbers are drawn: a state is replaced, a generator not."""
    is_generator = isinstance(tracked, torch.Generator)
    return _Frozen(tracked, tracked.get_state()) if is_generator else tracked


def _thawed(kept: Any) -> Any:
    if not isinstance(kept, _Frozen):
        return kept
    kept.generator.set_state(kept.state)
    return kept.generator
