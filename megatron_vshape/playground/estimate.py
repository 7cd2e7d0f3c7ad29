"""Estimates of pasted training commands: `rehearse` in a subprocess, one at a time."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_vshape.playground.request import FieldError
from megatron_vshape.playground.worker import Frame, error_frame, frame

LIMIT_S = 900
_MAX_CHARACTERS = 100_000
_MAX_GPUS = 1_000_000

_PROGRAM = "megatron_vshape.cli.pasted"
_RESULT = "estimate.json"
# Variables in a pasted script are substituted, and an error can contain them.
_ENVIRONMENT = ("HOME", "LANG", "LC_", "LD_", "PATH", "PYTHON", "TMPDIR", "TRANSFORMER_", "XDG_")


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """A training command, and the GPUs to estimate it for."""

    command: str
    gpu: str
    number: int | None  # None: the minimum for the command's parallel sizes


def parse_estimate(data: object, gpus: Mapping[str, int]) -> EstimateRequest:
    """Check a request of the browser.

    Raises:
        FieldError: A field is missing or invalid.
    """
    fields = data if isinstance(data, dict) else {}
    command, gpu, number = (fields.get(name) for name in ("command", "gpu", "number"))
    if not isinstance(command, str) or not 0 < len(command.strip()) <= _MAX_CHARACTERS:
        raise FieldError("command", "paste a training command, such as pretrain_gpt.py FLAGS")
    if not isinstance(gpu, str) or gpu not in gpus:
        raise FieldError("gpu", f"choose one of {', '.join(gpus)}")
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    if number is not None and not (is_whole and 0 < number <= _MAX_GPUS):
        raise FieldError("number", "the number of GPUs is a whole number above 0, or empty")
    return EstimateRequest(command, gpu, number)


class Estimator:
    """Runs one estimate at a time."""

    def __init__(self) -> None:
        self._is_busy = False
        self._ended: asyncio.Future[tuple[bytes, bytes]] | None = None

    async def answer(self, request: EstimateRequest) -> AsyncIterator[bytes]:
        """Yield a progress frame per second, and at last a result or an error.

        Closing the iterator ends the estimate.
        """
        if self._is_busy:
            yield error_frame("request", "another estimate is running: try again when it has ended")
            return
        self._is_busy = True
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                process = await _start(request, folder)
                async with aclosing(self._frames(request, process, Path(folder))) as frames:
                    async for progress_frame in frames:
                        yield progress_frame
        finally:
            self._is_busy = False

    async def _frames(
        self, request: EstimateRequest, process: Process, folder: Path
    ) -> AsyncGenerator[bytes]:
        self._ended = ended = asyncio.ensure_future(process.communicate(request.command.encode()))
        try:
            for _ in range(LIMIT_S):
                yield frame(Frame.PROGRESS, json.dumps({"doing": "estimating"}).encode())
                if (await asyncio.wait({ended}, timeout=1.0))[0]:
                    yield _last_frame(process, ended.result()[1].decode(), folder)
                    return
            limit = f"no result within {LIMIT_S // 60} minutes: estimate it without a time limit"
            yield error_frame("command", f"{limit}: megatron-vshape rehearse -- COMMAND")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its workers

    async def close(self) -> None:
        """Wait until the last estimate has ended."""
        if self._ended is not None:
            await asyncio.wait({self._ended}, timeout=5.0)


async def _start(request: EstimateRequest, folder: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", _PROGRAM, request.gpu, str(request.number or "")),
        stdin=PIPE,
        stdout=DEVNULL,
        stderr=PIPE,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
        start_new_session=True,
    )


def _last_frame(process: Process, errors: str, folder: Path) -> bytes:
    if process.returncode:
        error = errors.rpartition("megatron-vshape: ")[2].strip() or "it ended without a message"
        return error_frame("command", error)
    report = json.loads((folder / _RESULT).read_text())
    ranks = [
        {name: rank[name] for name in ("rank", "parts", "peak_bytes")} for rank in report["ranks"]
    ]
    answer = {name: report[name] for name in ("step_s", "step_estimate", "verdict", "remedies")}
    answer |= {name: report["assumed"][name] for name in ("gpu", "gpu_memory_bytes")}
    return frame(Frame.RESULT, json.dumps({**answer, "ranks": ranks}).encode())
