"""A plugin of the farm: SIGTERM comes to one rank in the middle of a step."""

from __future__ import annotations

import os
import signal
from typing import Any

from megatron_vshape.mcore.step.stage import MegatronStage

RANK, STEP, MICROBATCH = 2, 3, 5


def start(rank: int, given: object) -> None:
    """Send it to this process if this is the rank."""
    if rank != RANK:
        return
    original = MegatronStage.forward
    steps: list[int] = []

    def forward(stage: Any, microbatch: int, received: Any) -> Any:
        if stage.chunk == 0 and microbatch == MICROBATCH:
            steps.append(microbatch)
            if len(steps) == STEP:
                os.kill(os.getpid(), signal.SIGTERM)
        return original(stage, microbatch, received)

    MegatronStage.forward = forward  # type: ignore[method-assign]
