"""How a run ended, from its log and its figures."""

import sys
import time
from pathlib import Path

import pytest
from tuning.samples import CLUSTER

from megatron_vshape import figures
from megatron_vshape.tuning import training_run, worker
from megatron_vshape.tuning.files import Cluster, RunPart
from megatron_vshape.tuning.results import Outcome
from megatron_vshape.tuning.training_run import Status, run_command
from megatron_vshape.tuning.worker import (
    Job,
    merge_outcomes,
    outcome_of,
    read_outcome,
    write_outcome,
)


def job(nodes: int = 1, backend: str = "gloo", **over: object) -> Job:
    run = RunPart(warmup_steps=1, measured_steps=3, timeout_minutes=1, **over)  # type: ignore[arg-type]
    cluster = Cluster.model_validate(CLUSTER | {"nodes": nodes, "backend": backend})
    return Job([], Path(), run, cluster)


def steps(*bubbles: float | None) -> list[dict[str, float | None]]:
    """Return the records of four steps, of which the first one is slow."""
    times = (0.9, 0.1, 0.3, 0.2)
    step_bubbles = bubbles or (None,) * 4
    return [{"step_s": t, "bubble": b} for t, b in zip(times, step_bubbles, strict=True)]


ALLOCATED = {"allocated_bytes": [512, 1024]}


def test_the_measured_steps_follow_the_warm_up() -> None:
    measured = steps(0.6, 0.105, 0.125, 0.115)
    median, fastest = (
        outcome_of("", measured, 0, job(statistic=statistic)) for statistic in ("median", "fastest")
    )
    assert (median.step_s, median.bubble) == (pytest.approx(0.2), pytest.approx(0.115))
    assert (fastest.step_s, fastest.bubble) == (pytest.approx(0.1), pytest.approx(0.105))
    plain = outcome_of("", [*steps(), ALLOCATED], 0, job())
    assert (plain.status, plain.bubble, plain.peak_bytes) == (Status.OK, None, 1024)


def test_figures_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node0.jsonl"
    assert figures.read(path) == []
    figures.write_figures(step_s=1.0)  # to nobody
    monkeypatch.setenv(figures.VARIABLE, str(path))
    figures.write_figures(step_s=1.0, bubble=None)
    figures.write_figures(**ALLOCATED)
    with path.open("a") as stream:
        stream.write('{"step_s": 2')  # and then it was killed
    assert figures.read(path) == [{"step_s": 1.0, "bubble": None}, ALLOCATED]


CUDA_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
HOST_MEMORY = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1 bytes"
)
FOOTER = """\
E1124 12:31:29.733000 1 torch/distributed/elastic/multiprocessing/api.py:974] failed (exitcode: 1)
Traceback (most recent call last):
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
  rank      : 1 (local_rank: 1)
============================================================"""
FAULT = "ValueError: layers"


@pytest.mark.parametrize(
    ("text", "code", "status", "last"),
    [
        (CUDA_MEMORY, 1, Status.OUT_OF_MEMORY, CUDA_MEMORY),
        (HOST_MEMORY, 1, Status.OUT_OF_MEMORY, HOST_MEMORY),
        # The first fault is the reason, and later ones follow from it.
        ("noise\n" * 30 + f"{FAULT}\nRuntimeError: peer closed", 1, Status.FAILED, FAULT),
        # The report of torchrun is no reason.
        *(
            (f"noise\n{text}\n{FOOTER}", 1, Status.FAILED, text)
            for text in ("megatron-vshape: 18 layers do not divide", "AssertionError", "last words")
        ),
        ("\x1b[01;31m\x1b[Kfatal error: \x1b[m\x1b[Kx.h", 1, Status.FAILED, "fatal error: x.h"),
        ("noise", None, Status.FAILED, "ended after 60 s, the time limit of a run"),
        ("noise", 0, Status.FAILED, "ended after 0 steps"),
        ("", -15, Status.FAILED, "ended by signal 15 (Terminated)"),
        ("", 3, Status.FAILED, "ended with exit code 3, without a word"),
    ],
)
def test_a_run_without_a_result_has_a_reason(
    text: str, code: int | None, status: Status, last: str
) -> None:
    outcome = outcome_of(text, [], code, job())
    assert outcome.status is status
    *earlier_lines, end = outcome.log_tail.splitlines()
    assert end == last
    assert len(earlier_lines) < 12


def test_nodes_are_merged(tmp_path: Path) -> None:
    write_outcome(tmp_path / "node0.json", Outcome(Status.OK, None, 5.0))
    assert read_outcome(tmp_path, 2) is None
    write_outcome(tmp_path / "node1.json", Outcome(Status.OK, 0.5, 7.0, 0.125))
    assert read_outcome(tmp_path, 2) == Outcome(Status.OK, 0.5, 7.0, 0.125)
    bad = Outcome(Status.OUT_OF_MEMORY, log_tail="x")
    assert merge_outcomes([Outcome(Status.OK, 1.0), bad, Outcome(Status.FAILED)]) is bad


@pytest.mark.parametrize(("number", "port"), [("42", 20_042), ("1234567", 24_567)])
def test_jobs_on_one_node_use_different_ports(
    monkeypatch: pytest.MonkeyPatch, number: str, port: int
) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", number)
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[3-4]")
    node, flags = worker._rendezvous_of_node(2)
    assert node == 1
    assert flags[-4:] == ("--master-addr", "n3", "--master-port", str(port))


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
rank = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True)
print(child.pid, flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="environments: Linux only")
@pytest.mark.parametrize(
    ("end", "code"),
    [("while True: time.sleep(600)", None), ("os.kill(os.getpid(), signal.SIGKILL)", -9)],
    ids=["stopped", "killed"],
)
def test_ranks_in_separate_sessions_end_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, code: int | None
) -> None:
    """The ranks of a launcher that was killed are no longer its descendants."""
    monkeypatch.setattr(training_run, "STOPPING_S", 0.5)
    log = tmp_path / "log"
    with log.open("w") as output:
        command = [sys.executable, "-c", STUBBORN + end]
        is_started = lambda: code is None and log.read_text().endswith("\n")  # noqa: E731
        assert run_command(command, {}, output.fileno(), is_started) == code
    rank = int(log.read_text())
    deadline = time.monotonic() + 10
    while _runs(rank):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(process: int) -> bool:
    """Return whether a process is there and has not just been left unwaited for."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
