"""What capabilities do in a step: around the passes of a chunk, and by passes of their own.

A `Capability` is asked at the beginning of every step for its `Part` in it. The runner and the
stages know of no capability more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.hiding import Beside
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.mcore.setup.pipeline import Pipeline
from megatron_vshape.mcore.step.gradient_sync import GradientSync
from megatron_vshape.mcore.step_state import Slice, StepState
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.stage import Handler

ForwardStep = Callable[..., Any]
"""The trainer's forward step function, or its replacement."""


class Part:
    """A capability's part in one step; in a step without it nothing of this is done.

    Methods with a stage are called by it; `is_last` says that it is the model's last.
    """

    makes_loss = False  # in place of the F of the last stage

    def handlers(self) -> Mapping[Kind, Handler]:
        """Return what runs passes of kinds of its own."""
        return {}

    def session(self) -> AbstractContextManager[None]:
        """Return what the step's passes run inside."""
        return nullcontext()

    def slice_of(self, number: int) -> Slice | None:
        """Return the slice that passes of this number are of; None where microbatches are whole."""

    def forward(self, stage: int, is_last: bool, number: int, step: ForwardStep) -> ForwardStep:
        """Return what is to be called in F for the trainer's function."""
        return step

    def output(self, is_last: bool, number: int, output: Tensor) -> Tensor:
        """Return the output of an F, with its graph, as B is to have it."""
        return output

    def ends_forward(self, stage: int, number: int, output: Tensor) -> None:
        """Take note of what an F has left behind; `output` still has its data."""

    def sent(self, stage: int, number: int, output: Tensor) -> None:
        """Take what the last stage's F would send: its output without graph."""

    def begins(self, work: Pass) -> None:
        """Have B, BW or W find what it reads."""

    def gradient(self, is_last: bool, number: int, received: Tensor | None) -> Tensor | None:
        """Return the gradient of a stage's output, for its B."""
        return received


@dataclass(slots=True)
class Step:
    """What the trainer passed in for this step, what it hides, and what the stages put into it."""

    config: Any  # Megatron's TransformerConfig
    forward_step_func: ForwardStep
    num_microbatches: int
    context_parallel_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    gradient_sync: GradientSync
    num_tokens: Tensor  # of this rank's microbatches; only the last stage counts any
    beside: Mapping[Pass, Beside] = field(default_factory=dict)  # by B, what it runs of a W
    by_layers: bool = False  # by Megatron's layer plans, of which two can run beside each other
    slices: int = 1  # of every microbatch
    parts: list[Part] = field(default_factory=list)
    loss_store: list[Any] = field(default_factory=list)

    def handlers(self) -> dict[Kind, Handler]:
        """Return what runs the passes that are no stage's own, by kind."""
        return {kind: each for part in self.parts for kind, each in part.handlers().items()}


@dataclass(frozen=True, slots=True)
class Beginning:
    """A step that begins, as a capability sees it."""

    state: StepState
    pipeline: Pipeline
    step: Step
    chunks: Sequence[nn.Module]
    iterators: Sequence[Any]  # of the data, by chunk
    groups: Any  # Megatron's ProcessGroupCollection
    transport: Transport
    program: Program
    shape: tuple[int, ...]  # of a message: [s, b, h] of a slice
    seq_length: int
    local_ranks: int | None  # of this host
    again: Any = None  # reads the last chunk's data once more, where a shared vocabulary does

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages of this rank, by chunk."""
        return self.pipeline.stage_map.stages(self.groups.pp.rank())

    @property
    def torch_device(self) -> torch.device:
        """Return the device of the model."""
        return device_of(self.chunks[0])


class Capability:
    """What a schedule may have beside F, B and W; kept from step to step."""

    def begin(self, beginning: Beginning) -> Part | None:
        """Return its part in a step; None where it has none."""

    def end(self) -> None:
        """Take note that a training step has run."""

    def forget(self) -> None:
        """Let go of what a step has left that is undone."""

    def clear(self) -> None:
        """Let go of all that is kept between steps."""


def counted(state: StepState, handler: Handler) -> Handler:
    """Return the handler of passes after each of which memory is counted, where it is."""

    def run(work: Pass) -> None:
        handler.run(work)
        if state.census is not None:
            state.census.ends(work)

    return handler._replace(run=run)


def parts_of(capabilities: Iterable[Capability], beginning: Beginning) -> list[Part]:
    """Return the parts in a step."""
    found = (each.begin(beginning) for each in capabilities)
    return [part for part in found if part is not None]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters."""
    return next(model.parameters()).device
