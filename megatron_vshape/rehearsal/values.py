"""Values of fake tensors where Megatron reads them on the host.

Zero means "no overflow", "no clipping", "not NaN"; a check of all values is true. A tensor created
from a list returns the list.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class KnownNumbers(list[Any]):
    """A list of known numbers with an array interface; in several dimensions all are equal."""

    @property
    def T(self) -> KnownNumbers:
        return self

    def tolist(self) -> list[Any]:
        return list(self)

    def ravel(self) -> KnownNumbers:
        return self


def install() -> None:
    """Replace the methods of fake tensors that read values."""
    kind: Any = FakeTensor
    kind.item = _or_zero(Tensor.item)
    kind.__bool__ = lambda self: bool(kind.item(self))
    kind.__float__ = lambda self: 0.0
    kind.__int__ = kind.__index__ = lambda self: 0
    kind.tolist = _to_list
    kind.numpy = lambda self, *_, **__: _to_array(self)
    kind.__format__ = lambda self, spec: format(0.0, spec) if spec else "fake"
    kind.__repr__ = lambda self, **_: f"Fake{tuple(self.shape)}"
    owner: Any = torch
    owner.all = _yes(torch.all)
    kind.get_data_tensors = lambda self: ()  # Transformer Engine's offloading would ask for it


def known(values: list[Any]) -> Tensor:
    """Return a tensor with values that the host can read."""
    made = torch.tensor(values)
    made.known_values = values  # type: ignore[attr-defined]
    return made


def _yes(ask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a check of all values (finite, equal) return true."""

    @functools.wraps(ask)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        made = ask(*args, **kwargs)
        if not made.dim():
            made.known_values = [True]  # type: ignore[attr-defined]
        return made

    return run


def _or_zero(method: Callable[..., Any]) -> Callable[..., Any]:
    def answer(self: Any, *args: Any) -> Any:
        values = getattr(self, "known_values", None)
        if isinstance(values, list) and len(values) == 1 and isinstance(values[0], numbers.Number):
            return values[0]
        return 0 if not self.dtype.is_floating_point else 0.0

    return answer


def _to_list(self: Any) -> Any:
    values = getattr(self, "known_values", None)
    if values is not None:
        return values
    if not self.dim():
        return 0
    return [_to_list(each) for each in self] if self.dim() > 1 else [0] * self.numel()


def _to_array(self: Any) -> Any:
    import numpy

    return numpy.array(_to_list(self))
