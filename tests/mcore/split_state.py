"""Lets Megatron's linear layers defer their weight gradients, without a schedule."""

from typing import Any

from megatron.core.tensor_parallel import layers

from megatron_vshape.mcore.split.linear_layers import make_split_linear
from megatron_vshape.mcore.step_state import StepState

NAME = "LinearWithGradAccumulationAndAsyncCommunication"
UPSTREAM: Any = getattr(layers, NAME)


def split_state() -> Any:
    """Return the state to which Megatron's linear layers defer their weight gradients."""
    state, changed = StepState(has_own_schedule=True), vars(layers)
    changed[NAME] = make_split_linear(state, layers, UPSTREAM)
    return state
