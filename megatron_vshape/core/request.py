"""Plan requests and their results.

The command line, the playground, the trainer and the sweep convert their terms and units to a
`PlanRequest`, and `core.plan.plan_request` returns its `PlanResult`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import KINDS, ScheduleError
from megatron_vshape.core.model.pieces import Pieces, regroup
from megatron_vshape.core.model.placement import (
    Placement,
    default_placements,
    looping,
    v_shape,
    zigzag,
)
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.core.planner.lighter import fitting_layers
from megatron_vshape.core.schedule_names import MAX_COMPARED_PASSES

SLICES = (1, 2, 4, 8)
"""Slices per microbatch that AUTO chooses from, if the sequence allows them."""

StageCostFunction = Callable[[int, str], Costs]
"""Returns the costs of the model cut into that number of stages; the text names their user."""

_SEARCHED_CHUNKS = (1, 2, 3, 4, 6, 8, 10, 12)
"""Numbers of chunks per device of a plan if the layers of the model do not limit them."""

SAME = 1e-9
"""Relative tolerance for equal values, so that rounding decides nothing."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan request; times and memory are in the units of `costs`.

    Without costs, a pass of one of 2 * devices stages takes one unit of time and memory.
    """

    # A catalogue name, possibly with a plus or a colon and stages per device; AUTO; a schedule
    # file; or a schedule.
    name: str | Schedule
    num_devices: int
    num_microbatches: int
    # Their number of stages gives `default_placements` and the default of `chunks`; None: uniform.
    costs: Costs | None = None
    stage_cost_function: StageCostFunction | None = None  # None: adjacent stages are added up
    # Memory limit for AUTO: of all devices, or of each; a name for its peak; None: that of 1F1B.
    limit: float | Sequence[float] | str | None = None
    moved_limit: float = math.inf  # memory that AUTO may move off a device
    objective: Objective = Objective.MAKESPAN
    placements: tuple[Placement, ...] = ()  # allowed for AUTO; (): any
    chunks: tuple[int, ...] = ()  # stages per device for AUTO; (): up to the stages of `costs`
    slices: int | tuple[int, ...] = 1  # per microbatch; AUTO chooses from several
    baselines: tuple[EvaluatedSchedule, ...] = ()  # a plan is no worse than those that fit
    steps: int | None = None  # search steps; None: the default of `search.plan`
    seconds: float | None = None  # search time instead of steps
    # Instead of `stage_cost_function`: a model with that number of layers, balanced for every
    # placement.
    layers: tuple[Pieces, int] | None = None

    def full_costs(self) -> Costs:
        """Return `costs`, by default those of the V placement; `chunks` may allow more stages."""
        return self.costs or self.costs_of(v_shape(self.num_devices), "a plan")

    def costs_of(self, placement: Placement, name: str) -> Costs:
        """Return the costs of these stages; raises ScheduleError if there are none."""
        num_stages = len(placement)
        if self.layers is not None:
            pieces, num_layers = self.layers
            layers = pieces.balanced(num_layers, placement)
            if self.limit is not None and not isinstance(self.limit, str):
                layers = fitting_layers(pieces, layers, placement, self.limit)
            return pieces.costs(layers)
        if self.stage_cost_function is not None:
            return self.stage_cost_function(num_stages, name)
        if self.costs is None:
            return Costs.uniform(self.num_devices, num_stages)
        return regroup(self.costs, num_stages, name)

    def slice_counts(self) -> tuple[int, ...]:
        """Return the allowed numbers of slices per microbatch.

        Raises:
            ScheduleError: slices are required, but the costs have passes that are not of a stage.
        """
        counts = (self.slices,) if isinstance(self.slices, int) else self.slices
        if max(counts) == 1:
            return (1,)
        amounts = self.full_costs().by_stage
        shared_kinds = [kind for kind in KINDS if kind.of and kind.time in amounts]
        if not shared_kinds:
            return counts
        if 1 in counts:
            return (1,)
        raise ScheduleError(
            f"slices do not support passes that all ranks share, and the costs contain "
            f"{', '.join(shared_kind.label for shared_kind in shared_kinds)}: "
            "remove --slices, or these costs"
        )

    def chunk_counts(self) -> tuple[int, ...]:
        """Return the allowed numbers of stages per device."""
        if self.placements:
            counts = {len(placement) // self.num_devices for placement in self.placements}
            return tuple(sorted(counts))
        return self.chunks or tuple(range(1, self.full_costs().num_stages // self.num_devices + 1))

    def searched_placements(self) -> tuple[Placement, ...]:
        """Return the placements that AUTO searches.

        These are the allowed placements, by default those of `default_placements`. Without a layer
        split, offloading and vocabulary parallelism, and with one number of slices, the loop and
        the zigzag of the numbers of chunks that the costs support are added: of all if at most 8,
        else of those in `_SEARCHED_CHUNKS`, but none with more than `MAX_COMPARED_PASSES` passes.
        """
        if self.placements:
            return self.placements
        costs, devices, slices = self.full_costs(), self.num_devices, self.slice_counts()
        placements = default_placements(devices, costs.num_stages, costs.copies)
        if self.layers is not None or costs.copies or costs.shards_output_layer or slices[1:]:
            return tuple(placements)
        counts = [chunks for chunks in self.chunk_counts() if self._has_costs_of(chunks * devices)]
        if len(counts) > len(_SEARCHED_CHUNKS):  # not limited by the number of layers
            counts = [chunks for chunks in counts if chunks in _SEARCHED_CHUNKS]
        for chunks in counts:
            if 3 * chunks * devices * self.num_microbatches * slices[0] <= MAX_COMPARED_PASSES:
                placements += [zigzag(devices, chunks), looping(devices, chunks)]
        return tuple(dict.fromkeys(placements))

    def _has_costs_of(self, num_stages: int) -> bool:
        try:
            self.costs_of(looping(self.num_devices, num_stages // self.num_devices), "a plan")
        except ScheduleError:
            return False
        return True

    def allows(self, placement: Placement) -> bool:
        """Return whether a plan may have this placement."""
        if self.placements:
            return placement in self.placements
        return len(placement) // self.num_devices in self.chunk_counts()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A feasible schedule and the costs of its stages.

    The last four fields are those of a search; a schedule by name has none of them.
    """

    schedule: Schedule
    costs: Costs
    block: BuildingBlock | None = None  # of a published schedule by name
    searched: EvaluatedSchedule | None = None
    limits: tuple[float, ...] = ()  # memory limit of each device
    baselines: tuple[EvaluatedSchedule, ...] = ()  # those that could be better than the plan
    searched_bound: float = 0.0  # lower bound over the searched placements

    @classmethod
    def of_plan(cls, plan: EvaluatedSchedule, limits: tuple[float, ...]) -> "PlanResult":
        """Return the result of a search within these limits."""
        return cls(plan.schedule, plan.costs, searched=plan, limits=limits)

    @property
    def plan(self) -> EvaluatedSchedule:
        """Search result; raises ScheduleError for a schedule by name."""
        if self.searched is None:
            raise ScheduleError(f"{self.schedule.name} was requested by name, not planned")
        return self.searched
