"""Training runs that are no row of `test_parity`: their logs, and flags of one side alone."""

from inspect import signature
from pathlib import Path

import pytest
from mcore.farm import Train
from mcore.parity import TWO, UNTIED, assert_same_bits, assert_same_training, losses
from mcore.test_parity import SIX
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

from megatron_vshape import plan
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.placement import zigzag


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


def test_interleaved_1f1b_has_two_chunks(train: Train) -> None:
    flags = (*TWO.split(), UNTIED, "--pipeline-schedule", "interleaved-1f1b")
    assert "Number of virtual stages per pipeline stage: 2" in train(4, *flags).output[0]


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


def test_planned_zigzag_equals_1f1b_bitwise(train: Train, tmp_path: Path) -> None:
    """Four chunks per rank, in rounds of alternating direction."""
    placement, file = zigzag(2, 4), tmp_path / "zigzag.json"
    costs = Costs.uniform(2, 8, forward=1, backward=1.2, weight=0.8, send=0.05)
    schedule = plan(costs, 2, 8, limit=8, placements=[placement], steps=2_000).schedule
    assert schedule.placement == placement == (0, 1, 1, 0, 0, 1, 1, 0)
    file.write_text(schedule.to_json())
    flags = (*TWO.split(), "--clip-grad", "0", UNTIED)
    runs = [train(2, "--pipeline-schedule", name, *flags) for name in ("1f1b", str(file))]
    megatron_run, package_run = runs
    assert_same_bits(package_run, megatron_run)
