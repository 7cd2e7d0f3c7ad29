"""Temporary memory of torch's CUDA kernels that no tensor owns.

Sources: `setReduceConfig` (aten/src/ATen/native/cuda/Reduce.cuh) and
`embedding_backward_cuda_kernel` (EmbeddingBackwardKernel.cu) in torch 2.11, checked against the
allocator on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

THREADS = 512  # maximum threads per block
THREADS_AT_ONCE = 2048  # maximum threads per multiprocessor
WARP = 32
VALUES = 16, 256
"""Minimum and maximum number of values per thread if blocks share an output."""
ROWS = 10
"""Rows of an embedding's gradient per partial sum."""
FEW_TOKENS = 3072
"""Maximum tokens for which the gradient of an embedding is accumulated in place."""


def scratch_sizes(
    func: Any, args: Sequence[Any], out: Any, multiprocessors: int
) -> tuple[int, ...]:
    """Return the bytes of each temporary block that an operation allocates besides `out`."""
    sizes = _SIZES.get(func)
    return () if sizes is None else sizes(args, out, multiprocessors)


def _reduction(args: Sequence[Any], out: Tensor, multiprocessors: int) -> tuple[int, ...]:
    """Return the sizes of partial results and semaphores of blocks that share outputs."""
    given: Tensor = args[0]
    told = args[1] if len(args) > 1 and args[1] is not None else []
    over = {each % given.dim() for each in told} or set(range(given.dim()))
    dims = _dimensions(given, over)
    outputs = max(1, out.numel())
    inputs = given.numel() // outputs
    kept = next((each for each in dims if not each[0]), None)
    # Whether neighboring threads of a block reduce to one output.
    within = kept is None or (dims[0][0] and dims[0][1] < kept[1])
    vector = 1
    width, height = (inputs, outputs) if within else (outputs, inputs)
    if kept is not None and not within and kept[1] == 1:
        vector = _vector(kept[2], [each[1] for each in dims if each is not kept])
        width //= vector
    elif within and dims and dims[0][1] == 1 and width >= 128 and sum(d[0] for d in dims) == 1:
        width //= 4
    block_x, block_y = _block(width, height, THREADS // vector)
    step_input, step_output = (block_x, 1) if within else (1, block_x)
    values = _parts(inputs, step_input)
    if values < min(16 * block_y, VALUES[1]):
        return ()  # no output is shared between warps
    values = _parts(inputs, step_input * block_y)
    grid = _parts(outputs // vector, step_output)
    target = multiprocessors * (THREADS_AT_ONCE // (block_x * block_y))
    if values < VALUES[1] or grid > target:
        return ()  # no output is shared between blocks
    least, most = (_parts(values, each) for each in reversed(VALUES))
    blocks = max(min(_parts(target, grid), most), least)
    if blocks == 1:
        return ()
    size = max(4, given.element_size()) * outputs * blocks
    return (size if within else size * block_x * vector), 4 * grid


def _dimensions(given: Tensor, over: set[int]) -> list[tuple[bool, int, int]]:
    """Return (reduced, stride, size), reduced dimensions first, with adjacent dimensions merged."""
    found: list[tuple[bool, int, int]] = []
    strides = zip(given.stride(), given.shape, range(given.dim()), strict=True)
    ordered = sorted((at not in over, stride, size) for stride, size, at in strides if size > 1)
    for kept, stride, size in ordered:
        if found and found[-1][0] is not kept and stride == found[-1][1] * found[-1][2]:
            found[-1] = not kept, found[-1][1], found[-1][2] * size
        else:
            found.append((not kept, stride, size))
    return found


def _vector(size: int, strides: Sequence[int]) -> int:
    """Return the number of outputs that a thread reads at once."""
    return next(n for n in (4, 2, 1) if not any(each % n for each in (size, *strides)))


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """Return a block's threads in both dimensions."""
    x, y = (threads if each >= threads else _power(each) for each in (width, height))
    block_y = min(y, threads // min(x, WARP))
    return min(x, threads // block_y), block_y


def _power(number: int) -> int:
    """Return the largest power of two not above the number; 1 for zero."""
    return 1 << max(0, number.bit_length() - 1)


def _parts(number: int, size: int) -> int:
    return -(-number // size)


def _embedding(args: Sequence[Any], out: Tensor, _: int) -> tuple[int, ...]:
    """Return the sizes of the sorted tokens, of the part offsets, and of the fp32 partial sums."""
    gradient, tokens = args[:2]
    number, wide = tokens.numel(), tokens.element_size()
    if number <= FEW_TOKENS and args[3] < 0:
        return ()
    parts = number // ROWS + min(number, out.shape[0])
    sums = max(4, gradient.element_size()) * parts * out.shape[1]
    return *[number * wide] * 5, 8, 8, parts * wide, sums


_ATEN = torch.ops.aten
_SIZES: dict[Any, Callable[[Sequence[Any], Any, int], tuple[int, ...]]] = {
    _ATEN.sum.dim_IntList: _reduction,
    _ATEN.sum.default: lambda args, *rest: _reduction(args[:1], *rest),
    _ATEN.mean.dim: _reduction,
    _ATEN.mean.default: lambda args, *rest: _reduction(args[:1], *rest),
    _ATEN.embedding_dense_backward.default: _embedding,
}
