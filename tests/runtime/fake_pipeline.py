"""Programs on fake devices: stages whose passes are kernels, and the real runtime between them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from runtime.fake_device import Device, DeviceTensor, Kernel, World

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.early_start import StopPoint
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import ProgramRun
from megatron_vshape.runtime.variable_p2p import VariableTransport

SHAPE = (64, 2, 8)  # more than a block of memory, so that it is none that a number has had
MESSAGE_BYTES = 64 * 2 * 8 * 4

TO_THE_END = float("inf")
"""The lead of a host that launches its whole run before its device starts."""

Waits = Callable[[Device, Pass], bool]
"""Whether the host waits for its whole device inside a pass."""


def program_of(
    name: str, devices: int, microbatches: int, *, length_on_arrival: bool = False
) -> Program:
    """Return a program of the catalogue, fused where that delays nothing."""
    schedule = make(name, devices, microbatches)
    costs = Costs.uniform(devices, schedule.num_stages, 1, 1.15, 0.85, 0.05)
    return lower(
        schedule, simulate(schedule, costs), kernels=True, length_on_arrival=length_on_arrival
    )


def never(device: Device, work: Pass) -> bool:
    """No pass waits."""
    return False


def always(device: Device, work: Pass) -> bool:
    """Every pass waits, as where the allocator is out of memory."""
    return True


def at_first_kernels(device: Device, work: Pass) -> bool:
    """The first pass of every kind and stage waits, as where kernels are loaded lazily."""
    kind = work[:2]
    is_new = kind not in device.loaded
    device.loaded.add(kind)
    return is_new


def at_random(device: Device, work: Pass) -> bool:
    """Some passes wait."""
    return device.world.draw.random() < 0.3


WAITS: tuple[Waits, ...] = (never, always, at_first_kernels, at_random)


@dataclass
class FakeStage:
    """A stage that reads its inputs, and returns values that identify the pass and the step."""

    device: Device
    stage: int
    num_stages: int
    waits: Waits
    length_of: Callable[[int], int]
    step: int = 0

    def forward(self, microbatch: int, received: DeviceTensor | None) -> DeviceTensor | None:
        return self._run(Pass(Kind.F, self.stage, microbatch), Kind.F, received)

    def backward_inputs(
        self, microbatch: int, received: DeviceTensor | None
    ) -> DeviceTensor | None:
        return self._run(Pass(Kind.B, self.stage, microbatch), Kind.B, received)

    def backward(self, microbatch: int, received: DeviceTensor | None) -> DeviceTensor | None:
        return self._run(Pass(Kind.BW, self.stage, microbatch), Kind.B, received)

    def backward_weights(self, microbatch: int) -> None:
        self._run(Pass(Kind.W, self.stage, microbatch), None, None)

    def _run(
        self, work: Pass, makes: Kind | None, received: DeviceTensor | None
    ) -> DeviceTensor | None:
        device = self.device
        device.world.pause()
        if self.waits(device, work):
            device.wait_for_all()
        source_stage = self.stage + (-1 if makes is Kind.F else 1)
        reads: dict[int, Any] = {}
        if makes is not None and 0 <= source_stage < self.num_stages:
            assert received is not None, work
            reads[received.pointer] = (self.step, makes, source_stage, work.microbatch)
        else:
            assert received is None, work
        result, writes = None, {}
        target_stage = self.stage + (1 if makes is Kind.F else -1)
        if makes is not None and 0 <= target_stage < self.num_stages:
            length = self.length_of(work.microbatch)
            result = device.empty((length, *SHAPE[1:]), torch.float32)
            writes = {result.pointer: (self.step, makes, self.stage, work.microbatch)}
        kernel = Kernel(device.compute, str(work), reads, writes)
        kernel.is_pass = True
        device.lead += 1
        device.launch(kernel)
        return result


@dataclass
class Train:
    """Program of every host: some steps, and an optimizer after each.

    With `ends` the hosts wait for their devices where a step is cut. With `length_on_arrival`
    messages have variable length.
    """

    program: Program
    waits: Waits = never
    steps: int = 1
    ends: StopPoint | None = None
    length_on_arrival: bool = False
    transports: dict[int, Transport] = field(default_factory=dict)

    def __call__(self, device: Device) -> None:
        program, rank = self.program, device.rank
        transport_class = VariableTransport if self.length_on_arrival else Transport
        num_devices = program.schedule.num_devices
        transport = transport_class([range(num_devices)], SHAPE, torch.float32, "meta", timeout_s=9)
        self.transports[rank] = transport
        transport.prepare(program)
        device.waits_for_compute = 0  # to meet the others it may
        stages = stages_of(program.schedule.placement, device, self.waits, self.length_on_arrival)
        for step in range(self.steps):
            for stage in stages.values():
                stage.step = step
            run: Any = ProgramRun(program, rank, stages, transport)  # type: ignore[arg-type]
            if self.ends is not None:
                run.advance(self.ends[rank])
                device.wait_for_all()
            run.finish()
            optimize(device)
        transport.close()


def stages_of(
    placement: Placement, device: Device, waits: Waits, length_on_arrival: bool
) -> dict[int, FakeStage]:
    """Return the stages of a device."""
    number = len(placement)

    def length_of(microbatch: int) -> int:
        return SHAPE[0] * (1 + microbatch % 3) if length_on_arrival else SHAPE[0]

    return {
        stage: FakeStage(device, stage, number, waits, length_of)
        for stage, holder in enumerate(placement)
        if holder == device.rank
    }


def optimize(device: Device) -> None:
    """Reuse all free memory, as the code after a step may."""
    used: Sequence[DeviceTensor] = [
        device.filled(SHAPE, torch.float32, "of the optimizer") for _ in range(8)
    ]
    del used


def any_world(num_devices: int, seed: int) -> World:
    """Draw how many queues a device has, and how far the host is ahead."""
    draw = random.Random(seed)
    return World(
        num_devices,
        seed,
        connections=draw.choice((1, 1, 2, 8, 32)),
        lead=draw.choice((None, None, 0, 1, 3, TO_THE_END)),
    )
