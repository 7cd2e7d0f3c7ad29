"""scripts/measure_ranks.py: with tiny sizes on a CPU, so that it works on a GPU."""

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


def run(*arguments: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of two ranks measured on this CPU: the first under two schedules."""
    made = tmp_path_factory.mktemp("measured") / "found.json"
    cases = ("--only", "7B 1f1b", "7B v-zb", "--skip", "recompute")
    run("measure", "--output", str(made), *cases, "--flags", TINY)
    return made


def ranks(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    found = json.loads(file.read_text())["ranks"]
    return {(each["name"], each["rank"]): each for each in found}


def passes(rank: dict[str, Any]) -> dict[tuple[str, int], int]:
    return {(each["kind"], each["chunk"]): each["number"] for each in rank["kinds"]}


def test_every_pass_of_a_step_is_measured(file: Path) -> None:
    found = ranks(file)
    assert set(found) == {(f"7B {name}", 0) for name in ("1f1b", "v-zb")}
    for (name, _), rank in found.items():
        assert len(rank["step_s"]) == 3
        assert all(each["ms"] > 0 for each in rank["kinds"])
        number = passes(rank)
        if name == "7B 1f1b":
            assert number == {("F", 0): MICROBATCHES, ("BW", 0): MICROBATCHES}
            continue
        for chunk in (0, 1):
            assert number["F", chunk] == MICROBATCHES
            assert number["B", chunk] == number["W", chunk] == MICROBATCHES


@pytest.mark.slow
def test_the_same_ranks_are_rehearsed(file: Path, tmp_path: Path) -> None:
    found = json.loads(file.read_text())
    found["about"]["device"] = "NVIDIA H200"
    copy = tmp_path / "found.json"
    copy.write_text(json.dumps(found))
    run("rehearse", str(copy))
    for rank in ranks(copy).values():
        rehearsed = rank["rehearsed"]
        assert rehearsed["peak_bytes"] > rehearsed["held_bytes"] > 0
        chunks = {each["chunk"] for each in rank["kinds"]}
        assert {each["chunk"] for each in rehearsed["kinds"] if each["kind"] == "F"} == chunks


@pytest.mark.slow
def test_a_failed_rank_ends_with_1_and_says_why(tmp_path: Path) -> None:
    made = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "measure", "--output", str(made), "--only", "experts 1"]
    command += ["--flags", f"{TINY} --hidden-size 65"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1, ran.stderr[-2000:]
    (rank,) = ranks(made).values()
    assert "Error" in rank["error"]
