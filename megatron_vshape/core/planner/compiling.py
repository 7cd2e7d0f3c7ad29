"""The compiler of the inner loops: numba, or none, which is a hundred times slower.

Either way the results are the same to the last bit.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

try:
    from numba import njit
    from numba.extending import register_jitable
except ImportError:  # the extra `search` is not installed
    njit = None

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function, *called: Callable[..., Any]) -> _Function:
    """Return the function as machine code, kept for later runs; as it is without numba.

    `called` are plain functions that it calls, which other compiled ones may then call too.
    """
    if njit is None:
        return function
    for each in called:
        register_jitable(each)
    try:
        return cast(_Function, njit(cache=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's can be written
        logger.info("%s is compiled in every run: NUMBA_CACHE_DIR may name a folder", function)
        return cast(_Function, njit(function))
