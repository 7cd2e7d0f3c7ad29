"""Megatron-Bridge's unmodified `pretrain` trains vision-language models as with 1F1B, bit by bit.

Requires Megatron-Bridge and Transformer Engine's Python: `bash scripts/test.sh --bridge`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if importlib.util.find_spec("megatron") is None or not importlib.util.find_spec("megatron.bridge"):
    message = "Megatron-Bridge is not installed: bash scripts/test.sh --bridge"
    pytest.skip(message, allow_module_level=True)
if not os.environ.get("TRANSFORMER_ENGINE_PYTHON"):
    message = "Transformer Engine's Python is missing: megatron-vshape rehearse --fetch"
    pytest.skip(message, allow_module_level=True)

import torch

TRAINER = Path(__file__).with_name("vlm_on_cpu.py")
RANKS = 4
SPLIT = {"layer_split": "3,2,2,1,1,1,1,1"}


class Comparison(NamedTuple):
    """A model that is trained with 1F1B and with schedules of this package."""

    case: dict[str, Any]
    schedules: tuple[str, ...]
    num_gradients: int
    num_encoder_gradients: int
    options: dict[str, Any] = {}  # of the schedules


COMPARISONS = {
    "Qwen2.5-VL": Comparison({"model": "qwen25"}, ("v-half", "v-zb", "zb-h1"), 89, 30),
    "Qwen2.5-VL, encoder frozen": Comparison(
        {"model": "qwen25", "frozen": "encoder"}, ("v-half",), 59, 0
    ),
    "Qwen2.5-VL, language model frozen": Comparison(
        {"model": "qwen25", "frozen": "language"}, ("v-half",), 30, 30
    ),
    "Qwen3-VL": Comparison({"model": "qwen3"}, ("v-half", "v-zb"), 118, 51),
    "Qwen3-VL, three levels": Comparison(
        {"model": "qwen3", "layers": 12, "deepstack": [0, 1, 2]}, ("v-half",), 162, 63, SPLIT
    ),
    "Qwen3-VL, full recompute": Comparison(
        {"model": "qwen3", "recompute": "full"}, ("v-half",), 118, 51
    ),
    "Qwen3-VL-MoE": Comparison({"model": "qwen3-moe"}, ("v-half",), 174, 51),
    "GLM-4.5V": Comparison({"model": "glm45v"}, ("v-half",), 141, 27),
    "Qwen2.5-VL, five steps": Comparison(
        {"model": "qwen25", "steps": 5}, ("auto",), 89, 30, {"profile_steps": (2, 3)}
    ),
}

REJECTED = {
    "vocabulary": (
        {"model": "qwen25", "options": {"vocab_parallel": True}},
        "vocab_parallel does not support the encoder of Qwen25VLModel",
    ),
    "slices": (
        {"model": "qwen25", "options": {"slices": 2}},
        "slices does not work with --position-embedding-type mrope",
    ),
    "deepstack": (
        {"model": "qwen3", "deepstack": [0, 1, 2]},
        "deepstack_visual_indexes has 3 levels",
    ),
}
"""Rejected cases with a part of the message."""


RESUMED = (("v-half", None), (None, "v-half"))
"""Schedules of a run that saves a checkpoint after two of four steps, and of its resumption."""


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Return all cases by name; checkpoints are in subfolders of `folder`."""
    named: dict[str, dict[str, Any]] = {}
    for saving, resuming in RESUMED:
        case = {"model": "qwen25", "steps": 4, "checkpoint": str(folder / f"from {saving}")}
        named[f"{saving} saves"] = case | {"schedule": saving, "saves": True}
        named[f"{resuming} resumes"] = case | {"schedule": resuming}
    for model, comparison in COMPARISONS.items():
        for schedule in (None, *comparison.schedules):
            options = {} if schedule is None else comparison.options
            case = comparison.case | {"schedule": schedule, "options": options}
            named[f"{model}: {schedule}"] = case
    for name, (case, _) in REJECTED.items():
        named[name] = case | {"schedule": "v-half"}
    return named


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases; return the folder of their results."""
    folder = tmp_path_factory.mktemp("vlm")
    order = [case | {"name": name} for name, case in cases(folder).items()]
    (folder / "cases.json").write_text(json.dumps(order))
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_PORT": str(random.SystemRandom().randrange(10_000, 32_000)),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    ended = subprocess.run(
        [sys.executable, str(TRAINER), str(folder)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return folder


def load(folder: Path, name: str) -> dict[str, Any]:
    """Merge the records of all ranks of a case."""
    output = "".join(path.read_text()[-3000:] for path in (folder / name).glob("*.log"))
    assert not (folder / name / "failed").exists(), output
    records = [torch.load(folder / name / f"{rank}.pt") for rank in range(RANKS)]
    merged: dict[str, Any] = {"parameters": {}}
    for key in ("losses", "evaluations"):
        merged[key] = next(record[key] for record in records if record[key])
    steps = range(len(records[0]["gradients"]))
    merged["gradients"] = {
        (step, name): value
        for record in records
        for step in steps
        for name, value in record["gradients"][step].items()
    }
    for record in records:
        merged["parameters"] |= record["parameters"]
    return merged


def assert_equal(run: dict[str, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert run.keys() == expected.keys()
    assert not [name for name, value in run.items() if not torch.equal(value, expected[name])]


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (model, schedule)
        for model, comparison in COMPARISONS.items()
        for schedule in comparison.schedules
    ],
)
def test_gradients_equal_1f1b(folder: Path, model: str, schedule: str) -> None:
    expected, run = load(folder, f"{model}: None"), load(folder, f"{model}: {schedule}")
    assert run["losses"] == expected["losses"]
    assert run["evaluations"] == expected["evaluations"]
    assert_equal(run["gradients"], expected["gradients"])
    assert_equal(run["parameters"], expected["parameters"])
    comparison = COMPARISONS[model]
    names = [name for step, name in expected["gradients"] if step == 0]
    encoder = [name for name in names if not name.startswith("language_model")]
    counts = comparison.num_gradients, comparison.num_encoder_gradients
    assert (len(names), len(encoder)) == counts
    zero = [name for name in encoder if not expected["gradients"][0, name].any()]
    # Megatron-Bridge's recomputation loses the gradients of deepstack mergers.
    assert all("deepstack_merger" in name for name in zero)
    assert len(zero) == (6 if "recompute" in comparison.case else 0)


@pytest.mark.parametrize(("saving", "resuming"), RESUMED)
def test_checkpoints_are_those_of_1f1b(
    folder: Path, saving: str | None, resuming: str | None
) -> None:
    """Names and shapes of the saved tensors do not depend on the schedule."""
    expected, run = load(folder, f"{saving} saves"), load(folder, f"{resuming} resumes")
    assert len(expected["losses"]) == 4
    assert run["losses"] == expected["losses"][2:]
    assert_equal(run["parameters"], expected["parameters"])


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_options_end_all_ranks(folder: Path, name: str) -> None:
    outputs = [path.read_text() for path in sorted((folder / name).glob("*.log"))]
    assert len(outputs) == RANKS
    assert not list((folder / name).glob("*.pt"))
    assert REJECTED[name][1] in "".join(outputs)
