"""One chunk of a Megatron model during one step, with the interface of the program runner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from megatron.core.pipeline_parallel import schedules
from torch import Tensor, nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.step.step_hooks import (
    Backward,
    Forward,
    Made,
    PassRunner,
    StepContext,
)


@dataclass(eq=False)
class MegatronStage:
    """Runs the passes of one chunk by Megatron's step functions, or by those of a feature."""

    step: StepContext
    chunk: int
    stage: int
    is_last: bool
    has_chunks: bool  # whether the rank has several chunks
    _has_run: bool = False
    _inputs: dict[int, Tensor | None] = field(default_factory=dict)
    _outputs: dict[int, Tensor] = field(default_factory=dict)

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F; afterwards only the caller owns the memory of the output."""
        begun = self._begun(microbatch, received)
        with self._running(microbatch):
            output, num_tokens, _ = self._run(self.step.config, begun, None)
        return self._ended(begun, output, num_tokens)

    def forward_overlapped(
        self,
        microbatch: int,
        received: Tensor | None,
        other: MegatronStage,
        work: Pass,
        gradient: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run F overlapped with `work`, a B or BW of `other`; return the results of both.

        `gradient` is the gradient that `work` receives. While memory is measured, the two passes
        run one after the other.
        """
        run = self._overlapping
        # Megatron's own step functions cannot overlap passes. While memory is measured, overlapped
        # passes would mix their allocations.
        if self.step.state.census is not None or run is None:
            sent = self.forward(microbatch, received)
            return sent, getattr(other, work.kind.method)(work.microbatch, gradient)
        # A BW runs its weight gradients inside, unless gradient reductions need a separate W.
        whole = work.kind is Kind.BW and not other.step.gradient_sync.splits(other.chunk)
        begun = self._begun(microbatch, received)
        jobs, key = self.step.state.jobs, (other.stage, work.microbatch)
        with (
            self.step.state.running(self.chunk),
            contextlib.nullcontext() if whole else jobs.collect(key),
        ):
            backward = other.taken(work.microbatch, gradient, whole)
            output, num_tokens, gradient = run(self.step.config, begun, backward)
        if whole:
            self.step.gradient_sync.weights_done(other.chunk)
        elif work.kind is Kind.BW:
            other.backward_weights(work.microbatch)
        return self._ended(begun, output, num_tokens), gradient

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B; linear layers defer their weight gradients as jobs.

        While memory is measured, no jobs of a W run inside.
        """
        beside: tuple[Any, ...] = ()
        found = self.step.beside.get(Pass(Kind.B, self.stage, microbatch))
        if found is not None and self.step.state.census is None:
            beside = found.weights[1:], found.share
        with self.step.state.jobs.collect((self.stage, microbatch), *beside):
            gradient = self._backward(microbatch, received)
        self._count(Pass(Kind.B, self.stage, microbatch))
        return gradient

    def backward_weights(self, microbatch: int) -> None:
        """Run W."""
        work = Pass(Kind.W, self.stage, microbatch)
        # Features bring back saved activations that they have moved, before the jobs read them.
        for part in self.step.parts:
            part.begins(work)
        # In the last W of a chunk, the reduction of its first bucket can start.
        self.step.gradient_sync.weights_begin(self.chunk)
        self.step.state.jobs.run((self.stage, microbatch))
        self._count(work)
        self.step.gradient_sync.weights_done(self.chunk)

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B and W as one backward, which is upstream's."""
        if self.step.gradient_sync.splits(self.chunk):
            gradient = self.backward_inputs(microbatch, received)
            self.backward_weights(microbatch)
            return gradient
        gradient = self._backward(microbatch, received, Kind.BW)
        self._count(Pass(Kind.BW, self.stage, microbatch))
        self.step.gradient_sync.weights_done(self.chunk)
        return gradient

    @property
    def model(self) -> nn.Module:
        """The chunk with its wrappers."""
        return self.step.chunks[self.chunk]

    @property
    def _makes_loss(self) -> bool:
        """Return whether F ends with the loss."""
        return self.is_last and not any(part.makes_loss for part in self.step.parts)

    def _running(self, microbatch: int) -> AbstractContextManager[None]:
        """Set the running chunk and its tokens for code deep in the model."""
        own = None
        for part in self.step.parts:
            own = part.tokens_of(microbatch) or own
        return self.step.state.running(self.chunk, own)

    def taken(self, microbatch: int, received: Tensor | None, whole: bool) -> Backward:
        """Return the arguments of a B, and drop the stage's references to them."""
        # Dropped before B runs, so that autograd can free each activation as soon as it is used.
        inputs, outputs = self._inputs.pop(microbatch), self._outputs.pop(microbatch)
        return Backward(
            model=self.model,
            received=inputs,
            output=outputs,
            gradient=received,
            whole=self.step.state.jobs if whole else None,
        )

    def _begun(self, microbatch: int, received: Tensor | None) -> Forward:
        """Return the arguments of an F."""
        step = self.step
        if received is not None and not step.forward_only:
            # B sends the gradient of this tensor to the previous stage.
            received.requires_grad_()
        is_first = schedules.check_first_val_step(
            step.first_val_step, step.forward_only, not self._has_run
        )
        self._has_run = True
        forward_step = step.forward_step
        for part in step.parts:
            forward_step = part.forward(self.stage, self.is_last, microbatch, forward_step)
        return Forward(
            forward_step_func=forward_step,
            data_iterator=step.iterators[self.chunk],
            model=self.model,
            num_microbatches=step.num_microbatches,
            received=received,
            loss_store=step.loss_store,
            collect_non_loss_data=step.collect_non_loss_data,
            is_first=is_first,
            microbatch=microbatch,
            chunk=self.chunk if self.has_chunks else None,
            context_parallel_size=step.groups.cp.size(),
            makes_loss=self._makes_loss,
        )

    def _ended(self, begun: Forward, output: Tensor, num_tokens: Tensor) -> Tensor | None:
        """Store the tensors of an F that B needs; return the tensor for the next stage."""
        step, microbatch = self.step, begun.microbatch
        step.num_tokens += num_tokens
        for part in step.parts:
            output = part.output(self.is_last, microbatch, output)
        if step.forward_only:
            return None if self.is_last else output.detach()
        self._inputs[microbatch], self._outputs[microbatch] = begun.received, output
        self._count(Pass(Kind.F, self.stage, microbatch), output)
        for part in step.parts:
            part.ends_forward(self.stage, microbatch, output)
        if begun.makes_loss:
            return None
        # From here on only grad_fn of the output is needed; the alias owns its memory.
        sent: Tensor = output.detach()
        schedules.deallocate_output_tensor(output, step.config.deallocate_pipeline_outputs)
        if not self.is_last:
            return sent
        for part in step.parts:
            part.sent(self.stage, microbatch, sent)
        return None

    def _backward(
        self, microbatch: int, received: Tensor | None, kind: Kind = Kind.B
    ) -> Tensor | None:
        work = Pass(kind, self.stage, microbatch)
        for part in self.step.parts:
            part.begins(work)
            received = part.gradient(self.is_last, microbatch, received)
        with self._running(microbatch):
            backward = self.taken(microbatch, received, kind is Kind.BW)
            gradient = self._run(self.step.config, None, backward).gradient
        # A gradient in graph memory needs a copy: the next replay overwrites it during the send.
        kept: Tensor | None = self.step.state.graph_memory.kept(gradient)
        return kept

    @property
    def _overlapping(self) -> PassRunner | None:
        """Return a feature's runner of passes, which can overlap an F with a B."""
        return next(filter(None, (part.run_passes for part in self.step.parts)), None)

    @property
    def _run(self) -> PassRunner:
        return self._overlapping or run_alone

    def _count(self, work: Pass, output: Tensor | None = None) -> None:
        census = self.step.state.census
        if census is None:
            return
        if output is not None:
            census.add_graph(output)
            for part in self.step.parts:
                for tensor in part.retained(output):
                    census.add(tensor)
                    census.add_graph(tensor)
        census.ends(work)


def run_alone(config: Any, forward: Forward | None, backward: Backward | None) -> Made:
    """Run an F, or a B, as Megatron's schedules do."""
    output = num_tokens = gradient = None
    if forward is not None:
        output, num_tokens = schedules.forward_step(
            forward.forward_step_func,
            forward.data_iterator,
            forward.model,
            forward.num_microbatches,
            forward.received,
            forward.loss_store,
            config,
            forward.context_parallel_size,
            forward.collect_non_loss_data,
            None,
            forward.is_first,
            forward.microbatch,
            forward.chunk,
            forward.makes_loss,
        )
    if backward is not None:
        read = backward.received, backward.output, backward.gradient
        gradient = schedules.backward_step(*read, config)
    return Made(output, num_tokens, gradient)


def loss_maker(step: StepContext, reports: bool = True) -> Callable[..., Tensor | None]:
    """Create the function that computes the loss of a microbatch with the loss function of its F.

    In the usual case, the function gets the losses [b, s] and returns their gradient in training,
    including averages, scales, masks and loss scale of Megatron and the trainer. With `is_leaf`
    false, it gets a tensor that the trainer has computed from logits, with its graph, and returns
    None. With `reports`, the reports of the loss and its number of tokens are stored in the step.

    The loss function runs as in the F of the last chunk, because it may query the stage.
    """
    store: list[Any] = step.loss_store if reports else []
    model, num_chunks = step.chunks[-1], len(step.chunks)

    def lose(losses: Any, function: Any, is_leaf: bool = True) -> Tensor | None:
        with step.state.running(num_chunks - 1):
            return make(losses, function, is_leaf)

    def make(losses: Any, function: Any, is_leaf: bool) -> Tensor | None:
        if is_leaf and not step.forward_only:
            # The losses are detached from the model, so this backward ends here and gives their
            # gradient.
            losses.requires_grad_()
        if step.config.timers is not None:  # forward_step_calc_loss stops this timer
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
            step.groups.cp.size(),
            True,
        )
        if reports:
            step.num_tokens += num_tokens
        else:
            # Every rank computes this loss, but only one may report it to the trainer.
            store.clear()
        if step.forward_only:
            return None
        leaf = losses if is_leaf else None
        gradient: Tensor | None = schedules.backward_step(leaf, loss, None, step.config)
        return gradient

    return lose
