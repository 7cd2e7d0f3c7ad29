"""The grid: every combination is possible or has its reason."""

from pathlib import Path
from typing import Any

import pytest
from tuning.counts import predictor_of
from tuning.samples import MODEL, SWEEP, load_sample

from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.tuning.configurations import Layout, SweepError, count_stages, layers_of_stages
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.trainer_flags import trainer_command


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        ({"pipeline_parallel": [2, 4]}, "DP 1 x TP 1 x PP 4 x CP 1 takes 4 devices, the cluster"),
        ({"microbatch_size": [1, 3]}, "global batch of 8 is not a multiple of DP 1 x microbatch"),
        ({"layout": ["even", "balanced"]}, "8 layers and both ends do not divide among 4 stages"),
        ({"tensor_parallel": [1, 3]}, "DP 1 x TP 3 x PP 2"),
        ({"pipeline_parallel": [1, 2]}, "v-half on one pipeline device"),
    ],
)
def test_impossible_has_a_reason(tmp_path: Path, grid: dict[str, Any], reason: str) -> None:
    rejections = expand_grid(load_sample(tmp_path, grid)).dropped
    assert any(reason in rejection.reason for rejection in rejections)


def test_nothing_possible(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="no combination of the grid can run: DP 1 x TP 1 x PP 8"):
        expand_grid(load_sample(tmp_path, {"pipeline_parallel": [8]}))


def test_layers_add_up(tmp_path: Path) -> None:
    loaded = load_sample(tmp_path, BALANCED, model={"num_hidden_layers": 6})
    possible = expand_grid(loaded).possible
    assert possible
    for config in possible:
        assert config.layout is Layout.BALANCED
        assert layers_of_stages(config, loaded.subject, v_shape(2)) == (1, 2, 2, 1)


def test_stages_of_a_schedule() -> None:
    counts = [count_stages(name, 4) for name in ("1f1b", "v-half", "interleaved-1f1b", "adaptive")]
    assert counts == [4, 8, 8, 8]
    assert count_stages("interleaved-1f1b:4", 4) == 16


def test_sweep_schedule_name_may_contain_the_number_of_chunks(tmp_path: Path) -> None:
    names = ["interleaved-1f1b:2", "interleaved-1f1b:4"]
    loaded = load_sample(tmp_path, {"schedule": names})
    configs = {config.schedule: config for config in expand_grid(loaded).possible}
    predictor = predictor_of(loaded)
    two, four = (predictor(configs[name]) for name in names)
    assert four.bubble < two.bubble
    command = trainer_command(loaded, configs[names[1]])
    assert command[command.index("--pipeline-schedule") + 1] == "interleaved-1f1b:4"
    loaded = load_sample(tmp_path, {"schedule": ["v-half:4"]})
    with pytest.raises(
        SweepError, match="'v-half:4' is not a schedule: a number of chunks per rank"
    ):
        expand_grid(loaded)


BALANCED = {"schedule": ["v-half"], "layout": ["balanced"]}


def test_vocabulary_parallelism_uses_the_auto_layout(tmp_path: Path) -> None:
    """Embedding and output layer do not count as layers then, so any number is possible."""
    grid = {**BALANCED, "vocab_parallel": [True]}
    loaded = load_sample(tmp_path, grid, model={"num_hidden_layers": 7})
    config = expand_grid(loaded).possible[0]
    assert config.layout is Layout.AUTO
    assert layers_of_stages(config, loaded.subject, v_shape(2)) == (1, 2, 2, 2)
    words = trainer_command(loaded, config)
    assert "--pipeline-vocab-parallel" in words
    assert words[words.index("--pipeline-layer-split") + 1] == "auto"


def test_vocabulary_parallelism_rejects_post_validation(tmp_path: Path) -> None:
    grid, sweep = {"vocab_parallel": [True]}, {"post_validation": True}
    with pytest.raises(SweepError, match="post_validation does not go with vocab_parallel yet"):
        expand_grid(load_sample(tmp_path, grid, sweep=sweep))


@pytest.mark.parametrize("shared", [False, True])
def test_trainer_command_has_multi_token_prediction(tmp_path: Path, shared: bool) -> None:
    model = {"num_nextn_predict_layers": 2}
    loaded = load_sample(tmp_path, {"vocab_parallel": [shared]}, model=model)
    words = trainer_command(loaded, expand_grid(loaded).possible[0])
    assert words[words.index("--mtp-num-layers") + 1] == "2"
    assert ("--pipeline-vocab-parallel" in words) == shared


def test_default_layout_is_auto_if_layers_do_not_divide(tmp_path: Path) -> None:
    """80 layers, as Llama 70B has, and the two ends divide among 2 stages, but not among 4."""
    grid = {name: value for name, value in SWEEP["grid"].items() if name != "layout"}
    model = {**MODEL, "num_hidden_layers": 80}
    expanded = expand_grid(load_sample(tmp_path, model=model, sweep={"grid": grid}))
    layouts = {(config.schedule, config.layout) for config in expanded.possible}
    assert layouts == {("1f1b", Layout.BALANCED), ("v-half", Layout.AUTO)}
    balanced = {**grid, "layout": ["balanced"]}
    expanded = expand_grid(load_sample(tmp_path, model=model, sweep={"grid": balanced}))
    assert {config.schedule for config in expanded.possible} == {"1f1b"}
    assert expanded.dropped[0].reason == "80 layers and both ends do not divide among 4 stages"
