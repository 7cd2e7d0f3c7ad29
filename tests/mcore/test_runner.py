"""State after a call of the forward-backward function."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.mcore.refusals import RefusedError, UnsupportedError
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.stage import (
    MegatronStage,
    PassResults,
    PassRunner,
    StepContext,
)
from megatron_vshape.mcore.step_state import StepState, device_of


def test_weight_jobs_of_a_failed_step_are_freed() -> None:
    state = StepState()
    runner = PipelineRunner.__new__(PipelineRunner)  # the full step needs process groups
    runner._state, runner._transport, runner._step_features = state, None, ()
    with state.jobs.collect((3, 0)):
        pass
    runner.free_state()
    with state.jobs.collect((3, 0)):  # from the first step of another run
        pass


def test_step_connects_communicators_replaced_by_a_library() -> None:
    calls: list[str] = []
    runner = PipelineRunner.__new__(PipelineRunner)
    runner._transport = SimpleNamespace(  # from the previous step
        reconnect=lambda: calls.append("reconnect"), expect=lambda *_: calls.append("expect")
    )
    runner._ready_transport(SimpleNamespace(pipeline_dtype=torch.float32), (4, 1, 8), None, None)
    assert calls == ["reconnect", "expect"]


TWO_OUTPUTS = PassRunner(
    lambda config, forward, backward: PassResults(
        (torch.ones(2), torch.ones(1)), torch.tensor(0), None
    ),
    lambda output: iter(()),
)
"""Runs the passes of a model that returns two tensors."""


@pytest.mark.parametrize("forward_only", [False, True])
def test_stage_with_several_output_tensors_is_rejected(forward_only: bool) -> None:
    step: Any = SimpleNamespace(
        hooks=[],
        pass_runner=TWO_OUTPUTS,
        state=StepState(),
        config=None,
        pipeline=SimpleNamespace(choice=SimpleNamespace(name="v-half")),
        forward_only=forward_only,
        call=SimpleNamespace(first_val_step=None),
        tokens_of=lambda number: None,
        forward_step=None,
        num_tokens=0,
        check_captured=lambda *work: None,
    )
    stage = MegatronStage(step, chunk=0, stage=1, is_last=False, has_several_chunks=True)
    with pytest.raises(UnsupportedError, match="^stage 1 returned a tuple of 2 items: a stage of"):
        stage.forward(0, torch.ones(2))


def test_pass_order_other_than_the_captured_one_is_rejected() -> None:
    state = StepState(captured_passes=[(Kind.F, 0, 0), (Kind.B, 0, 0), (Kind.W, 0, 0)])
    context = StepContext.__new__(StepContext)
    context.state, context.forward_only, context.num_replayed = state, False, 0
    context.check_captured(Kind.F, 0, 0)
    with pytest.raises(ScheduleError, match="captured for B of microbatch 0 .* runs BW of micro"):
        context.check_captured(Kind.BW, 0, 0)
    context.check_captured(Kind.B, 0, 0)
    context.forward_only = True  # evaluation replays no graphs
    context.check_captured(Kind.F, 0, 1)


def test_adjusted_message_shapes_are_rejected() -> None:
    runner = PipelineRunner.__new__(PipelineRunner)
    runner.pipeline = SimpleNamespace(  # type: ignore[assignment]
        choice=SimpleNamespace(name="v-half")
    )
    with pytest.raises(RefusedError, match="v-half does not support adjust_tensor_shapes_fn: "):
        runner(adjust_tensor_shapes_fn=lambda *shapes: shapes)


def test_stage_without_parameters_has_a_device() -> None:
    assert device_of([nn.Identity(), nn.Linear(1, 1, device="meta")]).type == "meta"
    assert device_of([nn.Identity()]).type == ("cuda" if torch.cuda.is_available() else "cpu")
