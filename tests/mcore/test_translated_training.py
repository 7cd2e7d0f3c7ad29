"""Runs with options for Megatron's schedules: log lines and equal training."""

import re
from collections.abc import Callable

import pytest
from mcore.conftest import UNTIED, needs_hybrid
from mcore.farm import Ended
from mcore.parity import assert_same_bits, assert_same_training
from mcore.test_composition import EXPERTS
from mcore.test_training import TWO

Train = Callable[..., Ended]

MODEL = ("--num-layers", "14", *TWO)
LAYOUT = "Et|(tt|)*6tL"
RUNS = {
    "layout": (
        "v-half",
        f"--pipeline-model-parallel-layout {LAYOUT}",
        [f"pipeline_model_parallel_layout {LAYOUT}: its 8 stages as the schedule's 8"],
    ),
    "counted ends": (
        "v-zb",
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--num-layers-per-virtual-pipeline-stage 1 --defer-embedding-wgrad-compute "
        "--microbatch-group-size-per-virtual-pipeline-stage 5 "
        "--overlap-p2p-communication-warmup-flush",
        [
            "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: 16",
            "num_layers_per_virtual_pipeline_stage 1: ignored",
            "defer_embedding_wgrad_compute: turned off",
            "microbatch_group_size_per_vp_stage 5: ignored",
            "overlap_p2p_comm_warmup_flush: ignored",
        ],
    ),
    "layout of half as many": (
        "v-min",
        "--pipeline-model-parallel-layout Et*2|t*4|t*4|t*4L",
        ["pipeline_model_parallel_layout Et*2|t*4|t*4|t*4L: its 4 stages"],
    ),
    "first and last": (
        "zb-h1",
        "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4",
        ["decoder_first_pipeline_num_layers 2, decoder_last_pipeline_num_layers 4: the first"],
    ),
    "a split wins": (
        "v-half",
        "--pipeline-layer-split 1,2,2,2,2,2,2,1 --decoder-last-pipeline-num-layers 5",
        ["decoder_last_pipeline_num_layers 5: ignored, --pipeline-layer-split defines"],
    ),
}
SPLITS = {
    "layout of half as many": "1,1,2,2,2,2,2,2",
    "first and last": "2,4,4,4",
}
FAST = {"layout", "counted ends"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in RUNS]
)
def test_training_equals_one_rank(train: Train, name: str) -> None:
    schedule, flags, lines = RUNS[name]
    megatron_run = train(1, *MODEL)
    package_run = train(4, "--pipeline-schedule", schedule, *MODEL, *flags.split())
    assert_same_training(package_run, megatron_run)
    split = SPLITS.get(name, "1,2,2,2,2,2,2,1")
    for line in (*lines, f"layers per stage, in model order: {split}\n"):
        assert [text.count(line) for text in package_run.output] == [1, 0, 0, 0], line


AHEAD = (
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --ckpt-format torch"
)


@pytest.mark.parametrize(
    "schedule", ["v-half", pytest.param("grouped-interleaved-1f1b", marks=pytest.mark.slow)]
)
def test_early_optimizer_step_of_the_first_chunk(train: Train, schedule: str) -> None:
    flags = ("--pipeline-schedule", schedule, *TWO, UNTIED, "--clip-grad", "0", *AHEAD.split())
    without = train(4, *flags)
    package_run = train(4, *flags, "--overlap-param-gather-with-optimizer-step")
    assert_same_bits(package_run, without, view=Ended.by_place)
    assert len({tuple(place) for _, *place in package_run.by_place("parameters")}) > 1  # replicas
    assert re.search(r"overlap_param_gather_with_optimizer_step \.+ True", package_run.output[0])


SHARED = (
    f"{EXPERTS} {UNTIED} --pipeline-model-parallel-size 2 --moe-shared-expert-intermediate-size 16"
)


@pytest.mark.slow
def test_overlapped_shared_experts(train: Train) -> None:
    """A CPU has no such stream; tests/runtime/test_streams.py checks its calls."""
    flags = ("--train-iters", "2", *SHARED.split(), "--moe-shared-expert-overlap")
    megatron_run = train(2, "--pipeline-schedule", "1f1b", *flags)
    package_run = train(2, "--pipeline-schedule", "v-half", *flags)
    assert any("shared_experts.linear_fc1" in name for name in package_run.merged("parameters"))
    assert_same_training(package_run, megatron_run)


@pytest.mark.slow
@needs_hybrid
def test_layer_pattern_by_its_old_name(train: Train) -> None:
    flags = ("--train-iters", "2")
    megatron_run = train(1, "--hybrid-layer-pattern", "*-*-*-*-", *flags)
    package_run = train(
        2, "--pipeline-schedule", "v-half", "--hybrid-override-pattern", "*-*-*-*-", *flags
    )
    assert_same_training(package_run, megatron_run)
    assert package_run.output[0].count("renamed to hybrid_layer_pattern") == 1
