"""Variable-length microbatches equal Megatron's 1F1B, which also sends shapes first."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mcore.farm import Ended, Farm
from mcore.parity import assert_same_training
from mcore.test_training import UNTIED
from megatron.core.transformer import TransformerConfig

PLUGIN = Path(__file__).parent / "of_any_length.py"
WIDE = Path(__file__).parent / "wide_messages.py"
STEPS = ("--train-iters", "2", "--eval-interval", "2", "--eval-iters", "1")


@pytest.mark.parametrize(
    "schedule",
    ["v-half", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v-zb", "zb-h1"))],
)
def test_training_equals_megatrons_1f1b(train: Callable[..., Ended], schedule: str) -> None:
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *STEPS, plugin=PLUGIN)
    package_run = train(4, "--pipeline-schedule", schedule, *STEPS, plugin=PLUGIN)
    one_rank_run = train(1, *STEPS)
    assert (
        one_rank_run.record["losses"] != megatron_run.record["losses"]
    )  # so that the lengths do differ
    assert_same_training(package_run, megatron_run)


@pytest.mark.slow
def test_messages_are_received_when_posted_as_on_gpus(
    train: Callable[..., Ended], farm: Farm
) -> None:
    """A pass order that deadlocked before messages were received in this way."""
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *STEPS, plugin=PLUGIN)
    flags = ("--pipeline-schedule", "zb-h1", *STEPS)
    package_run = farm.run(4, *flags, plugin=PLUGIN, given="taken").check()
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
    megatron_run = farm.run(
        2, *steps, plugin=WIDE, given="any" if width == "fixed" else width
    ).check()
    flags = ("--pipeline-schedule", "zb-h1", *steps)
    package_run = farm.run(2, *flags, plugin=WIDE, given=width).check()
    assert_same_training(package_run, megatron_run)
