"""A plugin of the farm: variable-length microbatches, and a line with the order of each step.

A loader's processes must end with the trainer. With `given` "repeats", Megatron repeats every step,
as where it measures how exact one is; a run that is given "saves" may do that.
"""

from __future__ import annotations

import functools
from typing import Any

import of_any_length
import started_for_training
from megatron.core.rerun_state_machine import (
    RerunMode,
    get_rerun_state_machine,
)
from megatron.training import training

from megatron_vshape.mcore.features.variable_length.reorder import MicrobatchReorderer

LENGTHS = (32, 8, 24, 16, 12, 28, 20, 4, 31, 9, 23)  # each step of 8 has others


def start(rank: int, given: object) -> None:
    """Cut the samples of this process, and print the order of each step."""
    of_any_length.LENGTHS = LENGTHS
    of_any_length.start(rank, None)
    _tell_orders()
    if given != "saves":  # which starts a process that stays
        started_for_training.start(rank, given)
    if given == "repeats":
        _repeat_steps()


def _tell_orders() -> None:
    original = MicrobatchReorderer._decide_order

    @functools.wraps(original)
    def decided(places: MicrobatchReorderer, plan: Any, iterators: Any, count: int) -> Any:
        read, decision = original(places, plan, iterators, count)
        print(f"order {decision[1]} of {count}", flush=True)
        return read, decision

    MicrobatchReorderer._decide_order = decided  # type: ignore[method-assign]


def _repeat_steps() -> None:
    """Set the mode that 0.19 names otherwise in its flags than in its code."""
    original = training.train

    @functools.wraps(original)
    def train(*args: Any, **options: Any) -> Any:
        get_rerun_state_machine().set_mode(RerunMode.REPORT_DETERMINISM_STATS)
        return original(*args, **options)

    training.train = train
