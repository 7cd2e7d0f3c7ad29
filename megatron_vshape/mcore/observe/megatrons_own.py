"""Measurement of Megatron's schedules, for comparison with those of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper import catalogue
from megatron_vshape.mcore.observe.bubble import BubbleMeter, Logs
from megatron_vshape.mcore.observe.report import RunReport
from megatron_vshape.mcore.setup.choice import ScheduleConfig
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.activation_tracker import ActivationTracker


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
            Planner(ScheduleConfig(ranks, name))
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
            None if planner is None else planner.training,
        )

    def __call__(self, **arguments: Any) -> Any:
        """Run one step; the parameters are those of Megatron's function."""
        if arguments.get("forward_only"):
            self.report.interrupt()
            return self._original(**arguments)
        model, microbatches = arguments["model"], arguments["num_microbatches"]
        tokens = microbatches * arguments["micro_batch_size"] * arguments["seq_length"]
        chunks = model if isinstance(model, list) else [model]
        torch_device = next(chunks[0].parameters()).device
        with self.report.training_step(chunks, microbatches, tokens):
            timer = self.meter.begin_step(microbatches, torch_device)
            self._state.timer = timer
            try:
                return self._original(**arguments)
            finally:
                self._state.timer = None


def count_forward(
    census: ActivationTracker, chunk: int | None, output: Tensor | list[Tensor]
) -> None:
    """Count the activations that a forward pass of this rank's chunk saves."""
    for each in output if isinstance(output, list) else [output]:
        census.add_graph(each)
    census.ends(Pass(Kind.F, _stage_of(chunk or 0), 0))


def count_backward(census: ActivationTracker) -> None:
    """Count the memory after a full backward; the totals do not depend on the chunk."""
    census.ends(Pass(Kind.BW, 0, 0))


def _stage_of(chunk: int) -> int:
    ranks: int = parallel_state.get_pipeline_model_parallel_world_size()
    rank: int = parallel_state.get_pipeline_model_parallel_rank()
    return chunk * ranks + rank
