"""What the hooks share in a process that trains: the schedule in use and the chunk that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_vshape.mcore.arguments import PipelineOptions
from megatron_vshape.runtime.gathering_job import GatheringJob
from megatron_vshape.runtime.weight_jobs import Job, WeightJobs, defer

if TYPE_CHECKING:
    from megatron_vshape.mcore.census import Census
    from megatron_vshape.mcore.forward_backward import PipelineRunner
    from megatron_vshape.mcore.gradient_sync import GradientSync
    from megatron_vshape.mcore.iteration_log import IterationLog
    from megatron_vshape.mcore.late_checks import LateChecks
    from megatron_vshape.mcore.layout import StageLayout, StageMap
    from megatron_vshape.mcore.metering import MeteredSchedule
    from megatron_vshape.mcore.plans import Planner
    from megatron_vshape.mcore.post_validation import PostValidation
    from megatron_vshape.runtime.measure import PassTimer


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule that this package runs: what is known once the flags have been checked."""

    options: PipelineOptions
    planner: Planner
    stage_map: StageMap
    layout: StageLayout
    ties_embeddings: bool
    overlaps_grad_reduce: bool
    recomputes_layers: bool = False  # whole layers, in the backward: then it is not split
    recomputed_inputs: tuple[str, ...] = ()  # modules that B computes anew and W holds on to

    def ends(self, rank: int, chunk: int | None) -> tuple[bool, bool]:
        """Return whether a rank's chunk is the model's first stage, and whether its last."""
        stage = self.stage_map.stage(rank, chunk)
        return stage == 0, stage == self.stage_map.last_stage


@dataclass(slots=True)
class Session:
    """The state behind the hooks; one per `hooks.install`.

    `pipeline` is None while Megatron's own schedules run: then every hook does what upstream does.
    """

    pipeline: Pipeline | None = None
    megatrons_own: str | None = None  # the schedule of Megatron's that the user has named
    # What the trainer calls for every step; made when it asks for that.
    runner: PipelineRunner | MeteredSchedule | None = None
    post_validation: PostValidation | None = None  # while a run that asks for it trains
    jobs: WeightJobs = field(default_factory=WeightJobs)
    running_chunk: int | None = None
    census: Census | None = None  # while a step's activation memory is measured
    late_checks: LateChecks | None = None  # while a step's passes run
    timer: PassTimer | None = None  # while a step of Megatron's own schedules is timed
    iteration_log: IterationLog | None = None  # once Megatron's trainer runs, which logs
    gradient_sync: GradientSync | None = None  # while a step runs whose gradients are reduced in W

    @property
    def splits_backward(self) -> bool:
        """Return whether linear layers must be able to put their weight gradient off."""
        return self.pipeline is not None

    @contextmanager
    def run_chunk(self, chunk: int) -> Iterator[None]:
        """Let Megatron's questions about "this stage" mean `chunk` meanwhile."""
        self.running_chunk = chunk
        try:
            yield
        finally:
            self.running_chunk = None

    @contextmanager
    def reduce_with(self, gradient_sync: GradientSync | None) -> Iterator[None]:
        """Tell `gradient_sync` meanwhile of every weight job that is left and that has run."""
        self.gradient_sync = gradient_sync
        try:
            yield
        finally:
            self.gradient_sync = None

    def defer(
        self, job: GatheringJob, parameters: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> None:
        """Leave a job for W that adds to the gradients of `parameters` and keeps tensors till then.

        The tensors count where memory is being measured.
        """
        if self.census is not None:
            for tensor in kept:
                self.census.add(tensor)
        if self.gradient_sync is None:
            defer(job, job.begin, weights=parameters)
        else:
            self.gradient_sync.deferred(parameters)
            run = partial(self._run_and_tell, job, parameters)
            defer(run, job.begin, weights=parameters)

    def _run_and_tell(self, job: Job, parameters: Sequence[Tensor]) -> None:
        job()
        if self.gradient_sync is not None:
            self.gradient_sync.added(parameters)
