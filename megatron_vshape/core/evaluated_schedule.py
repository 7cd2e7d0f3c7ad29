"""A schedule with its figures, and the strategies to save memory that a search evaluated."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline
from megatron_vshape.core.schedule_names import BaselineSpec


class MemoryStrategy(NamedTuple):
    """How a plan saves memory, besides the pass order.

    With `copies`, activations of some microbatches are moved off the device; those of the stages
    `throughout` of every microbatch, if any.
    """

    copies: bool = False
    throughout: tuple[int, ...] = ()
    text: str = "schedule only"


ORDER_ALONE = MemoryStrategy()


class StrategyResult(NamedTuple):
    """Best value of a strategy; None if its lower bound exceeded another's value."""

    strategy: MemoryStrategy
    value: float | None
    lower_bound: float


@dataclass(frozen=True, slots=True)
class EvaluatedSchedule:
    """A schedule with its simulated times, its peak memory and its lower bound.

    Times and memory are in the units of the costs. The last four fields are those of a plan: no
    schedule of the same placement within the limits is faster than `lower_bound`, and `source`
    names the start of the search.
    """

    timeline: Timeline
    costs: Costs
    peak: tuple[float, ...]  # memory of each device
    objective: Objective = Objective.MAKESPAN
    baseline: BaselineSpec | None = None  # entry of the catalogue; None: a plan, or of a file
    lower_bound: float = 0.0
    source: str = ""
    steps: int = 0
    evaluated_strategies: tuple[StrategyResult, ...] = ()

    @property
    def schedule(self) -> Schedule:
        """The schedule itself."""
        return self.timeline.schedule

    @property
    def value(self) -> float:
        """Makespan or span, by the objective."""
        return self.objective.of(self.timeline)

    @property
    def busy(self) -> float:
        """Busy time of the busiest device."""
        return self.timeline.busy

    @property
    def overhead(self) -> float:
        """The value minus the busy time; 0 if it is a rounding error."""
        value = self.value
        idle = value - self.busy
        return idle if abs(idle) > 1e-9 * value else 0.0

    @property
    def bubble(self) -> float:
        """Share of the value in which the busiest device is idle."""
        return self.overhead / self.value

    @property
    def gap(self) -> float:
        """Maximum distance from the optimum, as a share of the lower bound."""
        return self.value / self.lower_bound - 1

    @property
    def is_megatrons(self) -> bool:
        """Whether a function of Megatron runs it: a baseline without further kinds."""
        schedule = self.schedule
        if self.baseline is None or not schedule.kinds <= {*PARTS, Kind.BW}:
            return False
        return self.baseline.is_megatrons(schedule.num_devices, schedule.num_microbatches)
