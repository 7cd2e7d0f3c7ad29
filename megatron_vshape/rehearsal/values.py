"""Values of fake tensors where Megatron reads them on the host.

Zero means "no overflow", "no clipping", "not NaN"; a check of all values is true. A tensor created
from a list returns the list. Other integers decide about sizes and work, so that reading them is an
error.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_vshape.rehearsal.device import Current


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
    kind.__float__ = lambda self: float(kind.item(self))
    kind.__int__ = kind.__index__ = lambda self: int(kind.item(self))
    kind.tolist = _to_list
    kind.numpy = lambda self, *_, **__: _to_array(self)
    kind.__format__ = lambda self, spec: format(0.0, spec) if spec else "fake"
    kind.__repr__ = lambda self, **_: f"Fake{tuple(self.shape)}"
    owner: Any = torch
    owner.all = _yes(torch.all)
    owner._is_all_true = _yes(owner._is_all_true)  # checks the arguments of distributions
    kind.all = _yes(Tensor.all)
    kind.sum = _with_sum(Tensor.sum)
    kind.detach = _keeping_values(Tensor.detach)
    kind.get_data_tensors = lambda self: ()  # Transformer Engine's offloading would ask for it


def values_of(tensor: Any) -> Any:
    """Return the known values of a tensor; None if unknown, or if it was written to."""
    return getattr(tensor, "known_values", None) if tensor._version == 0 else None


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
        values = values_of(self)
        if isinstance(values, list) and len(values) == 1 and isinstance(values[0], numbers.Number):
            return values[0]
        return _zero_of(self)

    return answer


class UnknownValueError(RuntimeError):
    """A dry run reads integers that it does not compute."""


class _Ignored:
    """Whether the readers of integers replace them."""

    now = False


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Read unknown integers as zero in this context, because they are replaced afterwards."""
    before, _Ignored.now = _Ignored.now, True
    try:
        yield
    finally:
        _Ignored.now = before


def _zero_of(tensor: Tensor) -> int | float:
    """Return a zero for a value that does not exist.

    Raises:
        UnknownValueError: several integers are read, or one in a pass.
    """
    if tensor.dtype.is_floating_point:
        return 0.0
    ledger = Current.ledger
    if tensor.dtype is torch.bool or ledger is None or _Ignored.now:
        return 0
    if tensor.numel() == 1 and not ledger.is_in_pass:  # flags and counters of the training loop
        return 0
    number = f"{tensor.numel()} integers" if tensor.numel() > 1 else "an integer"
    raise UnknownValueError(
        f"{_reader()} reads {number} of a tensor whose values a dry run does not compute, and "
        "memory and time depend on them: disable the feature that reads them, and report it"
    )


def _reader() -> str:
    """Return the line outside of torch and this package that reads a value."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("torch", "megatron_vshape.")):
            return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "the program"


def _to_list(self: Any) -> Any:
    values = values_of(self)
    if values is not None:
        return values
    zero = _zero_of(self)
    if not self.dim():
        return zero
    return [_to_list(each) for each in self] if self.dim() > 1 else [zero] * self.numel()


def _with_sum(sum_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Add known values up."""

    @functools.wraps(sum_)
    def run(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = sum_(self, *args, **kwargs)
        values = values_of(self)
        if values is not None and not made.dim():
            made.known_values = [sum(values)]  # type: ignore[attr-defined]
        return made

    return run


def _keeping_values(detach: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep the known values of a tensor, as recomputation detaches its inputs."""

    @functools.wraps(detach)
    def run(self: Tensor) -> Tensor:
        made = detach(self)
        values = values_of(self)
        if values is not None:
            made.known_values = values  # type: ignore[attr-defined]
        return made

    return run


def _to_array(self: Any) -> Any:
    import numpy

    return numpy.array(_to_list(self))
