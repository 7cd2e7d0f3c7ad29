"""The bubble: share of idle time in a step, measured in the steps that are logged.

`MeteredSchedule` also measures Megatron's schedules, for comparison with those of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper import catalogue
from megatron_vshape.mcore.observe.report import RunReport
from megatron_vshape.mcore.setup.choice import ScheduleChoice
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.step_state import StepState, device_of
from megatron_vshape.runtime.activation_tracker import ActivationTracker
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
    predict: _PredictBubble | None
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
        if self.predict is not None and self._num_microbatches:
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


class MeteredSchedule:
    """Runs Megatron's step function unchanged and measures the training steps."""

    def __init__(
        self,
        state: StepState,
        logs: Logs,
        original: Callable[..., Any],
        name: str,
    ) -> None:
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        planner = (
            Planner(ScheduleChoice(ranks, name))
            if name in catalogue.NAMES and chunks == 1
            else None
        )
        self._state = state
        self._original = original
        self.meter = BubbleMeter(logs, None if planner is None else planner.predicted_bubble)
        self.report = RunReport(
            state,
            f"{name} (Megatron's own)",
            [_stage_of(chunk) for chunk in range(chunks)],
            None if planner is None else planner.plan_step,
        )

    def __call__(self, **arguments: Any) -> Any:
        """Run one step; the parameters are those of Megatron's function."""
        if arguments.get("forward_only"):
            self.report.interrupt()
            return self._original(**arguments)
        model, microbatches = arguments["model"], arguments["num_microbatches"]
        tokens = microbatches * arguments["micro_batch_size"] * arguments["seq_length"]
        chunks = model if isinstance(model, list) else [model]
        torch_device = device_of(chunks)
        with self.report.training_step(chunks, microbatches, tokens):
            timer = self.meter.begin_step(microbatches, torch_device)
            with self._state.setting(timer=timer):
                return self._original(**arguments)


def count_forward(
    tracker: ActivationTracker, chunk: int | None, output: Tensor | list[Tensor]
) -> None:
    """Count the activations that a forward pass of this rank's chunk saves."""
    for tensor in output if isinstance(output, list) else [output]:
        tracker.add_graph(tensor)
    tracker.ends(Pass(Kind.F, _stage_of(chunk or 0), 0))


def count_backward(tracker: ActivationTracker) -> None:
    """Count the memory after a full backward; the totals do not depend on the chunk."""
    tracker.ends(Pass(Kind.BW, 0, 0))


def _stage_of(chunk: int) -> int:
    ranks: int = parallel_state.get_pipeline_model_parallel_world_size()
    rank: int = parallel_state.get_pipeline_model_parallel_rank()
    return chunk * ranks + rank
