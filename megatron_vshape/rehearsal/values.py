"""What a fake tensor answers where Megatron asks for its values on the host.

Zero is "no overflow", "no clipping", "not NaN"; of all values everything is true.
Where a list was put into a tensor, it comes back.
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
    """A list of known numbers that answers as an array would; of more dimensions all are equal."""

    @property
    def T(self) -> KnownNumbers:
        return self

    def tolist(self) -> list[Any]:
        return list(self)

    def ravel(self) -> KnownNumbers:
        return self


def install() -> None:
    """Have fake tensors answer."""
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
    """Return a tensor whose values the host knows."""
    made = torch.tensor(values)
    made.known_values = values  # type: ignore[attr-defined]
    return made


def _yes(ask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Have what asks of all values, whether they are finite or equal, hear that they are."""

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
