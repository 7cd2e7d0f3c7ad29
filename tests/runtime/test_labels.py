"""A trace shows every pass, wait and weight job by name, and no name is made without one."""

import re
from typing import Any, NamedTuple

import pytest
import torch
from runtime.plain_pipeline import module_of
from runtime.test_program_runner import Everywhere, NoCarrier
from torch.profiler import ProfilerActivity, profile

from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Await, Program, Run
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime import weight_jobs
from megatron_vshape.runtime.program_runner import run_drain, run_program
from megatron_vshape.runtime.weight_jobs import job_text, label, name_weights

LABEL = re.compile(r"(wait )?(F|B|W|BW)\d+\.\d+|job .+")


class Shown(NamedTuple):
    """A label in a trace, with its times in us."""

    name: str
    start: float
    end: float


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
