"""Launching with submitit's local executor and a trainer that only prints."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tuning.counts import predictor_of
from tuning.samples import (
    CLUSTER,
    FAKE,
    ROOT,
    SWEEP,
    load_sample,
    run_over,
    sweep_command,
    write_sweep,
)

from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.tuning import launcher as launching
from megatron_vshape.tuning import predictor as predicting
from megatron_vshape.tuning.configurations import SweepError
from megatron_vshape.tuning.files import Cluster, RunPart
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.launcher import Launcher
from megatron_vshape.tuning.predictor import Prediction
from megatron_vshape.tuning.results import Outcome, Result, Results, Status, open_results
from megatron_vshape.tuning.worker import write_outcome


def unseen(text: str) -> None:
    """The log of a sweep that nobody looks at."""


def launcher_of(
    folder: Path, sweep: dict[str, Any], results: Results, report: Callable[[str], None] = unseen
) -> tuple[Launcher, list[Prediction]]:
    """Return a launcher of the sweep, and the predictions of its runs."""
    loaded = load_sample(folder, sweep=sweep)
    predictor = predictor_of(loaded)
    chosen = [predictor(config) for config in expand_grid(loaded).possible]
    return Launcher(loaded, predictor, results, folder / "runs", report), chosen


def launch(
    folder: Path, sweep: dict[str, Any], report: Callable[[str], None] = unseen
) -> list[Result]:
    """Launch the sweep, and return the results of its new runs."""
    with open_results(folder / "results.db") as results:
        launcher, chosen = launcher_of(folder, sweep, results, report)
        old_keys = results.finished_keys()
        launcher.run(chosen)
        return results.read(results.finished_keys() - old_keys)


def test_statuses_and_no_run_twice(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    also = [
        {"schedule": "v-min", "pipeline_parallel": 2, "layout": "even", "arguments": [flag]}
        for flag in ("--out-of-memory", "--broken")
    ]
    sweep = {
        "grid": {**SWEEP["grid"], "schedule": ["1f1b"]},
        "also": also,
        **run_over(at_once=4, arguments=["--log-starts", str(starts)]),
    }
    lines: list[str] = []
    results = {
        str(result.configuration): result for result in launch(tmp_path, sweep, lines.append)
    }
    assert sum(line.startswith(("ok", "OOM", "failed")) for line in lines) == 4
    assert [result.outcome.status for _, result in sorted(results.items())] == [
        Status.OK,
        Status.OK,
        Status.FAILED,
        Status.OUT_OF_MEMORY,
    ]
    fast = results["1f1b s64 gbs8 dp1 tp1 pp2 mbs1 even"]
    assert fast.outcome.step_s == pytest.approx(0.1)
    assert fast.mfu is not None
    assert fast.outcome.peak_bytes is not None
    broken = results["v-min s64 gbs8 dp1 tp1 pp2 mbs1 even --broken"]
    assert broken.outcome.log_tail.endswith("error: unrecognized arguments: --broken")
    assert len(starts.read_text().splitlines()) == 4
    assert launch(tmp_path, sweep) == []
    assert len(starts.read_text().splitlines()) == 4


ONE = {"grid": {**SWEEP["grid"], "schedule": ["1f1b"], "microbatch_size": [1]}}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts scripts with the names of SLURM's commands on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(**texts: str) -> None:
        for name, text in {"srun": "exit 1", **texts}.items():
            (folder / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
            (folder / name).chmod(0o755)

    return write


def test_sbatch_error_is_reported(tmp_path: Path, tools: Callable[..., None]) -> None:
    tools(sbatch='cp "$1" asked\necho "sbatch: error: invalid partition: none" >&2\nexit 1')
    settings = {"partition": "none", "exclusive": False, "mem": "1GB", "setup": ["module load x"]}
    with pytest.raises(SweepError, match=r"(?s)invalid partition: none.*`run: slurm:`"):
        launch(tmp_path, ONE | run_over(executor="slurm", slurm=settings, threads=3))
    script = (tmp_path / "asked").read_text()
    assert "#SBATCH --partition=none\n" in script
    assert "#SBATCH --mem=1GB\n" in script
    # The cluster has no GPU, and false removes a flag.
    assert "--gpus" not in script
    assert "--exclusive" not in script
    assert "#SBATCH --cpus-per-task=6\n" in script  # two devices with three threads
    assert "#SBATCH --no-requeue\n" in script
    assert "\nmodule load x\n" in script


def test_predicted_plan_runs_without_planning_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of the prediction runs; it is not even simulated again."""
    simulated = []
    simulate = predicting.simulate
    monkeypatch.setattr(
        predicting,
        "simulate",
        lambda *arguments: simulated.append(arguments) or simulate(*arguments),
    )
    grid = {**SWEEP["grid"], "schedule": ["adaptive"], "microbatch_size": [1]}
    with open_results(tmp_path / "results.db") as results:
        launcher, chosen = launcher_of(tmp_path, {"grid": grid}, results)
        assert len(simulated) == 2  # the best order on the V, and that in a loop
        monkeypatch.setattr(predicting, "plan_adaptive", None)
        launcher.run(chosen)
        (result,) = results.read(results.finished_keys())
    assert result.outcome.status is Status.OK
    (file,) = (tmp_path / "runs").glob("*/schedule.json")
    assert Schedule.from_json(file.read_text()) == chosen[0].schedule


PICKLED = cloudpickle.dumps(("success", Outcome(Status.OK, 0.5)))


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the jobs of other tests, and do not wait for results."""
    monkeypatch.setattr(launching._Job, "watcher", launching._States())
    monkeypatch.setattr(launching._Job, "_results_timeout_s", 0)


@pytest.fixture
def slurm(tmp_path: Path, tools: Callable[..., None], states: None) -> Callable[..., Result]:
    """Return a function that sweeps one run and returns its result.

    Its jobs 42, 43, ... end in the given states, all but the last without a result.
    """

    def sweep(*states: str, stopped: bool = False) -> Result:
        last = 41 + len(states)
        (tmp_path / "result.pkl").write_bytes(PICKLED)
        rows = "".join(f"{job}|{state}|n1\n" for job, state in enumerate(states, 42) if state)
        (tmp_path / "states").write_text(f"JobID|State|NodeList\n{rows}")
        tools(
            sacct="cat states",
            sbatch="echo >> jobs\njob=$((41 + $(wc -l < jobs)))\nfolder=$(echo runs/*)\n"
            f"if [ $job = {last} ]; then cp result.pkl $folder/job/${{job}}_0_result.pkl\n"
            f"{'else touch $folder/stopped' * stopped}\nfi\n"
            "echo Submitted batch job $job",
        )
        (result,) = launch(tmp_path, ONE | run_over(executor="slurm"))
        (folder,) = (tmp_path / "runs").iterdir()
        with open_results(tmp_path / "results.db") as results:
            assert results.job_in_flight(folder.name) is None
        return result

    return sweep


@pytest.mark.parametrize(
    ("state", "stopped"),
    [("PREEMPTED", False), ("FAILED", True), ("", True)],
    ids=["preempted", "preempted in its grace time", "no accounts"],
)
def test_run_that_slurm_ends_is_requeued(
    tmp_path: Path, slurm: Callable[..., Result], state: str, stopped: bool
) -> None:
    assert slurm(state, "COMPLETED", stopped=stopped).outcome == Outcome(Status.OK, 0.5)
    assert (tmp_path / "jobs").read_text() == "\n" * 2


def test_cancelled_run_has_failed(slurm: Callable[..., Result]) -> None:
    outcome = slurm("CANCELLED by 0", "COMPLETED", stopped=True).outcome
    assert outcome.status is Status.FAILED
    assert outcome.log_tail.endswith("job 42 left no result (CANCELLED by 0)")


def test_number_of_requeues_is_limited(
    slurm: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "MAX_REQUEUES", 1)
    outcome = slurm("PREEMPTED", "NODE_FAIL", "COMPLETED").outcome
    assert outcome.status is Status.FAILED
    assert outcome.log_tail.startswith("its job was ended 2 times before it had a result")


TWO = {"grid": {**SWEEP["grid"], "schedule": ["1f1b"]}} | run_over(executor="slurm", at_once=2)


@pytest.mark.usefixtures("states")
def test_rejected_job_waits_for_running_jobs(
    tmp_path: Path, tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job ends when the second has been rejected."""
    monkeypatch.setattr(launching, "RETRY_S", 0.1)
    (tmp_path / "result.pkl").write_bytes(PICKLED)
    tools(
        sacct='printf "JobID|State|NodeList\\n42|RUNNING|n1\\n43|RUNNING|n1\\n"',
        scancel="echo >> cancelled",
        sbatch='echo "$1" >> asked\nlast=$(wc -l < asked)\n'
        "first=$(dirname $(head -n 1 asked))\n"
        "case $last in\n"
        "1) echo Submitted batch job 42;;\n"
        "2) cp result.pkl $first/42_0_result.pkl; echo QOSMaxSubmitJobPerUserLimit >&2; exit 1;;\n"
        "*) cp result.pkl $(dirname $1)/43_0_result.pkl; echo Submitted batch job 43\nesac",
    )
    assert [result.outcome.step_s for result in launch(tmp_path, TWO)] == [0.5, 0.5]
    assert len((tmp_path / "asked").read_text().splitlines()) == 3
    assert not (tmp_path / "cancelled").exists()


def stops(error: type[BaseException]) -> Callable[[str], None]:
    """Return a log of a sweep that ends with this error when it has started a run."""

    def report(text: str) -> None:
        if text.startswith("start"):
            raise error

    return report


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_only_an_interrupted_sweep_cancels_its_jobs(
    tmp_path: Path, tools: Callable[..., None], error: type[BaseException]
) -> None:
    """The next sweep takes over a job that goes on, and submits again one that was cancelled."""
    (tmp_path / "result.pkl").write_bytes(PICKLED)
    tools(
        sacct='[ -e cancelled ] && state="CANCELLED by 0" || state=COMPLETED\n'
        'printf "JobID|State|NodeList\\n42|$state|n1\\n"',
        scancel="echo $1 >> cancelled; exit 1",
        sbatch='echo "$1" >> asked\njob=$((41 + $(wc -l < asked)))\n'
        "[ $job = 42 ] || cp result.pkl $(dirname $1)/${job}_0_result.pkl\n"
        "echo Submitted batch job $job",
    )
    with pytest.raises(error):
        launch(tmp_path, TWO, stops(error))
    assert (tmp_path / "cancelled").exists() == (error is KeyboardInterrupt)
    (folder,) = (tmp_path / "runs").iterdir()
    if error is not KeyboardInterrupt:
        (folder / "job" / "42_0_result.pkl").write_bytes(PICKLED)
        write_outcome(folder / "node0.json", Outcome(Status.OK, 0.25))
    step_times = sorted(result.outcome.step_s or 0 for result in launch(tmp_path, TWO))
    assert step_times == ([0.5, 0.5] if error is KeyboardInterrupt else [0.25, 0.5])


def test_a_suspended_job_has_not_ended() -> None:
    states = launching._States()
    for state, is_done in (("SUSPENDED", False), ("RUNNING", False), ("CANCELLED by 0", True)):
        states._info_dict["9"] = {"State": state}
        assert states.is_done("9", mode="cache") is is_done


ONE_DEVICE = Cluster.model_validate(CLUSTER | {"devices_per_node": 1})


def test_time_limit_of_a_run(tmp_path: Path) -> None:
    from megatron_vshape.tuning.worker import Job, run_job

    command = [str(FAKE / "trainer.py"), "--train-iters", "100", "--sleep", "1"]
    run = RunPart.model_construct(timeout_minutes=1 / 60, environment={"PYTHONPATH": str(FAKE)})
    outcome = run_job(Job(command, tmp_path, run, ONE_DEVICE))
    assert outcome.status is Status.FAILED
    assert "ended after 1 s" in outcome.log_tail


TOLD_TO_END = """
import sys
from pathlib import Path
from megatron_vshape.tuning.files import Cluster, RunPart
from megatron_vshape.tuning.worker import Job, run_job

trainer, folder = map(Path, sys.argv[1:3])
command = [str(trainer), "--train-iters", "100", "--sleep", "1"]
run = RunPart(timeout_minutes=1, environment={"PYTHONPATH": str(trainer.parent)})
cluster = Cluster.model_validate_json(sys.argv[3])
run_job(Job(command, folder, run, cluster))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_signalled_job_has_no_outcome(tmp_path: Path, number: signal.Signals) -> None:
    trainer, cluster = str(FAKE / "trainer.py"), ONE_DEVICE.model_dump_json()
    command = [sys.executable, "-c", TOLD_TO_END, trainer, str(tmp_path), cluster]
    job = subprocess.Popen(command, cwd=ROOT)
    log = tmp_path / "node0.log"
    wait_for(lambda: log.exists() and "iteration 1" in log.read_text())
    job.send_signal(number)
    assert job.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "stopped").exists()
    assert not (tmp_path / "node0.json").exists()


def test_killed_launcher_loses_only_what_was_in_flight(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    three = {**SWEEP["grid"], "schedule": ["1f1b", "v-half", "v-min"], "microbatch_size": [1]}
    slow = run_over(arguments=["--log-starts", str(starts), "--sleep", "0.5"])
    path = write_sweep(tmp_path, sweep={"grid": three, **slow})
    command = sweep_command(path, "--results", tmp_path / "results.db")
    first = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in first.stdout:
        if line.startswith("ok"):
            break
    wait_for(lambda: len(starts.read_text().splitlines()) == 2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    first.stdout.close()
    wait_for(lambda: not children_of(first.pid, tmp_path))
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "1 of 3 runs were made before" in second.stdout
    assert "Kendall's tau of predicted and measured step times" in second.stdout
    assert len(starts.read_text().splitlines()) == 4  # three, and the one in flight again
    assert (tmp_path / "results.csv").stat().st_size > 0


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


def children_of(launcher: int, folder: Path) -> list[str]:
    """Return the trainers that still run for a sweep in `folder`."""
    lines = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in lines if "trainer.py" in line and str(folder) in line]
