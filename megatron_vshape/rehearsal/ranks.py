"""Rehearses ranks side by side, in processes forked from one that has everything imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError

Found = dict[str, Any]
"""What `one_rank.rehearse` returned, or an error."""


@dataclass(frozen=True, slots=True)
class Programs:
    """What is rehearsed with."""

    megatron: Path | None
    te: Path | None
    jobs: int  # ranks side by side


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
