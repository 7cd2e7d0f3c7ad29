"""A trace shows every pass, wait and weight job by name, and no name is made without one."""

import re
from typing import Any, NamedTuple

import pytest
import torch
from runtime.plain_pipeline import SHAPE, module_of, stages_for
from runtime.ranks import run_ranks
from runtime.test_program_runner import Everywhere, NoCarrier
from torch.profiler import ProfilerActivity, profile

from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Await, Program, Run
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime import weight_jobs
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_drain, run_program
from megatron_vshape.runtime.weight_jobs import job_text, label, name_weights

LABEL = re.compile(r"(wait )?(F|B|W|BW)\d+\.\d+|job .+")
JOBS = ["job 8x16", "job 16x8"]  # of a stage's two linears, the last first


class Shown(NamedTuple):
    """A label in a trace, with its times in us."""

    name: str
    start: float
    end: float

    def holds(self, inner: "Shown") -> bool:
        return self.start <= inner.start and inner.end <= self.end


def shown(trace: profile) -> list[Shown]:
    """Return the labels of the trace in the order in which they begin."""
    intervals = [
        Shown(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if LABEL.fullmatch(event.name)
    ]
    return sorted(intervals, key=lambda interval: (interval.start, -interval.end))


def row_of(program: Program, device: int) -> list[str]:
    """Return the expected labels of a device's row, without its weight jobs."""
    texts = []
    for instruction in program.instructions[device]:
        if isinstance(instruction, Run):
            texts.append(str(instruction.work))
        elif isinstance(instruction, Await):
            texts.append(f"wait {instruction.message.work}")
    return texts


def recorded(rank: int, name: str) -> list[Shown]:
    """Run a step on this rank and return the labels of its trace."""
    program = lower(make(name, 2, 3))
    transport = Transport([[0, 1]], SHAPE, torch.float32, "cpu", timeout_s=20)
    transport.prepare(program)
    stages = stages_for(program.schedule, rank, 0, torch.float32)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run_program(program, rank, stages, transport)
    transport.close()
    return shown(trace)


@pytest.mark.parametrize("name", ["v-half", "1f1b"])
def test_trace_shows_every_pass_of_a_device(name: str) -> None:
    program = lower(make(name, 2, 3))
    for device, intervals in enumerate(run_ranks(2, recorded, name)):
        outer = [interval for interval in intervals if not interval.name.startswith("job ")]
        jobs = [interval for interval in intervals if interval.name.startswith("job ")]
        assert [interval.name for interval in outer] == row_of(program, device)
        assert any(interval.name.startswith("wait ") for interval in outer)
        for former, later in zip(outer, outer[1:], strict=False):
            assert former.end <= later.start
        for interval in outer:
            inside = [job.name for job in jobs if interval.holds(job)]
            assert inside == (JOBS if interval.name.startswith("W") else [])
        num_split = sum(interval.name.startswith("W") for interval in outer)
        assert len(jobs) == 2 * num_split
        assert (num_split > 0) == (name == "v-half")


def test_drain_shows_its_waits() -> None:
    row = lower(make("v-half", 2, 3)).instructions[0]
    waits = [instruction for instruction in row if isinstance(instruction, Await)]
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run_drain(waits, NoCarrier(), torch.zeros(1))
    assert [interval.name for interval in shown(trace)] == [
        f"wait {instruction.message.work}" for instruction in waits
    ]


def test_no_label_is_created_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    record_function = weight_jobs.record_function

    def counted(name: str) -> Any:
        calls.append(name)
        return record_function(name)

    def text_of(number: int) -> str:
        calls.append("text")
        return str(number)

    monkeypatch.setattr(weight_jobs, "record_function", counted)
    program = lower(make("v-half", 2, 3))

    def run() -> None:
        run_program(program, 0, Everywhere(), NoCarrier())
        with label(text_of, 7):
            pass

    run()
    assert calls == []
    with profile(activities=[ProfilerActivity.CPU]):
        run()
    assert calls == [*row_of(program, 0), "text", "7"]
    run()
    assert len(calls) == len(row_of(program, 0)) + 2


def test_job_has_the_name_of_its_first_weight() -> None:
    module = module_of(0, torch.float32)
    weights = [module[2].weight, module[0].weight]
    assert job_text(weights) == "job 8x16"
    name_weights(module)
    assert job_text(weights) == "job 2"
    assert job_text([module[0].bias]) == "job 0.bias"
    assert job_text([]) == "job"
