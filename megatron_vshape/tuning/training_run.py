"""A process of a training run, and its log: shared by `sweep` and `trial`."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

LAST_LINES = 12
POLL_S = 0.2
STOPPING_S = 40.0  # torchrun gives its ranks 30 s before it kills them

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)
_FAULT = re.compile(r"(^|\s|\w)(Error|Exception)(: |$)|\berror: |^megatron-vshape: ")
_COLOR = re.compile(r"\x1b\[[\d;]*[mK]")
_FOOTER = re.compile(r"torch[./]distributed[./]elastic")
"""Start of torchrun's report about failed ranks."""

_MARK = "MEGATRON_VSHAPE_RUN"
"""Environment variable by which the processes of a run are known."""

STEP = re.compile(
    r"iteration +(?P<step>\d+)/ *(?P<steps>\d+) \|[^\n]*elapsed time per iteration \(ms\): "
    r"(?P<ms>[\d.]+) \|[^\n]*global batch size: +(?P<batch>\d+) \|"
    r"(?:[^\n]*\blm loss: (?P<loss>\S+) \|)?"
)
"""Megatron's line of a step; there is no loss if it is not a number."""

_MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\)[^\n]*\| max allocated: ([\d.]+)"
)
_NUM_RANKS = re.compile(r"using world size: (\d+),")


class Status(StrEnum):
    """Status of a finished run."""

    OK = "ok"
    OUT_OF_MEMORY = "OOM"
    FAILED = "failed"


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    is_unneeded: Callable[[], bool],
) -> int | None:
    """Return the exit code; None if the run became unneeded. No process of the run remains.

    Args:
        command: program and arguments.
        environment: variables in addition to those of this process.
        output: file descriptor for the output.
        is_unneeded: called several times per second; True ends the run.
    """
    mark = uuid4().hex
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment, _MARK: mark},
        start_new_session=True,
    )
    try:
        while process.poll() is None:
            if is_unneeded():
                return None
            time.sleep(POLL_S)
        return process.returncode
    finally:
        _stop(process, mark)


def _stop(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the run: torchrun, which ends its ranks, and any ranks that remain.

    Each rank is in a separate session, so signals to torchrun's group do not reach it.
    """
    if process.poll() == 0:
        return
    process.terminate()
    # A second Ctrl-C does not wait.
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(STOPPING_S)
    for pid in _marked_processes(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def _marked_processes(mark: str) -> list[int]:
    """List the processes of a run by their environment, from /proc on Linux; empty elsewhere.

    The ranks of a launcher that was killed have another parent.
    """
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if f"{_MARK}={mark}".encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def is_out_of_memory(text: str, code: int | None) -> bool:
    """Return whether a run with this log and exit code had too little memory."""
    return code == -signal.SIGKILL or _OUT_OF_MEMORY.search(text) is not None


def exit_text(code: int) -> str:
    """Format the exit code of a failed run."""
    if code >= 0:
        return f"ended with exit code {code}, without a word"
    return f"ended by signal {-code} ({signal.strsignal(-code) or 'unnamed'})"


def last_lines(text: str) -> str:
    """Return the last lines up to the first fault, because later faults follow from it.

    Without a fault, return the last lines before torchrun's report.
    """
    plain = _COLOR.sub("", text)
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    footer = next((index for index, line in enumerate(lines) if _FOOTER.search(line)), 0)
    lines = lines[: footer or len(lines)]
    faults = [index + 1 for index, line in enumerate(lines) if _FAULT.search(line)]
    end = faults[0] if faults else len(lines)
    return "\n".join(lines[max(0, end - LAST_LINES) : end])


@dataclass(slots=True)
class TrainingLog:
    """Figures in the log of a run with `--log-interval 1`."""

    path: Path
    step_s: dict[int, float] = field(default_factory=dict)  # by step, from 1
    losses: dict[int, float] = field(default_factory=dict)
    peak_bytes: dict[int, float] = field(default_factory=dict)  # allocated, by global rank
    num_ranks: int = 0
    _num_bytes: int = 0  # of the file that were read

    def update(self) -> None:
        """Read the complete lines that were added to the file."""
        with self.path.open("rb") as stream:
            stream.seek(self._num_bytes)
            lines, newline, _ = stream.read().rpartition(b"\n")
        self._num_bytes += len(lines + newline)
        text = lines.decode(errors="replace")
        for match in STEP.finditer(text):
            self.step_s[int(match["step"])] = float(match["ms"]) / 1e3
            if match["loss"] is not None:
                self.losses[int(match["step"])] = float(match["loss"])
        for rank, mib in _MEMORY.findall(text):
            peak_bytes = 2**20 * float(mib)
            self.peak_bytes[int(rank)] = max(peak_bytes, self.peak_bytes.get(int(rank), 0.0))
        for number in _NUM_RANKS.findall(text):
            self.num_ranks = int(number)
