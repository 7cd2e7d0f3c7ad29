"""The adapter on Transformer Engine's own Python; its compiled extension is torch (te_on_cpu)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

VARIABLE = "TRANSFORMER_ENGINE_PYTHON"
HOW = (
    f"{VARIABLE} is not set: for each version run `pip download --no-deps "
    "transformer-engine==VERSION`, unpack the wheel into a directory, put einops, onnxscript, "
    "onnx, onnx_ir and ml_dtypes where Python finds them, and set the variable to the "
    f"directories, separated by {os.pathsep!r}"
)


def directories() -> list[str]:
    """Return where versions of Transformer Engine's Python lie."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return named.split(os.pathsep)
    if torch.cuda.is_available():
        return []  # tests/gpu runs the real thing
    found = importlib.util.find_spec("transformer_engine")
    return [] if found is None or found.origin is None else [str(Path(found.origin).parents[1])]


@pytest.mark.parametrize(
    "directory",
    directories() or [pytest.param("", marks=pytest.mark.skip(reason=HOW))],
)
def test_gradients_equal_whole_backwards(directory: str) -> None:
    script = Path(__file__).with_name("te_on_cpu.py")
    run = subprocess.run(
        [sys.executable, str(script), directory], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [each for each in results if each.get("wrong")] == []
    # 4 layers, and from 2.16 on fused experts, x 3 kinds of bias x fused x first, and the version
    assert len(results) in (49, 61)
