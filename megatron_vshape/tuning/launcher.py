"""Launch one job per configuration through submitit, and record each result as it arrives."""

import logging
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import submitit
from submitit.slurm.slurm import SlurmInfoWatcher

from megatron_vshape.tuning import worker
from megatron_vshape.tuning.configurations import ADAPTIVE, SweepError
from megatron_vshape.tuning.files import Loaded
from megatron_vshape.tuning.predictor import Prediction, Predictor
from megatron_vshape.tuning.results import Outcome, Result, Results, key_of
from megatron_vshape.tuning.trainer_flags import trainer_command
from megatron_vshape.tuning.training_run import Status

logger = logging.getLogger(__name__)

_JOB = re.compile(r"[0-9]+(_[0-9]+)?")
"""Job name in SLURM."""

_JOB_FOLDER = "job"
"""Subfolder of a run for the files of submitit."""

_CANCELLED = "cancelled"
"""Marker file in a run's folder: its job was cancelled together with the sweep."""

POLL_S = 0.5
RETRY_S = 60.0
"""Seconds after which a rejected job is submitted again, if others run."""

_SPARE_MINUTES = 5
"""Margin of the job's time limit over that of the run, which ends first and reads the log."""

MAX_REQUEUES = 5
"""Maximum requeues of a run; after that, its end counts as a failure."""

_NO_FAULT = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")
"""SLURM states of a job that ended for reasons outside of its run."""

_ENDED_FROM_OUTSIDE = ("CANCELLED", "TIMEOUT")
"""SLURM states of a cancelled job, which is not run again."""


class _States(SlurmInfoWatcher):  # type: ignore[misc]
    """SLURM states of all jobs.

    submitit waits forever for a job that was preempted by cancellation, and treats a suspended job
    as ended.
    """

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        state: str = self.get_state(job_id, mode=mode)
        if state in ("PREEMPTED", "SUSPENDED"):
            return state == "PREEMPTED"
        return bool(super().is_done(job_id, mode="cache"))


class _Job(submitit.SlurmJob):  # type: ignore[misc]
    watcher = _States(delay_s=60)


class _RefusedError(SweepError):
    """SLURM rejects a job, but may accept it after others have ended."""


@dataclass(slots=True)
class _Running:
    prediction: Prediction
    key: str
    job: "submitit.Job[Outcome]"
    folder: Path

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended; without SLURM accounting, its worker reports it."""
        if self.job.done():
            return True
        return self.job.state == "UNKNOWN" and (self.folder / worker.STOPPED).exists()

    @property
    def is_interrupted(self) -> bool:
        """Whether a job without an outcome was ended for external reasons.

        slurmctld may report a job that it stopped as failed, because of its script's exit status.
        """
        state = self.job.state
        if state.startswith(_NO_FAULT) or (self.folder / _CANCELLED).exists():
            return True
        is_stopped = (self.folder / worker.STOPPED).exists()
        return is_stopped and not state.startswith(_ENDED_FROM_OUTSIDE)


@dataclass(slots=True)
class Launcher:
    """Run the chosen combinations of a sweep, except those in the results file."""

    loaded: Loaded
    predictor: Predictor
    results: Results
    folder: Path
    report: Callable[[str], None]
    _total: int = 0
    _ended: int = 0
    _refused_until: float = 0.0

    def run(self, chosen: Sequence[Prediction], retry_failed: bool = False) -> None:
        """Run missing combinations, `run.at_once` at a time; Ctrl-C cancels running jobs."""
        finished_keys = self.results.finished_keys(retry_failed)
        pending = [
            prediction for prediction in chosen if self._key(prediction) not in finished_keys
        ]
        self._total, self._ended = len(chosen), len(chosen) - len(pending)
        if self._ended:
            self.report(f"{self._ended} of {self._total} runs were made before")
        pending.reverse()
        # Jobs in flight from an earlier sweep come first, because they may use up a quota.
        pending.sort(
            key=lambda prediction: self.results.job_in_flight(self._key(prediction)) is not None
        )
        running: list[_Running] = []
        num_requeues: Counter[str] = Counter()
        with _cancel_on_interrupt(running):
            while pending or running:
                self._fill(pending, running)
                for run in [run for run in running if run.has_ended]:
                    running.remove(run)
                    outcome = self._outcome(run, num_requeues[run.key])
                    if outcome is None:
                        num_requeues[run.key] += 1
                        pending.append(run.prediction)
                        self.report(f"again  {run.prediction.configuration} {run.job.state}")
                    else:
                        self._record(run.prediction, run.key, outcome)
                time.sleep(POLL_S if running else 0)

    def _fill(self, pending: list[Prediction], running: list[_Running]) -> None:
        """Start waiting runs from the end of the list, up to the maximum number."""
        while pending and len(running) < self.loaded.sweep.run.at_once:
            if running and time.monotonic() < self._refused_until:
                return
            try:
                self._start(pending[-1], running)
            except _RefusedError as error:
                if not running:
                    raise
                logger.warning("%s; %d others run, so it is tried again", error, len(running))
                self._refused_until = time.monotonic() + RETRY_S
                return
            pending.pop()

    def _key(self, prediction: Prediction) -> str:
        return key_of(prediction.configuration, self.loaded)

    def _start(self, prediction: Prediction, running: list[_Running]) -> None:
        """Submit a run, or take over a job of an earlier sweep."""
        key = self._key(prediction)
        folder = self.folder / key
        job_id = self.results.job_in_flight(key)
        if job_id is not None:
            resumed = self._take_over(prediction, key, job_id)
            if resumed is not None:
                running.append(resumed)
                return
            outcome = worker.read_outcome(folder, self._num_nodes)
            if outcome is not None:
                self._record(prediction, key, outcome)
                return
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = map(worker.outcome_name, range(self._num_nodes))
        for name in (_CANCELLED, worker.STOPPED, *outcomes):
            (folder / name).unlink(missing_ok=True)
        job = self._submit(prediction, folder)
        running.append(_Running(prediction, key, job, folder))
        self.results.start(key, str(job.job_id))
        self.report(f"start  {prediction.configuration}")

    def _submit(self, prediction: Prediction, folder: Path) -> "submitit.Job[Outcome]":
        job = _job_of(self.loaded, prediction, folder)
        try:
            return self._executor(folder).submit(worker.run_job, job)
        except submitit.core.utils.FailedJobError as error:
            raise _RefusedError(
                f"no job can be submitted: {str(error).strip()}; what it asks for is the cluster "
                "file's nodes and devices, and what `run: slurm:` of the sweep adds"
            ) from None
        except (submitit.core.utils.FailedSubmissionError, OSError) as error:
            raise SweepError(f"no job can be submitted: {' '.join(str(error).split())}") from None

    def _take_over(self, prediction: Prediction, key: str, job_id: str) -> _Running | None:
        """Return a SLURM job that is still queued or running; local jobs end with their sweep."""
        # The number becomes part of a path from which submitit unpickles the job's result.
        if self.loaded.sweep.run.executor != "slurm" or not _JOB.fullmatch(job_id):
            return None
        folder = self.folder / key
        job: submitit.Job[Outcome] = _Job(folder / _JOB_FOLDER, job_id, range(self._num_nodes))
        resumed = _Running(prediction, key, job, folder)
        return None if resumed.has_ended else resumed

    def _record(self, prediction: Prediction, key: str, outcome: Outcome) -> None:
        config = prediction.configuration
        mfu = None if outcome.step_s is None else self.predictor.mfu(config, outcome.step_s)
        predicted = prediction.step_s, prediction.peak_bytes, prediction.bubble
        self.results.record(key, self.loaded.sweep.name, Result(config, outcome, mfu, *predicted))
        self._ended += 1
        speed = "" if outcome.step_s is None else f" {outcome.step_s:.3f} s a step"
        self.report(f"{outcome.status.value:6s} {config}{speed} ({self._ended} of {self._total})")

    def _outcome(self, running: _Running, num_requeues: int) -> Outcome | None:
        """Return the outcome of a run; None if it must be submitted again."""
        outcome = worker.read_outcome(running.folder, self._num_nodes)
        if outcome is not None:
            return outcome
        job = running.job
        if running.is_interrupted:
            if num_requeues < MAX_REQUEUES:
                return None
            why = f"its job was ended {num_requeues + 1} times before it had a result"
            return Outcome(
                Status.FAILED, log_tail=f"{why}, the last time {job.job_id} ({job.state})"
            )
        try:
            return worker.merge_outcomes(job.results())
        except Exception as error:  # submitit raises the job's exception, of any type
            text = f"{str(error).strip()[-2000:]}\njob {job.job_id} left no result ({job.state})"
            return Outcome(Status.FAILED, log_tail=text)

    @property
    def _num_nodes(self) -> int:
        return self.loaded.cluster.nodes

    def _executor(self, folder: Path) -> submitit.Executor:
        run, cluster = self.loaded.sweep.run, self.loaded.cluster
        jobs = folder / _JOB_FOLDER
        minutes = run.timeout_minutes + _SPARE_MINUTES
        gpus = cluster.devices_per_node if cluster.backend == "nccl" else 0
        if run.executor == "local":
            local = submitit.LocalExecutor(jobs)
            local.update_parameters(timeout_min=minutes, gpus_per_node=gpus)
            return local
        try:
            slurm = submitit.SlurmExecutor(jobs)
            slurm.job_class = _Job
            # A job has all processors of exclusive nodes; otherwise only the requested ones.
            shares = run.slurm.get("exclusive") is False
            parameters = {
                "job_name": self.loaded.sweep.name,
                "time": minutes,
                "nodes": cluster.nodes,
                "ntasks_per_node": 1,
                "gpus_per_node": gpus or False,
                "exclusive": True,
                "cpus_per_task": shares and cluster.devices_per_node * run.threads,
                # An interrupted run is submitted as a new job with separate files.
                "additional_parameters": {"no-requeue": True},
                **run.slurm,
            }
            # sbatch has no value for an absent flag, nor for zero GPUs without GPUs.
            slurm.update_parameters(
                **{name: value for name, value in parameters.items() if value is not False}
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise SweepError(f"SLURM cannot be used: {error}") from None
        return slurm


def _job_of(loaded: Loaded, prediction: Prediction, folder: Path) -> worker.Job:
    """Return the settings of a run; an adaptive plan is written to its folder."""
    config, run, plan = prediction.configuration, loaded.sweep.run, None
    folder = folder.resolve()
    if config.schedule == ADAPTIVE and prediction.schedule is not None:
        folder.mkdir(parents=True, exist_ok=True)
        plan = folder / "schedule.json"
        plan.write_text(prediction.schedule.to_json(), encoding="utf-8")
    return worker.Job(
        trainer_command(loaded, config, plan),
        folder,
        run,
        loaded.cluster,
        launcher=os.getpid() if run.executor == "local" else None,
        is_ordered=max(config.tensor_parallel, config.context_parallel) > 1,
    )


@contextmanager
def _cancel_on_interrupt(running: Sequence[_Running]) -> Iterator[None]:
    """Cancel running jobs when the sweep is interrupted.

    After any other failure, SLURM jobs continue, for the next sweep to take over; local jobs end
    with this sweep.
    """
    try:
        yield
    except BaseException as error:
        for run in running:
            is_local = not isinstance(run.job, _Job)
            if is_local or isinstance(error, KeyboardInterrupt):
                with suppress(OSError):
                    (run.folder / _CANCELLED).touch()
                run.job.cancel(check=False)
        raise


def dry_run(
    loaded: Loaded,
    chosen: Sequence[Prediction],
    folder: Path,
    show: Callable[[str], None],
) -> None:
    """Show the command of every run, for a shell on a node, instead of running it."""
    nodes = loaded.cluster.nodes
    rendezvous_flags = " ".join(worker.rendezvous(nodes, '"$NODE"', '"$HOST"'))
    if nodes > 1:
        show(
            f"# on each of {nodes} nodes, with its number as NODE and the first one's name as HOST"
        )
    for prediction in chosen:
        job = _job_of(loaded, prediction, folder / key_of(prediction.configuration, loaded))
        variables = [f"{name}={shlex.quote(value)}" for name, value in job.environment.items()]
        show(" ".join([*variables, "torchrun", rendezvous_flags, shlex.join(job.ranks)]))
