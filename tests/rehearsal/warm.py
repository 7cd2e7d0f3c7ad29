"""Dry runs of many commands that import Megatron once.

As a script, this file is a process that prepares like a worker of dry runs and forks for every set
of jobs: imports take longer than most dry runs of the tests. `Warm` starts such processes, unless
another one with the same folder `common` has, and the command line runs its jobs in them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple
from unittest import mock

import servers

from megatron_vshape.rehearsal.rank_job import RankJob

ROOT = Path(__file__).parents[2]


class PassRecord(NamedTuple):
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def alone(folder: Path, *arguments: str) -> PassRecord:
    """Run the command line in a separate process, which starts its workers."""
    ran = subprocess.run(
        [sys.executable, "-m", "megatron_vshape", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return PassRecord(ran.returncode, ran.stdout, ran.stderr)


def rehearse(
    run: Callable[..., PassRecord],
    folder: Path,
    flags: Sequence[str],
    *options: str,
    script: str = "pretrain_gpt.py",
) -> tuple[str, dict[str, Any]]:
    """Return the output of a dry run, and the content of its JSON file."""
    file = folder / "report.json"
    ran = run(folder, "rehearse", "--json", str(file), *options, "--", script, *flags)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, json.loads(file.read_text())


class Warm:
    """Prepared processes, one per pair of Megatron and Transformer Engine."""

    def __init__(self, folder: Path, common: Path) -> None:
        self._folder, self._common = folder, common
        self._requests: dict[str, IO[str]] = {}
        self._asked = 0

    def __call__(self, folder: Path, *arguments: str) -> PassRecord:
        """Run the command line in that folder."""
        from megatron_vshape.cli.main import main
        from megatron_vshape.rehearsal import ranks

        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(ranks, "run_jobs", self.run_jobs),
        ):
            status = main(arguments)
        return PassRecord(status, out.getvalue(), err.getvalue())

    def run_jobs(self, programs: Any, jobs: Iterable[RankJob]) -> Iterator[Any]:
        """Yield the result of every job, like `ranks.run_jobs`."""
        self._asked += 1
        job_file, result_file = (
            self._folder / f"{kind}{self._asked}" for kind in ("asked", "told")
        )
        job_file.write_text("".join(job.to_json() + "\n" for job in jobs))
        paths = {
            name: None if path is None else str(path.resolve())
            for name, path in (("megatron", programs.megatron), ("te", programs.te))
        }
        key = json.dumps(paths)
        name = f"warm{zlib.crc32(key.encode())}"
        if key not in self._requests:
            environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
            command = [__file__, key]
            self._requests[key] = servers.connect(self._common, name, command, environment)
        requests = self._requests[key]
        requests.write(json.dumps([str(job_file), str(result_file), programs.jobs]) + "\n")
        requests.flush()
        assert requests.readline() == "0\n", (self._common / f"{name}.log").read_text()[-3000:]
        yield from map(json.loads, result_file.read_text().splitlines())

    def close(self) -> None:
        """End the connections, and with the last one the processes."""
        for requests in self._requests.values():
            requests.close()


def _serve() -> None:
    from megatron_vshape.rehearsal import worker

    worker.prepare(**json.loads(sys.argv[1]))
    servers.serve(_handle)


def _handle(requests: IO[str]) -> None:
    """Fork for the jobs of each line."""
    from megatron_vshape.rehearsal import worker

    for line in requests:
        job_file, result_file, at_once = json.loads(line)
        child = os.fork()
        if not child:
            with open(job_file) as jobs, open(result_file, "w") as out:
                worker.serve(jobs, out, at_once)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(status, file=requests, flush=True)


if __name__ == "__main__":
    _serve()
