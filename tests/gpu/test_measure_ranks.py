"""scripts/measure_ranks.py with tiny sizes on a CPU, to ensure that it works on a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_ranks.py"
TINY = (
    "--num-layers 16 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 "
    "--seq-length 64 --max-position-embeddings 64 --vocab-size 512 --transformer-impl local "
    "--no-rope-fusion --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm"
)
MICROBATCHES = 8


def run_script(*arguments: str) -> None:
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr[-4000:]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure two ranks on this CPU, the first under two schedules, and return the file."""
    output = tmp_path_factory.mktemp("measured") / "found.json"
    cases = ("--only", "7B 1f1b", "7B v-zb", "--skip", "recompute")
    run_script("measure", "--output", str(output), *cases, "--flags", TINY)
    return output


def ranks_by_name(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    measurements = json.loads(file.read_text())["ranks"]
    return {(measurement["name"], measurement["rank"]): measurement for measurement in measurements}


def pass_counts(rank: dict[str, Any]) -> dict[tuple[str, int], int]:
    return {
        (measured_pass["kind"], measured_pass["chunk"]): measured_pass["number"]
        for measured_pass in rank["kinds"]
    }


def test_every_pass_of_a_step_is_measured(file: Path) -> None:
    measured_ranks = ranks_by_name(file)
    assert set(measured_ranks) == {(f"7B {name}", 0) for name in ("1f1b", "v-zb")}
    for (name, _), rank in measured_ranks.items():
        assert len(rank["step_s"]) == 3
        assert all(measured_pass["ms"] > 0 for measured_pass in rank["kinds"])
        counts = pass_counts(rank)
        if name == "7B 1f1b":
            assert counts == {("F", 0): MICROBATCHES, ("BW", 0): MICROBATCHES}
            continue
        for chunk in (0, 1):
            assert counts["F", chunk] == MICROBATCHES
            assert counts["B", chunk] == counts["W", chunk] == MICROBATCHES


@pytest.mark.slow
def test_measured_ranks_can_be_rehearsed(file: Path, tmp_path: Path) -> None:
    measurement = json.loads(file.read_text())
    measurement["about"]["device"] = "NVIDIA H200"
    copy = tmp_path / "found.json"
    copy.write_text(json.dumps(measurement))
    run_script("rehearse", str(copy))
    for rank in ranks_by_name(copy).values():
        rehearsed = rank["rehearsed"]
        assert rehearsed["peak_bytes"] > rehearsed["held_bytes"] > 0
        chunks = {measured_pass["chunk"] for measured_pass in rank["kinds"]}
        assert {
            measured_pass["chunk"]
            for measured_pass in rehearsed["kinds"]
            if measured_pass["kind"] == "F"
        } == chunks


@pytest.mark.slow
def test_failed_rank_exits_with_1_and_reports_its_error(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "measure", "--output", str(output)]
    command += ["--only", "experts 1", "--flags", f"{TINY} --hidden-size 65"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 1, process.stderr[-2000:]
    (rank,) = ranks_by_name(output).values()
    assert "Error" in rank["error"]
