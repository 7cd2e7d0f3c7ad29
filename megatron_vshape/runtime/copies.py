"""Measured times of copies between a GPU and host memory, in one or both directions at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.core.model.costs import Costs, with_copies_of
from megatron_vshape.core.model.files import MEASURED
from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT, FROM_HOST, TO_HOST
from megatron_vshape.runtime.program_runner import on_stream_of

MOST_BYTES = 256 << 20
"""Maximum bytes of a measured copy: above, time is proportional to size."""


class Copies(NamedTuple):
    """Bytes of one microbatch and stage that can be offloaded, and their copy times.

    The last two times are those of a copy while another copy runs in the other direction.
    """

    num_bytes: float
    out_us: float
    back_us: float
    out_beside_us: float
    back_beside_us: float

    def of(self, num_bytes: float) -> Copies:
        """Return the copies scaled to a number of bytes; the minimum is the time of one byte."""
        factor = max(num_bytes, 1.0) / max(self.num_bytes, 1.0)
        return Copies(num_bytes, *(factor * duration for duration in self[1:]))


def costs_with_copies(costs: Costs, stages: Sequence[Copies], source: str) -> Costs:
    """Add the copies of every stage to the costs, with their source."""
    # Most copies of a step run while another goes in the other direction.
    out_us = tuple(copies.out_beside_us for copies in stages)
    back_us = tuple(copies.back_beside_us for copies in stages)
    moved_bytes = tuple(float(copies.num_bytes) for copies in stages)
    costs = with_copies_of(costs, out_us, moved_bytes, back_us)
    return costs.with_source(source, COPY_OUT.time, COPY_OUT.offloaded, COPY_BACK.time)


def with_copies(costs: Costs, bytes_by_stage: Mapping[int, int], device: torch.device) -> Costs:
    """Add the cost of copies, measured on all ranks at the same time.

    `bytes_by_stage` is about this rank. All ranks of the world call this.
    """
    local_copies = measure_copies(device, max(bytes_by_stage.values()))
    copies_by_stage = {stage: local_copies.of(size) for stage, size in bytes_by_stage.items()}
    everyones = [copies_by_stage] * dist.get_world_size()
    dist.all_gather_object(everyones, copies_by_stage)
    median_copies = [
        Copies(
            *map(
                median,
                zip(
                    *(rank_copies[stage] for rank_copies in everyones if stage in rank_copies),
                    strict=True,
                ),
            )
        )
        for stage in range(costs.num_stages)
    ]
    return costs_with_copies(
        costs, median_copies, f"{MEASURED} on {dist.get_world_size()} ranks at once"
    )


def measure_copies(device: torch.device, num_bytes: int, rounds: int = 5) -> Copies:
    """Measure the median times of copies of `num_bytes`, on streams as in a training step.

    Temporarily allocates up to 2 * MOST_BYTES on the device and in host memory.
    """
    size = max(1, min(num_bytes, MOST_BYTES))
    pinned = device.type == "cuda"
    here = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    out = there[0], here[0]
    back = here[1], there[1]
    times: list[list[float]] = [[], [], [], []]
    with (
        ThreadPoolExecutor(1, initializer=on_stream_of(TO_HOST)) as outward,
        ThreadPoolExecutor(1, initializer=on_stream_of(FROM_HOST)) as homeward,
    ):
        run = _copier(device)
        for round_index in range(rounds + 1):
            # Alone, one after the other; then both at once, as in a step.
            durations = [outward.submit(run, *out).result(), homeward.submit(run, *back).result()]
            concurrent = outward.submit(run, *out), homeward.submit(run, *back)
            durations += [future.result() for future in concurrent]
            if round_index:  # the first round has cold caches
                for samples, duration in zip(times, durations, strict=True):
                    samples.append(duration)
    return Copies(size, *map(median, times)).of(num_bytes)


def _copier(device: torch.device) -> Callable[[Tensor, Tensor], float]:
    """Return a function that copies on the stream of its thread and returns the time in us."""
    if device.type == "cuda":
        torch.cuda.synchronize()  # the data was written on another stream

    def run(target: Tensor, source: Tensor) -> float:
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return 1e6 * (time.perf_counter() - start)

    return run
