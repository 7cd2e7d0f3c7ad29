"""Multi-token prediction under every placement: the numbers of one rank and of Megatron's 1F1B."""

import re
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from mcore.conftest import UNTIED, needs_hybrid
from mcore.farm import Ended, Farm
from mcore.parity import (
    BF16,
    FP32,
    Tolerance,
    assert_close_gradients,
    assert_close_tensors,
    assert_same_training,
    losses,
    relative,
)
from mcore.rejections import rejection
from mcore.test_composition import CONTEXT, EXPERT_PARALLEL, OVERLAP, SEQUENCE, STEPS, TENSOR
from mcore.test_iteration_log import of_wandb
from mcore.test_library import assert_equal_results, run_library
from mcore.test_training import all_forwards_first
from mcore.test_vocabulary import WEIGHTS, join_rows

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.stage_map import StageMap, split_layers
from megatron_vshape.mcore.refusals import UnsupportedError

Train = Callable[..., Ended]

ONE, TWO = ("--mtp-num-layers", "1"), ("--mtp-num-layers", "2")
STARTS = ("--train-iters", "3", "--eval-interval", "3", "--eval-iters", "1")
SAYS = (
    *("--wandb-project", "project", "--wandb-exp-name", "name"),
    *("--wandb-save-dir", tempfile.gettempdir()),
)

RUNS = {
    "v-half, untied": ("v-half", ONE, UNTIED),
    "v-zb, tied, depth 2": ("v-zb", TWO, ""),
    "zb-h1, tied": ("zb-h1", ONE, ""),
    "grouped-interleaved-1f1b, untied, depth 2": ("grouped-interleaved-1f1b", TWO, UNTIED),
    "v-min, a last stage without other layers": (
        "v-min",
        ONE,
        f"{UNTIED} --pipeline-layer-split 1,2,1,1,1,1,1,0",
    ),
    "v-half, balanced": ("v-half", ONE, "--pipeline-layer-split auto"),
    "v-half, stages of a layout": (
        "v-half",
        ONE,
        f"{UNTIED} --pipeline-model-parallel-layout Et*2|t|t|t|t|t|t|mL",
    ),
    "per-token loss": ("v-half", TWO, f"{UNTIED} --calculate-per-token-loss"),
    "recompute": (
        "v-half",
        ONE,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "post-validation": ("v-zb", ONE, "--rerun-mode disabled --optimizer-post-validation"),
    "zb-h1, untied": ("zb-h1", TWO, UNTIED),
    "one layer for all depths": ("v-half", TWO, f"{UNTIED} --mtp-use-repeated-layer"),
}
FAST = 6
OURS_ALONE = ("--pipeline-layer-split", "--pipeline-model-parallel-layout")


def logged_metrics(run: Ended) -> dict[str, list[tuple[int, float]]]:
    """Return the logged metrics of multi-token prediction."""
    return {name: values for name, values in of_wandb(run).items() if name.startswith("mtp_")}


@pytest.mark.parametrize(
    ("schedule", "depth", "flags"),
    [
        pytest.param(*run, id=name, marks=[pytest.mark.slow] * (number >= FAST))
        for number, (name, run) in enumerate(RUNS.items())
    ],
)
def test_training_equals_one_rank(
    train: Train, schedule: str, depth: tuple[str, ...], flags: str
) -> None:
    common = [*flags.split()]
    for flag in (*OURS_ALONE, "--optimizer-post-validation"):
        if flag in common:
            index = common.index(flag)
            del common[index : index + (2 if flag in OURS_ALONE else 1)]
    megatron_run = train(1, *depth, *STARTS, *SAYS, *common)
    package_run = train(4, "--pipeline-schedule", schedule, *depth, *STARTS, *SAYS, *flags.split())
    assert_same_training(package_run, megatron_run)
    assert_close_gradients(package_run, megatron_run, rtol=1e-4)
    assert_equal_metrics(package_run, megatron_run, int(depth[1]))
    assert "stay in B, because" not in package_run.output[0]  # all its products are put off


SHARED = "--pipeline-vocab-parallel"
SHARED_RUNS = {
    "v-half, untied": ("v-half", 4, ONE, UNTIED),
    "v-zb, tied, depth 2": ("v-zb", 4, TWO, ""),
    "zb-h1, untied, depth 2": ("zb-h1", 2, TWO, UNTIED),
    "zb-h1, tied": ("zb-h1", 4, ONE, ""),
    "grouped-interleaved-1f1b, tied": ("grouped-interleaved-1f1b", 2, ONE, ""),
    "v-min, tied, a last stage without other layers": (
        "v-min",
        4,
        ONE,
        "--pipeline-layer-split 1,2,1,1,1,1,1,0",
    ),
    "per-token loss": ("v-half", 2, TWO, f"{UNTIED} --calculate-per-token-loss"),
    "recompute, balanced": (
        "v-half",
        2,
        ONE,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--pipeline-layer-split auto",
    ),
    "one layer for all depths": ("v-half", 2, TWO, f"{UNTIED} --mtp-use-repeated-layer"),
}
SHARED_FAST = 3


@pytest.mark.parametrize(
    ("schedule", "ranks", "depth", "flags"),
    [
        pytest.param(*run, id=name, marks=[pytest.mark.slow] * (number >= SHARED_FAST))
        for number, (name, run) in enumerate(SHARED_RUNS.items())
    ],
)
def test_training_with_vocabulary_parallelism_equals_one_rank(
    train: Train, schedule: str, ranks: int, depth: tuple[str, ...], flags: str
) -> None:
    """Within the tolerances of the sums. The number of predicted tokens is exact."""
    common = [*flags.split()]
    if OURS_ALONE[0] in common:
        index = common.index(OURS_ALONE[0])
        del common[index : index + 2]
    megatron_run = train(1, *depth, *STARTS, *SAYS, *common)
    chosen = ("--pipeline-schedule", schedule, SHARED)
    package_run = train(ranks, *chosen, *depth, *STARTS, *SAYS, *flags.split())
    assert_same_training(package_run, megatron_run, Tolerance(parameters=WEIGHTS))
    assert_close_gradients(package_run, megatron_run, rtol=1e-4)
    assert (
        len(package_run.records[1]["parameters"]["embedding.word_embeddings.weight"])
        == 128 // ranks
    )
    assert_equal_metrics(package_run, megatron_run, int(depth[1]))


@pytest.mark.slow
def test_costs_measured_with_a_shared_vocabulary_plan_the_next_run(
    train: Train, tmp_path: Path
) -> None:
    flags = (*ONE, UNTIED, "--train-iters", "6")
    megatron_run = train(1, *flags)
    chosen = ("--pipeline-schedule", "auto", SHARED, *flags)
    measuring = ("--pipeline-profile-iterations", "2:4", "--pipeline-trace", str(tmp_path))
    first = train(2, *chosen, *measuring)
    file = tmp_path / "costs.json"
    assert Costs.load(file).shards_output_layer
    planned = ("--pipeline-layer-split", "auto", "--pipeline-costs", str(file))
    second = train(2, *chosen, *planned)
    assert "layers per stage, in model order: " in second.output[0]
    for run in (first, second):
        assert_same_training(run, megatron_run, Tolerance(parameters=WEIGHTS))


def assert_equal_metrics(package_run: Ended, megatron_run: Ended, depth: int) -> None:
    package_metrics = logged_metrics(package_run)
    assert len([name for name in package_metrics if name.endswith(" loss")]) == depth
    assert package_metrics.keys() == logged_metrics(megatron_run).keys()
    for name, values in logged_metrics(megatron_run).items():
        assert [step for step, _ in package_metrics[name]] == [step for step, _ in values]
        package_values = [value for _, value in package_metrics[name]]
        assert package_values == pytest.approx([value for _, value in values], rel=1e-5), name


@pytest.mark.slow
def test_training_equals_megatron_1f1b(train: Train) -> None:
    """Whose last rank has a copy of the embedding, filled and summed between the two ends."""
    flags = (*ONE, *STARTS, *SAYS, UNTIED)
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags)
    package_run = train(4, "--pipeline-schedule", "v-half", *flags)
    assert_same_training(package_run, megatron_run)
    assert_close_gradients(package_run, megatron_run, rtol=1e-4)
    assert logged_metrics(package_run).keys() == logged_metrics(megatron_run).keys() != set()


def test_an_embedding_on_one_rank_is_one_parameter(train: Train) -> None:
    """A copy there would train, but stay as it was filled: with nothing."""
    run = train(4, "--pipeline-schedule", "v-half", *ONE, *STARTS, *SAYS, UNTIED)
    names = [list(record["parameters"]) for record in run.records]
    assert [rank_names.count("embedding.word_embeddings.weight") for rank_names in names] == [
        1,
        0,
        0,
        0,
    ]
    assert all("mtp." not in name for rank_names in names[1:] for name in rank_names)
    model_sizes = sum(value.numel() for value in run.records[0]["parameters"].values())
    assert re.search(rf"number of parameters on .* rank \(0, .*0\): {model_sizes}\n", run.output[0])


PARALLEL = {
    "TP, SP": (4, f"{SEQUENCE} {UNTIED}"),
    "EP, overlap": (4, f"{EXPERT_PARALLEL} {OVERLAP}"),
    "tied, DP, overlap": (4, OVERLAP),
    "CP": (4, f"{CONTEXT} {UNTIED}"),
    "everything": (8, f"{SEQUENCE} {CONTEXT} {EXPERT_PARALLEL} {OVERLAP}"),
    "bf16": (2, f"--bf16 {UNTIED}"),
}


@pytest.mark.parametrize("schedule", ["v-half", pytest.param("zb-h1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("TP, SP", "EP, overlap")))
        for name in PARALLEL
    ],
)
def test_with_other_parallelism(train: Train, parallel: str, schedule: str) -> None:
    ranks, text = PARALLEL[parallel]
    flags, size = (*STEPS, *ONE, *text.split()), "--pipeline-model-parallel-size"
    package_run = train(ranks, "--pipeline-schedule", schedule, *flags, size, "2")
    if UNTIED in flags:
        megatron_run = train(ranks, "--pipeline-schedule", "1f1b", *flags, size, "2")
        tolerance = BF16 if "--bf16" in flags else FP32
        assert_same_training(package_run, megatron_run, tolerance, Ended.by_place)
    else:  # Megatron's own would keep an output layer that nobody reads
        assert_same_training(package_run, train(ranks // 2, *flags, size, "1"))


SHARED_PARALLEL = {
    "TP, SP, untied": ("v-half", 4, f"{SEQUENCE} {UNTIED}"),
    "TP, tied, zb-h1": ("zb-h1", 4, TENSOR),
    "EP, overlap": ("v-half", 4, f"{EXPERT_PARALLEL} {OVERLAP} {UNTIED}"),
    "CP": ("v-half", 4, f"{CONTEXT} {UNTIED}"),
    "SP, tied, zb-h1": ("zb-h1", 4, SEQUENCE),
    "everything": ("v-zb", 8, f"{SEQUENCE} {CONTEXT} {EXPERT_PARALLEL} {OVERLAP} {UNTIED}"),
    "bf16": ("v-half", 2, f"--bf16 {UNTIED}"),
}


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (number >= 1))
        for number, name in enumerate(SHARED_PARALLEL)
    ],
)
def test_vocabulary_parallelism_with_other_parallelism(train: Train, parallel: str) -> None:
    schedule, ranks, text = SHARED_PARALLEL[parallel]
    flags, size = (*STEPS, *TWO, *SAYS, *text.split()), "--pipeline-model-parallel-size"
    package_run = train(ranks, "--pipeline-schedule", schedule, SHARED, *flags, size, "2")
    megatron_run = train(ranks // 2, *flags, size, "1")
    half = "--bf16" in text
    assert relative(losses(package_run), losses(megatron_run)) <= (1e-4 if half else 1e-6)
    assert relative(package_run.record["grad_norms"], megatron_run.record["grad_norms"]) <= (
        1e-2 if half else 1e-5
    )
    if half:
        return
    assert_equal_metrics(package_run, megatron_run, 2)
    for key, tolerance in ("gradients", 1e-6), ("parameters", WEIGHTS):
        if key == "gradients" and OVERLAP in text:
            continue  # each rank has summed up its part alone
        assert_close_tensors(package_run.whole(key), megatron_run.whole(key), atol=tolerance)


@pytest.mark.slow
@needs_hybrid
@pytest.mark.parametrize("flags", ["", SHARED])
@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
def test_a_hybrid_model(train: Train, schedule: str, flags: str) -> None:
    pattern = ("--hybrid-layer-pattern", "*-*-*-*-/*-/*-")
    megatron_run = train(1, *pattern, *STARTS, *SAYS, UNTIED)
    chosen = ("--pipeline-schedule", schedule, *flags.split())
    package_run = train(4, *chosen, *pattern, *STARTS, *SAYS, UNTIED)
    tolerance = Tolerance(parameters=WEIGHTS) if flags else FP32
    assert_same_training(package_run, megatron_run, tolerance)
    assert_close_gradients(package_run, megatron_run, rtol=1e-4)
    assert {"mtp_1 loss", "mtp_2 loss"} <= logged_metrics(package_run).keys()


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
def test_a_library(farm: Farm, tmp_path: Path, schedule: str) -> None:
    plain = run_library(farm, tmp_path, "bridge", None, predicting=2)
    package_run = run_library(farm, tmp_path, "bridge", schedule, predicting=2)
    assert any(name.startswith("mtp.layers.1.") for name in package_run.gradients)
    assert_equal_results(package_run, plain)
    options = {"vocab_parallel": True}
    assert_equal_results(
        join_rows(run_library(farm, tmp_path, "bridge", schedule, options=options, predicting=2)),
        plain,
    )


def test_ends_on_ranks_that_cannot_share(tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(all_forwards_first((0, 3, 1, 2), 4, 8).to_json())
    said = rejection("--pipeline-schedule", str(file), *ONE, UNTIED)
    assert "only between ranks 0 and 3: number the devices" in said


def test_a_model_is_built_as_its_stages_were_made() -> None:
    stage_map = StageMap(v_shape(2), (1, 1, 1, 1))
    multi_token.check_model(stage_map, SimpleNamespace(mtp_num_layers=None))
    with pytest.raises(UnsupportedError, match="mtp_num_layers 1 and the stages were made for 0"):
        multi_token.check_model(stage_map, SimpleNamespace(mtp_num_layers=1))


@pytest.mark.parametrize("placement", [v_shape(3), linear(4), looping(2, 3)])
def test_ends_that_meet_or_are_the_pipelines(placement: tuple[int, ...]) -> None:
    multi_token.check_ends(StageMap(placement, (1,) * len(placement), 2))


def test_ends_elsewhere() -> None:
    placement = (0, 2, 1)
    multi_token.check_ends(StageMap(placement, (1, 1, 1)))
    with pytest.raises(ScheduleError, match="only between ranks 0 and 2: number the devices"):
        multi_token.check_ends(StageMap(placement, (1, 1, 1), 1))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"mtp_num_layers": None}, 0),
        ({"mtp_num_layers": 2}, 2),
        ({"mtp_num_layers": None, "hybrid_layer_pattern": "M*|M/M*/M*/M*"}, 3),
        ({"mtp_num_layers": 1, "hybrid_layer_pattern": "M*|M"}, 1),  # Megatron adds its pattern
    ],
)
def test_how_many(options: dict[str, object], expected: int) -> None:
    assert multi_token.num_predicting(SimpleNamespace(**options)) == expected


def model_sizes(vocabulary: int, predicting: int | None) -> Namespace:
    return Namespace(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        kv_channels=None,
        group_query_attention=False,
        ffn_hidden_size=None,
        swiglu=False,
        num_experts=None,
        seq_length=4096,
        padded_vocab_size=vocabulary,
        mtp_num_layers=predicting,
    )


@pytest.mark.parametrize(
    ("vocabulary", "predicting", "min_layers", "mean"),
    [
        (32_768, 1, 2.4, 4.3),
        (131_072, 1, 6.1, 4.8),
        (262_144, 1, 11.0, 5.4),
        (131_072, 2, 9.7, 5.2),
    ],
)
def test_the_balanced_split_counts_its_layers(
    vocabulary: int, predicting: int, min_layers: float, mean: float
) -> None:
    """The loads of a GPT's rank 0 without other layers, and of all devices, in layers of it."""
    split = split_layers(model_sizes(vocabulary, predicting), v_shape(8), "auto", None)
    assert split.estimate is not None
    stages = split.estimate.stages
    layer_us = stages[1].total_us / split.layers[1]
    devices = [
        (stages[device].total_us + stages[15 - device].total_us) / layer_us for device in range(8)
    ]
    heavy = min_layers > mean  # more than any split balances: rank 0 has no other layers
    assert split.layers[0] + split.layers[-1] == 0 or not heavy
    output_load = devices[0] - split.layers[0] - split.layers[-1]
    assert output_load == pytest.approx(min_layers, abs=0.06)
    assert sum(devices) / 8 == pytest.approx(mean, abs=0.06)
    assert stages[-1][Kind.F.allocated] == pytest.approx((split.layers[-1] + predicting) / 2)
