"""NeMo-RL's policy worker with schedules of one chunk as with Megatron's own 1F1B."""

from __future__ import annotations

import pytest
from clients.launching import Runs, checkout_of, python_of, run
from clients.on_cpu import make_model

python_of("verl")  # which has Megatron-Bridge and what else NeMo-RL imports of others
CHECKOUT = checkout_of("nemo_rl")

SHAPES = {
    "packed": {},
    "packed, two replicas": {"pipeline": 2},
    "padded": {"packed": False},
}
"""Of the rollouts: packed sequences of unlike lengths, as in NeMo-RL's examples, or padded."""

MATRIX = [("packed", "zb-h2"), *((shape, "zb-h1") for shape in SHAPES)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("nemo_rl")
    model = make_model(folder / "model")
    cases = {
        f"{shape}: {schedule}": {"schedule": schedule, "model": model, **SHAPES[shape]}
        for shape, schedule in (*((shape, "stock") for shape in SHAPES), *MATRIX)
    }
    cases["a V"] = {"schedule": "v-half", "model": model, "steps": 1}
    return run("verl", "nemo_rl_on_cpu.py", folder / "runs", cases, NEMO_RL=CHECKOUT)


@pytest.mark.parametrize(("shape", "schedule"), MATRIX)
def test_log_probabilities_losses_and_weights_are_its_own(
    runs: Runs, shape: str, schedule: str
) -> None:
    """As every rank is told them, broadcast from the last stage."""
    runs.compare(f"{shape}: {schedule}", f"{shape}: stock")


def test_a_v_is_refused_in_one_sentence(runs: Runs) -> None:
    """Its worker keeps the first chunk alone."""
    with pytest.raises(
        AssertionError, match="runs 1 of the 2 chunks a rank that v-half has.*zb-h1"
    ):
        runs.of("a V")
