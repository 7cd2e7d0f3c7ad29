"""Bubble and MFU beside what Megatron logs of an iteration: its line, TensorBoard and W&B."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

from megatron_vshape.figures import tell
from megatron_vshape.mcore.observe.peaks import peak_flops
from megatron_vshape.runtime.measure import PassTimer

PredictBubble = Callable[[int], float]
"""Returns the bubble to be expected of a training step with so many microbatches."""

# Megatron tells its step time nowhere but in the line that it prints.
_STEP_TIME = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+) \|")


@dataclass(frozen=True, slots=True)
class Figures:
    """What this package adds to the log of one iteration; shares of one, None where unknown."""

    iteration: int
    predicted_bubble: float | None = None
    bubble: float | None = None
    mfu: float | None = None

    def text(self) -> str:
        """Return what goes to the end of Megatron's line."""
        return "".join(f" {name}: {100 * share:.1f} % |" for name, share in self._known().items())

    def scalars(self) -> dict[str, float]:
        """Return the values by their names in TensorBoard and W&B."""
        return {name.lower().replace(" ", "-"): share for name, share in self._known().items()}

    def _known(self) -> dict[str, float]:
        shares = {
            "bubble": self.bubble,
            "predicted bubble": self.predicted_bubble,
            "MFU": self.mfu,
        }
        return {name: share for name, share in shares.items() if share is not None}


@dataclass(eq=False)
class BubbleMeter:
    """Times the passes of those training steps that Megatron logs, and of no others."""

    logs: Callable[[], bool]  # whether anything is logged
    predict: PredictBubble | None
    _timer: PassTimer | None = None
    _torch_device: torch.device = torch.device("cpu")
    _num_microbatches: int = 0

    def begin_step(
        self, num_microbatches: int, torch_device: torch.device, profiled: PassTimer | None = None
    ) -> PassTimer | None:
        """Return what is to observe the step that begins: `profiled` where that does anyway."""
        self._num_microbatches, self._torch_device = num_microbatches, torch_device
        self._timer = None
        if not self.logs() or not _is_logged():
            return profiled
        self._timer = profiled or PassTimer(torch_device, aligned=False)
        return self._timer

    @property
    def times_next(self) -> bool:
        """Return whether the passes of the next step are timed."""
        return self.logs() and _is_logged(1)

    def figures(self, iteration: int, pipeline_group: dist.ProcessGroup) -> Figures:
        """Return the step's bubbles; all ranks of the pipeline call this for the same steps.

        The bubble is, as in a simulated timeline, the share of the step in which the busiest
        rank is idle. Ranks enter a step together, since the optimizer before it has needed the
        gradients of all, so the step takes as long as for the rank that ends last.
        """
        predicted = None
        if self.predict is not None and self._num_microbatches:
            predicted = self.predict(self._num_microbatches)
        if self._timer is None:
            return Figures(iteration, predicted)
        times = self._timer.busy_and_whole()
        most = torch.tensor(times, dtype=torch.float64, device=self._torch_device)
        self._timer = None
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=pipeline_group)
        busy_us, whole_us = most.tolist()
        bubble = 1 - busy_us / whole_us if whole_us else None  # None: no pass was observed
        return Figures(iteration, predicted, bubble)


def _is_logged(ahead: int = 0) -> bool:
    """Return whether Megatron's trainer is going to log the step `ahead` of the one it runs now."""
    args = get_args()
    iteration = args.curr_iteration + 1 + ahead
    return bool(iteration % args.log_interval == 0)


@dataclass(slots=True)
class IterationLog:
    """The figures of the iteration that Megatron logs now, if it logs one."""

    figures: Figures | None = None

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
