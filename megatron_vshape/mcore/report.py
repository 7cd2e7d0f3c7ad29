"""What a run tells of itself: the schedule before it starts, speed and memory when it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vshape.core.costs import Costs
from megatron_vshape.mcore.census import Census
from megatron_vshape.mcore.plans import Plan
from megatron_vshape.mcore.session import Pipeline, Session

COLUMNS = 120
"""How wide the schedule's picture may be."""

MIB = 2**20


class Memory(NamedTuple):
    """What one rank measured in its first training step."""

    peak_bytes: int
    held: dict[int, tuple[float, float]]  # by stage: after F, after B; per microbatch
    allocated_bytes: int  # the allocator's peak over the run, all included; 0 without a GPU


class RunReport:
    """Measures the training steps of a run.

    Memory is counted in the first one (see `census`); the speed is that of the median step, from
    one step's start to the next one's where no evaluation came between.
    """

    def __init__(self, session: Session, pipeline: Pipeline) -> None:
        self._session = session
        self._pipeline = pipeline
        self._plan: Plan | None = None
        self._memory: Memory | None = None
        self._started_s: float | None = None
        self._step_s: list[float] = []
        self._tokens = 0

    def interrupt(self) -> None:
        """Do not count the time until the next training step: something else runs between."""
        self._started_s = None

    @contextmanager
    def training_step(
        self, model: Sequence[nn.Module], num_microbatches: int, tokens: int
    ) -> Iterator[None]:
        """Run a training step of this rank's pipeline inside, with `tokens` tokens."""
        now = time.perf_counter()
        if self._started_s is not None and tokens == self._tokens:
            self._step_s.append(now - self._started_s)
        self._started_s, self._tokens = now, tokens
        if self._memory is not None:
            yield
            return
        self._session.census = census = Census(_persistent(model))
        try:
            yield
        finally:
            self._session.census = None
        self._plan = self._pipeline.planner.training(num_microbatches)
        rank = self._rank()
        self._memory = Memory(
            census.peak_bytes,
            {stage: census.held_bytes(stage) for stage in self._pipeline.stage_map.stages(rank)},
            0,
        )
        # The first step also sets caches up; its time says nothing about the others.
        self._started_s = None

    def closing_line(self, data_parallel_size: int) -> str | None:
        """Return the run's figures, or None where no step ran; all ranks of a pipeline call it."""
        if self._memory is None or self._plan is None:
            return None
        own = self._memory._replace(allocated_bytes=_allocated_bytes())
        everyones: list[Memory] = [own] * self._pipeline.stage_map.num_ranks
        dist.all_gather_object(everyones, own, group=_pipeline_group())
        predicted = self._plan.peak_bytes(byte_costs(everyones))
        speed = "speed unknown (too few steps)"
        if self._step_s:
            per_second = self._tokens * data_parallel_size / median(self._step_s)
            speed = f"{per_second:,.0f} tokens/s"
        line = (
            f"{self._plan.schedule.name}: {speed}; peak activation memory per rank in MiB: "
            f"measured {_in_mib([each.peak_bytes for each in everyones])}, "
            f"predicted {_in_mib(predicted)}"
        )
        if any(each.allocated_bytes for each in everyones):
            line += f", allocated in all {_in_mib([each.allocated_bytes for each in everyones])}"
        return line

    def _rank(self) -> int:
        return _pipeline_group().rank()


def opening_lines(pipeline: Pipeline, num_microbatches: int) -> str:
    """Return the schedule's picture with its bubble and its peak."""
    plan = pipeline.planner.training(num_microbatches)
    schedule, chunks = plan.schedule, plan.peak_chunks
    relative = chunks / (2 * schedule.num_devices)
    return (
        f"pipeline schedule {schedule.name}, {schedule.num_devices} ranks, {num_microbatches} "
        "microbatches (upper case: even chunks; one row per rank):\n"
        f"{plan.timeline.draw(COLUMNS)}\n"
        f"at F = B = W: bubble {100 * plan.timeline.bubble:.1f} %, peak {chunks:g} chunks of "
        f"1/{2 * schedule.num_devices} of the model, {100 * relative:.0f} % of 1F1B's"
    )


def byte_costs(memories: Sequence[Memory]) -> Costs:
    """Return costs that hold the bytes the ranks measured; the times in them mean nothing."""
    held = {stage: pair for memory in memories for stage, pair in memory.held.items()}
    ones = (1.0,) * len(held)
    after_forward, after_backward = zip(*(held[stage] for stage in sorted(held)), strict=True)
    return Costs(ones, ones, ones, 0.0, after_forward, after_backward)


def _persistent(model: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield what lives as long as the model: parameters, their gradient buffers, buffers."""
    for chunk in model:
        # Not chunk.buffers(): Megatron's DDP has a list by that name.
        yield from nn.Module.buffers(chunk)
        for parameter in chunk.parameters():
            yield parameter
            main_grad = getattr(parameter, "main_grad", None)
            if isinstance(main_grad, Tensor):
                yield main_grad


def _pipeline_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()


def _allocated_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _in_mib(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value / MIB:.2f}" for value in values) + "]"
