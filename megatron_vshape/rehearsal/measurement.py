"""Starts single ranks of a training command on this machine, one after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_vshape.rehearsal.rank_job import RankJob

_AHEAD = 2
"""Processes that import while a rank runs."""


def measure_ranks(
    jobs: Sequence[RankJob],
    megatron: Path | None = None,
    timeout_s: float | None = None,
    steps: int = 6,
) -> Iterator[dict[str, Any]]:
    """Run the ranks one after another and yield their results; an error is a result, too."""
    processes = deque(_start(megatron, steps) for _ in jobs[:_AHEAD])
    try:
        for index, job in enumerate(jobs):
            process = processes.popleft()
            if index + _AHEAD < len(jobs):
                processes.append(_start(megatron, steps))
            try:
                text, errors = process.communicate(job.to_json() + "\n", timeout_s)
            except subprocess.TimeoutExpired:
                text, errors = "", f"no result after {timeout_s:g} s"
            finally:
                process.kill()
                process.wait()
            if lines := text.strip().splitlines():
                yield json.loads(lines[-1])
            else:
                last_lines = "\n".join(errors.strip().splitlines()[-8:])
                yield {"error": last_lines or "the process ended without a message"}
    finally:
        for process in processes:
            process.kill()


def _start(megatron: Path | None, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"{__package__}.measurement_worker", str(steps)]
    command += [] if megatron is None else [str(megatron)]
    root = str(Path(__file__).parents[2])  # a checkout need not be installed
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # as torchrun sets it
    environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(paths)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    )


def format_passes(result: Mapping[str, Any]) -> str:
    """Format the passes of a measured rank: times and, on a GPU, the memory that each pass adds."""
    return "; ".join(
        f"{kind['kind']}{kind['chunk']} {kind['ms']:.2f} ms"
        + (f" {kind['adds_bytes'] / 2**20:+.0f} MiB" if result["on_gpu"] else "")
        for kind in result["kinds"]
    )
