"""Early start of the next training step, before the current one is validated.

Only forwards before the first loss run early (`early_start.forward_stop_point`). If the parameters
change afterwards, all effects are rolled back: tensors are dropped, P2P messages are drained, and
microbatches and random numbers are replayed.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from torch import Tensor


class Backup:
    """Copies of the parameters, moments and step counts of torch-compatible optimizers.

    Arithmetic cannot undo Adam, because rounding loses the old values. So the backup copies
    everything: for Adam in fp32, 12 bytes per parameter that this rank updates. The memory is
    reused in every step. 16-bit weights are not copied, because they are casts of the fp32 weights.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._state_tensors: list[Tensor] = []
        self._values: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    @property
    def nbytes(self) -> int:
        """Return the size of the copies in bytes."""
        return sum(tensor.nbytes for tensor in self._copies)

    @torch.no_grad()
    def save(self, optimizers: Sequence[Any]) -> None:
        """Copy all state that the next step of `optimizers` may change."""
        self._values = [
            (table, _values(table)) for optimizer in optimizers for table in _tables(optimizer)
        ]
        parameters = [
            parameter.detach()
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        states = [
            value
            for table, values in self._values
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        self._state_tensors = parameters + states
        shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._state_tensors]
        # Allocate only if the shapes have changed, for example after the first step created the
        # moments.
        if shapes != [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._copies]:
            self._copies = [torch.empty_like(tensor) for tensor in self._state_tensors]
        _copy(self._copies, self._state_tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all values in place, and remove entries that the step has created."""
        _copy(self._state_tensors, self._copies)
        for table, values in self._values:
            for key in table.keys() - values.keys() - {"params"}:
                del table[key]
            table.update(values)


def _tables(optimizer: Any) -> Iterator[dict[Any, Any]]:
    """Yield the dicts that a step may write to.

    These are the groups (learning rates, step counts in apex) and the states per parameter
    (moments, step counts in torch).
    """
    yield from optimizer.param_groups
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield optimizer.state[parameter]


def _values(table: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in table.items() if key != "params"}


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source to its target, with one call per device and dtype.

    If a list mixes devices or dtypes, torch copies the tensors one by one. A single tensor is
    enough for that, such as the step count that torch's Adam keeps on the host.
    """
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.device, target.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)


class Replay:
    """An iterator that can return again all items since a mark."""

    def __init__(self, source: Any) -> None:
        """Set the trainer's iterator; all attributes except `next` are forwarded to it."""
        self.source = source
        self._replayed: deque[Any] = deque()
        self._recorded: list[Any] | None = None

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        batch = self._replayed.popleft() if self._replayed else next(self.source)
        if self._recorded is not None:
            # A copy, because a forward step may modify its batch.
            self._recorded.append(copy.copy(batch))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

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
