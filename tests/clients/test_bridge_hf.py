"""Megatron-Bridge from and to a Hugging Face model, with our schedules and with Megatron's 1F1B."""

from __future__ import annotations

import pytest
from clients.launching import SCHEDULES, Runs, python_of, run, tolerance_of
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
    for phase, option in begins.items():
        cases[f"{phase}: stock"] = {"schedule": "stock", **usual, **option}
        for case_phase, schedule in CASES:
            if case_phase == phase:
                options = option if phase == "SFT" else {}
                cases[f"{phase}: {schedule}"] = {"schedule": schedule, **usual, **options}
    return run("verl", "bridge_on_cpu_hf.py", folder / "runs", cases)


@pytest.mark.parametrize(("phase", "schedule"), CASES)
def test_training_and_export_equal_1f1b(runs: Runs, phase: str, schedule: str) -> None:
    """Losses, norms, evaluations and the model as Hugging Face has it."""
    runs.compare(f"{phase}: {schedule}", f"{phase}: stock", tolerance_of(schedule), chunks=2)
    records = runs.records_of(f"{phase}: {schedule}")
    assert len(records[-1]["logged"]) == 3
    assert "model.embed_tokens.weight" in records[0]["exported"]
