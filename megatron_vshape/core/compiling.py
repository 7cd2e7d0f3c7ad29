"""The compiler of the inner loops: numba, or none, which is a hundred times slower.

Either way the results are the same to the last bit.
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
    """Return how many processors this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(allowed(0)) if allowed else os.cpu_count() or 1


COMPILES = njit is not None

CORES = 1 if njit is None else processors()
"""Threads that gain anything."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function, *called: Callable[..., Any]) -> _Function:
    """Return the function as machine code, kept for later runs; as it is without numba.

    Threads run machine code side by side: it holds no lock of the interpreter.

    `called` are plain functions that it calls, which other compiled ones may then call too.
    """
    if njit is None:
        return function
    for each in called:
        register_jitable(each)
    dispatcher = njit(nogil=True)(function)
    dispatcher._cache = _CacheWhenCalled(dispatcher)
    return cast(_Function, dispatcher)


class _CacheWhenCalled:
    """Opens the cache of a function's machine code when that is first asked for.

    Opening one writes to its folder, and a thousand ranks may share that, of which one plans.
    """

    cache_path = None

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher

    def load_overload(self, *signature: Any) -> Any:
        try:
            self._dispatcher.enable_caching()
        except RuntimeError:  # neither the package's folder nor the user's can be written
            self._dispatcher._cache = NullCache()
            name = self._dispatcher.py_func
            logger.info("%s is compiled in every run: NUMBA_CACHE_DIR may name a folder", name)
        cache = self._dispatcher._cache
        try:
            return cache.load_overload(*signature)
        except (AttributeError, ImportError):  # kept by a version that had other names for types
            cache.flush()
            return None

    def flush(self) -> None:
        pass


compiled_once = functools.cache(compiled)


def in_arrays(data: Any) -> Any:
    """Return numbers in lists, and such lists in named tuples, as arrays; what else is as it is."""
    import numpy as np

    if isinstance(data, list):
        return np.array(data, np.float64 if data and isinstance(data[0], float) else np.int64)
    return type(data)(*map(in_arrays, data)) if isinstance(data, tuple) else data


@functools.cache
def say_if_slow() -> None:
    """Say once that there is no numba, for whoever waits for a plan."""
    if njit is None:
        logger.warning(
            "numba is not installed, so planning is about 100 times slower: "
            "pip install 'megatron-vshape[search]'"
        )
