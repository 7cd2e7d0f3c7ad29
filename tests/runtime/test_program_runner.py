"""The runner alone, on a single process and without a network; its labels in a trace."""

import re
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import pytest
import torch
from runtime.plain_pipeline import (
    gradients_of,
    module_of,
    one_process,
    stages_for,
    with_passes_after_forwards,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from megatron_vshape.core.model.kinds import Kind, Read, define, remove
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Await, Message, Program, Run
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime import weight_jobs
from megatron_vshape.runtime.program_runner import Handler, Place, run_drain, run_program
from megatron_vshape.runtime.weight_jobs import job_text, label, name_weights


class NoCarrier:
    """Delivers the same tensor every time and drops all sends."""

    tensor = torch.zeros(1)

    def post(self, message: Message) -> None: ...

    def wait(self, message: Message) -> Tensor:
        return self.tensor

    def send(self, message: Message, tensor: Tensor) -> None: ...

    def poll(self) -> None: ...

    def drain(self) -> None: ...


class NoStage:
    """Computes nothing."""

    tensor = torch.zeros(1)

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        return self.tensor

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        return self.tensor

    def backward_weights(self, microbatch: int) -> None: ...

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        return self.tensor


class Everywhere(Mapping[int, NoStage]):
    """The same stage under every number."""

    stage = NoStage()

    def __getitem__(self, key: int) -> NoStage:
        return self.stage

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("device", [0, 3])
def test_runner_needs_less_than_60_us_per_pass(device: int) -> None:
    program = lower(make("v-half", 4, 64))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run_program(program, device, Everywhere(), NoCarrier())
        times.append(time.perf_counter() - start)
    per_pass_us = min(times) / len(program.schedule.order[device]) * 1e6
    print(f"device {device}: {per_pass_us:.1f} us per pass")
    assert per_pass_us < 60


def one_device_program(num_stages: int, num_microbatches: int, is_full: bool) -> Program:
    """Return a program of one device that runs every microbatch through all stages and back."""
    row = []
    for m in range(num_microbatches):
        row += [Pass(Kind.F, s, m) for s in range(num_stages)]
        for s in reversed(range(num_stages)):
            row += [Pass(Kind.BW, s, m)] if is_full else [Pass(Kind.B, s, m), Pass(Kind.W, s, m)]
    placement = (0,) * num_stages
    return lower(Schedule("one", 1, num_microbatches, placement, (tuple(row),)))


def test_error_names_a_stage_without_a_result() -> None:
    class Empty(NoStage):
        tensor = None

    local = one_device_program(2, 1, is_full=True)
    with pytest.raises(RuntimeError, match=r"stage 0 returned nothing for F0\.0"):
        run_program(local, 0, {0: Empty(), 1: Empty()}, NoCarrier())
    remote = lower(make("1f1b", 2, 1))
    with pytest.raises(RuntimeError, match=r"stage 1 returned nothing for BW?1\.0"):
        run_program(remote, 1, {1: Empty()}, NoCarrier())


def test_stage_runs_both_passes_of_an_overlapped_pair() -> None:
    calls: list[tuple[Any, ...]] = []

    class Joint(NoStage):
        def forward_overlapped(self, microbatch: int, received: Any, *arguments: Any) -> Any:
            calls.append((microbatch, received, *arguments[1:]))
            return self.tensor, self.tensor

    program = lower(make("dualpipev", 2, 4))
    stages = {stage: Joint() for stage in range(4)}
    run_program(program, 0, stages, NoCarrier())
    pairs = program.schedule.overlapped_pairs().items()
    local_pairs = [pair for pair in pairs if program.schedule.placement[pair[0].stage] == 0]
    assert [(microbatch, work) for microbatch, _, work, _ in calls] == [
        (forward.microbatch, work) for forward, work in local_pairs
    ]
    # The first and the last stage receive nothing; a V placement turns on the other device.
    assert [received is None for _, received, _, _ in calls] == [
        f.stage == 0 for f, _ in local_pairs
    ]
    assert [gradient is None for *_, gradient in calls] == [b.stage == 3 for _, b in local_pairs]


def test_errors_name_stage_microbatch_and_pass() -> None:
    class Broken(NoStage):
        def backward(self, microbatch: int, received: Any) -> Any:
            raise ZeroDivisionError("by whom?")

    program, place = one_device_program(2, 3, is_full=True), Place()
    with pytest.raises(ZeroDivisionError, match="by whom") as error:
        run_program(program, 0, {0: NoStage(), 1: Broken()}, NoCarrier(), place=place)
    assert error.value.__notes__ == [
        "device 0 raised this in BW1.0, the full backward pass of stage 1 for microbatch 0"
    ]
    assert place.instruction == Run(Pass(Kind.BW, 1, 0))
    run_program(program, 0, {0: NoStage(), 1: NoStage()}, NoCarrier(), place=place)
    assert place.instruction is None
    assert place.last_pass == Pass(Kind.BW, 0, 2)


class Fresh(NoStage):
    """Returns a new tensor from every pass without a reference to it, and counts the live ones."""

    def __init__(self) -> None:
        self.made: list[StorageWeakRef] = []

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        del received
        assert self.num_alive() == 0, "the runner still holds what it handed over"
        tensor = torch.zeros(1)
        self.made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    backward_inputs = backward = forward

    def num_alive(self) -> int:
        return sum(not reference.expired() for reference in self.made)


def test_every_result_is_freed_after_its_read() -> None:
    stage = Fresh()
    stages = dict.fromkeys(range(3), stage)
    run_program(one_device_program(3, 2, is_full=False), 0, stages, NoCarrier())
    assert len(stage.made) == 12
    # The last stage's F and the first stage's B have no reader, so theirs may not stay either.
    assert stage.num_alive() == 0


def test_every_result_is_freed_after_its_send() -> None:
    stage = Fresh()
    run_program(lower(make("1f1b", 3, 5)), 1, {1: stage}, NoCarrier())
    assert len(stage.made) == 10
    assert stage.num_alive() == 0


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


MICROBATCHES = 3


def test_handler_methods_run_in_program_order() -> None:
    met = define(Kind("M", label="meeting", method="none", reads=(Read("F"),), is_collective=True))
    copy = define(
        Kind("K", label="copy", method="none", reads=(Read("F"),), before=("B",), resource="l")
    )
    try:
        schedule = with_passes_after_forwards(make("v-half", 1, MICROBATCHES), met, copy)
        (row,) = schedule.order
        events: list[tuple[str, Pass, bool]] = []

        def note(what: str) -> Any:
            main = threading.main_thread()
            return lambda work: events.append((what, work, threading.current_thread() is main))

        handlers = {
            met: Handler(note("run"), join=note("join")),
            copy: Handler(note("run"), prepare=note("prepare")),
        }
        program, stages = lower(schedule), stages_for(schedule, 0)
        run_program(program, 0, stages, cast(Any, NoCarrier()), handlers=handlers)
        for kind, first in ((met, "join"), (copy, "prepare")):
            events_of_kind = [
                (what, work.stage, work.microbatch) for what, work, _ in events if work.kind is kind
            ]
            turns = [work[1:] for work in row if work.kind is kind]
            assert [event for event in events_of_kind if event[0] == first] == [
                (first, *position) for position in turns
            ]
            assert [event for event in events_of_kind if event[0] == "run"] == [
                ("run", *position) for position in turns
            ]
        assert all(
            on_main == (work.kind is met or what == "prepare") for what, work, on_main in events
        )
        expected, _ = one_process(2, MICROBATCHES, 0, torch.float32)
        for stage_index, stage in stages.items():
            assert all(map(torch.equal, gradients_of(stage.module), expected[stage_index]))
    finally:
        remove(copy)
        remove(met)
