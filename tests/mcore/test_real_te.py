"""The adapter on Transformer Engine's Python code; torch replaces its extension (te_on_cpu)."""

import json
from pathlib import Path

import pytest
from mcore.farm import Ended, Farm


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """Return a plugin that imports `te_on_cpu`, which the farm has imported before."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text("from te_on_cpu import start")
    return plugin


def results_of(run: Ended, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in run.output[rank].splitlines() if line.startswith("{")]


def test_split_gradients_equal_full_backward(te_farm: Farm, plugin: Path) -> None:
    results = results_of(te_farm.run(1, plugin=plugin, given=False).check(), 0)
    assert [result for result in results if result.get("wrong")] == []
    # 4 layers, and from 2.16 on fused experts, x 3 kinds of bias x fused x first, and the version
    assert len(results) in (49, 61)


def test_b_does_not_gather_inputs_of_w(te_farm: Farm, plugin: Path) -> None:
    """With sequence parallelism, B gathers only output gradients; W gathers inputs as well."""
    run = te_farm.run(2, plugin=plugin, given=True).check()
    gathers = {"F": 1, "BW": 2, "B": 1, "W": 2}
    expected = [
        {"case": case, "gathers": gathers, "wrong": []} for case in ("LayerNormLinear", "Linear")
    ]
    for rank in range(2):
        assert results_of(run, rank) == expected, run.output[rank][-4000:]
