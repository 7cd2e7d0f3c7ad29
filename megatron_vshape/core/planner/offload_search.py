"""The search for orders of one placement in which some activations wait in host memory.

They begin from orders planned for more memory (`LEVELS`), into which copies are put (`offloading`)
and W dealt out anew. From there on the walk moves copies and their markers as it does any pass.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.check.choices import bound_of_choices
from megatron_vshape.core.model.kinds import PARTS
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Objective, Way
from megatron_vshape.core.planner.job_shop import Problem, make_problem
from megatron_vshape.core.planner.offloading import with_copies
from megatron_vshape.core.planner.orders import (
    DELAYS,
    MANY_PASSES,
    STARTS,
    Candidate,
    PlacementSearch,
    Run,
    best_of,
)
from megatron_vshape.core.planner.refilling import refill

LEVELS = ((1.0, 0, 3), (0.5, 4, 2))
"""Orders are planned for the limit and so much of what is missing to the memory of 1F1B.

With which part of the budget, or 0 for those of published blocks alone, and how many of them have
copies put in. At a quarter of what is missing nothing was found that these do not lead to.
"""

SLACKS = (0.0, 0.5, 1.0, 2.0)
"""So many chunks less than the limit are filled when it is chosen what is copied."""


class _Base(NamedTuple):
    """An order of F, B and W that may hold more than the limit."""

    name: str
    row: np.ndarray


Bases = dict[Placement, list[_Base]]
"""The orders that copies are put into, which are as good for stages of other settings."""


class OffloadSearch(PlacementSearch):
    """As `PlacementSearch`, but that the activations of some microbatches are copied."""

    def __init__(self, problem: Problem, seed: int, way: Way, bases: Bases | None = None) -> None:
        super().__init__(problem, seed, way)
        self.bases: Bases = {} if bases is None else bases

    def _bound(self) -> float:
        problem = self.problem
        return bound_of_choices(
            [problem.costs],
            True,
            problem.placement,
            problem.num_devices,
            problem.num_microbatches,
            problem.limits,
            span=problem.objective is Objective.SPAN,
        )

    def begin(self, budget: int, run: Run) -> list[Candidate]:
        """Return the orders to improve: those planned for more memory, with copies put in."""
        self._parts_shop()
        own = self.problem.placement
        if own not in self.bases:
            made = (
                self._bases(level, budget // part if part else 0, run, most)
                for level, part, most in LEVELS
            )
            self.bases[own] = [base for some in made for base in some]
        found = [each for made in run(self._with_copies, self.bases[own]) for each in made]
        for each in found:
            self.keep(each)
        return best_of(found, STARTS)

    def _bases(self, level: float, budget: int, run: Run, most: int) -> Iterator[_Base]:
        """Yield orders planned for more memory than there is."""
        problem, held = self.problem, self.problem.costs.held_after_forward_bytes
        devices = problem.num_devices
        limits = []
        stages = stages_of(problem.placement, devices)
        for own, limit in zip(stages, problem.limits, strict=True):
            ample = max(limit, devices * sum(held[stage] for stage in own))
            limits.append(limit + level * (ample - limit))
        sizes = devices, problem.num_microbatches, limits, problem.objective, problem.placement
        search = PlacementSearch(make_problem(problem.costs, *sizes, PARTS), self.seed)
        for each in best_of(search.begin(budget, run), most):
            yield _Base(f"{each.name} at {level:.0%}", search.whole_row(each))

    def _with_copies(self, base: _Base) -> list[Candidate]:
        """Return the order with copies put in, in every way that fits."""
        problem, m = self.problem, self.problem.num_microbatches
        none = np.zeros(1, np.int64)
        made = []
        is_large = base.row.size >= MANY_PASSES
        slacks: Sequence[float] = SLACKS[::2] if is_large else SLACKS
        slacks = SLACKS[:1] if self.way.throughout else slacks
        delays = DELAYS[:1] if is_large else DELAYS
        for rows in with_copies(problem, self._parts_shop(), base.row, slacks, self.way.throughout):
            dealt = (refill(problem, rows, delay, m) for delay in delays)
            made += [
                self._made(f"{base.name}, copies", 1, m, row, none, none) for row in (rows, *dealt)
            ]
        return [each for each in made if each is not None]
