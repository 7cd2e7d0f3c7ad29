"""The examples for verl, slime and ms-swift: V-Half against Megatron's 1F1B."""

from __future__ import annotations

from clients.launching import Runs, checkout_of, python_of, run
from clients.on_cpu import make_data, make_model

SCHEDULES = ("stock", "v-half")


def compare(runs: Runs) -> None:
    """Compare losses and the other results of a run; no rank may be missing."""
    runs.compare("v-half", "stock")
    assert any(record.get("steps") or record.get("logged") for record in runs.records_of("v-half"))


def test_verl_example_equals_1f1b(tmp_path) -> None:
    python_of("verl")
    usual = {"model": make_model(tmp_path / "model"), "example": True}
    cases = {schedule: {"schedule": schedule, **usual} for schedule in SCHEDULES}
    compare(run("verl", "verl_on_cpu.py", tmp_path / "runs", cases))


def test_slime_example_equals_1f1b(tmp_path) -> None:
    python_of("verl")
    checkout = checkout_of("slime")
    cases = {schedule: {"schedule": schedule} for schedule in SCHEDULES}
    compare(run("verl", "slime_on_cpu.py", tmp_path / "runs", cases, SLIME=checkout))


def test_ms_swift_example_equals_1f1b(tmp_path) -> None:
    python_of("swift")
    dialogues, preferences = make_data(tmp_path)
    data = {"dialogues": dialogues, "preferences": preferences}
    usual = {"model": make_model(tmp_path / "model"), "example": True, **data}
    cases = {schedule: {"schedule": schedule, **usual} for schedule in SCHEDULES}
    compare(run("swift", "swift_on_cpu.py", tmp_path / "runs", cases))
