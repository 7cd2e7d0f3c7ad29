"""Activation offloading to host memory as a capability of a step (see `runtime.offload`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from torch import Tensor

from megatron_vshape.core.model.kinds import RELEASE, RELOAD, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.features.offload import NAME
from megatron_vshape.mcore.observe.report import RunReport, persistent
from megatron_vshape.mcore.step.stage import StepContext, StepFeature, StepHook, counted
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.offload import Offload
from megatron_vshape.runtime.program_runner import Handler


class OffloadHook(StepHook):
    """Offloads and reloads microbatches of one step in separate passes."""

    def __init__(self, state: StepState, offload: Offload) -> None:
        """Set the shared state, and the offload buffers that live across steps."""
        self._state, self._offload = state, offload

    def handlers(self) -> Mapping[Kind, Handler]:
        """Return the handlers of the offload passes; memory is counted after RELEASE and RELOAD."""
        handlers = self._offload.handlers()
        markers = {kind: counted(self._state, handlers[kind]) for kind in (RELEASE, RELOAD)}
        return handlers | markers

    def ends_forward(self, stage: int, is_last: bool, number: int, output: Tensor) -> None:
        """Register the activations of an F; tensors that other passes read are not offloaded."""
        shared = chain.from_iterable(tensors() for tensors in self._state.shared_by_passes)
        self._offload.ends_forward(stage, number, output, shared)

    def before_backward(self, work: Pass, is_last: bool, gradient: Tensor | None) -> Tensor | None:
        """Make the activations of a B, BW or W available."""
        if work.kind is Kind.W:
            self._offload.begins_weights(work)
        else:
            self._offload.begins_backward(work)
        return gradient


class OffloadSteps(StepFeature):
    """Owns the host memory and the known sizes of stages across steps."""

    def __init__(self, report: RunReport) -> None:
        """Set the report, which provides the measured sizes."""
        self._report = report
        self._offload: Offload | None = None  # created for the first step that may offload
        self._learns = False  # whether the current step determines what can be offloaded

    def begin(self, context: StepContext) -> StepHook | None:
        """Create the StepHook that offloads in this step, or return None."""
        if self._offload is not None:
            self._offload.forget()  # the activations of a step that was rolled back
        choice = context.pipeline.choice
        offloads = context.program.schedule.copies
        self._learns = False
        # A step that measures memory also determines what later plans can offload.
        if not offloads and not (NAME in choice.enabled and self._report.measures_next):
            return None
        if self._offload is None:
            sizes = choice.moved_limit_bytes, context.local_ranks
            self._offload = Offload(context.call.torch_device, *sizes)
            self._report.external_memory = self._offload
        self._offload.keep(persistent(context.chunks))
        self._learns = offloads and not self._offload.has_learned(context.stages)
        return OffloadHook(context.state, self._offload)

    def end(self, context: StepContext) -> None:
        """Measure memory again after a step that selected tensors to offload: it retains more."""
        if self._learns:
            self._report.remeasure()

    def clear(self) -> None:
        """Free the host memory as well."""
        if self._offload is not None:
            self._offload.clear()
