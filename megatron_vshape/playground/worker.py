"""Worker processes of the playground, and the server's pool of them.

A worker reads requests from stdin and writes frames to stdout. It is separate from the server, so
that a long plan does not block the web UI. The worker of an abandoned request is killed and
replaced.
"""

import asyncio
import json
import logging
import os
import pickle
import resource
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import BinaryIO

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.playground.answer import make_answer
from megatron_vshape.playground.request import FieldError, Request

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
"""Length of a request on stdin, before its bytes."""

HEAD = struct.Struct("<cI")
"""Header of a frame: its type and the number of bytes."""

_MAX_MEMORY = 6 * 2**30
"""Bytes of address space; a hostile file ends its request, not the machine."""

_QUIET = 0.1
"""Minimum seconds between two progress frames of the same phase."""


class Frame(StrEnum):
    """Type of a frame's content."""

    PROGRESS = "P"  # JSON: progress
    RESULT = "R"  # the answer, encoded by picture.py
    ERROR = "E"  # JSON: the field and the error


def frame(kind: Frame, body: bytes) -> bytes:
    """Encode one frame."""
    return HEAD.pack(kind.encode(), len(body)) + body


def error_frame(field: str, text: str) -> bytes:
    """Encode an error of a field."""
    return frame(Frame.ERROR, json.dumps({"field": field, "text": text}).encode())


def main() -> None:
    """Answer requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # redirects stray prints away from the frames
    while head := sys.stdin.buffer.read(LENGTH.size):
        request = pickle.loads(sys.stdin.buffer.read(LENGTH.unpack(head)[0]))
        _write(answers, answer(request, answers))


def answer(request: Request, progress: BinaryIO) -> bytes:
    """Return the last frame of the answer, after writing progress frames."""
    last_write, phase = 0.0, object()

    def report(state: dict[str, object]) -> None:
        nonlocal last_write, phase
        now = time.monotonic()
        if state["doing"] != phase or now - last_write > _QUIET:
            last_write, phase = now, state["doing"]
            _write(progress, frame(Frame.PROGRESS, json.dumps(state).encode()))

    try:
        return frame(Frame.RESULT, make_answer(request, report))
    except FieldError as error:
        return error_frame(error.field, str(error))
    except ScheduleError as error:
        return error_frame("schedule", str(error))
    except (MemoryError, RecursionError):
        return error_frame("request", "this is too large for the playground's memory")
    except Exception:
        logger.exception("a request failed")
        return error_frame("request", "this failed for a reason that the server's log has")


def _write(stream: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


_NUM_WORKERS = 2
WAITING = 16
"""Maximum requests that wait for a worker; further requests are rejected."""


class Busy(Exception):
    """Too many requests are waiting."""


class Pool:
    """Answer requests in worker processes."""

    def __init__(self, workers: int = _NUM_WORKERS) -> None:
        self._workers = workers
        self._free = asyncio.Semaphore(workers)
        self._idle: list[Process] = []
        self._num_waiting = 0
        self._ending: set[asyncio.Future[int]] = set()

    async def answer(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the frames of the answer; the last is a result or an error.

        Closing the iterator ends the work.

        Raises:
            Busy: too many requests wait for a worker.
        """
        if self._num_waiting >= WAITING:
            raise Busy
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        try:
            async for encoded_frame in self._work(request):
                yield encoded_frame
        finally:
            self._free.release()

    async def close(self) -> None:
        """End all workers; waits until running requests have ended or been abandoned."""
        for _ in range(self._workers):
            await self._free.acquire()
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._ending)

    def _end(self, worker: Process) -> None:
        if worker.returncode is None:
            worker.kill()
        ended = asyncio.ensure_future(worker.wait())
        self._ending.add(ended)
        ended.add_done_callback(self._ending.discard)

    async def _work(self, request: Request) -> AsyncIterator[bytes]:
        worker = await self._worker()
        try:
            async for encoded_frame in _converse(worker, pickle.dumps(request)):
                yield encoded_frame
        except (asyncio.IncompleteReadError, ConnectionError):
            yield error_frame("request", "the worker ended before it had an answer")
        except BaseException:  # closed or cancelled midway: its output belongs to no request
            self._end(worker)
            raise
        else:
            self._idle.append(worker)

    async def _worker(self) -> Process:
        while self._idle:
            worker = self._idle.pop()
            if worker.returncode is None:
                return worker
        module = "megatron_vshape.playground.worker"
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            stdin=PIPE,
            stdout=PIPE,
            limit=2**20,
            start_new_session=True,  # the server handles Ctrl-C and ends its workers
        )


async def _converse(worker: Process, data: bytes) -> AsyncIterator[bytes]:
    """Send a request to a worker and yield its frames up to the last."""
    if worker.stdin is None or worker.stdout is None:
        raise ConnectionError("the worker was started without pipes")
    worker.stdin.write(LENGTH.pack(len(data)) + data)
    await worker.stdin.drain()
    kind = b""
    while kind not in (Frame.RESULT.encode(), Frame.ERROR.encode()):
        head = await worker.stdout.readexactly(HEAD.size)
        kind, length = HEAD.unpack(head)
        yield head + await worker.stdout.readexactly(length)


if __name__ == "__main__":
    main()
