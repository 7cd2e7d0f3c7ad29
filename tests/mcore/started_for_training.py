"""A plugin of the farm: a rank fails if an object that it started outlives the trainer."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time


def start(rank: int, given: object) -> None:
    """Look for it where the rank ends; an exit that is no farm's waits for the processes."""
    leave = os._exit

    def ended(code: int) -> None:
        children = multiprocessing.active_children()
        sending = _threads_that_send(within_s=5)
        print(f"rank {rank} leaves {children} and {sending}", flush=True)
        leave(code or len(children) + len(sending))

    os._exit = ended  # type: ignore[assignment]


def _threads_that_send(within_s: float) -> list[threading.Thread]:
    """Return the transport's threads that have not ended in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        threads = [
            thread for thread in threading.enumerate() if thread.name.startswith("sends to device")
        ]
        if not threads:
            break
        time.sleep(0.01)
    return threads
