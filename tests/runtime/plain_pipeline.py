"""A small model of plain torch, cut into stages: on one process, and as stages of a program."""

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

import torch
from runtime.split_linear import SplitLinear
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.runtime.weight_jobs import WeightJobs

SHAPE = (3, 2, 8)  # [s, b, h]
HIDDEN = SHAPE[-1]


def module_of(stage: int, dtype: torch.dtype) -> nn.Module:
    """Return the layers of a stage; equal for every rank and every call."""
    torch.manual_seed(1000 + stage)
    layers = nn.Sequential(
        SplitLinear(HIDDEN, 2 * HIDDEN), nn.Tanh(), SplitLinear(2 * HIDDEN, HIDDEN, bias=False)
    ).to(dtype)
    if dtype != torch.float32:
        for layer in (layers[0], layers[2]):
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    return layers


def data_of(microbatch: int, pipeline: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the input and the target of a microbatch."""
    generator = torch.Generator().manual_seed(7919 * pipeline + microbatch)
    return tuple(torch.randn(2, *SHAPE, generator=generator).to(dtype))  # type: ignore[return-value]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of one microbatch."""
    return (output.float() - target.float()).square().mean()


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Return where every parameter's gradient has come to rest."""
    return [
        getattr(
            parameter,
            "main_grad",
            parameter.grad if parameter.grad is not None else torch.tensor(torch.nan),
        )
        for parameter in module.parameters()
    ]


def one_process(
    num_stages: int, num_microbatches: int, pipeline: int, dtype: torch.dtype
) -> tuple[list[list[Tensor]], list[float]]:
    """Return every stage's gradients and every microbatch's loss, with no pipeline at all."""
    modules = [module_of(stage, dtype) for stage in range(num_stages)]
    losses = []
    for microbatch in range(num_microbatches):
        data, target = data_of(microbatch, pipeline, dtype)
        for module in modules:
            data = module(data)
        loss = loss_of(data, target)
        loss.backward()
        losses.append(loss.item())
    return [gradients_of(module) for module in modules], losses


@dataclass
class PlainStage:
    """A stage of the model; notes which of its activations are alive."""

    stage: int
    num_stages: int
    pipeline: int
    dtype: torch.dtype
    module: nn.Module = field(init=False)
    jobs: WeightJobs = field(default_factory=WeightJobs)
    losses: list[float] = field(default_factory=list)
    saved: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    alive: dict[int, list[StorageWeakRef]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.module = module_of(self.stage, self.dtype)
        self.weights = {
            parameter.untyped_storage().data_ptr() for parameter in self.module.parameters()
        }

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F."""
        references = self.alive.setdefault(microbatch, [])

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in self.weights:
                references.append(StorageWeakRef(tensor.untyped_storage()))
            return tensor

        if (received is None) != (self.stage == 0):
            raise AssertionError(f"stage {self.stage} received {received}")
        data = received
        if data is None:
            data, _ = data_of(microbatch, self.pipeline, self.dtype)
        else:
            data.requires_grad_()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self.module(data)
        if self.stage == self.num_stages - 1:
            output = loss_of(output, data_of(microbatch, self.pipeline, self.dtype)[1])
            self.losses.append(output.item())
        self.saved[microbatch] = (received, output)
        return None if self.stage == self.num_stages - 1 else output.detach()

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B and W at once."""
        data, output = self.saved.pop(microbatch)
        torch.autograd.backward(output, received)
        if data is None:
            return None
        gradient, data.grad = data.grad, None
        return gradient

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B."""
        with self.jobs.collect(microbatch):
            return self.backward(microbatch, received)

    def backward_weights(self, microbatch: int) -> None:
        """Run W."""
        self.jobs.run(microbatch)

    def num_alive(self) -> int:
        """Return of how many microbatches anything saved is alive."""
        self.alive = {
            key: references
            for key, references in self.alive.items()
            if any(not r.expired() for r in references)
        }
        return len(self.alive)


Stage = TypeVar("Stage", bound=PlainStage)


@dataclass
class AliveCounter:
    """An observer that notes the most microbatches whose activations are alive at once."""

    stages: dict[int, PlainStage]
    peak: int = 0
    passes: list[Pass] = field(default_factory=list)

    def begins(self, *works: Pass) -> None:
        """Note the pass, or both of a joint one."""
        self.passes += works

    def ends(self, *works: Pass) -> None:
        """Count live activations after the pass, or after both."""
        self.peak = max(self.peak, sum(stage.num_alive() for stage in self.stages.values()))


def stages_for(
    schedule: Schedule,
    device: int,
    pipeline: int = 0,
    dtype: torch.dtype = torch.float32,
    kind: type[Stage] = PlainStage,
) -> dict[int, Stage]:
    """Return the stages of a device."""
    stages = stages_of(schedule.placement, schedule.num_devices)[device]
    return {stage: kind(stage, schedule.num_stages, pipeline, dtype) for stage in stages}


def with_passes_after_forwards(schedule: Schedule, *kinds: Kind) -> Schedule:
    """Return the schedule with passes of further kinds after each F."""
    rows = []
    for row in schedule.order:
        parts = ((w, *(w._replace(kind=k) for k in kinds if w.kind is Kind.F)) for w in row)
        rows.append(tuple(chain.from_iterable(parts)))
    return replace(schedule, order=tuple(rows))
