"""Which rank failed first, and of what: told where others look when their messages fail.

A rank that dies takes its connections along, and those that wait for it would tell of nothing else.
The cause lies in the store by which the ranks have met, before the process ends.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

KEY = "megatron_vshape/first cause"
PATIENCE_S = 2.0
"""Seconds that a rank with a failed connection waits for the cause."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def tell(error: BaseException, where: str = "") -> None:
    """Say now why this rank fails, here and to the others, unless another one has failed before."""
    if getattr(error, "_told_as_cause", False):
        return
    error._told_as_cause = True  # type: ignore[attr-defined]
    cause = f"rank {dist.get_rank()}: {type(error).__name__}: {error!s:.300}{where}"
    logger.critical("%s", cause)
    with suppress(Exception):  # the store may be gone with the rank that had it
        _store().compare_set(KEY, "", cause)


def found() -> str:
    """Return another rank's first failure, to be put behind this one's; empty if none is known.

    Waits for a moment: a connection ends before the process at its other end has told all.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with suppress(Exception):
            if _store().check([KEY]):
                cause = _store().get(KEY).decode()
                return "" if cause.startswith(f"rank {dist.get_rank()}:") else f"; before, {cause}"
        time.sleep(0.1)
    return ""


def forget() -> None:
    """Let another try in this process tell of causes of its own."""
    with suppress(Exception):
        _store().delete_key(KEY)


@contextmanager
def telling(follows: type[Exception]) -> Iterator[None]:
    """Tell of what fails inside, unless it `follows` from another rank's failure."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, follows):
            tell(error)
        raise


def watch_the_end(follows: type[Exception]) -> None:
    """Have an error that ends this process told first, wherever it is raised; once is enough."""
    before = sys.excepthook
    if getattr(before, "tells_first_cause", False):
        return

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (
            isinstance(error, Exception)
            and not isinstance(error, follows)
            and dist.is_initialized()
        ):
            tell(error)
        before(kind, error, trace)

    say.tells_first_cause = True  # type: ignore[attr-defined]
    sys.excepthook = say


def _store() -> Any:
    return distributed_c10d._get_default_store()
