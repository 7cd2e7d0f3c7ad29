"""What is known of a run's schedule once the flags have been checked, and does not change."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vshape.mcore.layout.stages import StageLayout, StageMap
from megatron_vshape.mcore.setup.arguments import PipelineOptions
from megatron_vshape.mcore.setup.choice import Choice
from megatron_vshape.mcore.setup.plans import Planner


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule that this package runs: what is known once the flags have been checked."""

    options: PipelineOptions
    planner: Planner
    stage_map: StageMap
    layout: StageLayout
    overlaps_grad_reduce: bool
    recomputed_inputs: tuple[str, ...] = ()  # modules that B computes anew and W holds on to

    @property
    def choice(self) -> Choice:
        """Return what the planner plans."""
        return self.planner.choice

    def ends(self, rank: int, chunk: int | None) -> tuple[bool, bool]:
        """Return whether a rank's chunk is the model's first stage, and whether its last."""
        stage = self.stage_map.stage(rank, chunk)
        return stage == 0, stage == self.stage_map.last_stage
