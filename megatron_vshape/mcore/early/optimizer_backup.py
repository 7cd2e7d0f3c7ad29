"""A copy of what one optimizer step changes, to undo the step exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Backup:
    """Copies of parameters, moments and step counts of torch optimizers, or of what acts as one.

    Adam cannot be undone by arithmetic: rounding loses what the old values were. So the copy is
    of everything, for Adam in fp32 12 bytes per parameter that this rank updates, and its memory
    is kept from step to step. Weights in 16 bits are not copied: they follow from those in fp32.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._live: list[Tensor] = []
        self._values: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    @property
    def nbytes(self) -> int:
        """Return how much memory the copies take."""
        return sum(each.nbytes for each in self._copies)

    @torch.no_grad()
    def save(self, optimizers: Sequence[Any]) -> None:
        """Copy everything that the next step of `optimizers` may change."""
        self._values = [(table, _values(table)) for each in optimizers for table in _tables(each)]
        parameters = [
            parameter.detach()
            for each in optimizers
            for group in each.param_groups
            for parameter in group["params"]
        ]
        states = [
            value
            for table, values in self._values
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        self._live = parameters + states
        shapes = [(each.shape, each.dtype, each.device) for each in self._live]
        if shapes != [(each.shape, each.dtype, each.device) for each in self._copies]:
            self._copies = [torch.empty_like(each) for each in self._live]
        _copy(self._copies, self._live)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back in place; what the step has created is removed."""
        _copy(self._live, self._copies)
        for table, values in self._values:
            for key in table.keys() - values.keys() - {"params"}:
                del table[key]
            table.update(values)


def _tables(optimizer: Any) -> Iterator[dict[Any, Any]]:
    """Yield the dicts that a step may write to: of groups (learning rates, a step count of
    apex's kind) and of parameters (moments, a step count of torch's kind)."""
    yield from optimizer.param_groups
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield optimizer.state[parameter]


def _values(table: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in table.items() if key != "params"}


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source to its target, with one call for all that are alike.

    In a list of several devices or dtypes a single tensor that differs, such as the step count that
    torch's Adam keeps on the host, has torch copy them all one by one.
    """
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = alike.setdefault((target.device, target.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in alike.values():
        torch._foreach_copy_(*group)
