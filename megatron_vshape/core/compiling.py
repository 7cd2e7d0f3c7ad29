"""Compile the inner loops with numba; without numba they are about 100 times slower.

The results are bitwise equal in both cases.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

COMPILED_FROM = 50_000
"""Passes from which a compiled loop saves more time than the import of the compiler costs."""


def processors() -> int:
    """Return the number of processors that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@functools.cache
def compiles() -> bool:
    """Check whether numba, the extra `search`, is installed."""
    try:
        # Not before it is needed: numba needs a third of a second to import.
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function, *called: Callable[..., Any]) -> _Function:
    """Compile the function and cache the machine code on disk; without numba, return it unchanged.

    Compiled functions release the GIL, so threads run them in parallel. `called` are plain
    functions that it calls; other compiled functions may call them too.
    """
    if not compiles():
        return function
    from numba import njit
    from numba.extending import register_jitable

    for callee in called:
        register_jitable(callee)
    dispatcher = njit(nogil=True)(function)
    dispatcher._cache = _CacheWhenCalled(dispatcher)
    return cast(_Function, dispatcher)


def compiled_inline(function: _Function) -> _Function:
    """Compile a function that allocates no arrays, and copy it into its compiled callers.

    Numba counts references to every array of an argument at every call. In loops of small functions
    over tuples of arrays, counting and passing the tuples is two thirds of the time. `_nrt` omits
    the counters, which only allocations need.
    """
    if not compiles():
        return function
    from numba import njit

    dispatcher = njit(nogil=True, inline="always", _nrt=False)(function)
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
            from numba.core.caching import NullCache

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


def compile_if_large(
    num_passes: int, function: Callable[..., int], called: Sequence[Callable[..., Any]], *data: Any
) -> tuple[Any, ...]:
    """Compile the function if that is faster; return it with its data in arrays or in lists.

    `called` are the functions that it calls. Both variants have equal results. The function changes
    the returned data in place.
    """
    if num_passes < COMPILED_FROM:
        return function, *data
    compiled = compiled_once(function, *called)
    # `compiled_once` returns the function itself without numba; lists are faster in plain Python.
    convert = in_lists if compiled is function else in_arrays
    return compiled, *map(convert, data)


def in_arrays(data: Any) -> Any:
    """Convert lists of numbers to arrays, also within named tuples; other values are unchanged."""
    import numpy as np

    if isinstance(data, list):
        return np.array(data, np.float64 if data and isinstance(data[0], float) else np.int64)
    return type(data)(*map(in_arrays, data)) if isinstance(data, tuple) else data


def in_lists(data: Any) -> Any:
    """Convert arrays to lists, also within named tuples; other values are returned unchanged."""
    if isinstance(data, tuple):
        return type(data)(*map(in_lists, data))
    return data.tolist() if hasattr(data, "tolist") else data


@functools.cache
def warn_if_slow() -> None:
    """Log once that numba is missing, since planning is then slow."""
    if not compiles():
        logger.warning(
            "numba is not installed, so planning is about 10 times slower: "
            "pip install 'megatron-vshape[search]'"
        )
