"""slime trains with schedules of this package as with Megatron's own 1F1B, by its policy loss."""

from __future__ import annotations

import pytest
from clients.launching import Runs, checkout_of, matrix, most_of, python_of, run

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
    cases = {
        f"{shape}: {schedule}": {"schedule": schedule, **SHAPES[shape]}
        for shape, schedule in (*((shape, "stock") for shape in SHAPES), *MATRIX)
    }
    folder = tmp_path_factory.mktemp("slime") / "runs"
    return run("verl", "slime_on_cpu.py", folder, cases, SLIME=CHECKOUT)


@pytest.mark.parametrize(("shape", "schedule"), MATRIX)
def test_what_it_infers_logs_and_learns_is_slimes_own(
    runs: Runs, shape: str, schedule: str
) -> None:
    runs.compare(f"{shape}: {schedule}", f"{shape}: stock", most_of(schedule))
    assert [each["chunks"] for each in runs.of(f"{shape}: {schedule}")] == [2] * 4
