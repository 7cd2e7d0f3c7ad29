"""Results of tensor operations by the shapes of their arguments, so that each is inferred once.

The layers and microbatches of a rank repeat the same few hundred operations. FakeTensorMode has a
cache of its own, which costs ten times as much per operation: it is made for symbolic shapes,
several devices and sparse tensors, and dispatches each result through all active modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_META, _CPU = torch.device("meta"), torch.device("cpu")
# The functions of torch below its wrappers: this package replaces the factories of torch.
_raw: Any = torch._C
_empty_strided = _raw._VariableFunctions.empty_strided
_set = _raw.TensorBase.set_
_no_dispatch = _raw._DisableTorchDispatch
_warn_of_writes = _raw._set_warn_deprecated_on_mutable_data_ptr
_subclass: Any = Tensor._make_subclass

_PLAIN = frozenset(
    (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout)
    + (torch.memory_format,)
)
"""Types of arguments that are part of a key as they are."""

_NOT_CACHED = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result of an operation: an argument, a view of an argument, or a new tensor."""

    argument: int | None  # position of the argument that is returned or viewed; None: new
    shape: tuple[int, ...] | None  # None: the argument itself
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    state: dict[str, Any]  # attributes of a fake tensor

    def make(self, args: Sequence[Any]) -> FakeTensor:
        """Create the result for these arguments, as FakeTensorMode does."""
        if self.shape is None:
            assert self.argument is not None
            given: FakeTensor = args[self.argument]
            return given
        with _no_dispatch():
            if self.argument is None:
                bare = _empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
            else:
                bare = _empty_strided((), (), dtype=self.dtype, device=_META)
                storage = args[self.argument].untyped_storage()
                _set(bare, storage, self.offset, self.shape, self.stride)
            made: FakeTensor = _subclass(
                FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=_CPU
            )
        _warn_of_writes(made)
        made.__dict__.update(self.state)
        return made


@dataclass(frozen=True, slots=True)
class Operation:
    """The results of an operation and its memory traffic."""

    results: tuple[StoredResult | None, ...]
    container: type | None  # list or tuple; None: one result
    moved_bytes: int
    scratch: tuple[int, ...]

    def make(self, args: Sequence[Any]) -> tuple[Any, list[Tensor]]:
        """Create the results for these arguments; return them, and those with a new storage."""
        made = [None if each is None else each.make(args) for each in self.results]
        new: list[Tensor] = [
            tensor
            for tensor, each in zip(made, self.results, strict=True)
            if tensor is not None and each is not None and each.argument is None
        ]
        return (made[0] if self.container is None else self.container(made)), new


def key_of(func: Any, args: Sequence[Any], kwargs: Any) -> Key | None:
    """Return the key of an operation's results, or None if they are not cached."""
    parts: list[Any] = [func, torch.get_default_dtype()]
    if not _add(parts, args):
        return None
    for name, value in (kwargs or {}).items():
        if type(value) not in _PLAIN:  # such as out=, or a generator
            return None
        parts += (name, value)
    return tuple(parts)


def _add(parts: list[Any], values: Sequence[Any]) -> bool:
    """Append the properties of the values to the parts of a key, or return False."""
    for each in values:
        kind = type(each)
        if kind in _PLAIN:
            parts += (kind, each)  # 1, 1.0 and True are equal
        elif isinstance(each, FakeTensor):
            if each.constant is not None or each.is_complex() or each.fake_device != _CPU:
                return False
            parts += (each.shape, each.stride(), each.dtype, each.storage_offset())
        elif kind is list or kind is tuple:
            parts += (kind, len(each))
            if not _add(parts, each):
                return False
        else:
            return False
    return True


def operation_of(
    func: Any, args: Sequence[Any], out: Any, moved_bytes: int, scratch: tuple[int, ...]
) -> Operation | None:
    """Return the recipe of these results for `Operation.make`, or None if they are not cached."""
    if func.namespace != "aten" or any(each in func.tags for each in _NOT_CACHED):
        return None
    container = type(out) if type(out) in (list, tuple) else None
    outs = (out,) if container is None else out
    results: list[StoredResult | None] = []
    for each in outs:
        if each is not None and not _is_simple(each):
            return None
        found = None if each is None else _result_of(each, args)
        if each is not None and found is None:
            return None
        results.append(found)
    return Operation(tuple(results), container, moved_bytes, scratch)


def _is_simple(out: Any) -> bool:
    return (
        type(out) is FakeTensor
        and out.layout is torch.strided
        and not (out.requires_grad or out.is_complex() or out.is_neg() or out.is_inference())
        and out.constant is None
        and out.fake_device == _CPU
    )


def _result_of(out: Any, args: Sequence[Any]) -> StoredResult | None:
    storage = out.untyped_storage()._cdata
    at = None
    for index, each in enumerate(args):
        if isinstance(each, (list, tuple)):  # the results of such operations share no storage
            if any(isinstance(e, Tensor) and e.untyped_storage()._cdata == storage for e in each):
                return None
        elif each is out:
            return StoredResult(index, None, (), out.dtype, 0, {})
        elif at is None and isinstance(each, Tensor) and each.untyped_storage()._cdata == storage:
            at = index
    size = out.storage_offset() + _elements(out)
    if at is None and size * out.element_size() != out.untyped_storage().nbytes():
        return None
    shape, stride = tuple(out.shape), tuple(out.stride())
    return StoredResult(at, shape, stride, out.dtype, out.storage_offset(), dict(vars(out)))


def _elements(out: Tensor) -> int:
    """Return the elements from the first to the last of a tensor."""
    if not out.numel():
        return 0
    return 1 + sum((size - 1) * by for size, by in zip(out.shape, out.stride(), strict=True))
