"""Megatron-Bridge trains with schedules of this package as with Megatron's 1F1B.

Requires its wheel, without its dependencies: `bash scripts/test.sh --bridge`.
"""

from __future__ import annotations

import importlib.util
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

import torch

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.paper.catalogue import make

TRAINER = Path(__file__).with_name("bridge_on_cpu.py")
RANKS = 4
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


class Learnt(NamedTuple):
    """The data and the results of a run."""

    steps: list[tuple[float, float]]  # loss and gradient norm
    evaluations: list[float]
    parameters: dict[str, torch.Tensor]
    output: str


def train(folder: Path, *options: str) -> Learnt:
    folder.mkdir()
    port = str(random.SystemRandom().randrange(10_000, 32_000))
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--master-port", port]
    ended = subprocess.run(
        [sys.executable, *launcher, str(TRAINER), str(folder), *options],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    records: list[Any] = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    # One rank of a pipeline has the losses.
    reads = next(record for record in records if record["steps"])
    parameters = {name: value for record in records for name, value in record["parameters"].items()}
    return Learnt(reads["steps"], reads["evaluations"], parameters, ended.stdout + ended.stderr)


def assert_runs_equal(run: Learnt, expected_run: Learnt, steps: int = 3) -> None:
    assert len(run.steps) == steps
    for step, expected_step in zip(run.steps, expected_run.steps, strict=True):
        assert step == pytest.approx(expected_step, rel=1e-6)
    assert run.evaluations == pytest.approx(expected_run.evaluations, rel=1e-6)
    assert run.parameters.keys() == expected_run.parameters.keys()
    for name, value in run.parameters.items():
        torch.testing.assert_close(value, expected_run.parameters[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Learnt:
    return train(tmp_path_factory.mktemp("plain") / "run")


FILES = {"COSTS": Costs.uniform(4, 8, 100, 130, 90, 5), "PLAN": make("v-min", 4, 8)}


@pytest.mark.parametrize(
    "options",
    [
        *(f"--schedule {name}" for name in ("v-half", "v-zb", "zb-h1")),
        "--schedule v-half --late",
        "--schedule v-half --distributed-optimizer",
        "--schedule auto --costs COSTS",
        "--schedule PLAN",
    ],
)
def test_schedules_equal_1f1b(tmp_path: Path, plain: Learnt, options: str) -> None:
    """By name, registered before or after the import of Bridge, planned from costs, in a file."""
    for name, content in FILES.items():
        (tmp_path / f"{name}.json").write_text(content.to_json())
    words = [str(tmp_path / f"{word}.json") if word in FILES else word for word in options.split()]
    assert_runs_equal(train(tmp_path / "run", *words), plain)


class Saved(NamedTuple):
    """A run that was not interrupted, and its checkpoints."""

    learnt: Learnt
    folder: str


FOUR_STEPS = "--steps", "4"
"""With the plain optimizer: on a CPU, Bridge alone cannot load the distributed one's state either.

torch's Adam has no step in its group (`assert len(steps) == 1` in Megatron).
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Saved]:
    """The checkpoints of Bridge's 1F1B and of V-Half, by schedule."""
    runs = {}
    for schedule in (None, "v-half"):
        folder = tmp_path_factory.mktemp("saved")
        schedule_options = () if schedule is None else ("--schedule", schedule)
        learnt = train(
            folder / "run", *FOUR_STEPS, "--saves-in", str(folder / "all"), *schedule_options
        )
        runs[schedule] = Saved(learnt, str(folder / "all"))
    return runs


@pytest.mark.parametrize(
    ("saves", "resumes"), [("v-half", "v-half"), ("v-half", None), (None, "v-half")]
)
def test_resumed_run_equals_the_uninterrupted_run(
    tmp_path: Path,
    saved: dict[str | None, Saved],
    saves: str | None,
    resumes: str | None,
) -> None:
    """Whichever schedule has saved it, and whichever goes on."""
    uninterrupted, folder = saved[saves]
    assert_runs_equal(uninterrupted, saved[None].learnt, steps=4)
    schedule_options = () if resumes is None else ("--schedule", resumes)
    learnt = train(tmp_path / "run", *FOUR_STEPS, "--resumes", folder, *schedule_options)
    assert_runs_equal(learnt, uninterrupted._replace(steps=uninterrupted.steps[2:]), steps=2)


@pytest.mark.parametrize("pretrains", [None, "v-half"])
def test_lora_equals_1f1b(
    tmp_path: Path, saved: dict[str | None, Saved], pretrains: str | None
) -> None:
    """Bridge adds its adapters when the chunks are built; the adapted weights are frozen."""
    options = "--adapts", saved[pretrains].folder, "--pipeline", "2", "--distributed-optimizer"
    megatron_run = train(tmp_path / "own", *options)
    package_run = train(tmp_path / "ours", *options, "--schedule", "v-half")
    assert_runs_equal(package_run, megatron_run)
    pretrained = saved[pretrains].learnt.parameters
    frozen = {name.replace(".to_wrap", ""): name for name in megatron_run.parameters}
    for name, value in pretrained.items():
        assert torch.equal(megatron_run.parameters[frozen[name]], value)
    # The adapters have learnt.
    assert megatron_run.steps[0] != pytest.approx(megatron_run.steps[-1])


def test_resumed_lora_run_equals_the_uninterrupted_run(
    tmp_path: Path, saved: dict[str | None, Saved]
) -> None:
    adapters = str(tmp_path / "adapters")
    options = *FOUR_STEPS, "--adapts", saved[None].folder, "--schedule", "v-half"
    uninterrupted = train(tmp_path / "whole", *options, "--saves-in", adapters)
    learnt = train(tmp_path / "rest", *options, "--resumes", adapters)
    assert_runs_equal(learnt, uninterrupted._replace(steps=uninterrupted.steps[2:]), steps=2)


def test_tied_embeddings_equal_1f1b(tmp_path: Path) -> None:
    megatron_run = train(tmp_path / "own", "--tied")
    assert_runs_equal(train(tmp_path / "run", "--tied", "--schedule", "v-zb"), megatron_run)


def test_options_of_bridge_schedules_are_translated(tmp_path: Path, plain: Learnt) -> None:
    """The first and last stage have two layers less: 8 + 2 is not divisible by 8; it is logged."""
    learnt = train(tmp_path / "run", "--schedule", "v-half", "--counts-ends")
    assert "account_for_embedding_in_pipeline_split, account_for_loss" in learnt.output
    assert_runs_equal(learnt, plain)
