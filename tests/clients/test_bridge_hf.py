"""Megatron-Bridge from a model of Hugging Face and back, with schedules as with its own 1F1B."""

from __future__ import annotations

import pytest
from clients.launching import SCHEDULES, Runs, most_of, python_of, run
from clients.on_cpu import make_data, make_model

python_of("verl")  # which has Megatron-Bridge

CASES = [("pretraining", schedule) for schedule in SCHEDULES] + [("SFT", "v-half")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("bridge")
    usual = {"model": make_model(folder / "model"), "dialogues": make_data(folder)[0]}
    checkpoint = str(folder / "checkpoint")
    begins = {"pretraining": {"saves_in": checkpoint}, "SFT": {"pretrained": checkpoint}}
    cases = {}
    for way, option in begins.items():
        cases[f"{way}: stock"] = {"schedule": "stock", **usual, **option}
        for of, schedule in CASES:
            if of == way:
                own = option if way == "SFT" else {}
                cases[f"{way}: {schedule}"] = {"schedule": schedule, **usual, **own}
    return run("verl", "bridge_on_cpu_hf.py", folder / "runs", cases)


@pytest.mark.parametrize(("way", "schedule"), CASES)
def test_it_learns_and_exports_what_bridge_does(runs: Runs, way: str, schedule: str) -> None:
    """Losses, norms, evaluations and the model as Hugging Face has it."""
    runs.compare(f"{way}: {schedule}", f"{way}: stock", most_of(schedule))
    kept = runs.of(f"{way}: {schedule}")
    assert [each["chunks"] for each in kept] == [2] * 4
    assert len(kept[-1]["logged"]) == 3
    assert "model.embed_tokens.weight" in kept[0]["exported"]
