"""One chunk of a Megatron model during one step, as the program runner wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor, nn

from megatron_vshape.core.model.kinds import RELEASE, RELOAD, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.hiding import Beside
from megatron_vshape.mcore.step.gradient_sync import GradientSync
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.offload import Offload


@dataclass(slots=True)
class Step:
    """What the trainer passed in for this step, what it hides, and what the stages put into it."""

    config: Any  # Megatron's TransformerConfig
    forward_step_func: Callable[..., Any]
    num_microbatches: int
    context_parallel_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    gradient_sync: GradientSync
    num_tokens: Tensor  # of this rank's microbatches; only the last stage counts any
    beside: Mapping[Pass, Beside] = field(default_factory=dict)  # by B, what it runs of a W
    offload: Offload | None = None  # where microbatches may wait in host memory
    loss_store: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class MegatronStage:
    """Runs the passes of one chunk with Megatron's own forward_step and backward_step."""

    state: StepState
    step: Step
    model: nn.Module
    data_iterator: Any
    chunk: int
    stage: int
    is_last: bool
    has_chunks: bool  # whether its device has others
    _has_run: bool = False
    _inputs: dict[int, Tensor | None] = field(default_factory=dict)
    _outputs: dict[int, Tensor] = field(default_factory=dict)

    def loss(self, microbatch: int) -> Tensor | None:
        """Return the loss of a microbatch whose B has not run; None where the stage makes none."""
        return self._outputs.get(microbatch) if self.is_last else None

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F; the output's memory belongs to the caller alone afterwards."""
        step = self.step
        if received is not None and not step.forward_only:
            received.requires_grad_()
        is_first = schedules.check_first_val_step(
            step.first_val_step, step.forward_only, not self._has_run
        )
        self._has_run = True
        with self.state.meanwhile(running_chunk=self.chunk):
            output, num_tokens = schedules.forward_step(
                step.forward_step_func,
                self.data_iterator,
                self.model,
                step.num_microbatches,
                received,
                step.loss_store,
                step.config,
                step.context_parallel_size,
                step.collect_non_loss_data,
                None,
                is_first,
                microbatch,
                self.chunk if self.has_chunks else None,
                self.is_last,
            )
        step.num_tokens += num_tokens
        if step.forward_only:
            return None if self.is_last else output.detach()
        self._inputs[microbatch], self._outputs[microbatch] = received, output
        self._count(Pass(Kind.F, self.stage, microbatch), output)
        if step.offload is not None:
            step.offload.ends_forward(self.stage, microbatch, output)
        if self.is_last:
            return None
        # Of the output only grad_fn is still needed here; its memory goes with the alias.
        sent: Tensor = output.detach()
        schedules.deallocate_output_tensor(output, step.config.deallocate_pipeline_outputs)
        return sent

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B; the linears leave their weight gradients as jobs.

        Where the memory of every pass is counted, no W's jobs run inside.
        """
        beside: tuple[Any, ...] = ()
        found = self.step.beside.get(Pass(Kind.B, self.stage, microbatch))
        if found is not None and self.state.census is None:
            beside = found.weights[1:], found.share
        with self.state.jobs.collect((self.stage, microbatch), *beside):
            gradient = self._backward(microbatch, received)
        self._count(Pass(Kind.B, self.stage, microbatch))
        return gradient

    def backward_weights(self, microbatch: int) -> None:
        """Run W."""
        if self.step.offload is not None:
            self.step.offload.begins_weights(Pass(Kind.W, self.stage, microbatch))
        self.step.gradient_sync.weights_begin(self.chunk)
        self.state.jobs.run((self.stage, microbatch))
        self._count(Pass(Kind.W, self.stage, microbatch))
        self.step.gradient_sync.weights_done(self.chunk)

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B and W at once, which is upstream's backward."""
        if self.step.gradient_sync.splits(self.chunk):
            gradient = self.backward_inputs(microbatch, received)
            self.backward_weights(microbatch)
            return gradient
        gradient = self._backward(microbatch, received, Kind.BW)
        self._count(Pass(Kind.BW, self.stage, microbatch))
        self.step.gradient_sync.weights_done(self.chunk)
        return gradient

    def copy_out(self, microbatch: int) -> None:
        """Run D, as all that runs beside the processor in a thread of its own."""
        self._offload.copy_out(self.stage, microbatch)

    def release(self, microbatch: int) -> None:
        """Run L."""
        self._offload.release(self.stage, microbatch)
        self._count(Pass(RELEASE, self.stage, microbatch))

    def make_room(self, microbatch: int) -> None:
        """Run R."""
        self._offload.make_room(self.stage, microbatch)
        self._count(Pass(RELOAD, self.stage, microbatch))

    def copy_back(self, microbatch: int) -> None:
        """Run H, in a thread of its own."""
        self._offload.copy_back(self.stage, microbatch)

    @property
    def _offload(self) -> Offload:
        if self.step.offload is None:
            raise RuntimeError("a microbatch is to wait in host memory, and this step has none")
        return self.step.offload

    def _backward(
        self, microbatch: int, received: Tensor | None, kind: Kind = Kind.B
    ) -> Tensor | None:
        if self.step.offload is not None:
            self.step.offload.begins_backward(Pass(kind, self.stage, microbatch))
        with self.state.meanwhile(running_chunk=self.chunk):
            gradient: Tensor | None = schedules.backward_step(
                self._inputs.pop(microbatch),
                self._outputs.pop(microbatch),
                received,
                self.step.config,
            )
        # A replayed graph's own, which the next B writes to while this is on its way.
        kept: Tensor | None = self.state.graph_memory.kept(gradient)
        return kept

    def _count(self, work: Pass, output: Tensor | None = None) -> None:
        census = self.state.census
        if census is None:
            return
        if output is not None:
            census.add_graph(output)
        census.ends(work)


def zero_tokens(device: torch.device) -> Tensor:
    """Return the start of a step's count of tokens."""
    return torch.zeros([], dtype=torch.int, device=device)
