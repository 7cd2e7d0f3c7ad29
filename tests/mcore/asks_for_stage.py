"""A plugin of the farm: a loss function that queries the pipeline stage, as in some libraries."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules, utils


def start(rank: int, given: object) -> None:
    """Make Megatron's loss functions of this process fail unless they see the last stage."""
    original = schedules.forward_step_calc_loss
    signature = inspect.signature(original)

    @functools.wraps(original)
    def calculate(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        if bound.arguments["loss_func"] is not None and bound.arguments["is_last_stage"]:
            bound.arguments["loss_func"] = _asking(bound.arguments["loss_func"])
        return original(*bound.args, **bound.kwargs)

    schedules.forward_step_calc_loss = calculate


def _asking(loss_func: Any) -> Any:
    def asking(*args: Any, **options: Any) -> Any:
        group = parallel_state.get_pipeline_model_parallel_group()
        if not (parallel_state.is_pipeline_last_stage() and utils.is_pp_last_stage(group)):
            raise RuntimeError("the loss is made where the last stage is said not to be")
        return loss_func(*args, **options)

    return asking
