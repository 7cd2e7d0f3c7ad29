"""torchtitan and NeMo Automodel with exported schedules as with their own 1F1B."""

from __future__ import annotations

from itertools import product

import pytest
from clients.launching import Runs, python_of, run

python_of("torch_pipelining")

FRAMEWORKS = ("automodel", "torchtitan")
SCHEDULES = ("v-half", "v-min", "v-zb", "zb-h1", "interleaved-1f1b", "v-half, full")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    cases = {}
    for framework in FRAMEWORKS:
        cases[f"{framework}: stock"] = {"framework": framework}
        for schedule in SCHEDULES:
            name, _, full = schedule.partition(", ")
            cases[f"{framework}: {schedule}"] = {
                "framework": framework,
                "made": name,
                "full_backward": bool(full),
            }
    folder = tmp_path_factory.mktemp("torch_pipelining")
    return run("torch_pipelining", "torch_pipelining_on_cpu.py", folder / "runs", cases)


@pytest.mark.parametrize(("framework", "schedule"), [*product(FRAMEWORKS, SCHEDULES)])
def test_losses_and_gradients_equal_1f1b(runs: Runs, framework: str, schedule: str) -> None:
    chunks = 1 if schedule == "zb-h1" else 2
    runs.compare(f"{framework}: {schedule}", f"{framework}: stock", 0.0, chunks)
    assert len(runs.records_of(f"{framework}: {schedule}")[0]["losses"]) == 8
