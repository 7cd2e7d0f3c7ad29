"""Copies of optimizer state, to undo a step that was not valid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
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
