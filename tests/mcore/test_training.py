"""Training runs that are no row of `test_parity`: their logs, and flags of one side alone."""

from inspect import signature

import pytest
from mcore.farm import Train
from mcore.parity import TWO, UNTIED, assert_same_training, losses
from mcore.test_parity import SIX
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator


def test_log_has_losses_and_one_line_about_the_schedule(train: Train) -> None:
    run = train(4, *SIX.split(), "--pipeline-schedule", "v-half")
    assert losses(run)[-1] < losses(run)[0]
    assert run.output[3].count("lm loss: ") == len(losses(run)) == 6
    assert "validation loss at iteration 6" in run.output[3]
    counts = [
        text.count("pipeline schedule v-half, 4 ranks, 8 microbatches") for text in run.output
    ]
    assert counts == [1, 0, 0, 0]
    assert "75 % of 1F1B at PP 4" in run.output[0]
    (line,) = [line for line in run.output[0].splitlines() if "tokens/s" in line]
    assert line.startswith("v-half: ")
    assert "MiB: measured [" in line
    assert "predicted [" in line


GROWING = (
    ("--step-batch-size-schedule", "0:4 512:8")  # from 512 tokens (16 samples) on
    if "step_batch_size_schedule" in signature(init_num_microbatches_calculator).parameters
    else "--global-batch-size 8 --rampup-batch-size 4 4 16".split()  # ignored by later versions
)
"""Four steps of four microbatches, then steps of eight; without `CONSTANT`."""

CONSTANT = "--train-iters", "--global-batch-size"


def test_growing_batch_size(train: Train) -> None:
    """Megatron up to 0.17 requires sample-based training for this."""
    flags = (*GROWING, "--train-samples", "40", UNTIED)
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags, without=CONSTANT)
    package_run = train(4, "--pipeline-schedule", "v-half", *flags, without=CONSTANT)
    assert len(losses(megatron_run)) == 4 + 3
    assert_same_training(package_run, megatron_run)


@pytest.mark.slow
def test_fused_accumulation_without_apex_is_turned_off(train: Train) -> None:
    megatron_run = train(4, *TWO.split(), "--pipeline-schedule", "1f1b")
    without = ("--no-gradient-accumulation-fusion",)
    package_run = train(4, *TWO.split(), "--pipeline-schedule", "v-half", without=without)
    assert "gradient_accumulation_fusion: turned off" in package_run.output[0]
    assert_same_training(package_run, megatron_run)
