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

from megatron_vshape.core.model.files import is_whole
from megatron_vshape.playground.request import FieldError
from megatron_vshape.playground.worker import Frame, error_frame, frame

_COMMAND = """torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py \\
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \\
    --disable-bias-linear --position-embedding-type rope \\
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \\
    --seq-length 8192 --max-position-embeddings 8192 --bf16 \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B \\
    --transformer-impl transformer_engine --use-distributed-optimizer \\
    --no-create-attention-mask-in-dataloader \\
    --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 128
"""

EXAMPLE = {"command": _COMMAND, "gpu": "h100", "number": "", "vocabulary": "128256"}
"""Entries of the form for Llama 3 8B on 32 GPUs."""

LIMIT_S = 900
_MAX_CHARACTERS = 100_000
_MAX_NUMBER = 10_000_000

_PROGRAM = "megatron_vshape.cli.pasted"
_RESULT = "estimate.json"
_VOCABULARY_FIX = "add --vocabulary N before the --"
_REPORT_FIELDS = ("run", "step_s", "step_estimate", "verdict", "remedies")
_RANK_FIELDS = ("rank", "parts", "peak_bytes", "reserved_bytes", "spare_bytes")
# Variables in a pasted script are substituted, and an error can contain them.
_ENVIRONMENT = ("HOME", "LANG", "LC_", "LD_", "PATH", "PYTHON", "TMPDIR", "TRANSFORMER_", "XDG_")


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """A training command, and the GPUs to estimate it for."""

    command: str
    gpu: str
    number: int | None = None  # of GPUs; None: the minimum for the command's parallel sizes
    vocabulary: int | None = None  # None: the size in the command

    def options(self) -> list[str]:
        """Return the options of `rehearse`."""
        counts = {"--gpus": self.number, "--vocabulary": self.vocabulary}
        pairs = [(name, str(count)) for name, count in counts.items() if count is not None]
        return [word for pair in (("--gpu", self.gpu), *pairs) for word in pair]


def parse_estimate(data: object, gpus: Mapping[str, int]) -> EstimateRequest:
    """Check a request of the browser.

    Raises:
        FieldError: A field is missing or invalid.
    """
    fields = data if isinstance(data, dict) else {}
    command, gpu = fields.get("command"), fields.get("gpu")
    if not isinstance(command, str) or not 0 < len(command.strip()) <= _MAX_CHARACTERS:
        raise FieldError("command", "paste a training command, such as pretrain_gpt.py FLAGS")
    if not isinstance(gpu, str) or gpu not in gpus:
        raise FieldError("gpu", f"choose one of {', '.join(gpus)}")
    number = _count(fields.get("number"), "number", "the number of GPUs")
    vocabulary = _count(fields.get("vocabulary"), "vocabulary", "the vocabulary size")
    return EstimateRequest(command, gpu, number, vocabulary)


def _count(value: object, field: str, name: str) -> int | None:
    if value is not None and not (is_whole(value) and 0 < value <= _MAX_NUMBER):
        raise FieldError(field, f"{name} is a whole number above 0, or empty")
    return value


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
        *("-m", _PROGRAM, *request.options()),
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
        if _VOCABULARY_FIX in error:
            return error_frame(
                "vocabulary", error.replace(_VOCABULARY_FIX, "enter the vocabulary size")
            )
        return error_frame("command", error)
    report = json.loads((folder / _RESULT).read_text())
    ranks = [{name: rank[name] for name in _RANK_FIELDS} for rank in report["ranks"]]
    answer = {name: report[name] for name in _REPORT_FIELDS}
    answer |= {name: report["assumed"][name] for name in ("gpu", "gpu_memory_bytes")}
    return frame(Frame.RESULT, json.dumps({**answer, "ranks": ranks}).encode())
