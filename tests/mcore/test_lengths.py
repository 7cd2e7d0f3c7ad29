"""Microbatches of unlike length: the numbers of Megatron's 1F1B, which sends shapes first too."""

from pathlib import Path

import pytest
from mcore.farm import Farm
from mcore.test_training import assert_equal_training

PLUGIN = Path(__file__).parent / "of_any_length.py"
STEPS = ("--train-iters", "2", "--eval-interval", "2", "--eval-iters", "1")


def test_an_order_that_would_deadlock_on_gpus_is_refused(farm: Farm) -> None:
    said = "v-half does not work with variable_seq_lengths on GPUs"
    run = farm.run(4, "--pipeline-schedule", "v-half", *STEPS, plugin=PLUGIN, given=said)
    assert run.codes == [1] * 4, run.output
    told = [text.partition("megatron-vshape: ")[2].strip() for text in run.output]
    assert told == [said, "", "", ""]
    assert not any("Traceback" in text for text in run.output)


@pytest.mark.parametrize(
    "schedule",
    ["v-half", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v-zb", "zb-h1"))],
)
def test_training_equals_megatrons_1f1b(farm: Farm, schedule: str) -> None:
    theirs = farm.run(4, "--pipeline-schedule", "1f1b", *STEPS, plugin=PLUGIN).check()
    ours = farm.run(4, "--pipeline-schedule", schedule, *STEPS, plugin=PLUGIN).check()
    whole = farm.run(1, *STEPS).check()
    assert whole.record["losses"] != theirs.record["losses"]  # so that the lengths do differ
    assert_equal_training(ours, theirs)
