"""Replans every few steps with other costs, and measures the memory of a rank meanwhile."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.costs import Costs


def start(rank: int, settings: dict[str, Any]) -> None:
    """Measure and replan every `every` steps; write the results to `folder`."""
    import megatron.training.training as training

    from megatron_vshape.mcore.step.forward_backward import PipelineRunner

    runners: list[PipelineRunner] = []
    original_init = PipelineRunner.__init__
    original = training.train_step
    samples: list[dict[str, Any]] = []
    steps = 0

    @functools.wraps(original_init)
    def remember(runner: PipelineRunner, *args: Any) -> None:
        original_init(runner, *args)
        runners.append(runner)

    @functools.wraps(original)
    def step(*args: Any, **options: Any) -> Any:
        nonlocal steps
        result = original(*args, **options)
        steps += 1
        if steps % settings["every"] == 0:
            samples.append({"step": steps} | _measure())
            for runner in runners:
                samples[-1]["plan"] = _plan_anew(runner, steps)
            (Path(settings["folder"]) / f"soak{rank}.json").write_text(json.dumps(samples))
        return result

    PipelineRunner.__init__ = remember
    training.train_step = step


def costs(num_stages: int, seed: int) -> Costs:
    """Return costs as if measured: different for every stage and for every seed."""
    numbers = random.Random(seed)

    def times(low: float, high: float) -> tuple[float, ...]:
        return tuple(numbers.uniform(low, high) for _ in range(num_stages))

    held_bytes = times(2e6, 3e6)
    after_backward_bytes = tuple(num_bytes * numbers.uniform(0.3, 0.9) for num_bytes in held_bytes)
    return Costs.of(
        times(50, 150),
        times(50, 150),
        times(30, 150),
        numbers.uniform(1, 60),
        held_bytes,
        after_backward_bytes,
    )


def _plan_anew(runner: Any, seed: int) -> str:
    """Adopt other costs between two steps, as the profiler does, and return the order's digest."""
    planner = runner.planner
    planner.adopt(costs(len(planner.choice.placement), seed))
    runner.report.remeasure()
    return str(abs(hash(planner.plan_step(8).schedule.order)) % 10**8)


def _measure() -> dict[str, int]:
    import torch

    gc.collect()
    time.sleep(0.1)  # gloo's thread frees its buffers after the call has returned
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tensors": sum(1 for candidate in gc.get_objects() if isinstance(candidate, torch.Tensor)),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }
