"""Interface for optional features of a step: hooks around passes, and additional passes.

At the start of every step, each `StepFeature` returns its `StepHook` for this step. The runner and
the stages use features only through this interface.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import Beside
from megatron_vshape.mcore.setup.configure import Pipeline
from megatron_vshape.mcore.step.gradient_sync import GradientSync
from megatron_vshape.mcore.step_state import StepState, TokenRange
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import Handler, ProgramRun
from megatron_vshape.runtime.weight_jobs import WeightJobs

ForwardStep = Callable[..., Any]
"""The trainer's forward step function, or its replacement."""


class Forward(NamedTuple):
    """Megatron's arguments for the F of a microbatch."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: nn.Module
    num_microbatches: int
    received: Tensor | None  # [s, b, h], None on the first stage
    loss_store: list[Any]
    collect_non_loss_data: bool
    is_first: bool
    microbatch: int
    chunk: int | None  # None if the rank has one chunk
    context_parallel_size: int
    makes_loss: bool  # whether F ends with the loss


class Backward(NamedTuple):
    """Megatron's arguments for the B of a microbatch whose F has run."""

    model: nn.Module
    received: Tensor | None  # input of its F
    output: Tensor  # output of its F; references the layer plan
    gradient: Tensor | None  # gradient of the output, None on the last stage
    whole: WeightJobs | None = None  # runs the W inside (BW); None: jobs are deferred


class Made(NamedTuple):
    """Results of the passes; None for a pass that did not run."""

    output: Any  # a Tensor
    num_tokens: Any  # a Tensor
    gradient: Tensor | None  # gradient of the input


PassRunner = Callable[[Any, Forward | None, Backward | None], Made]
"""Runs an F, a B or both for a TransformerConfig."""


class StepHook:
    """A feature's part in one step; the defaults do nothing.

    `stage` is the stage of the pass, and `is_last` whether it is the last stage of the model.
    """

    makes_loss = False  # computes the loss instead of the F of the last stage
    # Runs the passes instead of Megatron's step functions; it can overlap an F with a B.
    run_passes: PassRunner | None = None

    def handlers(self) -> Mapping[Kind, Handler]:
        """Return the functions that run this part's kinds of passes."""
        return {}

    def session(self) -> AbstractContextManager[None]:
        """Return the context manager for the passes of the step."""
        return nullcontext()

    def tokens_of(self, number: int) -> TokenRange | None:
        """Return the tokens of passes with this number; None for all of a microbatch."""

    def forward(self, stage: int, is_last: bool, number: int, step: ForwardStep) -> ForwardStep:
        """Return the replacement of the trainer's function in F."""
        return step

    def output(self, is_last: bool, number: int, output: Tensor) -> Tensor:
        """Return the output of an F, with its graph, for B."""
        return output

    def ends_forward(self, stage: int, number: int, output: Tensor) -> None:
        """Observe the end of an F; `output` still has its data."""

    def retained(self, output: Tensor) -> Iterator[Tensor]:
        """Yield tensors that the output of an F retains outside of its autograd graph."""
        return iter(())

    def sent(self, stage: int, number: int, output: Tensor) -> None:
        """Handle the output of the last stage's F, without its graph, which is not sent."""

    def begins(self, work: Pass) -> None:
        """Make the data of a B, BW or W available before it runs."""

    def gradient(self, is_last: bool, number: int, received: Tensor | None) -> Tensor | None:
        """Return the gradient of a stage's output for its B."""
        return received


def _unset() -> Any:
    """Declare a field that the constructor does not set, and that does not count for equality."""
    return field(init=False, compare=False, repr=False)


@dataclass(slots=True)
class StepContext:
    """One step of a rank: the trainer's arguments, and everything that its passes share.

    Two steps are equal if the trainer's arguments are, as in all training steps of a run: a step
    that was started early is then the one that the trainer asks for. Fields without a default are
    set by `PipelineRunner.prepare`.
    """

    state: StepState = field(compare=False)
    pipeline: Pipeline = field(compare=False)
    # The parameters of Megatron's function, except adjust_tensor_shapes_fn and p2p_communicator.
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

    chunks: list[nn.Module] = _unset()  # the model chunks of this rank
    config: Any = _unset()  # Megatron's TransformerConfig
    groups: Any = _unset()  # Megatron's ProcessGroupCollection
    forward_step: ForwardStep = _unset()  # forward_step_func, whose calls are recorded
    passes_per_microbatch: int = _unset()  # each F of a microbatch has an equal part of it
    shape: tuple[int, ...] = _unset()  # [s, b, h] of a P2P message
    transport: Transport = _unset()
    gradient_sync: GradientSync = _unset()
    program: Program = _unset()
    beside: Mapping[Pass, Beside] = _unset()  # B -> W jobs that it overlaps with
    iterators: list[Any] = _unset()  # data iterators by chunk
    order: Sequence[int] | None = _unset()  # microbatches in execution order; None: as given
    again: Any = _unset()  # second reader of the last chunk's data, if a feature reads it again
    local_ranks: int | None = _unset()  # number of ranks on this host
    num_tokens: Tensor = _unset()  # of this rank's microbatches; only the last stage counts them
    parts: list[StepHook] = field(default_factory=list, init=False, compare=False)
    loss_store: list[Any] = field(default_factory=list, init=False, compare=False)

    def __post_init__(self) -> None:
        """Set the chunks and their config."""
        self.chunks = self.model if isinstance(self.model, list) else [self.model]
        self.config = get_model_config(self.chunks[0])

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, by chunk."""
        return self.pipeline.stage_map.stages(self.groups.pp.rank())

    @property
    def torch_device(self) -> torch.device:
        """The device of the model."""
        return next(self.chunks[0].parameters()).device

    def handlers(self) -> dict[Kind, Handler]:
        """Return the handlers of passes that do not belong to a stage, by kind."""
        return {kind: each for part in self.parts for kind, each in part.handlers().items()}

    @contextmanager
    def session(self) -> Iterator[None]:
        """Enter the contexts of all parts around the passes."""
        with ExitStack() as stack:
            # Parts may reference this object. Such a cycle would keep the trainer's data iterators
            # alive, whose processes then outlive the trainer.
            stack.callback(self.parts.clear)
            for part in self.parts:
                stack.enter_context(part.session())
            yield


Started = tuple[StepContext, ProgramRun]
"""A step, and the run of its program up to the passes that have run."""


class StepFeature:
    """A feature's part in all steps of a run; the defaults do nothing."""

    def check(self, context: StepContext) -> None:
        """Reject a step that the feature does not support, before it is prepared."""

    overlaps_steps = False  # a rank may start the next step before others have ended this one
    reads_again = False  # the step needs a second reader of the last chunk's data

    def begin_training(self, optimizer: Any, args: Namespace) -> str | None:
        """Called by Megatron-LM's trainer before the first step; returns a line for its log."""

    def end_training(self) -> str | None:
        """Called by Megatron-LM's trainer after the last step; returns a line for its log."""

    def passes_per_microbatch(self, context: StepContext) -> int:
        """Return the number of F passes of a microbatch per stage in a training step."""
        return 1

    def read(self, context: StepContext) -> None:
        """Replace the `iterators` or the `order` of a training step, before chunks share them."""

    def begin(self, context: StepContext) -> StepHook | None:
        """Return its part in a step, or None."""

    def end(self, context: StepContext) -> None:
        """Called after the passes of a training step."""

    def take_started(self, context: StepContext) -> Started | None:
        """Return this step if it was started early; roll back another one that was."""

    def start_next(self) -> None:
        """Start the next training step, as far as it can be rolled back."""

    def roll_back(self) -> None:
        """Roll back a step that was started early; all ranks of the pipeline call this together."""

    def forget(self) -> None:
        """Drop the state of a step that is rolled back."""

    def clear(self) -> None:
        """Free all state between steps."""


def counted(state: StepState, handler: Handler) -> Handler:
    """Wrap a handler so that memory is counted after each pass, if it is being measured."""

    def run(work: Pass) -> None:
        handler.run(work)
        if state.census is not None:
            state.census.ends(work)

    return handler._replace(run=run)
