"""A new pass type needs one row of the table, and every part of the package supports it."""

from typing import Any

import torch
from runtime.plain_pipeline import (
    SHAPE,
    PlainStage,
    gradients_of,
    one_process,
    stages_for,
    with_passes_after_forwards,
)
from runtime.ranks import run_ranks

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.amounts import Amount, Measure
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, Read, define, remove
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program

LINK, TIME = "link to the host", Amount("copy_us", Measure.COPY)
COPY: dict[str, Any] = {"label": "copy to the host", "method": "copy", "resource": LINK}


def lists(tensors: list[torch.Tensor]) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


class CopyingStage(PlainStage):
    def copy(self, microbatch: int) -> None:
        self.__dict__.setdefault("copied", []).append(self.saved[microbatch][1].detach().clone())


def run_rank(rank: int, text: str) -> list[tuple[int, list[Any], int]]:
    define(Kind("K", reads=(Read("F"),), before=("B",), time=TIME, **COPY))
    program = lower(Schedule.from_json(text))
    transport = Transport([[0, 1]], SHAPE, torch.float32, "cpu")
    transport.prepare(program)
    stages = stages_for(program.schedule, rank, kind=CopyingStage)
    run_program(program, rank, stages, transport)
    transport.close()
    return [
        (stage, lists(gradients_of(stage_object.module)), len(stage_object.copied))
        for stage, stage_object in stages.items()
    ]


def test_new_copy_pass_is_verified_drawn_and_run() -> None:
    copy = define(Kind("K", reads=(Read("F"),), before=("B",), time=TIME, **COPY))
    try:
        costs = Costs.uniform(2, 4, kinds=[copy])
        plain = make("v-half", 2, 5)
        schedule = with_passes_after_forwards(plain, copy)
        verify(schedule, 4, costs)
        timeline = simulate(schedule, costs)
        assert timeline.makespan > simulate(plain, costs).makespan
        assert timeline.draw().count("K") + timeline.draw().count("k") == 4 * 5
        text = schedule.to_json()
        assert Schedule.from_json(text) == schedule
        expected, _ = one_process(4, 5, 0, torch.float32)
        for stage, gradients, copies in sum(run_ranks(2, run_rank, text), []):
            assert gradients == lists(expected[stage])
            assert copies == 5
    finally:
        remove(copy)
