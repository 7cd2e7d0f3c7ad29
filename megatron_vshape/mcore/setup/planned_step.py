"""A planned training step with its predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_vshape.core.check.simulate import peak_held, peak_shared
from megatron_vshape.core.evaluation import limits_of
from megatron_vshape.core.model.costs import Costs, chunk_of
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import DeferredWgradOverlap
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A planned training step with its predictions."""

    schedule: Schedule  # before `lower` fuses adjacent B and W
    timeline: Timeline  # in us with costs, else in passes of one of 2 * devices stages
    program: Program
    costs: Costs | None = None  # the costs of the timeline; None: all passes are equal
    wgrad_overlaps: Mapping[Pass, DeferredWgradOverlap] = field(
        default_factory=dict
    )  # B -> W jobs it overlaps with

    @property
    def peak_chunks(self) -> float:
        """Return the highest activation peak in chunks of 1 / (2 * devices) of the model."""
        if self.costs is None:
            return max(peak_held(self.schedule))
        peak = max(peak_held(self.schedule, self.costs.of_activations()))
        return peak / chunk_of(self.costs, len(self.schedule.order))

    @property
    def peak_messages(self) -> int:
        """Return the maximum number of P2P messages in memory on any device."""
        return max(map(self.program.peak_messages, range(self.schedule.num_devices)))

    @property
    def relative_peak(self) -> float:
        """Return the largest peak relative to 1F1B with one microbatch per rank.

        If the stages of the costs cannot be combined to those of 1F1B, all stages count as equal.
        """
        ranks = self.schedule.num_devices
        try:
            (peak_of_1f1b, *_) = limits_of(PlanRequest(AUTO, ranks, ranks, self.costs))
        except ScheduleError:
            return self.peak_chunks / (2 * ranks)
        return max(peak_held(self.schedule, self.costs)) / peak_of_1f1b

    def peak_bytes(
        self, costs: Costs, shared: Mapping[int, tuple[float, float]] | None = None
    ) -> tuple[float, ...]:
        """Return the peak activation memory of every device for stages with the bytes of `costs`.

        `shared` has, per stage, the bytes that the passes of a microbatch share and those of their
        gradients.
        """
        if not shared:
            return peak_held(self.program.schedule, costs)
        return peak_shared(self.program.schedule, costs, shared)
