"""Kill a rank in every pass of a step, one run per pass; print how the other ranks ended.

Run as a script: it imports torch once and forks the ranks of every run. Prints a line of JSON per
run: device and pass of the killed rank, the exit codes and reports of the others, and the seconds
until the last of them had ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runtime.plain_pipeline import SHAPE, stages_for

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Program, Run
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import Place, run_program

RANKS, MICROBATCHES = 4, 4
METHODS = {
    Kind.F: "forward",
    Kind.B: "backward_inputs",
    Kind.W: "backward_weights",
    Kind.BW: "backward",
}


def main() -> None:
    """Run the matrix."""
    schedule = make("v-half", RANKS, MICROBATCHES)
    program = lower(schedule, simulate(schedule))
    for device in range(RANKS):
        for instruction in program.instructions[device]:
            if isinstance(instruction, Run):
                print(json.dumps(_case(program, device, instruction.work)), flush=True)


def _case(program: Program, victim: int, work: Pass) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                _become_rank(rank, Path(folder), program, victim, work)
            children.append(child)
        codes = _wait(children, 120.0)
        ended_s = time.monotonic()
        struck_s = float((Path(folder) / "struck").read_text())
        said = [(Path(folder) / f"said{rank}") for rank in range(RANKS)]
        return {
            "device": victim,
            "pass": str(work),
            "codes": codes,
            "said": [note.read_text() if note.exists() else "" for note in said],
            "seconds": ended_s - struck_s,
        }


def _become_rank(rank: int, folder: Path, program: Program, victim: int, work: Pass) -> None:
    torch.set_num_threads(1)
    place, code = Place(), 0
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
        )
        transport = Transport([list(range(RANKS))], SHAPE, torch.float32, "cpu", timeout_s=60)
        transport.prepare(program)
        stages: Any = stages_for(program.schedule, rank, 0, torch.float32)
        if rank == victim:
            _arm(stages[work.stage], work, folder)
        try:
            run_program(program, rank, stages, transport, place=place)
            dist.barrier()  # as an optimizer step would wait for all
        except Exception as error:
            (folder / f"said{rank}").write_text(f"{error}\n{transport.describe(place)}")
            code = 1
    except BaseException:
        (folder / f"said{rank}").write_text(traceback.format_exc())
        code = 3
    os._exit(code)


def _arm(stage: Any, work: Pass, folder: Path) -> None:
    original = getattr(stage, METHODS[work.kind])

    def run(microbatch: int, *args: Any) -> Any:
        result = original(microbatch, *args)
        if microbatch == work.microbatch:
            (folder / "struck").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(stage, METHODS[work.kind], run)


def _wait(children: list[int], timeout_s: float) -> list[int | None]:
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = None
        time.sleep(0.005)
    return [codes[child] for child in children]


if __name__ == "__main__":
    sys.exit(main())
