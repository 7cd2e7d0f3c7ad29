"""The recorder of training runs, with one of its runs."""

from pathlib import Path

import pytest
from gold import runs


@pytest.mark.slow
def test_run_records_losses_gradients_and_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RUNS", {"v-half": runs.RUNS["v-half"]})
    record = runs.record_runs(tmp_path)
    parts = ("losses", "gradients", "program")
    assert list(record) == [f"run/v-half/rank {rank}/{part}" for rank in range(4) for part in parts]
    assert all(record.values())
