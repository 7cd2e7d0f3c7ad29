"""The context of a step, and the stage that runs the passes of one chunk in it.

At the start of every step, each `StepFeature` returns its `StepHook` for this step. The runner and
the stages use optional features only through these two classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config, make_viewless_tensor
from torch import Tensor, nn

from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import DeferredWgradOverlap
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.run_config import RunConfig
from megatron_vshape.mcore.step.gradient_sync import GradientSync
from megatron_vshape.mcore.step_state import StepState, TokenRange, device_of
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import Handler, ProgramRun
from megatron_vshape.runtime.weight_jobs import WeightJobs

Handlers = Mapping[Kind, Handler]

ForwardStep = Callable[..., Any]
"""The trainer's forward step function, or its replacement."""


class Forward(NamedTuple):
    """The F of a microbatch."""

    step: StepContext
    chunk: int
    vp_stage: int | None  # None if the rank has one chunk
    microbatch: int
    forward_step: ForwardStep  # the trainer's function, or its replacement by features
    received: Tensor | None  # [s, b, h], None on the first stage
    is_first: bool  # the first F of the chunk in this step
    makes_loss: bool  # whether F ends with the loss


class Backward(NamedTuple):
    """Megatron's arguments for the B of a microbatch whose F has run."""

    model: nn.Module
    received: Tensor | None  # input of its F
    output: Tensor  # output of its F; references the layer plan
    gradient: Tensor | None  # gradient of the output, None on the last stage
    whole: WeightJobs | None = None  # runs the W inside (BW); None: jobs are deferred


class PassResults(NamedTuple):
    """Results of the passes; None for a pass that did not run."""

    output: Any  # a Tensor
    num_tokens: Any  # a Tensor
    gradient: Tensor | None  # gradient of the input


class PassRunner(NamedTuple):
    """Functions of a feature that run passes instead of Megatron's step functions."""

    # Runs an F, a B or both overlapped for a TransformerConfig.
    run: Callable[[Any, Forward | None, Backward | None], PassResults]
    # Yields tensors that the output of an F retains outside of its autograd graph.
    retained: Callable[[Tensor], Iterator[Tensor]]


class StepHook:
    """A feature's hook in one step; the defaults do nothing.

    `stage` is the stage of the pass, and `is_last` whether it is the last stage of the model.
    """

    makes_loss = False  # computes the loss instead of the F of the last stage

    def handlers(self) -> Mapping[Kind, Handler]:
        """Return the functions that run this feature's kinds of passes."""
        return {}

    def around_passes(self) -> AbstractContextManager[None]:
        """Return the context manager for the passes of the step."""
        return nullcontext()

    def forward(self, stage: int, is_last: bool, number: int, step: ForwardStep) -> ForwardStep:
        """Return the replacement of the trainer's function in F."""
        return step

    def output(self, is_last: bool, number: int, output: Tensor) -> Tensor:
        """Return the output of an F, with its graph, for B."""
        return output

    def ends_forward(self, stage: int, is_last: bool, number: int, output: Tensor) -> None:
        """Handle the end of an F in training; `output` still has its data."""

    def before_backward(self, work: Pass, is_last: bool, gradient: Tensor | None) -> Tensor | None:
        """Make the data of a B, BW or W available; return the gradient of the stage's output.

        `gradient` is the received one; it is None on the last stage, and for a W.
        """
        return gradient


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """The trainer's arguments of a step: parameters of Megatron's function, by their names.

    Only the number of microbatches and the data change from step to step.
    """

    forward_step_func: Any
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    pg_collection: Any = None
    force_all_reduce: bool | None = False

    @property
    def chunks(self) -> list[nn.Module]:
        """The model chunks of this rank."""
        # Megatron passes a list only if there are several chunks.
        return self.model if isinstance(self.model, list) else [self.model]

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig."""
        return get_model_config(self.chunks[0])

    @property
    def torch_device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.chunks)


class StepData(NamedTuple):
    """The data of a step: iterators, and the order of the microbatches."""

    iterators: list[Any]  # by chunk
    order: Sequence[int] | None = None  # microbatches in execution order; None: as given


@dataclass(slots=True, eq=False)
class StepContext:
    """One step of a rank, with everything that its passes share."""

    call: TrainerCall
    state: StepState
    pipeline: RunConfig
    groups: Any  # Megatron's ProcessGroupCollection
    passes_per_microbatch: int  # each F of a microbatch has an equal part of it
    shape: tuple[int, ...]  # [s, b, h] of a P2P message
    transport: Transport
    gradient_sync: GradientSync
    program: Program
    wgrad_overlaps: Mapping[Pass, DeferredWgradOverlap]  # B -> W jobs in it
    data: StepData
    forward_step: ForwardStep  # the trainer's function, whose calls are recorded
    num_tokens: Tensor  # of this rank's microbatches; only the last stage counts them
    second_reader: Any = None  # of the last chunk's data, if a feature reads it again
    local_ranks: int | None = None  # number of ranks on this host
    # Of the features that act in this step: without options, none, and `FirstStepWarnings` in the
    # first one. They get the context, so they follow it.
    hooks: list[StepHook] = field(default_factory=list)
    pass_runner: PassRunner | None = None  # of a feature; it can overlap an F with a B
    loss_store: list[Any] = field(default_factory=list)
    num_replayed: int = 0  # passes with CUDA graphs
    chunks: list[nn.Module] = field(init=False)  # the model chunks of this rank
    config: Any = field(init=False)  # Megatron's TransformerConfig
    forward_only: bool = field(init=False)
    num_microbatches: int = field(init=False)

    def __post_init__(self) -> None:
        """Copy the arguments that every pass reads."""
        call = self.call
        self.chunks, self.config, self.forward_only = call.chunks, call.config, call.forward_only
        self.num_microbatches = call.num_microbatches

    def tokens_of(self, number: int) -> TokenRange | None:
        """Return the tokens of passes with this number; None for all of a microbatch."""
        if self.passes_per_microbatch == 1:
            return None
        return TokenRange.of_pass(number, self.passes_per_microbatch, self.call.seq_length)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, by chunk."""
        return self.pipeline.stage_map.stages(self.groups.pp.rank())

    def handlers(self) -> dict[Kind, Handler]:
        """Return the handlers of passes that do not belong to a stage, by kind."""
        return {kind: handler for hook in self.hooks for kind, handler in hook.handlers().items()}

    def check_captured(self, kind: Kind, chunk: int, microbatch: int) -> None:
        """Raise ScheduleError unless this is the next pass in the captured order of CUDA graphs.

        Graphs share memory in the order of their capture, so replays in another order would
        overwrite tensors that later passes read.
        """
        captured = self.state.captured_passes
        if captured is None or self.forward_only:
            return
        if captured[self.num_replayed] != (kind, chunk, microbatch):
            expected = captured[self.num_replayed]
            raise ScheduleError(
                f"CUDA graphs were captured for {expected[0]} of microbatch {expected[2]} in chunk "
                f"{expected[1]} as pass {self.num_replayed} of a step, which runs {kind} of "
                f"microbatch {microbatch} in chunk {chunk}: replays in another order overwrite "
                "each other's memory. Add --pipeline-split-graphs off"
            )
        self.num_replayed += 1

    @contextmanager
    def around_passes(self) -> Iterator[None]:
        """Enter the contexts of all StepHooks around the passes."""
        with ExitStack() as stack:
            # A StepHook may reference this object. Such a cycle would keep the trainer's data
            # iterators alive, whose processes then outlive the trainer.
            stack.callback(self.hooks.clear)
            for hook in self.hooks:
                stack.enter_context(hook.around_passes())
            yield


class PreparedStep(NamedTuple):
    """A step, and the run of its program up to the passes that have run."""

    context: StepContext
    run: ProgramRun


class StepRequest(NamedTuple):
    """The step that the trainer requests."""

    call: TrainerCall
    started: PreparedStep | None = None  # this step, if it has been started already


class StepFeature:
    """A feature in all steps of a run; the defaults do nothing."""

    def prepare(self, request: StepRequest) -> StepRequest:
        """Return the request with other data or a started step, or reject it; all ranks call it."""
        return request

    def change_data(self, call: TrainerCall, groups: Any, data: StepData) -> StepData:
        """Return the data of a training step, before chunks share iterators."""
        return data

    def begin(self, context: StepContext) -> StepHook | None:
        """Return its hook in a step, or None; an earlier step may have been rolled back."""

    def end(self, context: StepContext) -> None:
        """Called after the passes of a training step."""

    def clear(self) -> None:
        """Free all state between steps."""


def counted(state: StepState, handler: Handler) -> Handler:
    """Wrap a handler so that memory is counted after each pass, if it is being measured."""

    def run(work: Pass) -> None:
        handler.run(work)
        if state.tracker is not None:
            state.tracker.ends(work)

    return handler._replace(run=run)


@dataclass(eq=False)
class MegatronStage:
    """Runs the passes of one chunk by Megatron's step functions, or by those of a feature."""

    step: StepContext
    chunk: int
    stage: int
    is_last: bool
    has_several_chunks: bool  # whether the rank has several chunks
    _has_run: bool = False
    _inputs: dict[int, Tensor | None] = field(default_factory=dict)
    _outputs: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Choose the functions that run passes: those of a feature, or Megatron's."""
        # A feature's runner can overlap an F with a B (--overlap-moe-expert-parallel-comm).
        runner = self.step.pass_runner
        self._run_pass = run_by_megatron if runner is None else runner.run

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F; afterwards only the caller owns the memory of the output."""
        forward = self._forward_arguments(microbatch, received)
        # While it runs, "is this the first stage?" in the model is about this chunk.
        with self._running(microbatch):
            output, num_tokens, _ = self._run_pass(self.step.config, forward, None)
        return self._finish_forward(forward, output, num_tokens)

    def forward_overlapped(
        self,
        microbatch: int,
        received: Tensor | None,
        backward_stage: MegatronStage,
        work: Pass,
        gradient: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run F overlapped with `work`, a B or BW of `backward_stage`; return the results of both.

        `gradient` is the gradient that `work` receives. While memory is measured, the two passes
        run one after the other.
        """
        runner = self.step.pass_runner
        # Megatron's own step functions cannot overlap passes. While memory is measured, overlapped
        # passes would mix their allocations.
        if self.step.state.tracker is not None or runner is None:
            output_to_send = self.forward(microbatch, received)
            return output_to_send, getattr(backward_stage, work.kind.method)(
                work.microbatch, gradient
            )
        # A BW runs its weight gradients inside, unless gradient reductions need a separate W.
        is_full = work.kind is Kind.BW and not backward_stage.step.gradient_sync.splits(
            backward_stage.chunk
        )
        forward = self._forward_arguments(microbatch, received)
        jobs, key = self.step.state.jobs, (backward_stage.stage, work.microbatch)
        with (
            self.step.state.setting(running_chunk=self.chunk),
            contextlib.nullcontext() if is_full else jobs.collect(key),
        ):
            backward = backward_stage.backward_arguments(work.microbatch, gradient, is_full)
            output, num_tokens, gradient = runner.run(self.step.config, forward, backward)
        if is_full:
            self.step.gradient_sync.weights_done(backward_stage.chunk)
        elif work.kind is Kind.BW:
            backward_stage.backward_weights(work.microbatch)
        return self._finish_forward(forward, output, num_tokens), gradient

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B; linear layers defer their weight gradients as jobs.

        If the plan has an overlap for this B (`wgrad_overlaps`), jobs of the next W run inside,
        while B waits for tensor-parallel ranks, but not while memory is measured.
        """
        overlap_arguments: tuple[Any, ...] = ()
        overlap = self.step.wgrad_overlaps.get(Pass(Kind.B, self.stage, microbatch))
        if overlap is not None and self.step.state.tracker is None:
            overlap_arguments = overlap.weights[1:], overlap.share
        # Autograd runs as usual. Linear layers find the open bucket and add their weight gradient
        # to it as a job, which W runs.
        with self.step.state.jobs.collect((self.stage, microbatch), *overlap_arguments):
            gradient = self._backward(microbatch, received)
        self._count(Pass(Kind.B, self.stage, microbatch))
        return gradient

    def backward_weights(self, microbatch: int) -> None:
        """Run W."""
        work = Pass(Kind.W, self.stage, microbatch)
        self.step.check_captured(Kind.W, self.chunk, microbatch)
        # Features bring back saved activations that they have moved, before the jobs read them.
        for hook in self.step.hooks:
            hook.before_backward(work, self.is_last, None)
        # In the last W of a chunk, the reduction of buckets without weight jobs can start.
        self.step.gradient_sync.weights_begin(self.chunk)
        self.step.state.jobs.run((self.stage, microbatch))
        self._count(work)
        self.step.gradient_sync.weights_done(self.chunk)

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B and W as one backward, which is upstream's."""
        # The last backward of a chunk is split even here: its buckets can then be reduced one by
        # one.
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
        return self.is_last and not any(hook.makes_loss for hook in self.step.hooks)

    def _running(self, microbatch: int) -> AbstractContextManager[None]:
        """Set the running chunk and its tokens for code deep in the model."""
        tokens = self.step.tokens_of(microbatch)
        return self.step.state.setting(running_chunk=self.chunk, tokens=tokens)

    def backward_arguments(
        self, microbatch: int, received: Tensor | None, is_full: bool
    ) -> Backward:
        """Return the arguments of a B, and drop the stage's references to them."""
        self.step.check_captured(Kind.BW if is_full else Kind.B, self.chunk, microbatch)
        # Dropped before B runs, so that autograd can free each activation as soon as it is used.
        inputs, outputs = self._inputs.pop(microbatch), self._outputs.pop(microbatch)
        return Backward(
            model=self.model,
            received=inputs,
            output=outputs,
            gradient=received,
            whole=self.step.state.jobs if is_full else None,
        )

    def _forward_arguments(self, microbatch: int, received: Tensor | None) -> Forward:
        """Return the arguments of an F."""
        step = self.step
        step.check_captured(Kind.F, self.chunk, microbatch)
        if received is not None and not step.forward_only:
            # B sends the gradient of this tensor to the previous stage.
            received.requires_grad_()
        # Megatron's is_first_microbatch, with which TE casts weights to FP8 once per step. A chunk
        # may start with any microbatch, so its own first F counts.
        is_first = schedules.check_first_val_step(
            step.call.first_val_step, step.forward_only, not self._has_run
        )
        self._has_run = True
        forward_step = step.forward_step
        for hook in step.hooks:
            forward_step = hook.forward(self.stage, self.is_last, microbatch, forward_step)
        return Forward(
            step=step,
            chunk=self.chunk,
            # As Megatron: no vp_stage without virtual stages.
            vp_stage=self.chunk if self.has_several_chunks else None,
            microbatch=microbatch,
            forward_step=forward_step,
            received=received,
            is_first=is_first,
            makes_loss=self._makes_loss,
        )

    def _finish_forward(
        self, forward: Forward, output: Tensor, num_tokens: Tensor
    ) -> Tensor | None:
        """Store the tensors of an F that B needs; return the tensor for the next stage."""
        step, microbatch = self.step, forward.microbatch
        if not self.is_last:
            self._check_output(output)
            # Recomputed layers of a library's model return views, which cannot be freed.
            output = make_viewless_tensor(output, output.requires_grad, keep_graph=True)
        step.num_tokens += num_tokens
        for hook in step.hooks:
            output = hook.output(self.is_last, microbatch, output)
        if step.forward_only:
            return None if self.is_last else output.detach()
        # By number, not in a queue as in Megatron: B may run in another order than F.
        self._inputs[microbatch], self._outputs[microbatch] = forward.received, output
        self._count(Pass(Kind.F, self.stage, microbatch), output)
        for hook in step.hooks:
            hook.ends_forward(self.stage, self.is_last, microbatch, output)
        if forward.makes_loss:
            return None
        # From here on only grad_fn of the output is needed; the alias owns its memory.
        output_to_send: Tensor = output.detach()
        schedules.deallocate_output_tensor(output, step.config.deallocate_pipeline_outputs)
        return None if self.is_last else output_to_send

    def _check_output(self, output: Any) -> None:
        """Raise UnsupportedError unless the output of an F can be sent to the next stage."""
        if isinstance(output, Tensor):
            return
        size = f" of {len(output)} items" if isinstance(output, (tuple, list, dict)) else ""
        raise UnsupportedError(
            f"stage {self.stage} returned a {type(output).__name__}{size}: a stage of "
            f"--pipeline-schedule {self.step.pipeline.choice.name} sends one tensor per microbatch "
            "to the next stage. Return one tensor from the model, or remove --pipeline-schedule"
        )

    def _backward(
        self, microbatch: int, received: Tensor | None, kind: Kind = Kind.B
    ) -> Tensor | None:
        """Run autograd from the output of F, and return the gradient of its input."""
        work = Pass(kind, self.stage, microbatch)
        for hook in self.step.hooks:
            received = hook.before_backward(work, self.is_last, received)
        with self._running(microbatch):
            backward = self.backward_arguments(microbatch, received, kind is Kind.BW)
            gradient = self._run_pass(self.step.config, None, backward).gradient
        # A gradient in graph memory needs a copy: the next replay overwrites it during the send.
        copied_gradient: Tensor | None = self.step.state.graph_memory.kept(gradient)
        return copied_gradient

    def _count(self, work: Pass, output: Tensor | None = None) -> None:
        """Count the activation memory after a pass, if this step measures it."""
        tracker = self.step.state.tracker
        if tracker is None:
            return
        if output is not None:
            tracker.add_graph(output)
            runner = self.step.pass_runner
            for tensor in () if runner is None else runner.retained(output):
                tracker.add(tensor)
                tracker.add_graph(tensor)
        tracker.ends(work)


@dataclass(frozen=True, slots=True)
class Execution:
    """The objects that run the passes of this process; a dry run observes passes by its own."""

    stage: type[MegatronStage] = MegatronStage
    executor: type[Executor] = ThreadPoolExecutor  # of copies and collectives
    adapt_handlers: Callable[[Handlers, Mapping[int, MegatronStage]], Handlers] = (
        lambda handlers, stages: handlers
    )


def run_by_megatron(config: Any, forward: Forward | None, backward: Backward | None) -> PassResults:
    """Run an F, or a B, as Megatron's schedules do."""
    output = num_tokens = gradient = None
    if forward is not None:
        step = forward.step
        # It sets the received tensor as the input of the model, calls the trainer's function and,
        # at the end of the model, its loss function. None: no partial activation checkpointing.
        output, num_tokens = schedules.forward_step(
            forward.forward_step,
            step.data.iterators[forward.chunk],
            step.chunks[forward.chunk],
            step.num_microbatches,
            forward.received,
            step.loss_store,
            config,
            step.groups.cp.size(),
            step.call.collect_non_loss_data,
            None,
            forward.is_first,
            forward.microbatch,
            forward.vp_stage,
            forward.makes_loss,
        )
    if backward is not None:
        read = backward.received, backward.output, backward.gradient
        # Megatron's custom_backward: torch's would reject the output, whose data
        # `_finish_forward` has freed.
        gradient = schedules.backward_step(*read, config)
    return PassResults(output, num_tokens, gradient)


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
        with step.state.setting(running_chunk=num_chunks - 1, tokens=None):
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
            step.call.collect_non_loss_data,
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
