"""Search for orders of one placement with offloading of activations to host memory.

It starts from orders planned for more memory (`LEVELS`), into which copies are inserted
(`offloading`) and W placed again. The local search then moves copies and their markers like any
pass.
"""

from collections.abc import Iterator, Sequence
from math import isinf
from operator import lt
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.check.bounds import bound_at, least_memory
from megatron_vshape.core.model.kinds import OFFLOAD, PARTS, ScheduleError
from megatron_vshape.core.model.placement import Placement, chunks_of, stages_of
from megatron_vshape.core.model.schedule import ORDER_ALONE, MemoryStrategy
from megatron_vshape.core.planner.job_shop import Problem, make_problem
from megatron_vshape.core.planner.offloading import with_copies
from megatron_vshape.core.planner.orders import (
    STARTS,
    VALUE,
    Candidate,
    PlacementSearch,
    Run,
)
from megatron_vshape.core.planner.race import best_of
from megatron_vshape.core.planner.refilling import refill

LEVELS = ((1.0, 3), (0.75, 2), (0.5, 2), (0.25, 2))
"""Memory levels of the initial orders, and the number of orders per level that get copies.

At level x, orders are planned for the limit plus x times the memory that is missing to that of
1F1B, or times the host memory if that is less. They are of published blocks. Below the first level,
steady orders are added if host memory is less than the missing memory: at d=8, m=32, 4 chunks, a
copy as long as an F and 8 chunks in host memory, blocks alone lead to 66.0, with steady orders to
35.25. In other cases steady orders need a quarter of the time and improved one cell of 11 (6
chunks, a copy as long as two F: 15.65, without 16.1); a local search of that length
(`search.TURNS_OF_TRADES`) improves 6 of them.
"""

STEADY = 4
"""The steady orders of a level have 1 / STEADY of the budget."""

SLACKS = (0.0, 0.5, 1.0, 2.0)
"""Reductions of the limit, in chunks, for choosing the activations to offload."""


class _Base(NamedTuple):
    """An order of F, B and W that may exceed the memory limit."""

    name: str
    row: np.ndarray


Bases = dict[tuple[Placement, int], list[_Base]]
"""Orders that copies are inserted into, by placement and slices."""


def ways_to_save(copies: bool, placement: Placement) -> Iterator[MemoryStrategy]:
    """Yield the strategies to compare: no offloading and, with `copies`, two that offload.

    Activations of the first chunks live longest, so published schedules offload all of these.
    """
    yield ORDER_ALONE
    if copies:
        first = tuple(stage for stage, chunk in enumerate(chunks_of(placement)) if not chunk)
        yield MemoryStrategy(copies=True, throughout=first)
        yield MemoryStrategy(copies=True)


class OffloadSearch(PlacementSearch):
    """Search like `PlacementSearch`, with activations of some microbatches offloaded."""

    kinds = (*PARTS, *OFFLOAD)

    def __init__(
        self, problem: Problem, seed: int, way: MemoryStrategy, bases: Bases | None = None
    ) -> None:
        super().__init__(problem, seed, way)
        self.bases: Bases = {} if bases is None else bases

    def _bound(self) -> float:
        problem = self.problem
        count, limits = problem.num_microbatches, problem.limits
        return bound_at(problem.costs, problem.placement, count, limits, problem.objective)

    def begin(self, budget: int, run: Run) -> list[Candidate]:
        """Return the orders to improve: orders planned for more memory, with copies inserted."""
        self._parts_shop()
        own = self.problem.placement, self.problem.slices
        if own not in self.bases:
            made = (self._bases(level, count, budget // STEADY, run) for level, count in LEVELS)
            self.bases[own] = [base for some in made for base in some]
        found = [each for made in run(self._with_copies, self.bases[own]) for each in made]
        for each in found:
            self.keep(each)
        return best_of(found, STARTS, VALUE)

    def _bases(self, level: float, count: int, budget: int, run: Run) -> Iterator[_Base]:
        """Yield orders planned for more memory than the limit."""
        problem, held = self.problem, self.problem.costs.held_after_forward_bytes
        devices, slices = problem.num_devices, problem.slices
        stages = stages_of(problem.placement, devices)
        # Activation memory of 1F1B: more cannot shorten the order.
        most = [(devices + slices - 1) * sum(held[stage] for stage in own) for own in stages]
        ample = [limit + problem.in_host for limit in problem.limits]
        is_scarce = level < 1 and any(map(lt, ample, most))
        least = least_memory(problem.costs, problem.placement, devices, slices)
        limits = [
            max(need, limit + level * (max(limit, min(each)) - limit))
            for need, limit, *each in zip(least, problem.limits, most, ample, strict=True)
        ]
        asked = make_problem(
            problem.costs,
            devices,
            problem.num_microbatches,
            limits,
            problem.objective,
            problem.placement,
            PARTS,
            slices=slices,
        )
        search = PlacementSearch(asked, self.seed)
        for each in best_of(search.begin(budget if is_scarce else 0, run), count, VALUE):
            yield _Base(f"{each.name} at {level:.0%}", search.whole_row(each))

    def _with_copies(self, base: _Base) -> list[Candidate]:
        """Return the order with copies inserted, in every variant that fits."""
        problem, m = self.problem, self.problem.num_microbatches
        none = np.zeros(1, np.int64)
        made = []
        slacks: Sequence[float] = SLACKS[:1] if self.way.throughout else SLACKS
        throughout, in_host, shop = self.way.throughout, problem.room_in_host, self._parts_shop()
        for rows in with_copies(problem, shop, base.row, slacks, throughout, in_host):
            made += [
                self._made(f"{base.name}, copies", 1, m, row, none, none)
                for row in (rows, refill(problem, rows, m))
            ]
        return [each for each in made if each is not None]

    def _found(self) -> tuple[int, np.ndarray, str]:
        if self.best is None and not isinf(self.problem.in_host):
            raise ScheduleError(
                f"no order was found within the limits {self.problem.limits} and with at most "
                f"{self.problem.in_host:g} of a device in host memory: make one of the two larger"
            )
        return super()._found()
