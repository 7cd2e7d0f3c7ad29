"""NeMo-RL's policy worker with schedules of this package against Megatron's 1F1B."""

from __future__ import annotations

import pytest
from clients.launching import (
    ONE_CHUNK,
    SHARED,
    Runs,
    cases_of,
    checkout_of,
    matrix,
    python_of,
    run,
    tolerance_of,
)
from clients.on_cpu import make_model

from megatron_vshape.rehearsal.command_reader import read_command

python_of("verl")  # which has Megatron-Bridge and the other imports of NeMo-RL
CHECKOUT = checkout_of("nemo_rl")

SHAPES = {
    "packed": {},
    "packed, two replicas": {"pipeline": 2},
    "padded": {"packed": False},
    "streamed": {"streams": True},
}
"""Packed sequences of variable length, as in NeMo-RL's examples, or padded; at once or streamed."""

ONE = [(shape, "zb-h1") for shape in ("packed", "padded")]
MATRIX = [case for case in (*matrix(SHAPES), *ONE) if SHARED not in case]
SAVES = ("stock", "v-half")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("nemo_rl")
    model = make_model(folder / "model")
    cases = cases_of(SHAPES, MATRIX, model=model)
    for saves in SAVES:
        where = str(folder / saves)
        first, then = {"steps": 1, "saves_in": where}, {"steps": 2, "resumes": where}
        cases[f"saved: {saves}"] = {"schedule": saves, "model": model, **first}
        cases[f"resumed: {saves}"] = {"schedule": saves, "model": model, **then}
    for schedule in ("stock", "zb-h1", "v-half"):
        cases[f"values: {schedule}"] = {"schedule": schedule, "model": model, "value": True}
    cases["draft"] = {"schedule": "v-half", "model": model, "draft": True}
    return run("verl", "nemo_rl_on_cpu.py", folder / "runs", cases, NEMO_RL=CHECKOUT)


@pytest.mark.parametrize(("shape", "schedule"), MATRIX)
def test_results_equal_nemo_rl_with_1f1b(runs: Runs, shape: str, schedule: str) -> None:
    """Log-probabilities (policy, reference), losses, norms and evaluation of all ranks; weights."""
    chunks = 1 if schedule in ONE_CHUNK else 2
    runs.compare(f"{shape}: {schedule}", f"{shape}: stock", tolerance_of(schedule), chunks)


def test_resumed_run_equals_1f1b(runs: Runs) -> None:
    """With the same schedule: NeMo-RL cannot save the optimizer fully reshardable."""
    runs.compare("resumed: v-half", "resumed: stock")


def test_feature_with_a_single_module_is_rejected(runs: Runs) -> None:
    with pytest.raises(AssertionError, match=r"policy.draft.enabled: .*schedule=zb-h1"):
        runs.records_of("draft")


def test_value_worker_with_one_chunk_equals_1f1b(runs: Runs) -> None:
    runs.compare("values: zb-h1", "values: stock")


def test_value_worker_rejects_several_chunks(runs: Runs) -> None:
    with pytest.raises(AssertionError):
        runs.records_of("values: v-half")
    reason = "schedule=v-half has several model chunks per rank, and NeMo-RL's value worker"
    assert reason in runs.output_of("values: v-half")


def test_rehearsal_reads_the_saved_configuration(runs: Runs) -> None:
    (file,) = (runs.folder.parent / "v-half").glob("iter_*/run_config.yaml")
    command = read_command([str(file)])
    sizes = ["--num-layers", "--pipeline-model-parallel-size", "--global-batch-size"]
    assert [command.number(flag, 0) for flag in sizes] == [8, 4, 8]
