"""ROLL trains with schedules of this package as with Megatron's 1F1B, with its policy loss."""

from __future__ import annotations

import pytest
from clients.launching import SHARED, Runs, cases_of, checkout_of, matrix, python_of, run
from clients.on_cpu import make_model

python_of("verl")  # which has the other imports of ROLL
CHECKOUT = checkout_of("roll")

CHUNKS = {"virtual_pipeline_model_parallel_size": 2}
SHAPES = {"four ranks": {}, "two replicas": {"pipeline": 2}}
MATRIX = [case for case in matrix(SHAPES) if SHARED not in case]  # whose rows it does not convert


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("roll")
    model = make_model(folder / "model")
    cases = cases_of(SHAPES, MATRIX, model=model)
    interleaved = {"schedule": "stock", "strategy": CHUNKS}
    cases["interleaved: stock"] = {"model": model, **interleaved}
    cases["chunks asked for: v-half"] = {"model": model, **interleaved, "schedule": "v-half"}
    return run("verl", "roll_on_cpu.py", folder / "runs", cases, ROLL=CHECKOUT)


@pytest.mark.parametrize(("shape", "schedule"), MATRIX)
def test_inference_log_and_weights_equal_1f1b(runs: Runs, shape: str, schedule: str) -> None:
    """Log-probabilities, entropy and metrics where ROLL collects them, and exported weights."""
    runs.compare(f"{shape}: {schedule}", f"{shape}: stock", chunks=2)


def test_interleaving_of_the_user_is_replaced(runs: Runs) -> None:
    """Users of Megatron's interleaving need to change nothing."""
    runs.compare("chunks asked for: v-half", "interleaved: stock")
