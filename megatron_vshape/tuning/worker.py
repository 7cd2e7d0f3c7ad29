"""One run within its job: start the trainer, read its measurements, and report the outcome."""

import json
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import submitit

from megatron_vshape import figures
from megatron_vshape.environment import CONNECTIONS
from megatron_vshape.tuning.files import Cluster, RunPart
from megatron_vshape.tuning.results import Outcome
from megatron_vshape.tuning.training_run import (
    Status,
    exit_text,
    is_out_of_memory,
    last_lines,
    run_command,
)

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Rendezvous port range; jobs that share a node use different ports."""

STOPPED = "stopped"
"""Marker file of a run whose job was cancelled before it had a result."""

Figures = Sequence[Mapping[str, Any]]
"""File with the measurements of a run: see `megatron_vshape.figures`."""


@dataclass(frozen=True, slots=True)
class Job:
    """Settings of a run, sent to the node."""

    command: list[str]  # of the trainer, without torchrun
    folder: Path
    run: RunPart
    cluster: Cluster
    launcher: int | None = None  # process id; the run stops if it ends
    is_ordered: bool = False  # whether Megatron requires launch order, by the environment

    @property
    def timeout_s(self) -> float:
        """Time limit of the trainer in seconds."""
        return 60.0 * self.run.timeout_minutes

    @property
    def ranks(self) -> list[str]:
        """Arguments of torchrun for a node's ranks, the same on all nodes."""
        return ["--nproc-per-node", str(self.cluster.devices_per_node), *self.command]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the trainer in addition to the node's."""
        variables = {"OMP_NUM_THREADS": str(self.run.threads)}
        if self.cluster.backend == "gloo":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        if self.is_ordered:
            variables |= {name: os.environ.get(name, value) for name, value in CONNECTIONS.items()}
        return variables | self.run.environment


def run_job(job: Job) -> Outcome:
    """Run the trainer on this node and return its outcome, which is also written to a file.

    Raises:
        SystemExit: the job was stopped, for example by preemption. The run has no outcome then, and
            submitit, which finds no result, writes none either.
    """
    node, rendezvous_flags = _rendezvous_of_node(job.cluster.nodes)
    log = job.folder / f"node{node}.log"
    measured = job.folder / f"node{node}.jsonl"
    measured.unlink(missing_ok=True)  # from an interrupted run
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous_flags, *job.ranks]
    with _received_signals(job.folder) as received:
        with log.open("w") as output:
            environment = job.environment | {figures.VARIABLE: str(measured.absolute())}
            end = time.monotonic() + job.timeout_s
            code = run_command(
                command,
                environment,
                output.fileno(),
                lambda: time.monotonic() > end or bool(received) or not _alive(job.launcher),
            )
        text = log.read_text(errors="replace")
        outcome = outcome_of(text, figures.read(measured), code, job)
        if received:
            raise SystemExit(128 + signal.SIGTERM)
        if _alive(job.launcher):  # otherwise the run was interrupted and will run again
            write_outcome(job.folder / outcome_name(node), outcome)
    return outcome


@contextmanager
def _received_signals(folder: Path) -> Iterator[list[int]]:
    """Handle the signals by which SLURM ends a job, instead of submitit, which would requeue it.

    Yields the list of received signals. The first one is recorded in the run's folder at once: the
    remaining time of the job is for ending the ranks.
    """
    received: list[int] = []

    def record_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        (folder / STOPPED).touch()

    numbers = (signal.SIGTERM, submitit.JobEnvironment._usr_sig())
    previous_handlers = {number: signal.signal(number, record_signal) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _rendezvous_of_node(num_nodes: int) -> tuple[int, tuple[str, ...]]:
    """Return this node's index in the job, and torchrun's rendezvous flags."""
    if num_nodes == 1:
        return 0, rendezvous(1)
    environment = submitit.JobEnvironment()
    node, port = environment.node, FIRST_PORT + int(environment.raw_job_id) % NUM_PORTS
    return node, rendezvous(num_nodes, str(node), environment.hostnames[0], port)


def rendezvous(
    num_nodes: int, node: str = "", first_host: str = "", port: int = FIRST_PORT
) -> tuple[str, ...]:
    """Return torchrun's flags for the ranks of a node to find those of the others."""
    if num_nodes == 1:
        return ("--standalone",)
    return (
        *("--nnodes", str(num_nodes), "--node-rank", node),
        *("--master-addr", first_host, "--master-port", str(port)),
    )


def _alive(process: int | None) -> bool:
    if process is None:
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def outcome_of(text: str, measured: Figures, code: int | None, job: Job) -> Outcome:
    """Derive the outcome from the log, the figures and the exit code."""
    steps = [record for record in measured if "step_s" in record]
    peak = _peak_bytes(measured, job)
    if code == 0 and len(steps) >= job.run.warmup_steps + job.run.measured_steps:
        last = steps[job.run.warmup_steps :]
        return Outcome(
            Status.OK, _step_figure(last, "step_s", job), peak, _step_figure(last, "bubble", job)
        )
    tail = last_lines(text)
    if is_out_of_memory(text, code):
        return Outcome(Status.OUT_OF_MEMORY, peak_bytes=peak, log_tail=tail)
    if code == 0:
        # The last node's ranks report step times, and the first node's report allocated memory.
        status = Status.FAILED if job.cluster.nodes == 1 else Status.OK
        tail += f"\nended after {len(steps)} steps"
        return Outcome(status, peak_bytes=peak, log_tail=tail)
    if code is None:
        tail += f"\nended after {job.timeout_s:.0f} s, the time limit of a run"
    elif code < 0 or not tail:
        tail += f"\n{exit_text(code)}"
    return Outcome(Status.FAILED, log_tail=tail)


def _step_figure(steps: Figures, name: str, job: Job) -> float | None:
    """Return a figure of the measured steps; None if the trainer has not measured it."""
    values = [step[name] for step in steps if step[name] is not None]
    if not values:
        return None
    return float(min(values) if job.run.statistic == "fastest" else statistics.median(values))


def _peak_bytes(measured: Figures, job: Job) -> float | None:
    """Return the peak memory allocated on a GPU, or without GPUs, resident in a process.

    None if no rank of this node reports GPU memory; only the first node does.
    """
    peaks = [record["allocated_bytes"] for record in measured if "allocated_bytes" in record]
    if peaks:
        return float(max(peaks[-1]))
    if job.cluster.backend == "nccl":
        return None
    return 1024.0 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def outcome_name(node: int) -> str:
    """Return the name of the file with a node's outcome."""
    return f"node{node}.json"


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write the outcome atomically, so that a reader finds a complete file or none."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(outcome)))
    draft.replace(path)


def read_outcome(folder: Path, num_nodes: int) -> Outcome | None:
    """Read and merge the outcomes of all nodes of a run; None while one is missing."""
    outcomes = []
    for node in range(num_nodes):
        try:
            fields = json.loads((folder / outcome_name(node)).read_text())
            outcomes.append(Outcome(**{**fields, "status": Status(fields["status"])}))
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return merge_outcomes(outcomes)


def merge_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Merge outcomes of nodes: worst status, maximum step time, peak memory and bubble."""
    order = (Status.OUT_OF_MEMORY, Status.FAILED, Status.OK)
    worst = min(outcomes, key=lambda outcome: order.index(outcome.status))
    if worst.status is not Status.OK:
        return worst
    steps = [outcome.step_s for outcome in outcomes if outcome.step_s is not None]
    peaks = [outcome.peak_bytes for outcome in outcomes if outcome.peak_bytes is not None]
    if not steps:
        return Outcome(Status.FAILED, log_tail="no node has reported a step time")
    bubbles = [outcome.bubble for outcome in outcomes if outcome.bubble is not None]
    return Outcome(Status.OK, max(steps), max(peaks, default=None), max(bubbles, default=None))
