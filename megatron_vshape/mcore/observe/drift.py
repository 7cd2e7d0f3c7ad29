"""Whether a run's steps have come to take another time than when their order was chosen."""

from __future__ import annotations

import logging
from statistics import median

import torch.distributed as dist

from megatron_vshape.mcore.setup.one_planner import OnePlanner

logger = logging.getLogger(__name__)

WINDOW = 20
"""Steps whose median is compared with that of the first so many."""


class Drift:
    """Watches steps by rank 0's times; all ranks of the world call it for the same steps."""

    def __init__(self, share: float, once: OnePlanner | None) -> None:
        """Take by what share of the first steps' median later ones may differ."""
        self._share = share
        self._once = once
        self._steps = 0
        self._first_s: float | None = None
        self._times_s: list[float] = []

    def ends_step(self, seconds_before: float | None) -> bool:
        """Count a step, before which one took so long; return whether steps have drifted."""
        self._steps += 1
        if seconds_before is not None:
            self._times_s.append(seconds_before)
        if self._steps % WINDOW:
            return False
        return self._drifted() if self._once is None else self._once(self._drifted)

    def _drifted(self) -> bool:
        times, self._times_s = self._times_s, []
        if len(times) < WINDOW // 2:  # evaluations came between
            return False
        now_s = median(times)
        if self._first_s is None:
            self._first_s = now_s
            return False
        if abs(now_s / self._first_s - 1) <= self._share:
            return False
        told = 1e3 * self._first_s, 1e3 * now_s
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("steps took %.2f ms and take %.2f ms now: measured anew", *told)
        return True
