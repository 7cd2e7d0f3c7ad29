"""The slices into which the sequence of a microbatch divides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_vshape.mcore.refusals import UnsupportedError


def even_slices(counts: Iterable[int], length: int | None, options: Any) -> tuple[int, ...]:
    """Return those of the numbers of slices into which `length` tokens divide evenly."""
    unit = _length_unit(options)
    return tuple(count for count in counts if count == 1 or not (length or 0) % (count * unit))


def _length_unit(options: Any) -> int:
    """Return the number of tokens that must divide the length of a slice."""
    parts: int = getattr(options, "tensor_model_parallel_size", 1)
    return parts if getattr(options, "sequence_parallel", False) else 1


def check_sequence(slices: int, length: int | None, options: Any) -> None:
    """Raise UnsupportedError unless `length` tokens are divisible into equal slices."""
    unit = _length_unit(options)
    if length is None or even_slices([slices], length, options):
        return
    valid_counts = [count for count in range(1, length // unit + 1) if not length % (count * unit)]
    nearest = min(valid_counts, key=lambda count: abs(count - slices)) if valid_counts else 1
    multiple = f", each a multiple of {unit} tensor-parallel ranks" if unit > 1 else ""
    raise UnsupportedError(
        f"--pipeline-slices {slices} does not divide {length} tokens into equal "
        f"slices{multiple}. Use --pipeline-slices {nearest}"
    )
