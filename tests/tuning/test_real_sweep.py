"""The laptop's sweep with Megatron's trainer, killed half way and run again (minutes)."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tuning.samples import ROOT, sweep_command

from megatron_vshape.tuning.results import Status, open_results

FIRST_RUNS = 3


@pytest.mark.slow
def test_laptop_sweep_survives_a_kill(tmp_path: Path) -> None:
    database = tmp_path / "results.db"
    command = sweep_command(ROOT / "configs" / "sweeps" / "laptop.yaml", "--results", database)
    started = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        ended = 0
        for line in first.stdout:
            ended += line.startswith(("ok", "failed", "OOM"))
            if ended == FIRST_RUNS:
                break
        os.kill(first.pid, signal.SIGKILL)
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(second.stdout, second.stderr)
    assert second.returncode == 0
    assert f"{FIRST_RUNS} of 10 runs were made before" in second.stdout
    assert "Kendall's tau" in second.stdout
    assert time.monotonic() - started < 600
    with open_results(database) as results:
        outcomes = [result.outcome for result in results.read(results.finished_keys())]
    assert sorted(outcome.status for outcome in outcomes) == [Status.FAILED] + [Status.OK] * 9
    bubbles = [outcome.bubble for outcome in outcomes if outcome.status is Status.OK]
    # Schedules of Megatron are not measured.
    assert any(bubbles)
    assert all(bubble is None or 0 < bubble < 1 for bubble in bubbles)
