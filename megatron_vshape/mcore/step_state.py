"""State that the layers and stages of a process share during a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.runtime.activation_tracker import ActivationTracker
from megatron_vshape.runtime.graph_memory import GraphMemory
from megatron_vshape.runtime.weight_jobs import GatheringJob, Job, WeightJobs, defer, plain_tensors


class Reducer(Protocol):
    """Reduces gradients from within W; implemented by `gradient_sync.GradientSync`."""

    def deferred(self, parameters: Sequence[Tensor]) -> None:
        """Count a deferred job for the gradients of `parameters`."""

    def added(self, parameters: Sequence[Tensor]) -> None:
        """Count a completed job."""


class Checks(Protocol):
    """Stores loss checks until the passes have run; implemented by `losses.LateChecks`."""

    def add(self, check: Callable[[Tensor], None], result: Tensor) -> None:
        """Store a check."""

    def make(self) -> None:
        """Run the stored checks; raises their exceptions."""


class WeightCapture(Protocol):
    """Captures weight gradients in graphs of their own; implemented by `graphs.Capture`."""

    def splits(self, layer: nn.Module) -> bool:
        """Return whether the weight gradients of a layer have a graph of their own."""

    def put(self, layer: nn.Module, job: GatheringJob, parameters: Sequence[Tensor]) -> None:
        """Store the weight job of a layer for the capture of its W."""


class TensorRanks(Protocol):
    """Number of tensor-parallel ranks per caller; implemented by `RanksOfRows`."""

    def number_for(self, code: CodeType) -> int:
        """Return the number for a caller with this code object."""


class TokenRange(NamedTuple):
    """The token range of a microbatch's sequence that a pass runs on."""

    microbatch: int
    begin: int
    end: int
    total: int

    @classmethod
    def of_pass(cls, number: int, slices: int, length: int) -> TokenRange:
        """Return the tokens of the pass with this number in a schedule of slices."""
        microbatch, slice_index = divmod(number, slices)
        slice_length = length // slices
        begin = slice_index * slice_length
        return cls(microbatch, begin, begin + slice_length, length)


class MutableState:
    """State whose fields can be set within a context."""

    __slots__ = ()

    @contextmanager
    def setting(self, **values: Any) -> Iterator[None]:
        """Set these fields in this context, and restore them at its end."""
        original_values = {name: getattr(self, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in original_values.items():
                setattr(self, name, value)


@dataclass(slots=True)
class StepState(MutableState):
    """State behind the replacements of Megatron's functions and of layers deep in a model.

    One object per process. A step resets all fields that it sets.
    """

    # A schedule of this package is chosen; an open bucket decides whether a pass defers.
    has_own_schedule: bool = False
    jobs: WeightJobs = field(default_factory=WeightJobs)
    running_chunk: int | None = None  # the chunk of Megatron's "is this the first stage?" checks
    graph_memory: GraphMemory = field(default_factory=GraphMemory)
    capture: WeightCapture | None = None  # while Transformer Engine captures F, B and W
    captured: Program | None = None  # the program that CUDA graphs replay; no other can run
    # Type, chunk and microbatch of every pass of a step, if CUDA graphs replay W separately.
    captured_passes: Sequence[tuple[Kind, int, int]] | None = None
    tracker: ActivationTracker | None = None  # set while a step measures activation memory
    late_checks: Checks | None = None  # set while passes run; stores loss checks
    gradient_sync: Reducer | None = None  # set in a step that reduces gradients in W
    # True while every rank computes the trainer's loss of logits from its rows.
    has_logits: bool = False
    tensor_ranks: TensorRanks | None = None  # as has_logits: number of ranks, by caller
    tokens: TokenRange | None = None  # set while a pass of a part of a microbatch runs
    # Each drops values of the microbatches in flight that a layer keeps between passes.
    drop_values: list[Callable[[], None]] = field(default_factory=list)
    # Each returns tensors that several passes of a microbatch read.
    shared_by_passes: list[Callable[[], Iterable[Tensor]]] = field(default_factory=list)

    @property
    def running_tokens(self) -> TokenRange:
        """Return the tokens of the running pass.

        Raises:
            RuntimeError: No pass of a part of a microbatch runs.
        """
        if self.tokens is None:
            raise RuntimeError("attention or its backward ran outside any pass")
        return self.tokens

    def defer(self, job: GatheringJob, parameters: Sequence[Tensor]) -> None:
        """Defer a job to W that adds to the gradients of `parameters` and retains tensors.

        The tensors count as activations while memory is measured.
        """
        # Graph replays overwrite graph memory before W runs, so such tensors are copied.
        job.tensors = self.graph_memory.kept(job.tensors)
        retained = list(plain_tensors(job.tensors))
        if self.tracker is not None:
            for tensor in retained:
                self.tracker.add(tensor)
        if self.gradient_sync is None:
            defer(job, job.begin, weights=parameters, tensors=retained)
        else:
            self.gradient_sync.deferred(parameters)
            run = partial(self._run_and_count, job, parameters)
            defer(run, job.begin, weights=parameters, tensors=retained)

    def _run_and_count(self, job: Job, parameters: Sequence[Tensor]) -> None:
        job()
        if self.gradient_sync is not None:
            self.gradient_sync.added(parameters)


def unwrapped(chunk: nn.Module) -> Any:
    """Return the chunk without the wrappers of data parallelism and 16-bit precision."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def device_of(chunks: Iterable[nn.Module]) -> torch.device:
    """Return the device of a rank's chunks; without parameters, the current device."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    parameter = next(parameters, None)
    if parameter is not None:
        return parameter.device
    # A stage of no-op layers has none; its messages are on the device that Megatron uses.
    is_on_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
