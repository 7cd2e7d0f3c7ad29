"""Pool of warm worker processes; a worker of an abandoned request is killed and replaced."""

import asyncio
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

from megatron_vshape.playground.request import Request
from megatron_vshape.playground.worker import HEAD, LENGTH, Frame, error_frame

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
            async for frame in self._work(request):
                yield frame
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
            async for frame in _converse(worker, pickle.dumps(request)):
                yield frame
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
