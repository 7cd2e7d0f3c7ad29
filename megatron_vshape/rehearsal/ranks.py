"""Run dry runs of several ranks in parallel, in processes forked from a prepared one."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.schedule_names import is_megatrons_own
from megatron_vshape.rehearsal import sources
from megatron_vshape.rehearsal.command import SCHEDULE, Command, Sizes
from megatron_vshape.rehearsal.dry_run_flags import environment_of, evaluation_of, without_files
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.rank_job import LoraConfig, RankJob, Reference
from megatron_vshape.rehearsal.rank_report import CheckedRank, FailedRank, RankReport, ending
from megatron_vshape.rehearsal.sources import MissingSourceError, PythonSource

PER_RANK = 4
"""Maximum microbatches per pipeline rank: a schedule reaches its peak in the first ones."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of a dry run."""

    megatron: Path | None
    te: Path | None
    jobs: int  # ranks in parallel


@dataclass(frozen=True, slots=True)
class DryRunConfig:
    """Programs, GPU and other settings for the dry runs of a command."""

    programs: Programs
    script: Path
    gpu: Gpu
    vocabulary: int | None = None  # vocabulary size of the tokenizer's files
    imbalance: float = 1.0  # tokens of a rank's experts relative to the mean
    strict: bool = False  # reject flags that Megatron's parser does not have
    lora: LoraConfig | None = None
    reference: Reference | None = None

    @classmethod
    def of(
        cls,
        command: Command,
        gpu: Gpu,
        megatron: Path | None = None,
        te: Path | None = None,
        jobs: int | None = None,
        vocabulary: int | None = None,
        imbalance: float = 1.0,
        strict: bool = False,
        lora: LoraConfig | None = None,
    ) -> DryRunConfig:
        """Find the programs for a command.

        Raises:
            ScheduleError: Megatron, Transformer Engine or the script cannot be found.
        """
        megatron = sources.find_megatron(megatron, command.script)
        if _needs_te(command, te):
            te = sources.find_te(te)
        programs = Programs(megatron, te, jobs or os.cpu_count() or 1)
        script = sources.find_script(command.script, megatron)
        return cls(programs, script, gpu, vocabulary, imbalance, strict, lora, command.reference)

    def flags(self, command: Command) -> list[str]:
        """Return the command's flags without those that read files."""
        return without_files(command, self.vocabulary)

    def job(
        self, command: Command, sizes: Sizes, stage: int, name: str, check: bool = False
    ) -> RankJob:
        """Return the job for a pipeline rank; its result includes `name`.

        Flags that read files are removed. With --pipeline-schedule, the batch is cut to `PER_RANK`
        microbatches per pipeline rank, unless the schedule is from a file.
        With `check`, only the start-up checks run, which include those of the evaluation.
        """
        flags = self.flags(command)
        schedule, many = command.value(SCHEDULE), 0
        if check:
            flags += evaluation_of(command)
        # Megatron's interleaved 1F1B does not support every number of microbatches.
        if schedule is not None and not (check and is_megatrons_own(schedule)):
            flags += _fewer_microbatches(command, sizes)
            batch = command.number("--global-batch-size", 0)
            many = batch // (command.number("--micro-batch-size", 1) * sizes.replicas)
        return RankJob(
            script=str(self.script),
            flags=flags,
            gpu=self.gpu,
            world=sizes.world,
            rank=sizes.last_rank(stage),
            environment=environment_of(command),
            has_schedule=schedule is not None,
            stage=stage,
            name=name,
            imbalance=self.imbalance,
            lora=self.lora,
            reference=self.reference,
            batch_microbatches=many,
            checks_only=check,
            strict=self.strict,
        )


def missing_sources(command: Command, megatron: Path | None, te: Path | None) -> list[PythonSource]:
    """Return the Python sources that a dry run of the command needs and this machine lacks."""
    searches: list[Callable[[], object]] = [lambda: sources.find_megatron(megatron, command.script)]
    if _needs_te(command, te):
        searches.append(lambda: sources.find_te(te))
    missing = []
    for search in searches:
        try:
            search()
        except MissingSourceError as error:
            missing.append(error.source)
    return missing


def _needs_te(command: Command, te: Path | None) -> bool:
    return command.value("--transformer-impl") != "local" or te is not None


def _fewer_microbatches(command: Command, sizes: Sizes) -> list[str]:
    """Return flags for a smaller batch: the first microbatches determine a schedule's peak.

    A schedule file is for a fixed number.
    """
    if (command.value(SCHEDULE) or "").endswith((".json", ".csv")):
        return []
    samples = command.number("--micro-batch-size", 1) * sizes.replicas
    max_batch = samples * PER_RANK * sizes.pipeline
    batch = command.number("--global-batch-size", max_batch)
    return ["--global-batch-size", str(min(batch, max_batch))]


def rehearse_all(programs: Programs, jobs: Iterable[RankJob]) -> Iterator[RankReport | FailedRank]:
    """Run each job by `one_rank.rehearse`, in a process forked from `worker`.

    Yields its report or error in order of completion.

    Raises:
        ScheduleError: The worker did not start.
    """
    for plain in run_jobs(programs, jobs):
        yield FailedRank(**plain) if "error" in plain else RankReport.from_json(plain)


def check_all(programs: Programs, jobs: Iterable[RankJob]) -> Iterator[CheckedRank | FailedRank]:
    """Run the start-up checks of each job; yield in order of completion, errors included.

    Args:
        programs: the programs of a dry run.
        jobs: jobs that were made with `check`.

    Raises:
        ScheduleError: The worker did not start.
    """
    for plain in run_jobs(programs, jobs):
        yield FailedRank(**plain) if "error" in plain else CheckedRank(**plain)


def run_jobs(programs: Programs, jobs: Iterable[RankJob]) -> Iterator[dict[str, Any]]:
    """Run jobs in a worker process and yield its results as plain values.

    Later calls with the same programs use the same worker, since its imports take several seconds.

    Raises:
        ScheduleError: The worker did not start, or ended.
    """
    worker = _idle_workers.pop(programs, None)
    if worker is None or not worker.is_running():
        worker = _Worker(programs)
    is_idle = False
    try:
        yield from worker.run(jobs)
        is_idle = _idle_workers.setdefault(programs, worker) is worker
    finally:
        if not is_idle:
            worker.kill()


_idle_workers: dict[Programs, _Worker] = {}
os.register_at_fork(after_in_child=_idle_workers.clear)


@atexit.register
def _kill_idle_workers() -> None:
    for worker in _idle_workers.values():
        worker.kill()


class _Worker:
    """A process of `rehearsal.worker`."""

    def __init__(self, programs: Programs) -> None:
        options = {
            "megatron": None if programs.megatron is None else str(programs.megatron),
            "te": None if programs.te is None else str(programs.te.resolve()),
            "jobs": programs.jobs,
        }
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_vshape.rehearsal.worker", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def is_running(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.poll() is None

    def run(self, jobs: Iterable[RankJob]) -> Iterator[dict[str, Any]]:
        """Yield the result of each job in order of completion.

        Raises:
            ScheduleError: The worker has ended.
        """
        requests: Any = self._process.stdin
        results: Any = self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            requests.write("".join(job.to_json() + "\n" for job in jobs) + "\n")
            requests.flush()
        for line in results:
            if not line.strip():
                return
            yield json.loads(line)
        returncode = self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors if line.strip()]
        error = lines[-1].strip() if lines else f"its process ended {ending(returncode)}"
        raise ScheduleError(f"the dry run could not be prepared: {error}{_install_hint(error)}")

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._errors, self._process:
            pass


def _install_hint(error: str) -> str:
    """Return the command that installs a library which Megatron imports, if one is missing."""
    name = error.partition("No module named '")[2]
    if not name or name.startswith(("megatron", "transformer_engine")):
        return ""
    return ": pip install 'megatron-vshape[estimate]'"
