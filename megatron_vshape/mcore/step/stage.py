"""One chunk of a Megatron model during one step, as the program runner wants it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor, nn

from megatron_vshape.core.model.kinds import (
    HEAD_WEIGHT,
    LOGITS,
    LOOKUP_WEIGHT,
    RELEASE,
    RELOAD,
    Kind,
)
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.hiding import Beside
from megatron_vshape.mcore.refusals import captures_locally
from megatron_vshape.mcore.split import local_graphs
from megatron_vshape.mcore.step.gradient_sync import GradientSync
from megatron_vshape.mcore.step.layer_plans import Backward, Forward, kept_by, run_by_layers
from megatron_vshape.mcore.step.slices import Slices
from megatron_vshape.mcore.step.vocabulary import SharedVocabulary
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
    by_layers: bool = False  # by Megatron's layer plans, of which two can run beside each other
    vocabulary: SharedVocabulary | None = None  # where all ranks share one
    slices: Slices | None = None  # where microbatches are cut along their sequence
    loss_store: list[Any] = field(default_factory=list)

    @property
    def num_numbers(self) -> int:
        """Return how many F, B and W a stage has: one of each slice."""
        return self.num_microbatches * (1 if self.slices is None else self.slices.count)


@dataclass(eq=False)
class MegatronStage:
    """Runs the passes of one chunk: by Megatron's forward_step and backward_step, or its plans."""

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
        return self._outputs.get(microbatch) if self._makes_loss else None

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F; the output's memory belongs to the caller alone afterwards."""
        step, begun = self.step, self._begun(microbatch, received)
        with self._running(microbatch):
            if step.by_layers:
                output, num_tokens, _ = run_by_layers(step.config, begun, None)
            else:
                output, num_tokens = schedules.forward_step(
                    begun.forward_step_func,
                    self.data_iterator,
                    self.model,
                    step.num_microbatches,
                    received,
                    step.loss_store,
                    step.config,
                    step.context_parallel_size,
                    step.collect_non_loss_data,
                    None,
                    begun.is_first,
                    microbatch,
                    begun.chunk,
                    self._makes_loss,
                )
        return self._ended(begun, output, num_tokens)

    def forward_beside(
        self,
        microbatch: int,
        received: Tensor | None,
        other: MegatronStage,
        work: Pass,
        gradient: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run F beside `work`, a B or BW of `other`; return what each would return alone.

        `gradient` is what `work` receives. Where the memory of every pass is counted, the two run
        in turn.
        """
        if self.state.census is not None or not self.step.by_layers:
            sent = self.forward(microbatch, received)
            return sent, getattr(other, work.kind.method)(work.microbatch, gradient)
        whole = work.kind is Kind.BW and not other.step.gradient_sync.splits(other.chunk)
        begun = self._begun(microbatch, received)
        jobs, key = self.state.jobs, (other.stage, work.microbatch)
        with (
            self.state.meanwhile(running_chunk=self.chunk),
            contextlib.nullcontext() if whole else jobs.collect(key),
        ):
            backward = other.taken(work.microbatch, gradient, whole)
            output, num_tokens, gradient = run_by_layers(self.step.config, begun, backward)
        if whole:
            self.step.gradient_sync.weights_done(other.chunk)
        elif work.kind is Kind.BW:
            other.backward_weights(work.microbatch)
        return self._ended(begun, output, num_tokens), gradient

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

    def prepare(self, work: Pass) -> None:
        """Make ready for what is to run beside the processor."""
        if self.step.offload is not None:
            self.step.offload.prepare(work)

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

    def join(self, work: Pass) -> None:
        """Come to a pass that all ranks join."""
        self._vocabulary.join(work)

    def look_up(self, microbatch: int) -> None:
        """Run I."""
        self._vocabulary.look_up(microbatch)

    def sum_embeddings(self, microbatch: int) -> None:
        """Run E, in a thread of its own."""
        self._vocabulary.wait_for_embeddings(microbatch)

    def own_logits(self, microbatch: int) -> None:
        """Run S."""
        self._vocabulary.own_logits(microbatch)
        self._count(Pass(LOGITS, self.stage, microbatch))

    def sum_vocabulary(self, microbatch: int) -> None:
        """Run C, in a thread of its own."""
        self._vocabulary.wait_for_sums(microbatch)

    def own_head_weights(self, microbatch: int) -> None:
        """Run T."""
        self._vocabulary.own_head_weights(microbatch)
        self._count(Pass(HEAD_WEIGHT, self.stage, microbatch))

    def own_embedding_weights(self, microbatch: int) -> None:
        """Run J."""
        self._vocabulary.own_embedding_weights(microbatch)
        self._count(Pass(LOOKUP_WEIGHT, self.stage, microbatch))

    @property
    def _vocabulary(self) -> SharedVocabulary:
        if self.step.vocabulary is None:
            raise RuntimeError("a vocabulary is to be shared, and this step has none that is")
        return self.step.vocabulary

    @property
    def _makes_loss(self) -> bool:
        """Return whether F ends with the loss: no shared output layer, nor losses of a slice."""
        return self.is_last and self.step.vocabulary is None and self.step.slices is None

    def _running(self, microbatch: int) -> AbstractContextManager[None]:
        """Tell whoever is deep in the model what runs inside."""
        slices = self.step.slices
        own = None if slices is None else slices.part(microbatch)
        return self.state.meanwhile(running_chunk=self.chunk, slice=own)

    def _forward_step_func(self, microbatch: int) -> Callable[..., Any]:
        """Return what reads a microbatch and calls the model."""
        vocabulary = self.step.vocabulary
        if vocabulary is not None:
            vocabulary.running = microbatch
            if self.stage == 0:
                return vocabulary.first_forward(microbatch)
            if self.is_last:
                return vocabulary.last_forward(microbatch)
        if self.step.slices is not None:
            return self.step.slices.forward(self.stage, microbatch)
        return self.step.forward_step_func

    @property
    def _offload(self) -> Offload:
        if self.step.offload is None:
            raise RuntimeError("a microbatch is to wait in host memory, and this step has none")
        return self.step.offload

    def taken(self, microbatch: int, received: Tensor | None, whole: bool) -> Backward:
        """Return what a B by layer plans needs, which the stage keeps no longer."""
        inputs, outputs = self._inputs.pop(microbatch), self._outputs.pop(microbatch)
        return Backward(self.model, inputs, outputs, received, self.state.jobs if whole else None)

    def _begun(self, microbatch: int, received: Tensor | None) -> Forward:
        """Return what an F needs."""
        step = self.step
        if received is not None and not step.forward_only:
            received.requires_grad_()
        is_first = schedules.check_first_val_step(
            step.first_val_step, step.forward_only, not self._has_run
        )
        self._has_run = True
        local_graphs.begin_forward(step.config, self.model)
        return Forward(
            self._forward_step_func(microbatch),
            self.data_iterator,
            self.model,
            step.num_microbatches,
            received,
            step.loss_store,
            step.collect_non_loss_data,
            is_first,
            microbatch,
            self.chunk if self.has_chunks else None,
        )

    def _ended(self, begun: Forward, output: Tensor, num_tokens: Tensor) -> Tensor | None:
        """Keep what B needs of an F that has run, and return what the next stage does."""
        step, microbatch = self.step, begun.microbatch
        step.num_tokens += num_tokens
        if self.is_last and step.vocabulary is not None:
            step.vocabulary.keep_hidden(microbatch, output)
        if step.forward_only:
            return None if self.is_last else output.detach()
        if captures_locally(step.config):
            output = local_graphs.own(output)
        if self.is_last and step.slices is not None:  # a view, which Megatron frees nothing of
            output = output.clone()
        self._inputs[microbatch], self._outputs[microbatch] = begun.received, output
        self._count(Pass(Kind.F, self.stage, microbatch), output)
        if step.offload is not None:
            step.offload.ends_forward(self.stage, microbatch, output)
        if self._makes_loss:
            return None
        # Of the output only grad_fn is still needed here; its memory goes with the alias.
        sent: Tensor = output.detach()
        schedules.deallocate_output_tensor(output, step.config.deallocate_pipeline_outputs)
        if self.is_last and step.slices is not None:
            step.slices.keep_losses(self.stage, microbatch, sent)
        return None if self.is_last else sent

    def _backward(
        self, microbatch: int, received: Tensor | None, kind: Kind = Kind.B
    ) -> Tensor | None:
        if self.step.offload is not None:
            self.step.offload.begins_backward(Pass(kind, self.stage, microbatch))
        if self.is_last and self.step.vocabulary is not None:
            received = self.step.vocabulary.hidden_gradient(microbatch)
        if self.is_last and self.step.slices is not None:
            received = self.step.slices.loss_gradient(microbatch)
        gradient: Tensor | None
        with self._running(microbatch):
            if self.step.by_layers:
                backward = self.taken(microbatch, received, kind is Kind.BW)
                gradient = run_by_layers(self.step.config, None, backward).gradient
            else:
                gradient = schedules.backward_step(
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
            for tensor in kept_by(output):
                census.add(tensor)
                census.add_graph(tensor)
        census.ends(work)


def loss_maker(
    step: Step, model: nn.Module, num_chunks: int, reports: bool = True
) -> Callable[..., Tensor | None]:
    """Return what makes a microbatch's loss, by the function that F returned.

    It takes the losses [b, s], and returns their gradient where they are to learn from it:
    Megatron's own averages and scales, masks and loss scale are in that. Or it takes what the
    trainer has made of logits, with their graph (`is_leaf` false), and nothing is returned. What is
    reported of the loss and how many tokens it counts is kept where `reports`.
    """
    store: list[Any] = step.loss_store if reports else []

    def lose(losses: Any, function: Any, is_leaf: bool = True) -> Tensor | None:
        if is_leaf and not step.forward_only:
            losses.requires_grad_()
        if step.config.timers is not None:  # what makes the loss stops it
            step.config.timers("forward-compute", log_level=2).start()
        loss, num_tokens = schedules.forward_step_calc_loss(
            model,
            losses,
            function,
            step.config,
            num_chunks - 1 if num_chunks > 1 else None,
            step.collect_non_loss_data,
            step.num_microbatches,
            store,
            step.context_parallel_size,
            True,
        )
        if reports:
            step.num_tokens += num_tokens
        else:
            store.clear()
        if step.forward_only:
            return None
        leaf = losses if is_leaf else None
        gradient: Tensor | None = schedules.backward_step(leaf, loss, None, step.config)
        return gradient

    return lose


def zero_tokens(device: torch.device) -> Tensor:
    """Return the start of a step's count of tokens."""
    return torch.zeros([], dtype=torch.int, device=device)
