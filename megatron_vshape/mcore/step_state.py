"""What the layers and the stages of a process share while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from megatron_vshape.core.program.instructions import Program
from megatron_vshape.runtime.gathering_job import GatheringJob, plain_tensors
from megatron_vshape.runtime.graph_memory import GraphMemory
from megatron_vshape.runtime.held_bytes import Census
from megatron_vshape.runtime.measure import PassTimer
from megatron_vshape.runtime.weight_jobs import Job, WeightJobs, defer


class Reducer(Protocol):
    """What reduces gradients from within W; `gradient_sync.GradientSync`."""

    def deferred(self, parameters: Sequence[Tensor]) -> None:
        """Take note that a job is left for the gradients of these."""

    def added(self, parameters: Sequence[Tensor]) -> None:
        """Take note that one has run."""


class Checks(Protocol):
    """What keeps checks of losses until the passes have run; `late_checks.LateChecks`."""

    def add(self, check: Callable[[Tensor], None], result: Tensor) -> None:
        """Keep a check."""

    def make(self) -> None:
        """Make those that are kept; raises what they raise."""


class TensorRanks(Protocol):
    """The number of tensor-parallel ranks for who asks; `loss_of_logits.RanksOfRows`."""

    def number_for(self, code: CodeType) -> int:
        """Return the number for this code."""


class Slice(NamedTuple):
    """Which part of a microbatch's sequence a pass is of, in tokens."""

    microbatch: int
    begin: int
    end: int
    total: int


@dataclass(slots=True)
class StepState:
    """The state that layers deep in a model and Megatron's own functions are replaced with.

    One per process; what a step sets, it takes back.
    """

    splits_backward: bool = False  # linear layers must be able to put their weight gradient off
    jobs: WeightJobs = field(default_factory=WeightJobs)
    running_chunk: int | None = None  # that Megatron's questions about "this stage" mean
    graph_memory: GraphMemory = field(default_factory=GraphMemory)
    # While Transformer Engine captures F, B and W: a `split.graph_weights.Capture`.
    capture: Any = None
    captured: Program | None = None  # whose passes CUDA graphs replay; no other can run then
    census: Census | None = None  # while a step's activation memory is measured: what passes leave
    late_checks: Checks | None = None  # while a step's passes run: keeps checks of losses
    timer: PassTimer | None = None  # while a step of Megatron's own schedules is timed
    gradient_sync: Reducer | None = None  # while a step runs whose gradients are reduced in W
    # While one runs whose vocabulary all ranks share: its `step.vocabulary.SharedVocabulary`.
    shared_vocabulary: Any = None
    # While the trainer's own loss is made on every rank, of its rows of the logits.
    has_logits: bool = False
    tensor_ranks: TensorRanks | None = None  # the same: how many ranks have rows, by who asks
    slice: Slice | None = None  # while a pass of one runs
    # Where microbatches are cut in slices, by layer: `split.sliced_attention.KeysValues` of those
    # whose passes have begun.
    kept: list[dict[int, Any]] = field(default_factory=list)

    @property
    def running_slice(self) -> Slice:
        """Return the slice that a pass runs of.

        Raises:
            RuntimeError: none does: a layer of slices runs outside the passes.
        """
        if self.slice is None:
            raise RuntimeError("attention of slices ran, or its backward, outside any pass")
        return self.slice

    @contextmanager
    def running(self, chunk: int, part: Slice | None = None) -> Iterator[None]:
        """Have a pass of a chunk, of a slice perhaps, run inside."""
        before = self.running_chunk, self.slice
        self.running_chunk, self.slice = chunk, part
        try:
            yield
        finally:
            self.running_chunk, self.slice = before

    @contextmanager
    def having_logits(self, tensor_ranks: TensorRanks) -> Iterator[None]:
        """Have this rank be all stages inside, and one of these ranks, as far as one can ask."""
        self.has_logits, self.tensor_ranks = True, tensor_ranks
        try:
            yield
        finally:
            self.has_logits, self.tensor_ranks = False, None

    @contextmanager
    def reducing(self, reducer: Reducer | None) -> Iterator[None]:
        """Have gradients reduced inside from within W, by this if it is one."""
        self.gradient_sync = reducer
        try:
            yield
        finally:
            self.gradient_sync = None

    @contextmanager
    def counting(self, census: Census) -> Iterator[None]:
        """Have what passes leave counted inside."""
        self.census = census
        try:
            yield
        finally:
            self.census = None

    def defer(self, job: GatheringJob, parameters: Sequence[Tensor]) -> None:
        """Leave a job for W that adds to the gradients of `parameters` and keeps tensors till then.

        The tensors count where memory is being measured.
        """
        job.tensors = self.graph_memory.kept(job.tensors)
        kept = list(plain_tensors(job.tensors))
        if self.census is not None:
            for tensor in kept:
                self.census.add(tensor)
        if self.gradient_sync is None:
            defer(job, job.begin, weights=parameters, kept=kept)
        else:
            self.gradient_sync.deferred(parameters)
            run = partial(self._run_and_tell, job, parameters)
            defer(run, job.begin, weights=parameters, kept=kept)

    def _run_and_tell(self, job: Job, parameters: Sequence[Tensor]) -> None:
        job()
        if self.gradient_sync is not None:
            self.gradient_sync.added(parameters)


def unwrapped(chunk: nn.Module) -> Any:
    """Return the chunk without what data parallelism and 16 bits put around it."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk
