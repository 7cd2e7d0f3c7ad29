"""A plugin of the farm: microbatches of unlike length, and whether their order was found early.

A loader's processes must end with the trainer. With `given` "repeats", Megatron repeats every step,
as where it measures how exact one is; a run that is given "saves" may do that.
"""

from __future__ import annotations

import functools
from typing import Any

import of_any_length
import started_for_training
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    get_rerun_state_machine,
)
from megatron.training import training

from megatron_vshape.mcore.step.unlike import Ahead, Places

LENGTHS = (32, 8, 24, 16, 12, 28, 20, 4, 31, 9, 23)  # each step of 8 has others


def start(rank: int, given: object) -> None:
    """Cut the samples of this process, and print how each order was come by, and what is read."""
    of_any_length.LENGTHS = LENGTHS
    of_any_length.start(rank, None)
    _tell_orders()
    _tell_reads()
    if given != "saves":  # which starts a process that stays
        started_for_training.start(rank, given)
    if given == "repeats":
        _repeat_steps()


def _tell_orders() -> None:
    original = Places._decided

    @functools.wraps(original)
    def decided(places: Places, plan: Any, iterators: Any, count: int) -> Any:
        early = places._early
        read, found = original(places, plan, iterators, count)
        used = early is not None and places._early is not early and early.found.result() is found
        print(f"order {found[1]} of {count}, {'early' if used else 'at the start'}", flush=True)
        return read, found

    Places._decided = decided  # type: ignore[method-assign]


def _tell_reads() -> None:
    """Print what Megatron's own iterators have given, by the sum of its tokens."""
    original = RerunDataIterator.__next__

    def read(iterator: Any) -> Any:
        item = original(iterator)
        beneath = "ahead" if isinstance(iterator.iterable, Ahead) else "plain"
        print(f"read {int(item['tokens'].sum())} {beneath}", flush=True)
        return item

    RerunDataIterator.__next__ = read


def _repeat_steps() -> None:
    """Set the mode that 0.19 names otherwise in its flags than in its code."""
    original = training.train

    @functools.wraps(original)
    def train(*args: Any, **options: Any) -> Any:
        get_rerun_state_machine().set_mode(RerunMode.REPORT_DETERMINISM_STATS)
        return original(*args, **options)

    training.train = train
