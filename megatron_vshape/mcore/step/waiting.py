"""Activations that wait in host memory, as a capability of a step (see `runtime.offload`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_vshape.core.model.kinds import RELEASE, RELOAD, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.observe.report import RunReport, persistent
from megatron_vshape.mcore.split.sliced_attention import KeysValues
from megatron_vshape.mcore.step.parts import Beginning, Capability, Part, counted
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.offload import Offload
from megatron_vshape.runtime.stage import Handler


class Waiting(Part):
    """Has microbatches of one step wait, by passes of their own."""

    def __init__(self, state: StepState, offload: Offload) -> None:
        """Take what layers share, and what has waited in the steps before."""
        self._state, self._offload = state, offload

    def handlers(self) -> Mapping[Kind, Handler]:
        """Return what runs D, L, R and H; memory is counted after the markers."""
        found = self._offload.handlers()
        markers = {kind: counted(self._state, found[kind]) for kind in (RELEASE, RELOAD)}
        return found | markers

    def ends_forward(self, stage: int, number: int, output: Tensor) -> None:
        """Take note of what an F has left behind; keys and values that slices share stay."""
        shared = (
            tensor
            for by_microbatch in self._state.kept
            for each in by_microbatch.values()
            if isinstance(each, KeysValues)
            for tensor in each.whole
        )
        self._offload.ends_forward(stage, number, output, shared)

    def begins(self, work: Pass) -> None:
        """Have B, BW or W find what it reads."""
        if work.kind is Kind.W:
            self._offload.begins_weights(work)
        else:
            self._offload.begins_backward(work)


class HostMemoryWaiting(Capability):
    """Keeps host memory, and what has been learned of the stages, from step to step."""

    def __init__(self, report: RunReport) -> None:
        """Take the report, which tells what has waited."""
        self._report = report
        self._offload: Offload | None = None  # made for the first step that may need it
        self._learns = False  # what may wait in the step that has begun

    def begin(self, beginning: Beginning) -> Part | None:
        """Return what lets microbatches of this step wait in host memory, if any are to."""
        choice = beginning.pipeline.choice
        waits = beginning.program.schedule.copies
        self._learns = False
        if not waits and not (choice.may_offload and self._report.measures_next):
            return None
        if self._offload is None:
            sizes = choice.host_limit_bytes, beginning.local_ranks
            self._report.offload = self._offload = Offload(beginning.torch_device, *sizes)
        self._offload.keep(persistent(beginning.chunks))
        self._learns = waits and not self._offload.has_learned(beginning.stages)
        return Waiting(beginning.state, self._offload)

    def end(self) -> None:
        """Have memory measured again: more is held while it is learned what may wait."""
        if self._learns:
            self._report.remeasure()

    def forget(self) -> None:
        """Let go of what waits."""
        if self._offload is not None:
            self._offload.forget()

    def clear(self) -> None:
        """Let go of the host memory too."""
        if self._offload is not None:
            self._offload.clear()
