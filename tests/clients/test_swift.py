"""ms-swift trains and logs with schedules of this package as with Megatron's 1F1B."""

from __future__ import annotations

import pytest
from clients.launching import SHARED, Runs, cases_of, matrix, python_of, run, tolerance_of
from clients.on_cpu import make_data, make_model

python_of("swift")

LORA = ["--tuner_type", "lora", "--lora_rank", "4", "--target_modules", "all-linear"]
# The gradient norm is reduced over the ranks in another order. Clipping by it changes the last bit
# of gradients, and Adam divides small gradients by their size: norms of the third step of DPO
# differed by 2.3e-5. Without clipping, V-Half's weights equal those of stock Megatron bitwise.
UNCLIPPED_DPO = ["--rlhf_type", "dpo", "--clip_grad", "0"]
SHAPES = {
    "SFT": {},
    "SFT, two replicas": {"pipeline": 2},
    "SFT, packed": {"options": ["--padding_free", "true"]},
    "DPO": {"prefers": True, "options": UNCLIPPED_DPO},
    "DPO, two replicas": {"prefers": True, "pipeline": 2, "options": UNCLIPPED_DPO},
}
MATRIX = [case for case in matrix(SHAPES) if SHARED not in case]  # whose rows it does not convert
SAVES = ("stock", "v-half")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("swift")
    dialogues, preferences = make_data(folder)
    usual = {"model": make_model(folder / "model"), "dialogues": dialogues}
    usual["preferences"] = preferences
    cases = cases_of(SHAPES, MATRIX, **usual)
    all_runs = folder / "runs"
    for saves in SAVES:
        checkpoint = f"{all_runs}/SFT: {saves}/run/checkpoint-3"
        goes_on = ["--mcore_model", checkpoint, "--finetune", "false"]
        for resumes in SAVES:
            resumed_options = {"schedule": resumes, "steps": 5, "options": goes_on}
            cases[f"resumed: {saves}, {resumes}"] = usual | resumed_options
    # The initial values of an adapter are random per rank, so all runs start from one saved
    # adapter.
    cases["LoRA's first"] = {"schedule": "stock", "steps": 1, "options": LORA, **usual}
    adapter = f"{all_runs}/LoRA's first/run/checkpoint-1"
    for schedule in ("stock", "v-half"):
        options = [*LORA, "--adapters", adapter]
        cases[f"LoRA: {schedule}"] = {"schedule": schedule, "options": options, **usual}
    return run("swift", "swift_on_cpu.py", all_runs, cases)


@pytest.mark.parametrize(("shape", "schedule"), [*MATRIX, ("LoRA", "v-half")])
def test_log_and_checkpoint_equal_1f1b(runs: Runs, shape: str, schedule: str) -> None:
    """Losses, norms and evaluations as the user reads them, and the weights."""
    runs.compare(f"{shape}: {schedule}", f"{shape}: stock", tolerance_of(schedule))
    logged = runs.records_of(f"{shape}: {schedule}")[-1]["logged"]
    assert len(logged) >= 4  # three steps, an evaluation


@pytest.mark.parametrize(
    ("saves", "resumes"), [("stock", "v-half"), ("v-half", "stock"), ("v-half", "v-half")]
)
def test_run_resumes_under_another_schedule(runs: Runs, saves: str, resumes: str) -> None:
    """With an optimizer's state that is saved fully reshardable, which is not the default."""
    runs.compare(f"resumed: {saves}, {resumes}", "resumed: stock, stock")
