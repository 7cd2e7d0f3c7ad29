"""Launching: one job per combination through submitit, each result kept as it arrives."""

import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import submitit

from megatron_vshape.sweep import worker
from megatron_vshape.sweep.command import trainer_command
from megatron_vshape.sweep.files import Loaded, SweepError
from megatron_vshape.sweep.grid import ADAPTIVE, Combination
from megatron_vshape.sweep.layer import model_flops
from megatron_vshape.sweep.predict import Prediction, Predictor
from megatron_vshape.sweep.results import Outcome, Result, Results, Status, key_of

logger = logging.getLogger(__name__)

_JOB = re.compile(r"[0-9]+(_[0-9]+)?")
"""What SLURM calls a job."""

_JOB_FOLDER = "job"
"""In a run's folder: what submitit writes there, the job's result among it."""

POLL_S = 0.5
SPARE_MINUTES = 5
"""The job's own limit is so much later than the run's, which ends it with its log read."""


class Watcher:
    """Hears of what happens; the default hears nothing."""

    def started(self, combination: Combination) -> None:
        """Hear that a run has been submitted."""

    def ended(self, result: Result) -> None:
        """Hear that a run has ended and its result is in the file."""


@dataclass(slots=True)
class _Running:
    prediction: Prediction
    key: str
    job: "submitit.Job[Outcome]"


@dataclass(slots=True)
class Launcher:
    """Runs the chosen combinations of a sweep; what the results file has is not run again."""

    loaded: Loaded
    predictor: Predictor
    results: Results
    folder: Path
    watcher: Watcher

    def run(self, chosen: Sequence[Prediction], retry_failed: bool = False) -> None:
        """Run what is missing, at most `run.at_once` side by side; Ctrl-C cancels what runs."""
        done = self.results.ended(retry_failed)
        waiting = [each for each in chosen if self._key(each) not in done]
        waiting.reverse()
        running: list[_Running] = []
        with _cancelled(running):
            while waiting or running:
                while waiting and len(running) < self.loaded.sweep.run.at_once:
                    self._start(waiting.pop(), running)
                for each in [each for each in running if each.job.done()]:
                    running.remove(each)
                    self._record(each.prediction, each.key, self._outcome(each))
                time.sleep(POLL_S if running else 0)

    def _key(self, prediction: Prediction) -> str:
        return key_of(prediction.combination, self.loaded, self.predictor.measured)

    def _start(self, prediction: Prediction, running: list[_Running]) -> None:
        """Submit a run, or take over the one that an earlier sweep left behind."""
        key = self._key(prediction)
        folder = self.folder / key
        left = self.results.job_in_flight(key)
        if left is not None:
            outcome = worker.read_outcome(folder, self._num_nodes)
            if outcome is not None:
                self._record(prediction, key, outcome)
                return
            job = self._reattach(folder, left)
            if job is not None:
                running.append(_Running(prediction, key, job))
                return
        folder.mkdir(parents=True, exist_ok=True)
        for node in range(self._num_nodes):
            (folder / worker.outcome_name(node)).unlink(missing_ok=True)
        self.watcher.started(prediction.combination)
        try:
            job = self._executor(folder).submit(worker.run_job, self._job(prediction, folder))
        except submitit.core.utils.FailedJobError as error:
            raise SweepError(
                f"no job can be submitted: {str(error).strip()}; what it asks for is the cluster "
                "file's nodes and devices, and what `run: slurm:` of the sweep adds"
            ) from None
        self.results.start(key, str(job.job_id))
        running.append(_Running(prediction, key, job))

    def _reattach(self, folder: Path, left: str) -> "submitit.Job[Outcome] | None":
        """Return a SLURM job that is still queued or running; local ones end with their sweep."""
        # The number becomes part of a path from which submitit unpickles the job's result.
        if self.loaded.sweep.run.executor != "slurm" or not _JOB.fullmatch(left):
            return None
        job: submitit.Job[Outcome] = submitit.SlurmJob(
            folder / _JOB_FOLDER, left, range(self._num_nodes)
        )
        return None if job.done() else job

    def _record(self, prediction: Prediction, key: str, outcome: Outcome) -> None:
        result = self._result(prediction, outcome)
        self.results.record(key, self.loaded.sweep.name, result)
        self.watcher.ended(result)

    def _outcome(self, running: _Running) -> Outcome:
        """Return how a job ended; one that raised, or was killed, has failed."""
        try:
            return worker.merge(running.job.results())
        except Exception as error:  # submitit raises what the job raised, of any type
            left = worker.read_outcome(self.folder / running.key, self._num_nodes)
            return left or Outcome(Status.FAILED, log_tail=str(error).strip()[-2000:])

    def _result(self, prediction: Prediction, outcome: Outcome) -> Result:
        it = prediction.combination
        mfu = None
        if outcome.step_s is not None:
            flops = model_flops(self.loaded.model, it.sequence_length, it.global_batch_size)
            peak = self.predictor.machine.peak_flops_per_us * 1e6 * it.num_devices
            mfu = flops / (outcome.step_s * peak)
        return Result(
            it,
            outcome,
            mfu,
            prediction.step_s,
            prediction.peak_bytes,
            prediction.bubble,
        )

    @property
    def _num_nodes(self) -> int:
        return self.loaded.cluster.nodes

    def _job(self, prediction: Prediction, folder: Path) -> worker.Job:
        run, cluster = self.loaded.sweep.run, self.loaded.cluster
        environment = {
            "OMP_NUM_THREADS": str(run.threads),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if cluster.backend == "gloo" else {}),
            **run.environment,
        }
        return worker.Job(
            tuple(self._command(prediction.combination, folder)),
            folder.resolve(),
            cluster.devices_per_node,
            cluster.nodes,
            run.warmup_steps,
            run.measured_steps,
            run.statistic == "fastest",
            60.0 * run.timeout_minutes,
            environment,
            os.getpid() if run.executor == "local" else None,
        )

    def _command(self, combination: Combination, folder: Path) -> list[str]:
        """Return the trainer's command; an adaptive plan goes along as a file."""
        if combination.schedule != ADAPTIVE:
            return trainer_command(self.loaded, combination)
        path = (folder / "schedule.json").resolve()
        path.write_text(self.predictor.schedule(combination).to_json(), encoding="utf-8")
        return trainer_command(self.loaded, combination, path)

    def _executor(self, folder: Path) -> submitit.Executor:
        run, cluster = self.loaded.sweep.run, self.loaded.cluster
        jobs = folder / _JOB_FOLDER
        minutes = run.timeout_minutes + SPARE_MINUTES
        gpus = cluster.devices_per_node if cluster.backend == "nccl" else 0
        if run.executor == "local":
            local = submitit.LocalExecutor(jobs)
            local.update_parameters(timeout_min=minutes, gpus_per_node=gpus)
            return local
        try:
            slurm = submitit.SlurmExecutor(jobs)
            asked = {
                "job_name": self.loaded.sweep.name,
                "time": minutes,
                "nodes": cluster.nodes,
                "ntasks_per_node": 1,
                "gpus_per_node": gpus or False,
                "exclusive": True,
                **run.slurm,
            }
            # sbatch has no word for a flag that is not given, nor for zero GPUs where none are.
            slurm.update_parameters(**{k: v for k, v in asked.items() if v is not False})
        except (RuntimeError, ValueError) as error:
            raise SweepError(f"SLURM cannot be used: {error}") from None
        return slurm


@contextmanager
def _cancelled(running: Sequence[_Running]) -> Iterator[None]:
    """Cancel the jobs that still run when an exception passes, Ctrl-C among them."""
    try:
        yield
    except BaseException:
        for each in running:
            each.job.cancel()
        raise


def dry_run(loaded: Loaded, chosen: Sequence[Prediction], show: Callable[[str], None]) -> None:
    """Show the command of every run instead of running it."""
    for each in chosen:
        plan = Path("PLAN.json") if each.combination.schedule == ADAPTIVE else None
        show(shlex.join(trainer_command(loaded, each.combination, plan)))
