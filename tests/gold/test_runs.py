"""The recorder of training runs, with one of its runs."""

from pathlib import Path

import pytest
from gold import runs


@pytest.mark.slow
def test_a_run_has_losses_gradients_and_program_of_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RUNS", {"v-half": runs.RUNS["v-half"]})
    found = runs.record_runs(tmp_path)
    parts = ("losses", "gradients", "program")
    assert list(found) == [f"run/v-half/rank {rank}/{part}" for rank in range(4) for part in parts]
    assert all(found.values())
