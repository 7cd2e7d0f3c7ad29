"""Messages of variable length, and wider ones, beyond the rows of `test_parity`."""

import pytest
from mcore.farm import Farm, Train
from mcore.parity import EVALUATED, UNTIED, assert_same_training
from megatron.core.transformer import TransformerConfig


@pytest.mark.slow
def test_messages_are_received_when_posted_as_on_gpus(train: Train, farm: Farm) -> None:
    """A pass order that deadlocked before messages were received in this way."""
    steps, plugin = EVALUATED.split(), "variable_lengths"
    megatron_run = train(4, *steps, "--pipeline-schedule", "1f1b", plugin=plugin)
    flags = ("--pipeline-schedule", "zb-h1", *steps)
    package_run = farm.run(4, *flags, plugin=plugin, given="taken").check()
    assert_same_training(package_run, megatron_run)


@pytest.mark.skipif(
    hasattr(TransformerConfig, "enable_mhc_connections"),
    reason="this Megatron has such models, and rejects them with a pipeline",
)
@pytest.mark.parametrize("width", ["fixed", pytest.param("growing", marks=pytest.mark.slow)])
def test_messages_wider_than_the_hidden_size(farm: Farm, width: str) -> None:
    """Of several residual streams; with shapes sent ahead they may also grow from stage to stage.

    Megatron 0.19 has no such models. Its 1F1B supports them only if shapes are sent ahead.
    """
    steps = ("--train-iters", "2", "--clip-grad", "0", UNTIED)
    sent_ahead = "any" if width == "fixed" else width
    megatron_run = farm.run(2, *steps, plugin="wide_messages", given=sent_ahead).check()
    flags = ("--pipeline-schedule", "zb-h1", *steps)
    package_run = farm.run(2, *flags, plugin="wide_messages", given=width).check()
    assert_same_training(package_run, megatron_run)
