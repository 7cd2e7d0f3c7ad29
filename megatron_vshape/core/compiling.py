"""Compile the inner loops with numba; without numba they are about 100 times slower.

The results are bitwise equal in both cases.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

try:
    from numba import njit
    from numba.core.caching import NullCache
    from numba.extending import register_jitable
except ImportError:  # the extra `search` is not installed
    njit = None

logger = logging.getLogger(__name__)


def processors() -> int:
    """Return the number of processors that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(allowed(0)) if allowed else os.cpu_count() or 1


COMPILES = njit is not None

CORES = 1 if njit is None else processors()
"""Useful number of threads."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function, *called: Callable[..., Any]) -> _Function:
    """Compile the function and cache the machine code on disk; without numba, return it unchanged.

    Compiled functions release the GIL, so threads run them in parallel. `called` are plain
    functions that it calls; other compiled functions may call them too.
    """
    if njit is None:
        return function
    for each in called:
        register_jitable(each)
    dispatcher = njit(nogil=True)(function)
    dispatcher._cache = _CacheWhenCalled(dispatcher)
    return cast(_Function, dispatcher)


class _CacheWhenCalled:
    """Open the on-disk cache of a function's machine code at its first call.

    Opening it writes to its folder. A thousand ranks may share that folder, but only one plans.
    """

    cache_path = None

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    def load_overload(self, *signature: Any) -> Any:
        try:
            self._dispatcher.enable_caching()
        except RuntimeError:  # no folder for the cache is writable
            self._dispatcher._cache = NullCache()
            name = self._dispatcher.py_func
            logger.info("%s is compiled in every run: NUMBA_CACHE_DIR may name a folder", name)
        cache = self._dispatcher._cache
        try:
            return cache.load_overload(*signature)
        except (AttributeError, ImportError):  # from another version with other type names
            cache.flush()
            return None

    def flush(self) -> None:
        pass


compiled_once = functools.cache(compiled)


def in_arrays(data: Any) -> Any:
    """Convert lists of numbers to arrays, also within named tuples; other values are unchanged."""
    import numpy as np

    if isinstance(data, list):
        return np.array(data, np.float64 if data and isinstance(data[0], float) else np.int64)
    return type(data)(*map(in_arrays, data)) if isinstance(data, tuple) else data


@functools.cache
def say_if_slow() -> None:
    """Log once that numba is missing, since a plan then takes long."""
    if njit is None:
        logger.warning(
            "numba is not installed, so planning is about 100 times slower: "
            "pip install 'megatron-vshape[search]'"
        )
