"""Training with schedules of this package equals Megatron's 1F1B."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest
from mcore.conftest import UNTIED
from mcore.farm import Ended
from mcore.parity import Tolerance, assert_same_bits, assert_same_training, losses
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

from megatron_vshape import plan
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, looping, stages_of, zigzag
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.mcore.options import MEGATRONS_OWN

Train = Callable[..., Ended]

SIX = ("--train-iters", "6", "--eval-interval", "6", "--eval-iters", "2")
TWO = ("--train-iters", "2")


@pytest.mark.parametrize("embeddings", [(), (UNTIED,)], ids=["tied", "untied"])
@pytest.mark.parametrize("schedule", ["v-min", "v-half", "v-zb"])
def test_six_steps_equal_1f1b(train: Train, schedule: str, embeddings: tuple[str, ...]) -> None:
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *SIX, *embeddings)
    package_run = train(4, "--pipeline-schedule", schedule, *SIX, *embeddings)
    assert len(losses(package_run)) == 6
    assert losses(package_run)[-1] < losses(package_run)[0]
    assert package_run.record["evaluations"]
    assert_same_training(package_run, megatron_run)


def test_log_has_losses_and_one_line_about_the_schedule(train: Train) -> None:
    run = train(4, "--pipeline-schedule", "v-half", *SIX)
    assert run.output[3].count("lm loss: ") == 6
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


OPTIONS = {
    "data-parallel, distributed optimizer, overlap": (
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather"
    ),
    "tied, data-parallel, overlap": "--pipeline-model-parallel-size 2 --overlap-grad-reduce",
    "tensor-parallel": "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
    "per-token loss": "--calculate-per-token-loss",
    "recompute": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "learned positions, swiglu": "--position-embedding-type learned_absolute --swiglu",
    "other evaluation batch": (
        "--eval-interval 2 --eval-iters 1 --eval-global-batch-size 6 --eval-micro-batch-size 2"
    ),
}


SLOW = {"per-token loss", "learned positions, swiglu", "other evaluation batch"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, options in OPTIONS.items()
    ],
)
def test_training_equals_1f1b_with_megatron_options(train: Train, options: str) -> None:
    flags = options.split()
    if "tied" not in options and "swiglu" not in options:
        flags.append(UNTIED)
    megatron_run = train(4, *TWO, "--pipeline-schedule", "1f1b", *flags)
    package_run = train(4, *TWO, "--pipeline-schedule", "v-half", *flags)
    assert_same_training(package_run, megatron_run)


GROWING = (
    ("--step-batch-size-schedule", "0:4 512:8")  # from 512 tokens (16 samples) on
    if "step_batch_size_schedule" in signature(init_num_microbatches_calculator).parameters
    else (
        "--global-batch-size",
        "8",
        "--rampup-batch-size",
        "4",
        "4",
        "16",
    )  # ignored by later versions
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
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *TWO)
    without = ("--no-gradient-accumulation-fusion",)
    package_run = train(4, "--pipeline-schedule", "v-half", *TWO, without=without)
    assert "gradient_accumulation_fusion: turned off" in package_run.output[0]
    assert_same_training(package_run, megatron_run)


@pytest.mark.slow
def test_fp16_with_a_loss_scale(train: Train) -> None:
    flags = ("--fp16", "--initial-loss-scale", "1024", *TWO, UNTIED)
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags)
    package_run = train(4, "--pipeline-schedule", "v-half", *flags)
    assert_same_training(package_run, megatron_run, Tolerance(1e-5, 1e-3, 1e-3))


@pytest.mark.slow
def test_mixture_of_experts(train: Train) -> None:
    flags = ("--num-experts", "4", "--moe-router-load-balancing-type", "aux_loss", *TWO, UNTIED)
    flags += ("--moe-aux-loss-coeff", "1e-2", "--disable-bias-linear")
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags)
    package_run = train(4, "--pipeline-schedule", "v-half", *flags)
    assert_same_training(package_run, megatron_run)


def all_forwards_first(placement: Placement, num_devices: int, microbatches: int) -> Schedule:
    """Return a valid schedule for any placement whose stages can run in order."""
    order = []
    for stages in stages_of(placement, num_devices):
        row = [Pass(Kind.F, stage, m) for stage in stages for m in range(microbatches)]
        for stage in reversed(stages):
            row += [Pass(Kind.B, stage, m) for m in range(microbatches)]
        row += [Pass(Kind.W, stage, m) for stage in stages for m in range(microbatches)]
        order.append(tuple(row))
    return Schedule("file", num_devices, microbatches, placement, tuple(order))


PLACEMENTS = {
    "linear, tied": ((0, 1, 2, 3), ()),
    "looping, tied": (looping(4, 2), ()),
    "ends on one rank": ((0, 2, 1, 3, 1, 3, 2, 0), ()),
    "ends anywhere": ((2, 0, 3, 1, 1, 3, 2, 0), (UNTIED,)),
    "loss on an inner rank": ((0, 3, 1, 2), (UNTIED,)),
}


@pytest.mark.parametrize(("placement", "flags"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_schedule_file_with_any_placement_equals_1f1b(
    train: Train, tmp_path: Path, placement: Placement, flags: tuple[str, ...]
) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(all_forwards_first(placement, 4, 8).to_json())
    flags = (*TWO, "--eval-interval", "2", "--eval-iters", "1", *flags)
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags)
    package_run = train(4, "--pipeline-schedule", str(file), *flags)
    assert_same_training(package_run, megatron_run)


def test_planned_zigzag_equals_1f1b_bitwise(train: Train, tmp_path: Path) -> None:
    """Four chunks per rank, in rounds of alternating direction."""
    placement, file = zigzag(2, 4), tmp_path / "zigzag.json"
    costs = Costs.uniform(2, 8, forward=1, backward=1.2, weight=0.8, send=0.05)
    schedule = plan(costs, 2, 8, limit=8, placements=[placement], steps=2_000).schedule
    assert schedule.placement == placement == (0, 1, 1, 0, 0, 1, 1, 0)
    file.write_text(schedule.to_json())
    flags = (*TWO, "--clip-grad", "0", UNTIED)
    runs = [train(2, "--pipeline-schedule", name, *flags) for name in ("1f1b", str(file))]
    megatron_run, package_run = runs
    assert_same_bits(package_run, megatron_run)


@pytest.mark.slow
def test_exported_1f1b_equals_megatron_bitwise(train: Train, tmp_path: Path) -> None:
    file = tmp_path / "1f1b.json"
    file.write_text(make("1f1b", 4, 8).to_json())
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *TWO, UNTIED)
    package_run = train(4, "--pipeline-schedule", str(file), *TWO, UNTIED)
    assert_same_bits(package_run, megatron_run, ["gradients"])


REST_OF_THE_CATALOGUE = [
    name
    for name in NAMES
    if name not in (*MEGATRONS_OWN, "v-min", "v-half", "v-zb")  # tested separately
]


@pytest.mark.parametrize("schedule", REST_OF_THE_CATALOGUE)
def test_every_named_schedule_equals_1f1b(train: Train, schedule: str) -> None:
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *TWO, UNTIED)
    package_run = train(4, "--pipeline-schedule", schedule, *TWO, UNTIED)
    assert f"pipeline schedule {schedule}, 4 ranks" in package_run.output[0]
    assert_same_training(package_run, megatron_run)


def test_interleaved_1f1b_selects_megatron_with_two_chunks(train: Train) -> None:
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *TWO, UNTIED)
    interleaved = train(4, "--pipeline-schedule", "interleaved-1f1b", *TWO, UNTIED)
    assert_same_training(interleaved, megatron_run)
    assert "Number of virtual stages per pipeline stage: 2" in interleaved.output[0]


def test_one_rank_trains_without_a_pipeline(train: Train) -> None:
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *TWO, UNTIED)
    assert_same_training(train(1, "--pipeline-schedule", "v-half", *TWO, UNTIED), megatron_run)


def test_two_ranks_and_few_microbatches(train: Train) -> None:
    flags = (*TWO, UNTIED, "--global-batch-size", "2", "--no-overlap-p2p-communication")
    megatron_run = train(2, "--pipeline-schedule", "1f1b", *flags)
    for schedule in ("v-min", "v-half", "v-zb"):
        assert_same_training(train(2, "--pipeline-schedule", schedule, *flags), megatron_run)
