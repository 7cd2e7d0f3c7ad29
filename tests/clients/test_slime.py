"""slime trains with schedules of this package as with Megatron's 1F1B, with its policy loss."""

from __future__ import annotations

import pytest
from clients.launching import Runs, cases_of, checkout_of, matrix, python_of, run, tolerance_of

python_of("verl")  # which has all that slime imports of others
CHECKOUT = checkout_of("slime")

SHAPES = {
    "four ranks": {},
    "two replicas": {"pipeline": 2},
    "asleep between steps": {"sleeps": True},
}
MATRIX = matrix(SHAPES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    cases = cases_of(SHAPES, MATRIX)
    folder = tmp_path_factory.mktemp("slime") / "runs"
    return run("verl", "slime_on_cpu.py", folder, cases, SLIME=CHECKOUT)


@pytest.mark.parametrize(("shape", "schedule"), MATRIX)
def test_inference_log_and_weights_equal_1f1b(runs: Runs, shape: str, schedule: str) -> None:
    runs.compare(f"{shape}: {schedule}", f"{shape}: stock", tolerance_of(schedule), chunks=2)


def test_process_groups_are_destroyed_while_slime_sleeps(runs: Runs) -> None:
    """Except the world's and slime's, as without a schedule: communicators use GPU memory."""
    package_records, stock_records = (
        runs.records_of(f"asleep between steps: {schedule}") for schedule in ("v-half", "stock")
    )
    assert (
        [record["groups"] for record in package_records]
        == [record["groups"] for record in stock_records]
        == [[2, 2]] * 4
    )
