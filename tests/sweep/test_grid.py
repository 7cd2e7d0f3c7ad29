"""The grid: every combination is possible or has its reason."""

from pathlib import Path
from typing import Any

import pytest
from sweep.samples import SWEEP, load_sample

from megatron_vshape.sweep.files import Layout, SweepError
from megatron_vshape.sweep.grid import count_stages, expand, layers_of_stages


def reasons(folder: Path, **grid: Any) -> list[str]:
    return [
        each.reason
        for each in expand(load_sample(folder, sweep={"grid": {**SWEEP["grid"], **grid}})).dropped
    ]


def test_all_of_a_small_grid(tmp_path: Path) -> None:
    found = expand(load_sample(tmp_path))
    assert [str(each) for each in found.possible] == [
        "1f1b s64 gbs8 dp1 tp1 pp2 mbs1 even",
        "1f1b s64 gbs8 dp1 tp1 pp2 mbs2 even",
        "v-half s64 gbs8 dp1 tp1 pp2 mbs1 even",
        "v-half s64 gbs8 dp1 tp1 pp2 mbs2 even",
    ]
    assert not found.dropped


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
    assert any(reason in each for each in reasons(tmp_path, **grid))


def test_nothing_possible(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="no combination of the grid can run: DP 1 x TP 1 x PP 8"):
        expand(load_sample(tmp_path, sweep={"grid": {**SWEEP["grid"], "pipeline_parallel": [8]}}))


def test_layers_add_up(tmp_path: Path) -> None:
    loaded = load_sample(tmp_path, model={"layers": 6}, sweep={"grid": BALANCED})
    for it in expand(loaded).possible:
        assert it.layout is Layout.BALANCED
        assert sum(layers_of_stages(it, loaded.model, 4)) == 6
        assert layers_of_stages(it, loaded.model, 4) == (1, 2, 2, 1)


def test_stages_of_a_schedule() -> None:
    found = [count_stages(name, 4) for name in ("1f1b", "v-half", "interleaved-1f1b", "adaptive")]
    assert found == [4, 8, 8, 8]


BALANCED = {**SWEEP["grid"], "schedule": ["v-half"], "layout": ["balanced"]}


def test_runs_beside_the_grid_keep_their_arguments(tmp_path: Path) -> None:
    also = [{"schedule": "v-min", "pipeline_parallel": 2, "layout": "even", "arguments": ["--x"]}]
    found = expand(load_sample(tmp_path, sweep={"also": also})).possible
    assert str(found[-1]) == "v-min s64 gbs8 dp1 tp1 pp2 mbs1 even --x"
