"""The compiler of the inner loops: numba, or none, which is a hundred times slower.

Either way the results are the same to the last bit.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

try:
    from numba import njit
except ImportError:  # the extra `search` is not installed
    njit = None

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Return the function as machine code, kept for later runs; as it is without numba."""
    return function if njit is None else cast(_Function, njit(cache=True)(function))
