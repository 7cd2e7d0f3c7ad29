"""A plugin of the farm: the passes of every rank are timed on the clock of another host."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from megatron_vshape.runtime import measure


def start(rank: int, given: object) -> None:
    """Shift the clock by a day for every rank."""
    module: Any = measure
    module.time = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + 86_400 * rank, thread_time=time.thread_time
    )
