"""The first failure of a run, shared among ranks through torch.distributed's store.

A rank that dies closes its connections, and its peers would report only these. So a failing rank
writes the cause to the rendezvous store before its process ends.
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
"""Seconds for which a rank with a failed connection waits for the cause."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def publish(error: BaseException, where: str = "") -> None:
    """Log why this rank fails, and publish it unless another rank has failed before."""
    if getattr(error, "_is_published", False):
        return
    # The exception may pass several of these handlers on its way up.
    error._is_published = True  # type: ignore[attr-defined]
    cause = f"rank {dist.get_rank()}: {type(error).__name__}: {error!s:.300}{where}"
    logger.critical("%s", cause)
    with suppress(Exception):  # the store may be gone with the rank that had it
        # An empty expected value sets the key only if it does not exist: the first failure wins.
        _store().compare_set(KEY, "", cause)


def found() -> str:
    """Format another rank's first failure, to append to an error message; empty if unknown.

    Waits up to `PATIENCE_S`: a connection closes before the process at its other end has published
    the cause.
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
    """Delete the published failure, before this process tries again."""
    with suppress(Exception):
        _store().delete_key(KEY)


@contextmanager
def publishing(follows: type[Exception]) -> Iterator[None]:
    """Report an exception raised inside, unless its type `follows` from another rank's failure."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, follows):
            publish(error)
        raise


def watch_the_end(follows: type[Exception]) -> None:
    """Report exceptions that end this process before its usual traceback. Installed once."""
    before = sys.excepthook
    if getattr(before, "publishes_first_cause", False):
        return

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Errors of type `follows` are consequences; reporting them would hide the cause.
        if (
            isinstance(error, Exception)
            and not isinstance(error, follows)
            and dist.is_initialized()
        ):
            publish(error)
        before(kind, error, trace)

    say.publishes_first_cause = True  # type: ignore[attr-defined]
    sys.excepthook = say


def _store() -> Any:
    return distributed_c10d._get_default_store()
