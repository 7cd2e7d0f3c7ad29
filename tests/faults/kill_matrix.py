"""A rank killed in a pass of a small model of plain torch, and the reports of the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runtime.plain_pipeline import SHAPE, stages_for

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Program, Run
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import Place, run_program

RANKS, MICROBATCHES = 4, 4


def program_of_step() -> Program:
    schedule = make("v-half", RANKS, MICROBATCHES)
    return lower(schedule, simulate(schedule))


def passes_of_step() -> Iterator[tuple[int, Pass]]:
    """Yield every pass with its device."""
    for device, row in enumerate(program_of_step().instructions):
        yield from ((device, item.work) for item in row if isinstance(item, Run))


def run_until_killed(rank: int, folder: Path, victim: int, work: Pass) -> None:
    """Run a step whose victim dies after a pass; the other ranks write their reports."""
    place, program = Place(), program_of_step()
    transport = Transport([list(range(RANKS))], SHAPE, torch.float32, "cpu", timeout_s=60)
    transport.prepare(program)
    stages: Any = stages_for(program.schedule, rank, 0, torch.float32)
    if rank == victim:
        kill_after(stages[work.stage], work, folder)
    try:
        run_program(program, rank, stages, transport, place=place)
        dist.barrier()  # as an optimizer step would wait for all
    except Exception as error:
        (folder / f"said{rank}").write_text(f"{error}\n{transport.describe(place)}")


def kill_after(stage: Any, work: Pass, folder: Path) -> None:
    """Kill this rank at the end of a pass, and write the time."""
    original = getattr(stage, work.kind.method)

    def run(microbatch: int, *args: Any) -> Any:
        result = original(microbatch, *args)
        if microbatch == work.microbatch:
            (folder / "struck").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(stage, work.kind.method, run)
