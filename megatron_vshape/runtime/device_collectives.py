"""Collectives over all ranks of a pipeline.

All ranks reach the passes with collectives in the same order, as lowering has proved, and start all
collectives in these passes. So each of the two process groups has one order on all ranks. The first
group carries broadcasts, which the receivers wait for immediately. The second group carries
reductions and gathers, which overlap with the following passes: in a thread on a CPU, on a CUDA
stream on a GPU.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.core.model.kinds import COLLECTIVES
from megatron_vshape.runtime.failures import WaitingThreads, no_progress
from megatron_vshape.runtime.hosts import has_peers
from megatron_vshape.runtime.program_runner import stream_of

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """Result of a job that overlaps with the passes."""

    def __init__(self, collectives: "DeviceCollectives", future: "Future[Result]") -> None:
        self._collectives = collectives
        self._future = future
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait for the job; on a GPU the host does not wait.

        Raises:
            RuntimeError: the run has ended before the job.
            Exception: the job's exception.
        """
        # In short waits, so that a closed run ends the thread's wait as well.
        while True:
            try:
                self._future.result(timeout=1.0)
                return
            except TimeoutError:
                if self._collectives.is_closed:
                    raise RuntimeError("the run has ended while devices were to meet") from None

    def result(self) -> Result:
        """Return the job's result, ready for later computation of this thread; raises as `wait`."""
        self.wait()
        result = self._future.result()
        if self.event is not None:
            stream = torch.cuda.current_stream()
            # The allocator knows only the stream on which the job made the result.
            stream.wait_event(self.event)
            for part in result if isinstance(result, tuple) else (result,):
                if isinstance(part, Tensor):
                    part.record_stream(stream)
        return result


class DeviceCollectives:
    """Collectives of this rank's pipeline, over two process groups of all its ranks."""

    def __init__(
        self,
        ranks: Sequence[int],
        make_group: Callable[[str], "dist.ProcessGroup"],
        torch_device: torch.device,
        timeout_s: float,
    ) -> None:
        """Create the groups and connect all ranks; collective over the world, in one order.

        `ranks` are the ranks of this pipeline, in pipeline order. `make_group` creates a group of
        them.
        """
        self._ranks = tuple(ranks)
        self.device = self._ranks.index(dist.get_rank())
        self._read, self._summed = make_group("what all devices read"), make_group("sums")
        self._torch_device, self._timeout_s = torch_device, timeout_s
        self._blocks = torch_device.type == "cpu"
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()  # broadcasts of this rank
        self._waits: dict[int, str] = {}  # descriptions, by thread
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failure: Exception | None = None  # of a job whose result this rank may never read
        self.is_closed = False
        self.connect()
        # gloo's collectives block the calling thread; on a GPU they are only launched.
        if self._blocks:
            threads = WaitingThreads(self.close, lambda: [self._summed])
            threads.start(self._work, name=COLLECTIVES)

    def connect(self) -> None:
        """Connect all ranks: the first use of a communicator blocks until all have arrived."""
        for group in (self._read, self._summed):
            dist.all_reduce(torch.zeros(1, device=self._torch_device), group=group)

    def describe_waits(self) -> list[str]:
        """Format the pending waits of this rank. Thread-safe."""
        return list(self._waits.copy().values())

    def from_one(self, device: int, tensor: Tensor, what: str) -> Tensor:
        """Broadcast a tensor from pipeline rank `device`; the other ranks receive into `tensor`.

        The sender does not wait, and keeps the memory until the broadcast has completed.
        """
        source = self._ranks[device]
        work = dist.broadcast(tensor, source, group=self._read, async_op=True)
        assert work is not None
        if self.device != device:
            self._wait(work, f"{what} from rank {source} (device {device})")
            return tensor
        # Free completed broadcasts; they complete in order.
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        self._leaving.append((work, tensor))
        return tensor

    def begin(self, job: Callable[[], Result], inputs: Sequence[Tensor]) -> Pending[Result]:
        """Start a job with collectives. Jobs run in the order of their start.

        `inputs` are the tensors from passes that the job reads.
        """
        future: Future[Result] = Future()
        pending = Pending(self, future)

        def run() -> None:
            try:
                result = job()
            except Exception as error:
                self._failure = error
                future.set_exception(error)
            else:
                future.set_result(result)

        if not has_peers():  # nothing to wait for, and fake tensors support one thread
            run()
            return pending
        if self._blocks:
            self._jobs.put(run)
            return pending
        stream = stream_of(COLLECTIVES, torch.cuda.current_device())
        # The inputs were made on the stream of the passes.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for tensor in inputs:
                tensor.record_stream(stream)
            run()
            pending.event = torch.cuda.Event()
            pending.event.record()
        return pending

    def gather(self, part: Tensor, what: str) -> Tensor:
        """Gather the parts of all ranks, [ranks, ...]. Call only from a job."""
        gathered = part.new_empty((len(self._ranks), *part.shape))
        work = dist.all_gather(list(gathered.unbind()), part, group=self._summed, async_op=True)
        self._wait(work, what)
        return gathered

    def sum_to(self, device: int, part: Tensor, what: str) -> Tensor:
        """Reduce (sum) the parts to the pipeline rank `device`, in place. Call only from a job.

        The tensors of the other ranks have no defined content afterwards.
        """
        work = dist.reduce(part, self._ranks[device], group=self._summed, async_op=True)
        self._wait(work, what)
        return part

    def broadcast(self, device: int, tensor: Tensor, what: str) -> Tensor:
        """Broadcast a tensor from pipeline rank `device`, as `from_one`. Call only from a job."""
        work = dist.broadcast(tensor, self._ranks[device], group=self._summed, async_op=True)
        self._wait(work, what)
        return tensor

    def drain(self) -> None:
        """Wait for the broadcasts of this rank and all jobs. Raises the exception of a job."""
        # Jobs run in order, so an empty one ends after all others.
        self.begin(lambda: None, ()).wait()
        if self._failure is not None:
            raise self._failure
        while self._leaving:
            self._wait(self._leaving[0][0], "all devices to read it")
            self._leaving.popleft()

    def close(self) -> None:
        """End the thread, after the last step or a failed step."""
        self.is_closed = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self.is_closed:
            job()
            job = None  # drops the reference while the thread waits for the next job

    def _wait(self, work: "dist.Work | None", what: str) -> None:
        assert work is not None  # this rank is in the group
        with self._described_wait(
            f"rank {self._ranks[self.device]} (device {self.device}) waits for {what}"
        ):
            if self._blocks:
                work.wait(timedelta(seconds=self._timeout_s))
            else:
                work.wait()

    @contextmanager
    def _described_wait(self, text: str) -> Iterator[None]:
        """Register the wait for `describe_waits`, and add its text to an error raised inside."""
        thread, since = threading.get_ident(), time.monotonic()
        # By thread, because the passes and the jobs may wait at the same time.
        self._waits[thread] = text
        try:
            yield
        except RuntimeError as error:
            is_late = time.monotonic() - since >= self._timeout_s
            why = no_progress(self._timeout_s) if is_late else f", whose connection failed: {error}"
            raise RuntimeError(text + why) from error
        finally:
            del self._waits[thread]
