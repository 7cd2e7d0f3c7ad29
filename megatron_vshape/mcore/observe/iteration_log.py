"""Bubble and MFU beside what Megatron logs of an iteration: its line, TensorBoard and W&B."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

from megatron_vshape.figures import tell
from megatron_vshape.mcore.observe.bubble import BubbleMeter, Figures
from megatron_vshape.mcore.observe.peaks import peak_flops

# Megatron tells its step time nowhere but in the line that it prints.
_STEP_TIME = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+) \|")


@dataclass(slots=True)
class IterationLog:
    """The figures of the iteration that Megatron logs now, if it logs one."""

    figures: Figures | None = None

    def has(self, ahead: int = 0) -> bool:
        """Return whether Megatron is going to log the step `ahead` of the one it runs now."""
        args = get_args()
        iteration = args.curr_iteration + 1 + ahead
        return bool(iteration % args.log_interval == 0)

    @contextmanager
    def iteration(self, meter: BubbleMeter, number: int) -> Iterator[None]:
        """Let Megatron log an iteration inside, with this package's figures added."""
        args = get_args()
        if number % args.log_interval == 0:
            group = parallel_state.get_pipeline_model_parallel_group()
            self.figures = meter.figures(number, group)
        try:
            yield
        finally:
            self.figures = None

    def complete(self, line: str) -> str:
        """Return Megatron's line with the figures, which also go to TensorBoard and W&B."""
        step_time = _STEP_TIME.search(line)
        if self.figures is None or step_time is None:
            return line
        step_s = float(step_time[1]) / 1e3
        figures = replace(self.figures, mfu=_mfu(get_args(), step_s))
        self.figures = None
        tell(step_s=step_s, bubble=figures.bubble)
        _write(figures)
        return line + figures.text()


def _write(figures: Figures) -> None:
    """Write the figures where Megatron writes its own: on the last rank, if it was asked to."""
    writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
    for name, value in figures.scalars().items():
        if writer:
            writer.add_scalar(name, value, figures.iteration)
        if wandb_writer:
            wandb_writer.log({name: value}, figures.iteration)


def _mfu(args: Namespace, step_s: float) -> float | None:
    """Return the share of all devices' peak that the model's own operations take."""
    peak = _peak_flops(args)
    if peak is None or step_s <= 0:
        return None
    flops: float = training.num_floating_point_operations(args, get_current_global_batch_size())
    most: float = step_s * peak * args.world_size
    return flops / most


def _peak_flops(args: Namespace) -> float | None:
    if getattr(args, "fp8", None) or getattr(args, "fp4", None):
        return None  # part of the products run at another peak
    return peak_flops(torch.cuda.get_device_name(), args.params_dtype)


def why_no_mfu() -> str | None:
    """Return the sentence that says why the log has no MFU, or None where it has one."""
    args = get_args()
    if _peak_flops(args) is not None:
        return None
    precision = "fp8" if getattr(args, "fp8", None) else str(args.params_dtype)[len("torch.") :]
    return (
        f"no MFU in the log: the peak FLOP/s of {torch.cuda.get_device_name()} in {precision} is "
        "not known"
    )
