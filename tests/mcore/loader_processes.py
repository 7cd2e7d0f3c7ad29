"""A plugin of the farm: a rank fails if processes of its data loaders outlive the trainer."""

from __future__ import annotations

import multiprocessing
import os


def start(rank: int, given: object) -> None:
    """Look for them where the rank ends; an exit that is no farm's waits for them."""
    leave = os._exit

    def ended(code: int) -> None:
        left = multiprocessing.active_children()
        print(f"rank {rank} leaves {len(left)} processes", flush=True)
        leave(code or len(left))

    os._exit = ended  # type: ignore[assignment]
