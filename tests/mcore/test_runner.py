"""What the function that Megatron calls for every step leaves behind."""

import pytest

pytest.importorskip("megatron.training")

from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step_state import StepState


def test_weight_jobs_of_a_step_that_failed_are_let_go_of() -> None:
    state = StepState()
    runner = PipelineRunner.__new__(PipelineRunner)  # the whole of it needs process groups
    runner._state, runner._transport, runner._step_features = state, None, ()
    with state.jobs.collect((3, 0)):
        pass
    runner.forget_data()
    with state.jobs.collect((3, 0)):  # of the first step of another run
        pass
