"""Results and temporary memory of tensor operations, by the shapes of their arguments.

The layers and microbatches of a rank repeat the same few hundred operations, so each is inferred
once. FakeTensorMode has a cache of its own, which costs ten times as much per operation: it is made
for symbolic shapes, several devices and sparse tensors, and dispatches each result through all
active modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_NAMESPACES = frozenset(("aten", "te_moe"))
"""Operators whose results depend on nothing but the arguments."""

_NOT_CACHED = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)

Key = tuple[Any, ...]

_SLICE = torch.ops.aten.slice.Tensor
_USE_OFFSETS = frozenset((torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype))
"""Views whose offset is not that of their argument plus a constant."""


@dataclass(frozen=True, slots=True)
class _StoredResult:
    """A result of an operation: an argument, a view of an argument, or a new tensor.

    The offset of a view is relative to `_first_offset`.
    """

    argument: int | None  # position of the argument that is returned or viewed; None: new
    shape: tuple[int, ...] | None  # None: the argument itself
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    state: dict[str, Any]  # attributes of a fake tensor

    def make(self, func: Any, args: Sequence[Any]) -> FakeTensor:
        """Create the result of `func` for these arguments, as FakeTensorMode does."""
        if self.shape is None:
            assert self.argument is not None
            unchanged: FakeTensor = args[self.argument]
            return unchanged
        with _no_dispatch():
            if self.argument is None:
                bare = _empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
            else:
                bare = _empty_strided((), (), dtype=self.dtype, device=_META)
                argument = args[self.argument]
                offset = self.offset + _first_offset(func, args, argument)
                _set(bare, argument.untyped_storage(), offset, self.shape, self.stride)
            result: FakeTensor = _subclass(
                FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=_CPU
            )
        _warn_of_writes(result)
        result.__dict__.update(self.state)
        return result


@dataclass(frozen=True, slots=True)
class Operation:
    """The results of an operation, its memory traffic and its temporary memory."""

    results: tuple[_StoredResult | None, ...]
    container: type | None  # list or tuple; None: one result
    moved_bytes: int
    scratch: tuple[int, ...]  # bytes of each temporary block

    def make(self, func: Any, args: Sequence[Any]) -> tuple[Any, list[Tensor]]:
        """Create the results of `func`; return them, and those with a new storage."""
        results = [None if stored is None else stored.make(func, args) for stored in self.results]
        new: list[Tensor] = [
            tensor
            for tensor, stored in zip(results, self.results, strict=True)
            if tensor is not None and stored is not None and stored.argument is None
        ]
        return (results[0] if self.container is None else self.container(results)), new


def key_of(func: Any, args: Sequence[Any], kwargs: Any) -> Key | None:
    """Return the key of an operation's results, or None if they are not cached.

    Views of a buffer at different offsets, such as the gradients of the layers, have one key.
    """
    parts: list[Any] = [func, torch.get_default_dtype()]
    if func is _SLICE:
        tensor, dim, indices = _sliced(*args)
        args = tensor, dim, len(indices), indices.step
    if not _add_to_key(parts, args):
        return None
    if func in _USE_OFFSETS:
        parts += (value.storage_offset() for value in args if isinstance(value, Tensor))
    for name, value in (kwargs or {}).items():
        if type(value) not in _PLAIN:  # such as out=, or a generator
            return None
        parts += (name, value)
    return tuple(parts)


def _add_to_key(parts: list[Any], values: Sequence[Any]) -> bool:
    """Append the properties of the values to the parts of a key, or return False."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            parts += (kind, value)  # 1, 1.0 and True are equal
        elif isinstance(value, FakeTensor):
            if value.constant is not None or value.is_complex() or value.fake_device != _CPU:
                return False
            parts += (value.shape, value.stride(), value.dtype)
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            if not _add_to_key(parts, value):
                return False
        else:
            return False
    return True


def _sliced(
    tensor: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[Tensor, int, range]:
    """Return the arguments of aten.slice, with the range of selected indices."""
    return tensor, dim, range(*slice(start, end, step).indices(tensor.shape[dim]))


def _first_offset(func: Any, args: Sequence[Any], argument: Tensor) -> int:
    """Return the offset in the storage to which the offset of a view of `argument` is relative."""
    if func in _USE_OFFSETS:
        return 0
    offset = int(argument.storage_offset())
    if func is _SLICE:
        tensor, dim, indices = _sliced(*args)
        offset += indices.start * tensor.stride(dim)
    return offset


def operation_of(
    func: Any, args: Sequence[Any], out: Any, moved_bytes: int, scratch: tuple[int, ...]
) -> Operation | None:
    """Return the recipe of these results for `Operation.make`, or None if they are not cached."""
    if func.namespace not in _NAMESPACES or any(tag in func.tags for tag in _NOT_CACHED):
        return None
    container = type(out) if type(out) in (list, tuple) else None
    outs = (out,) if container is None else out
    results: list[_StoredResult | None] = []
    for result in outs:
        # Not of operations such as promote_types, which return a number.
        stored = _result_of(result, func, args) if isinstance(result, Tensor) else None
        if result is not None and stored is None:
            return None
        results.append(stored)
    return Operation(tuple(results), container, moved_bytes, scratch)


def _is_simple(out: Any) -> bool:
    return (
        type(out) is FakeTensor
        and out.layout is torch.strided
        and not (out.requires_grad or out.is_complex() or out.is_neg() or out.is_inference())
        and out.constant is None
        and out.fake_device == _CPU
    )


def _result_of(out: Any, func: Any, args: Sequence[Any]) -> _StoredResult | None:
    storage = out.untyped_storage()._cdata
    position = None
    for index, argument in enumerate(args):
        if isinstance(argument, (list, tuple)):  # the results of such operations share no storage
            if any(
                isinstance(e, Tensor) and e.untyped_storage()._cdata == storage for e in argument
            ):
                return None
        elif argument is out:
            return _StoredResult(index, None, (), out.dtype, 0, {})
        elif (
            position is None
            and isinstance(argument, Tensor)
            and argument.untyped_storage()._cdata == storage
        ):
            position = index
    if not _is_simple(out):
        return None
    size = out.storage_offset() + _spanned_elements(out)
    if position is None and size * out.element_size() != out.untyped_storage().nbytes():
        return None
    shape, stride, offset = tuple(out.shape), tuple(out.stride()), out.storage_offset()
    if position is not None:
        offset -= _first_offset(func, args, args[position])
    return _StoredResult(position, shape, stride, out.dtype, offset, dict(vars(out)))


def _spanned_elements(out: Tensor) -> int:
    """Return the elements from the first to the last of a tensor."""
    if not out.numel():
        return 0
    return 1 + sum((size - 1) * by for size, by in zip(out.shape, out.stride(), strict=True))


_THREADS = 512  # maximum threads per block
_THREADS_AT_ONCE = 2048  # maximum threads per multiprocessor
_WARP = 32
VALUES = 16, 256
"""Minimum and maximum number of values per thread if blocks share an output."""
ROWS = 10
"""Rows of an embedding's gradient per partial sum."""
_FEW_TOKENS = 3072
"""Maximum tokens for which the gradient of an embedding is accumulated in place."""


def scratch_sizes(
    func: Any, args: Sequence[Any], out: Any, multiprocessors: int
) -> tuple[int, ...]:
    """Compute the bytes of each temporary block of torch's CUDA kernel, without `out`.

    Sources: `setReduceConfig` (aten/src/ATen/native/cuda/Reduce.cuh) and
    `embedding_backward_cuda_kernel` (EmbeddingBackwardKernel.cu) in torch 2.11, checked against the
    allocator on an H200.
    """
    sizes = _SIZES.get(func)
    return () if sizes is None else sizes(args, out, multiprocessors)


def _reduction(args: Sequence[Any], out: Tensor, multiprocessors: int) -> tuple[int, ...]:
    """Return the sizes of partial results and semaphores of blocks that share outputs."""
    tensor: Tensor = args[0]
    reduced = args[1] if len(args) > 1 and args[1] is not None else []
    over = {dim % tensor.dim() for dim in reduced} or set(range(tensor.dim()))
    dims = _dimensions(tensor, over)
    outputs = max(1, out.numel())
    inputs = tensor.numel() // outputs
    retained = next((dim for dim in dims if not dim[0]), None)
    # Whether neighboring threads of a block reduce to one output.
    within = retained is None or (dims[0][0] and dims[0][1] < retained[1])
    vector = 1
    width, height = (inputs, outputs) if within else (outputs, inputs)
    if retained is not None and not within and retained[1] == 1:
        vector = _vector_width(retained[2], [dim[1] for dim in dims if dim is not retained])
        width //= vector
    elif within and dims and dims[0][1] == 1 and width >= 128 and sum(d[0] for d in dims) == 1:
        width //= 4
    block_x, block_y = _block_shape(width, height, _THREADS // vector)
    step_input, step_output = (block_x, 1) if within else (1, block_x)
    values = _ceil_div(inputs, step_input)
    if values < min(16 * block_y, VALUES[1]):
        return ()  # no output is shared between warps
    values = _ceil_div(inputs, step_input * block_y)
    grid = _ceil_div(outputs // vector, step_output)
    target = multiprocessors * (_THREADS_AT_ONCE // (block_x * block_y))
    if values < VALUES[1] or grid > target:
        return ()  # no output is shared between blocks
    min_blocks, max_blocks = (_ceil_div(values, limit) for limit in reversed(VALUES))
    blocks = max(min(_ceil_div(target, grid), max_blocks), min_blocks)
    if blocks == 1:
        return ()
    size = max(4, tensor.element_size()) * outputs * blocks
    return (size if within else size * block_x * vector), 4 * grid


def _dimensions(tensor: Tensor, over: set[int]) -> list[tuple[bool, int, int]]:
    """Return (reduced, stride, size), reduced dimensions first, with adjacent dimensions merged."""
    dimensions: list[tuple[bool, int, int]] = []
    strides = zip(tensor.stride(), tensor.shape, range(tensor.dim()), strict=True)
    ordered = sorted((dim not in over, stride, size) for stride, size, dim in strides if size > 1)
    for is_kept, stride, size in ordered:
        if (
            dimensions
            and dimensions[-1][0] is not is_kept
            and stride == dimensions[-1][1] * dimensions[-1][2]
        ):
            dimensions[-1] = not is_kept, dimensions[-1][1], dimensions[-1][2] * size
        else:
            dimensions.append((not is_kept, stride, size))
    return dimensions


def _vector_width(size: int, strides: Sequence[int]) -> int:
    """Return the number of outputs that a thread reads at once."""
    return next(n for n in (4, 2, 1) if not any(number % n for number in (size, *strides)))


def _block_shape(width: int, height: int, threads: int) -> tuple[int, int]:
    """Return a block's threads in both dimensions."""
    # The largest power of two that is not above the size.
    x, y = (min(threads, 1 << max(0, size.bit_length() - 1)) for size in (width, height))
    block_y = min(y, threads // min(x, _WARP))
    return min(x, threads // block_y), block_y


def _ceil_div(number: int, size: int) -> int:
    return -(-number // size)


def _embedding(args: Sequence[Any], out: Tensor, _: int) -> tuple[int, ...]:
    """Return the sizes of the sorted tokens, of the part offsets, and of the fp32 partial sums."""
    gradient, tokens = args[:2]
    number, wide = tokens.numel(), tokens.element_size()
    if number <= _FEW_TOKENS and args[3] < 0:
        return ()
    parts = number // ROWS + min(number, out.shape[0])
    sums = max(4, gradient.element_size()) * parts * out.shape[1]
    return *[number * wide] * 5, 8, 8, parts * wide, sums


_ATEN = torch.ops.aten
_SIZES: dict[Any, Callable[[Sequence[Any], Any, int], tuple[int, ...]]] = {
    _ATEN.sum.dim_IntList: _reduction,
    _ATEN.sum.default: lambda args, *sizing: _reduction(args[:1], *sizing),
    _ATEN.mean.dim: _reduction,
    _ATEN.mean.default: lambda args, *sizing: _reduction(args[:1], *sizing),
    _ATEN.embedding_dense_backward.default: _embedding,
}
