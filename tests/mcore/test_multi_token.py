"""Multi-token prediction under every placement, beyond the rows of `test_parity`."""

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mcore.farm import Farm, Train
from mcore.parity import SHARED, UNTIED, WEIGHTS, Tolerance, assert_same_training
from mcore.rejections import rejection
from mcore.test_library import assert_equal_results, run_library
from mcore.test_parity import all_forwards_first
from mcore.test_vocabulary import join_library_rows

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.stage_map import StageMap, split_layers
from megatron_vshape.mcore.refusals import UnsupportedError

ONE = ("--mtp-num-layers", "1")


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


def test_an_embedding_on_one_rank_is_one_parameter(train: Train) -> None:
    """A copy there would train, but stay as it was filled: with nothing."""
    run = train(4, "--pipeline-schedule", "v-half", *ONE, UNTIED)
    names = [list(record["parameters"]) for record in run.records]
    embeddings = [rank_names.count("embedding.word_embeddings.weight") for rank_names in names]
    assert embeddings == [1, 0, 0, 0]
    assert all("mtp." not in name for rank_names in names[1:] for name in rank_names)
    model_sizes = sum(value.numel() for value in run.records[0]["parameters"].values())
    assert re.search(rf"number of parameters on .* rank \(0, .*0\): {model_sizes}\n", run.output[0])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
def test_a_library(farm: Farm, schedule: str) -> None:
    plain = run_library(farm, "bridge", None, predicting=2)
    package_run = run_library(farm, "bridge", schedule, predicting=2)
    assert any(name.startswith("mtp.layers.1.") for name in package_run.gradients)
    assert_equal_results(package_run, plain)
    options = {"vocab_parallel": True}
    shared_run = run_library(farm, "bridge", schedule, options=options, predicting=2)
    assert_equal_results(join_library_rows(shared_run), plain)


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


@pytest.mark.parametrize(
    ("placement", "depths"), [(v_shape(3), 2), (linear(4), 2), (looping(2, 3), 2), ((0, 2, 1), 0)]
)
def test_ends_that_meet_or_are_the_pipelines(placement: tuple[int, ...], depths: int) -> None:
    multi_token.check_ends(StageMap(placement, (1,) * len(placement), depths))


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
