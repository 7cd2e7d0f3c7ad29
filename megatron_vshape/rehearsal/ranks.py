"""Rehearses ranks side by side, in processes forked from one that has everything imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal import sources
from megatron_vshape.rehearsal.flags import Command, Sizes, environment_of, without_files

SCHEDULE = "--pipeline-schedule"
PER_RANK = 4
"""Microbatches of a schedule of ours that are run, at most, per rank of the pipeline."""

Found = dict[str, Any]
"""Result of `one_rank.rehearse`, or an error."""


@dataclass(frozen=True, slots=True)
class Programs:
    """What is rehearsed with."""

    megatron: Path | None
    te: Path | None
    jobs: int  # ranks side by side


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """With what ranks of a command are rehearsed, and on what."""

    programs: Programs
    script: Path
    gpu: str
    vocabulary: int | None = None  # tokens that the tokenizer's files have
    imbalance: float = 1.0  # tokens that a rank's experts get, over the mean

    @classmethod
    def of(
        cls,
        command: Command,
        gpu: str,
        megatron: Path | None = None,
        te: Path | None = None,
        jobs: int | None = None,
        vocabulary: int | None = None,
        imbalance: float = 1.0,
    ) -> Rehearsed:
        """Return what the command is rehearsed with.

        Raises:
            ScheduleError: Megatron, Transformer Engine or the script cannot be found.
        """
        megatron = sources.find_megatron(megatron, command.script)
        if command.value("--transformer-impl") != "local" or te is not None:
            te = sources.find_te(te)
        programs = Programs(megatron, te, jobs or os.cpu_count() or 1)
        script = sources.find_script(command.script, megatron)
        return cls(programs, script, gpu, vocabulary, imbalance)

    def job(self, command: Command, sizes: Sizes, stage: int, name: str) -> dict[str, Any]:
        """Return the rehearsal of a rank of the pipeline; `name` comes back with what it finds."""
        flags = without_files(command, self.vocabulary)
        ours, many = command.has(SCHEDULE), 0
        if ours:
            flags += _fewer_microbatches(command, sizes)
            batch = command.number("--global-batch-size", 0)
            many = batch // (command.number("--micro-batch-size", 1) * sizes.replicas)
        return {
            "script": str(self.script),
            "flags": flags,
            "gpu": self.gpu,
            "world": sizes.world,
            "rank": sizes.last_rank(stage),
            "imbalance": self.imbalance,
            "environment": environment_of(command),
            "schedule": ours,
            "batch_microbatches": many,
            "stage": stage,
            "name": name,
        }


def _fewer_microbatches(command: Command, sizes: Sizes) -> list[str]:
    """Return flags for a batch of at most so many: a schedule's peak is that of its first ones.

    A file's schedule is for so many as it says.
    """
    if (command.value(SCHEDULE) or "").endswith((".json", ".csv")):
        return []
    each = command.number("--micro-batch-size", 1) * sizes.replicas
    most = each * PER_RANK * sizes.pipeline
    batch = command.number("--global-batch-size", most)
    return ["--global-batch-size", str(min(batch, most))]


def rehearse_all(programs: Programs, jobs: Iterable[Mapping[str, Any]]) -> Iterator[Found]:
    """Yield what each job found, in the order in which they end; an error is a finding, too.

    Raises:
        ScheduleError: the worker did not start.
    """
    options = {
        "megatron": None if programs.megatron is None else str(programs.megatron),
        "te": None if programs.te is None else str(programs.te.resolve()),
        "jobs": programs.jobs,
    }
    command = [sys.executable, "-m", "megatron_vshape.rehearsal.worker", json.dumps(options)]
    text = "".join(json.dumps(job) + "\n" for job in jobs)
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+") as told:
        asked.write(text)
        asked.seek(0)
        with subprocess.Popen(
            command, stdin=asked, stdout=subprocess.PIPE, stderr=told, text=True
        ) as worker:
            yield from map(json.loads, worker.stdout or ())
        told.seek(0)
        errors = told.read()
    if worker.returncode:
        last = [line for line in errors.splitlines() if line.strip()]
        raise ScheduleError(
            f"the rehearsal could not be prepared: {(last or ['no reason given'])[-1]}"
        )
