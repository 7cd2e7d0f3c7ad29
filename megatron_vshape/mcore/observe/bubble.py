"""The bubble: share of idle time in a step, measured in the steps that are logged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_vshape.runtime.measure import PassTimer

Logs = Callable[[int], bool]
"""Returns whether the trainer logs the step at this offset from the current one."""

_PredictBubble = Callable[[int], float]
"""Returns the expected bubble of a training step with this number of microbatches."""


@dataclass(frozen=True, slots=True)
class Figures:
    """This package's metrics for the log of one iteration: fractions of 1, None if unknown."""

    iteration: int
    predicted_bubble: float | None = None
    bubble: float | None = None

    def text(self) -> str:
        """Return the text to append to Megatron's log line."""
        return "".join(
            f" {name}: {100 * share:.1f} % |" for name, share in self._known_shares().items()
        )

    def scalars(self) -> dict[str, float]:
        """Return the values by their names in TensorBoard and W&B."""
        return {
            name.lower().replace(" ", "-"): share for name, share in self._known_shares().items()
        }

    def _known_shares(self) -> dict[str, float]:
        shares = {"bubble": self.bubble, "predicted bubble": self.predicted_bubble}
        return {name: share for name, share in shares.items() if share is not None}


@dataclass(eq=False)
class BubbleMeter:
    """Times the passes of training steps that are logged, and of no other steps."""

    logs: Logs
    predict: _PredictBubble
    _timer: PassTimer | None = None
    _torch_device: torch.device = torch.device("cpu")
    _num_microbatches: int = 0

    def begin_step(
        self, num_microbatches: int, torch_device: torch.device, profiled: PassTimer | None = None
    ) -> PassTimer | None:
        """Return the timer of the next step: `profiled` if given, else a new one if needed."""
        self._num_microbatches, self._torch_device = num_microbatches, torch_device
        self._timer = None
        if not self.logs(0):
            return profiled
        self._timer = profiled or PassTimer(torch_device, aligned=False)
        return self._timer

    @property
    def times_next(self) -> bool:
        """Return whether the passes of the next step are timed."""
        return self.logs(1)

    def figures(self, iteration: int, pipeline_group: dist.ProcessGroup) -> Figures:
        """Return the bubbles of the step; all ranks of the pipeline call this for the same steps.

        As in a simulated timeline, the bubble is the share of the step in which the busiest rank is
        idle. Ranks enter a step together, because the optimizer before it needs the gradients of
        all ranks. So the duration of the step is that of the rank that ends last.
        """
        predicted = None
        if self._num_microbatches:
            predicted = self.predict(self._num_microbatches)
        if self._timer is None:
            return Figures(iteration, predicted)
        times = self._timer.busy_and_whole()
        max_times = torch.tensor(times, dtype=torch.float64, device=self._torch_device)
        self._timer = None
        dist.all_reduce(max_times, op=dist.ReduceOp.MAX, group=pipeline_group)
        busy_us, whole_us = max_times.tolist()
        bubble = 1 - busy_us / whole_us if whole_us else None  # None: no pass was observed
        return Figures(iteration, predicted, bubble)
