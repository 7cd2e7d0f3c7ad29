"""The runner alone, on a single process and without a network."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from posting import streams_of
from runtime.plain_pipeline import gradients_of, one_process, stages_for
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Message, Program, Run
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.program_runner import Place, run_program


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


@pytest.mark.parametrize("is_full", [False, True])
def test_one_device_passes_results_without_transport(is_full: bool) -> None:
    program = one_device_program(3, 4, is_full)
    assert streams_of(program) == []
    stages = stages_for(program.schedule, 0, 0, torch.float32)
    run_program(program, 0, stages, NoCarrier())
    expected, losses = one_process(3, 4, 0, torch.float32)
    assert stages[2].losses == losses
    for stage, stage_object in stages.items():
        for gradient, expected_gradient in zip(
            gradients_of(stage_object.module), expected[stage], strict=True
        ):
            assert torch.equal(gradient, expected_gradient)


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
