"""The command line: predictions, comparison, dry runs, and one sentence when it cannot be done."""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tuning.counts import Fake
from tuning.samples import CLUSTER, ROOT, SWEEP, load_sample, run_over, write_sweep

from megatron_vshape import ScheduleError, load_schedule
from megatron_vshape.cli import sweep, sweep_run
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.predictor import Prediction, Verdict
from megatron_vshape.tuning.report import rows_of, write_csv
from megatron_vshape.tuning.results import open_results
from megatron_vshape.view.numbers import GIB


@pytest.fixture(autouse=True)
def nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_vshape.tuning.predictor.Counts", Fake)


ONE_GRID = {**SWEEP["grid"], "schedule": ["1f1b"], "microbatch_size": [1]}


def call(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    return sweep.run(parser.parse_args([str(argument) for argument in arguments]))


def test_predict_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trainer and no submitit are necessary."""
    monkeypatch.setitem(sys.modules, "submitit", None)
    table = tmp_path / "all.csv"
    path = write_sweep(tmp_path, sweep=run_over(script="gone.py"))
    assert call(path, "--predict-only", "--csv", table) == 0
    out = capsys.readouterr().out
    assert "V-Half" in out
    with table.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:  # the peak of the row is the maximum over its ranks
        of_ranks, *parts = (
            [float(gib) for gib in row[f"predicted_{name}"].split()]
            for name in ("ranks", "states", "activations", "rest")
        )
        assert len(of_ranks) == 2
        assert max(of_ranks) == pytest.approx(float(row["predicted_peak_gib"]), abs=0.01)
        assert of_ranks == pytest.approx(list(map(sum, zip(*parts, strict=True))), abs=0.02)
    best = max(rows, key=lambda row: float(row["predicted_mfu"]))
    assert "GiB by pipeline rank:\n" in out
    assert f"    activations          {best['predicted_activations']}\n" in out
    assert [row["verdict"] for row in rows] == ["predicted runs"] * 4
    assert all(float(row["predicted_mfu"]) > 0 for row in rows)


def test_a_command_of_a_dry_run_can_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the plan that it names, and the environment that the run would have."""
    grid = {**ONE_GRID, "schedule": ["adaptive"]}
    path = write_sweep(tmp_path, sweep={"grid": grid} | run_over(threads=3))
    assert call(path, "--results", tmp_path / "here" / "results.db", "--dry-run") == 0
    command = capsys.readouterr().out.splitlines()[-1]
    (plan,) = (tmp_path / "here").glob("*/schedule.json")
    assert f"--pipeline-schedule {plan}" in command
    assert load_schedule(plan).num_devices == 2
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    completed = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert "OMP_NUM_THREADS=3 " in command
    assert "iteration 3 |" in completed.stdout


def test_dry_run_for_several_nodes_names_node_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {"nodes": 2, "devices_per_node": 1}
    path = write_sweep(tmp_path, cluster=cluster, sweep=run_over(executor="slurm"))
    assert call(path, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "# on each of 2 nodes, with its number as NODE and the first one's name as HOST" in shown
    assert ' torchrun --nnodes 2 --node-rank "$NODE" --master-addr "$HOST" --master-port ' in shown


def test_cluster_that_nothing_fits(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, cluster={"device": CLUSTER["device"] | {"memory_gib": 1}})
    with pytest.raises(
        ScheduleError, match=r"none of the 4 combinations fits; the closest is .* which needs 2\.\d"
    ):
        call(path, "--predict-only")


def test_default_headroom_is_kept_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "all.csv"
    sweep_path = write_sweep(tmp_path, sweep={"grid": ONE_GRID})
    assert call(sweep_path, "--predict-only", "--csv", table) == 0
    (row,) = csv.DictReader(table.read_text().splitlines())
    brim = {**CLUSTER["device"], "memory_gib": float(row["predicted_peak_gib"]) * 1.03}
    path = write_sweep(tmp_path, sweep={"grid": ONE_GRID}, cluster={"device": brim})
    capsys.readouterr()
    assert call(path, "--predict-only", "--headroom", "0") == 0
    assert "kept free" not in capsys.readouterr().out
    with pytest.raises(ScheduleError, match="none of the 1 combinations fits"):
        call(path, "--predict-only")
    assert "4% of every GPU's memory is kept free" in capsys.readouterr().out


def test_sbatch_script(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "slurm" / "sweep.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    usage = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert usage.stderr.startswith("usage: sbatch")
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --requeue" in options
    assert "#SBATCH --open-mode=append" in options  # else a requeued sweep begins its log anew


def test_results_are_reported_and_no_run_is_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the sweep has another name and would choose fewer runs."""
    database = tmp_path / "results.db"
    path = write_sweep(tmp_path, sweep=run_over(at_once=4))
    with pytest.raises(ScheduleError, match=r"results\.db: there are no results yet"):
        call(path, "--results", database, "--report")
    assert call(path, "--results", database) == 0
    table = capsys.readouterr().out.partition("model on two")[2].partition("results: ")[0]
    first_csv = (tmp_path / "results.csv").read_text()
    assert [row["verdict"] for row in csv.DictReader(first_csv.splitlines())] == ["ok"] * 4
    renamed = {"name": "renamed", "pruning": {"margin": 0.0, "at_most": 1}}
    assert call(write_sweep(tmp_path, sweep=renamed), "--results", database) == 0
    assert "2 of 2 runs were made before" in capsys.readouterr().out
    csv_text = (tmp_path / "results.csv").read_text()
    assert sorted(csv_text.splitlines()) == sorted(first_csv.splitlines())
    monkeypatch.setattr(sweep_run, "_predict", None)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with open_results(database) as results:
        results.start(next(iter(results.finished_keys())), "42")
        assert call(path, "--results", database, "--report", "--csv", tmp_path / "now.csv") == 0
    shown, last = capsys.readouterr().out.partition("model on two")[2].rsplit("\n", 2)[:2]
    assert last == f"4 runs have ended, 1 are in flight: {database}"
    assert shown.strip("\n").split("\n") == table.strip("\n").split("\n")
    # ... except the prediction for each rank, which the results file does not contain
    now, then = (
        [line.rsplit(",", 4)[0] for line in sorted(text.splitlines())]
        for text in ((tmp_path / "now.csv").read_text(), first_csv)
    )
    assert now == then


def test_retry_failed_runs_failed_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flaky = run_over(arguments=["--broken-unless", str(tmp_path / "mended")])
    path = write_sweep(tmp_path, sweep={"grid": ONE_GRID} | flaky)
    results = ("--results", tmp_path / "results.db")
    assert call(path, *results) == 1
    shown = capsys.readouterr().out
    assert "failed: 1f1b" in shown
    (log,) = tmp_path.glob("*/node0.log")
    assert f"    {log}\n" in shown
    assert shown.endswith("no run has ended well\n")
    (tmp_path / "mended").touch()
    assert call(path, *results) == 1
    assert "failed: 1f1b" in capsys.readouterr().out
    assert call(path, *results, "--retry-failed") == 0
    shown = capsys.readouterr().out
    assert "failed: " not in shown
    assert "ok     1f1b" in shown


@pytest.mark.parametrize(
    ("run", "arguments", "patched", "text"),
    [
        (
            {"executor": "slurm"},
            [],
            {"shutil.which": lambda name: None},
            "executor is slurm, but sbatch and srun cannot be found",
        ),
        ({"script": "gone.py"}, [], {}, r"run\.script gone\.py is no file in .*: start the"),
        (
            {},
            ["--dry-run"],
            {"megatron_vshape.cli.files.is_installed": lambda name: name != "submitit"},
            "a sweep needs submitit, which is not installed",
        ),
        ({}, ["--csv", "nodir/x.csv"], {}, r"--csv nodir/x\.csv: directory .*nodir does not exist"),
    ],
)
def test_faults_are_reported_before_predicting(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    run: dict[str, str],
    arguments: list[str],
    patched: dict[str, object],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_run, "_predict", None)
    for name, value in patched.items():
        monkeypatch.setattr(name, value)
    with pytest.raises(ScheduleError, match=text):
        call(write_sweep(tmp_path, sweep=run_over(**run)), *arguments)
    assert capsys.readouterr().out == ""


def test_unplanned_row_has_no_peak(tmp_path: Path) -> None:
    (config,) = expand_grid(load_sample(tmp_path, sweep={"grid": ONE_GRID})).possible
    not_planned = Prediction(config, Verdict.NOT_PLANNED, 0.0, reason="too slow")
    write_csv(
        rows_of([not_planned, Prediction(config, Verdict.RUNS, 2.0 * GIB)]), tmp_path / "all.csv"
    )
    with (tmp_path / "all.csv").open() as file:
        assert [row["predicted_peak_gib"] for row in csv.DictReader(file)] == ["", "2.0"]
