"""The whole training command of a row of `advise`, and whether it starts."""

from __future__ import annotations

import logging
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from itertools import chain
from pathlib import Path

from megatron_vshape.mcore.options import schedule_names
from megatron_vshape.rehearsal.command import Command, sizes_of, words_by_flag
from megatron_vshape.rehearsal.megatron_layers import with_layers
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import CheckedRank, FailedRank, notes_of_ignored
from megatron_vshape.rehearsal.ranks import DryRunConfig, check_all
from megatron_vshape.tuning import fsdp
from megatron_vshape.tuning.configurations import POST_VALIDATION, Subject
from megatron_vshape.tuning.predictor import Prediction

logger = logging.getLogger(__name__)


def needs_file(row: Prediction) -> bool:
    """Return whether training runs the row's schedule from a file: a plan, or one of k chunks."""
    name = row.configuration.schedule
    return not row.is_stock and name != fsdp.NAME and name not in schedule_names()


def row_command(
    row: Prediction, subject: Subject, file: str, post_validation: bool = False
) -> Command:
    """Return the whole command that runs a row.

    Args:
        row: the prediction.
        subject: the model with today's command.
        file: path of the schedule file, for schedules that training does not have by name.
        post_validation: validate the gradient norm after the step.
    """
    config = row.configuration
    command = config.command(subject)
    if config.schedule == fsdp.NAME:
        return fsdp.sharded_command(command)
    if row.is_stock:
        return with_layers(command, row.layers, config.pipeline_parallel)
    split = ",".join(map(str, row.layers)) if len(set(row.layers)) > 1 else ""
    flags = config.schedule_flags(file if needs_file(row) else config.schedule, split)
    options = {flag.removeprefix("--"): text or True for flag, text in flags.items()}
    return command.having(**options, **(POST_VALIDATION if post_validation else {}))


def script_of(command: Command, gpus: int, node: int) -> str:
    """Return a shell script that starts a command with torchrun.

    Args:
        command: the whole command.
        gpus: number of GPUs.
        node: maximum number of GPUs per node; a node that the command names takes precedence.
    """
    per_node = min(gpus, node)
    launcher = f"torchrun --nnodes {gpus // per_node} --nproc-per-node {per_node}"
    options = [shlex.join([flag, *words]) for flag, words in words_by_flag(command.flags).items()]
    lines = [
        "#!/usr/bin/env bash",
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(text)}" for name, text in command.environment.items()),
        " \\\n    ".join([f"{launcher} {shlex.quote(command.script)}", *options]),
    ]
    return "\n".join(lines) + "\n"


class StartChecks:
    """Start-up checks of the first and the last rank of rows, while the search continues.

    Rows whose schedule has neither a name nor a file are not checked.
    """

    def __init__(
        self,
        subject: Subject,
        gpus: int,
        make_config: Callable[[], DryRunConfig],
        executor: Executor,
    ) -> None:
        """Prepare checks of rows of `subject` on `gpus` GPUs, which `executor` runs."""
        self._subject, self._gpus, self._make_config = subject, gpus, make_config
        self._executor = executor
        self._checks: list[tuple[Prediction, Future[list[CheckedRank | FailedRank]]]] = []

    def start(self, row: Prediction | None) -> None:
        """Start the checks of a row, unless they have been started."""
        if row is not None and not any(row is checked_row for checked_row, _ in self._checks):
            self._checks.append((row, self._executor.submit(self._check, row)))

    def faults(self, rows: Iterable[Prediction]) -> list[tuple[Prediction, str]]:
        """Check rows, and return those that do not start, with the reason."""
        rows = list(rows)
        for row in rows:
            self.start(row)
        checks = [
            (row, check.result())
            for row, check in self._checks
            if any(row is wanted_row for wanted_row in rows)
        ]
        for note in notes_of_ignored(chain.from_iterable(results for _, results in checks)):
            logger.warning("%s", note)
        return [
            (row, result.error)
            for row, results in checks
            for result in results[-1:]
            if isinstance(result, FailedRank)
        ]

    def _check(self, row: Prediction) -> list[CheckedRank | FailedRank]:
        config = self._make_config()
        with tempfile.TemporaryDirectory() as folder:
            jobs = list(_jobs(row, self._subject, self._gpus, config, Path(folder)))
            results = list(check_all(config.programs, jobs)) if jobs else []
        return sorted(results, key=lambda result: isinstance(result, FailedRank))


def _with_few_layers(command: Command) -> Command:
    """Return a command without a pipeline with at most four layers, to build them in seconds.

    Its start does not depend on their number. Commands that name the kind of every layer stay.
    """
    if command.pattern or command.has("--linear-attention-freq"):
        return command
    return command.having(num_layers=min(_FEW, command.layers), moe_layer_freq=None)


_FEW = 4


def _jobs(
    row: Prediction, subject: Subject, gpus: int, config: DryRunConfig, folder: Path
) -> Iterator[RankJob]:
    path = folder / "schedule.json"
    if needs_file(row):
        if row.schedule is None:
            return
        path.write_text(row.schedule.to_json())
    command = row_command(row, subject, str(path))
    sizes = sizes_of(command, gpus)
    if sizes.pipeline == 1:
        command = _with_few_layers(command)
    for stage in dict.fromkeys((0, sizes.pipeline - 1)):
        yield config.job(command, sizes, stage, row.configuration.schedule, check=True)
