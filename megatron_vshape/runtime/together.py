"""What all devices of a pipeline do together in passes that they join: collectives.

Every device comes to these passes in one order, which lowering has proved, and begins all its
collectives in them; so each of the two process groups sees one order everywhere. One group carries
what all read of one device, and is waited for at once, but by that device. The other carries sums,
which are put together beside the passes that follow: by a thread, or on a GPU by a stream.
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
from megatron_vshape.runtime.program_runner import stream_of
from megatron_vshape.runtime.watch import no_progress

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """What is put together beside the passes."""

    def __init__(self, together: "Together", future: "Future[Result]") -> None:
        self._together = together
        self._future = future
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until it is there; raises what it raised, and RuntimeError once the run has ended.

        On a GPU the host does not wait.
        """
        while True:
            try:
                self._future.result(timeout=1.0)
                return
            except TimeoutError:
                if self._together.is_closed:
                    raise RuntimeError("the run has ended while devices were to meet") from None

    def result(self) -> Result:
        """Return it, there for all that this thread computes from now on; raises as `wait`."""
        self.wait()
        made = self._future.result()
        if self.event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.event)
            for each in made if isinstance(made, tuple) else (made,):
                if isinstance(each, Tensor):
                    each.record_stream(stream)
        return made


class Together:
    """The collectives of this rank's pipeline; keeps two process groups of all its ranks."""

    def __init__(
        self,
        ranks: Sequence[int],
        make_group: Callable[[str], "dist.ProcessGroup"],
        torch_device: torch.device,
        timeout_s: float,
    ) -> None:
        """Make the groups, and connect all ranks; all of the world call this in one order.

        `ranks` are those of the pipeline, device by device; `make_group` makes a group of them.
        """
        self._ranks = tuple(ranks)
        self.device = self._ranks.index(dist.get_rank())
        self._read, self._summed = make_group("what all devices read"), make_group("sums")
        self._torch_device, self._timeout_s = torch_device, timeout_s
        self._blocks = torch_device.type == "cpu"
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()  # what others read of this one
        self._waits: dict[int, str] = {}  # by thread
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failure: Exception | None = None  # of a job, which nobody here may ask for
        self.is_closed = False
        for group in (self._read, self._summed):
            dist.all_reduce(torch.zeros(1, device=torch_device), group=group)
        if self._blocks:  # a daemon: a run that fails does not wait for what it waits for
            threading.Thread(target=self._work, name=COLLECTIVES, daemon=True).start()

    def tell(self) -> list[str]:
        """Return what this rank waits for; any thread may ask."""
        return list(self._waits.copy().values())

    def from_one(self, device: int, tensor: Tensor, what: str) -> Tensor:
        """Return what the device has of a tensor; on the others it is written into theirs.

        There it leaves by itself, and its memory is kept until it has.
        """
        source = self._ranks[device]
        work = dist.broadcast(tensor, source, group=self._read, async_op=True)
        assert work is not None
        if self.device != device:
            self._wait(work, f"{what} from rank {source} (device {device})")
            return tensor
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        self._leaving.append((work, tensor))
        return tensor

    def begin(self, job: Callable[[], Result], inputs: Sequence[Tensor]) -> Pending[Result]:
        """Begin a job, which sums; jobs run in the order in which they are begun.

        `inputs` are what it reads of tensors that passes have made.
        """
        future: Future[Result] = Future()
        pending = Pending(self, future)

        def run() -> None:
            try:
                made = job()
            except Exception as error:
                self._failure = error
                future.set_exception(error)
            else:
                future.set_result(made)

        if self._blocks:
            self._jobs.put(run)
            return pending
        stream = stream_of(COLLECTIVES, torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for each in inputs:
                each.record_stream(stream)
            run()
            pending.event = torch.cuda.Event()
            pending.event.record()
        return pending

    def gather(self, part: Tensor, what: str) -> Tensor:
        """Return the parts of all devices, [devices, ...]; only in a job."""
        whole = part.new_empty((len(self._ranks), *part.shape))
        work = dist.all_gather(list(whole.unbind()), part, group=self._summed, async_op=True)
        self._wait(work, what)
        return whole

    def sum_to(self, device: int, part: Tensor, what: str) -> Tensor:
        """Return the sum of all devices' parts on this device, in the memory of its part.

        What is in the others' then is of no use. Only in a job.
        """
        work = dist.reduce(part, self._ranks[device], group=self._summed, async_op=True)
        self._wait(work, what)
        return part

    def tell_all(self, device: int, tensor: Tensor, what: str) -> Tensor:
        """Return what the device has of a tensor, as `from_one`; only in a job."""
        work = dist.broadcast(tensor, self._ranks[device], group=self._summed, async_op=True)
        self._wait(work, what)
        return tensor

    def drain(self) -> None:
        """Wait until what others read of this device has left, and all jobs have run.

        Raises what one of them has raised.
        """
        self.begin(lambda: None, ()).wait()
        if self._failure is not None:
            raise self._failure
        while self._leaving:
            self._wait(self._leaving[0][0], "all devices to read it")
            self._leaving.popleft()

    def close(self) -> None:
        """End what waits here, after the last step or a step that has failed."""
        self.is_closed = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self.is_closed:
            job()
            job = None  # not held while the thread waits for the next

    def _wait(self, work: "dist.Work | None", what: str) -> None:
        assert work is not None  # this rank is in the group
        with self._telling(
            f"rank {self._ranks[self.device]} (device {self.device}) waits for {what}"
        ):
            if self._blocks:
                work.wait(timedelta(seconds=self._timeout_s))
            else:
                work.wait()

    @contextmanager
    def _telling(self, text: str) -> Iterator[None]:
        """Let others know what this thread waits for inside, and say it where that fails."""
        thread, since = threading.get_ident(), time.monotonic()
        self._waits[thread] = text
        try:
            yield
        except RuntimeError as error:
            late = time.monotonic() - since >= self._timeout_s
            why = no_progress(self._timeout_s) if late else f", whose connection failed: {error}"
            raise RuntimeError(text + why) from error
        finally:
            del self._waits[thread]
