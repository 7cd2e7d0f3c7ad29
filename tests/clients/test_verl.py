"""verl's Megatron engine with schedules of this package as with Megatron's 1F1B."""

from __future__ import annotations

import pytest
from clients.launching import SHARED, Runs, cases_of, matrix, python_of, run, tolerance_of
from clients.on_cpu import make_model

from megatron_vshape.rehearsal.command_reader import read_command

python_of("verl")

SHAPES = {
    "packed": {},
    "packed, two replicas": {"pipeline": 2},
    "padded": {"padded": True},
    "critic": {"critic": True},
    "critic, two replicas": {"critic": True, "pipeline": 2},
}
"""Batches of the engine: packed up to a token limit, or padded; a policy or a critic."""

SAVES = ("stock", "v-half")
MATRIX = [*matrix(SHAPES), *((shape, SHARED) for shape in ("padded", "packed, two replicas"))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("verl")
    model = make_model(folder / "model")
    cases = cases_of(SHAPES, MATRIX, model=model)
    for schedule in SAVES:
        offloads = {"steps": 2, "offloads": True}
        cases[f"offloaded: {schedule}"] = {"schedule": schedule, "model": model, **offloads}
    first, then = {"steps": 1}, {"steps": 2}
    for saves in SAVES:
        where = {"saves_in": str(folder / f"saved by {saves}")}
        cases[f"saved: {saves}"] = {"schedule": saves, "model": model, **first, **where}
    for saves, resumes in RESUMED:
        where = {"resumes": str(folder / f"saved by {saves}")}
        name = f"resumed: {saves}, {resumes}"
        cases[name] = {"schedule": resumes, "model": model, **then, **where}
    return run("verl", "verl_on_cpu.py", folder / "runs", cases)


RESUMED = tuple((saves, resumes) for saves in SAVES for resumes in SAVES)
"""Under which schedule verl's checkpoint manager has saved, and under which it loads."""


@pytest.mark.parametrize(("shape", "schedule"), MATRIX)
def test_results_equal_verl_with_1f1b(runs: Runs, shape: str, schedule: str) -> None:
    """Log-probabilities, entropy, values, losses, norms where verl collects them, and weights."""
    runs.compare(f"{shape}: {schedule}", f"{shape}: stock", tolerance_of(schedule), chunks=2)


@pytest.mark.parametrize(("saves", "resumes"), RESUMED[1:])
def test_resumed_run_equals_1f1b(runs: Runs, saves: str, resumes: str) -> None:
    runs.compare(f"resumed: {saves}, {resumes}", "resumed: stock, stock")


def test_package_frees_its_memory_between_phases(runs: Runs) -> None:
    """When verl has offloaded model and optimizer, an inference engine has the GPU's memory."""
    package_records, stock_records = (
        runs.records_of(f"offloaded: {schedule}") for schedule in ("v-half", "stock")
    )
    assert [record["held"] for record in package_records] == [[]] * 4
    num_bytes = list(zip(package_records[0]["left"], stock_records[0]["left"], strict=True))
    assert len(num_bytes) == 2
    assert all(package_bytes <= stock_bytes for package_bytes, stock_bytes in num_bytes), num_bytes
    runs.compare("offloaded: v-half", "offloaded: stock")


def test_rehearsal_reads_the_saved_configuration(runs: Runs) -> None:
    folder = runs.folder.parent / "saved by v-half"
    command = read_command([str(folder / "transformer_config.json")])
    expected = {"--num-layers": 8, "--pipeline-model-parallel-size": 4, "--padded-vocab-size": 384}
    assert {flag: command.number(flag, 0) for flag in expected} == expected
    assert command.has("--use-distributed-optimizer")
