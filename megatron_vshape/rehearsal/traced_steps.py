"""The steps of a dry run: the microbatches that run, and the memory between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_vshape.rehearsal import repeats
from megatron_vshape.rehearsal.graph_pools import GraphPool
from megatron_vshape.rehearsal.ledger import Ledger
from megatron_vshape.rehearsal.memory_parts import parts_of
from megatron_vshape.rehearsal.phases import STEP
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import Bytes
from megatron_vshape.rehearsal.work import Work

STEPS = 2
"""The second step is the first with allocated optimizer moments."""


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """Megatron's arguments, and the chunks of the model that it has built for this rank."""

    args: Any
    chunks: list[Any]
    pool: GraphPool | None  # with CUDA graphs


class TracedSteps:
    """Limits the microbatches of a step, and records the memory between two steps."""

    def __init__(self, job: RankJob, ledger: Ledger) -> None:
        """Set the job, and the ledger of its memory."""
        self._job, self._ledger = job, ledger
        self.held_bytes = 0  # after the last step
        self.held_parts: Bytes = {}
        self.peaks: list[int] = []  # before each step
        self.num_ended = 0
        self.batch_microbatches = self.microbatches = self.traced = 0
        self.repeated_work = Work()  # of each microbatch that is not traced

    def limit_microbatches(self, batch_microbatches: int, model: BuiltModel) -> int:
        """Return fewer microbatches than the batch has: the first few determine the peak."""
        self.batch_microbatches = self.microbatches = batch_microbatches
        if not self._job.has_schedule:  # a schedule is made for one number
            ranks = model.args.pipeline_model_parallel_size
            # 1F1B has at most `ranks` microbatches in flight, so twice that number includes the
            # peak.
            self.microbatches = min(batch_microbatches, 2 * ranks if ranks > 1 else 2)
        num_needed = self._needed_microbatches(model)
        self.traced = min(self.microbatches, num_needed or self.microbatches)
        return self.traced

    def _needed_microbatches(self, model: BuiltModel) -> int | None:
        from megatron.core import parallel_state

        job = self._job
        if job.has_schedule or job.traces_all or len(model.chunks) > 1:
            return None
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return repeats.needed_microbatches(model.args, stage)

    def start_forward(self, microbatch: int) -> None:
        """When the last forward starts, add the memory and work of the microbatches left out."""
        if microbatch == self.traced - 1 and self.traced < self.microbatches:
            repeated = repeats.repeated_microbatch(self._ledger)
            self.repeated_work = repeated.work
            for record in repeated.retained:
                self._ledger.repeat(record, self.microbatches - self.traced)

    def end_step(self) -> None:
        """Record the memory after a step; without effect before the first one."""
        ledger = self._ledger
        if ledger.phase is STEP:
            self.num_ended += 1
            self.held_bytes = ledger.allocated_bytes
            self.held_parts = parts_of(ledger.held_at(ledger.clock), ledger.allocated_bytes)

    def start_step(self) -> None:
        """Reset the ledger for a step."""
        self._ledger.phase = STEP
        self.peaks.append(self._ledger.peak_bytes)
        self._ledger.begin_step()
