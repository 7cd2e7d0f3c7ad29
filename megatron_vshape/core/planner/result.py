"""Results of a search: the plan, and the strategies to save memory that were evaluated for it."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_vshape.core.model.schedule import Objective, Schedule


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
class Plan:
    """Result of a search: schedule, step time, peak memory and lower bound.

    `value` is the makespan or span in the costs' unit. No schedule of the same placement within the
    limits is below `lower_bound`. `source` names the start of the search. `tried` are the evaluated
    strategies to save memory.
    """

    schedule: Schedule
    objective: Objective
    value: float
    busy: float
    lower_bound: float
    peak: tuple[float, ...]
    source: str
    steps: int
    evaluated_strategies: tuple[StrategyResult, ...] = ()

    @property
    def overhead(self) -> float:
        """The value minus the work of the busiest device."""
        return self.value - self.busy

    @property
    def bubble(self) -> float:
        """Share of the value in which the busiest device is idle."""
        return self.overhead / self.value

    @property
    def gap(self) -> float:
        """Maximum distance from the optimum, as a share of the lower bound."""
        return self.value / self.lower_bound - 1
