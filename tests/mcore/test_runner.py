"""What the function that Megatron calls for every step leaves behind."""

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.training")

import torch

from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step_state import StepState


def test_weight_jobs_of_a_step_that_failed_are_let_go_of() -> None:
    state = StepState()
    runner = PipelineRunner.__new__(PipelineRunner)  # the whole of it needs process groups
    runner._state, runner._transport, runner._step_features = state, None, ()
    with state.jobs.collect((3, 0)):
        pass
    runner.free_state()
    with state.jobs.collect((3, 0)):  # of the first step of another run
        pass


def test_a_step_connects_communicators_that_a_library_has_replaced() -> None:
    calls: list[str] = []
    runner = PipelineRunner.__new__(PipelineRunner)
    runner._transport = SimpleNamespace(  # of the step before
        reconnect=lambda: calls.append("reconnect"), expect=lambda *_: calls.append("expect")
    )
    runner._ready_transport(SimpleNamespace(pipeline_dtype=torch.float32), (4, 1, 8), None, None)
    assert calls == ["reconnect", "expect"]
