"""Reports every check of a rank of the farm whether a number is NaN, with its place."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.training import training


def start(rank: int, given: Any) -> None:
    """Watch `torch.isnan`, whether a forward pass runs, and whether gradients are final.

    Checks of values other than the loss, such as the norm, come later in a step.
    """
    running: list[bool] = []
    finished: list[bool] = []
    forward_step, isnan = schedules.forward_step, torch.isnan

    @functools.wraps(forward_step)
    def step(*args: Any, **options: Any) -> Any:
        running.append(True)
        finished.clear()
        try:
            return forward_step(*args, **options)
        finally:
            running.pop()

    def told(value: torch.Tensor) -> Any:
        where = "in a pass" if running else "after the passes"
        if finished and not running:
            where = "after the gradients"
        print(f"isnan of a loss {where}", flush=True)
        return isnan(value)

    finish = training.finalize_model_grads

    @functools.wraps(finish)
    def finishes(*args: Any, **options: Any) -> Any:
        finished.append(True)
        return finish(*args, **options)

    training.finalize_model_grads = finishes
    schedules.forward_step = step
    torch.isnan = told
