"""The adapter on Transformer Engine's Python code; torch replaces its extension (te_on_cpu)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from skips import TE_MISSING

VARIABLE = "TRANSFORMER_ENGINE_PYTHON"


def directories() -> list[str]:
    """Return the directories of Transformer Engine's Python, one for each version."""
    configured = os.environ.get(VARIABLE, "")
    if configured:
        return configured.split(os.pathsep)
    if torch.cuda.is_available():
        return []  # tests/gpu runs the real thing
    spec = importlib.util.find_spec("transformer_engine")
    return [] if spec is None or spec.origin is None else [str(Path(spec.origin).parents[1])]


SCRIPT = str(Path(__file__).with_name("te_on_cpu.py"))

in_every_directory = pytest.mark.parametrize(
    "directory", directories() or [pytest.param("", marks=pytest.mark.skip(reason=TE_MISSING))]
)


@in_every_directory
def test_split_gradients_equal_full_backward(directory: str) -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT, directory], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [result for result in results if result.get("wrong")] == []
    # 4 layers, and from 2.16 on fused experts, x 3 kinds of bias x fused x first, and the version
    assert len(results) in (49, 61)


@in_every_directory
def test_b_does_not_gather_inputs_of_w(directory: str, tmp_path: Path) -> None:
    """With sequence parallelism, B gathers only output gradients; W gathers inputs as well."""
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, directory, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, errors = rank.communicate(timeout=300)
        results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        gathers = {"F": 1, "BW": 2, "B": 1, "W": 2}
        expected = [
            {"case": case, "gathers": gathers, "wrong": []}
            for case in ("LayerNormLinear", "Linear")
        ]
        assert results == expected, errors[-4000:]
