"""The search for orders of one placement in which some activations wait in host memory.

They begin from orders planned for more memory (`LEVELS`), into which copies are put (`offloading`)
and W dealt out anew. From there on the walk moves copies and their markers as it does any pass.

Where host memory has a limit too, orders that exceed it are none: what is put in keeps it, and the
walk, which knows of the device's alone, is taken back where it ends above it.
"""

from collections.abc import Iterator, Sequence
from math import inf, isinf
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.check.bounds import least_memory
from megatron_vshape.core.check.choices import bound_of_choices
from megatron_vshape.core.model.kinds import COPY_OUT, PARTS, RELOAD, Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Objective, Way
from megatron_vshape.core.planner import improve
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
"""Orders are planned for the limit and so much of what is missing to the memory of 1F1B, or of what
may wait in host memory if that is less.

With which part of the budget, or 0 for those of published blocks alone, and how many of them have
copies put in. At a quarter of what is missing nothing was found that these do not lead to.
"""

BETWEEN = ((0.75, 4, 2), (0.25, 4, 2))
"""Levels beside these where host memory has a limit, with which those may not fit: at d=8, m=32,
8 chunks, a copy as long as an F and 4 chunks in host memory they find 33.5 in place of 39.25.
"""

SLACKS = (0.0, 0.5, 1.0, 2.0)
"""So many chunks less than the limit are filled when it is chosen what is copied."""


WALKED = 500
"""After so many steps it is looked whether host memory still has room for what waits there."""


class _Base(NamedTuple):
    """An order of F, B and W that may hold more than the limit."""

    name: str
    row: np.ndarray


Bases = dict[Placement, list[_Base]]
"""The orders that copies are put into, which are as good for stages of other settings."""


class OffloadSearch(PlacementSearch):
    """As `PlacementSearch`, but that the activations of some microbatches are copied."""

    def __init__(
        self,
        problem: Problem,
        seed: int,
        way: Way,
        bases: Bases | None = None,
        in_host: float = inf,
    ) -> None:
        super().__init__(problem, seed, way)
        self.bases: Bases = {} if bases is None else bases
        self.in_host = in_host  # the most that may wait there of a device, in bytes
        self.room_in_host = (
            None if isinf(in_host) else int(in_host * problem.units_per_byte * (1 + 1e-9))
        )

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
            levels = LEVELS if self.room_in_host is None else (*LEVELS, *BETWEEN)
            made = (
                self._bases(level, budget // part if part else 0, run, count)
                for level, part, count in levels
            )
            self.bases[own] = [base for some in made for base in some]
        found = [each for made in run(self._with_copies, self.bases[own]) for each in made]
        for each in found:
            self.keep(each)
        return best_of(found, STARTS)

    def _bases(self, level: float, budget: int, run: Run, count: int) -> Iterator[_Base]:
        """Yield orders planned for more memory than there is."""
        problem, held = self.problem, self.problem.costs.held_after_forward_bytes
        devices = problem.num_devices
        limits = []
        stages = stages_of(problem.placement, devices)
        least = least_memory(problem.costs, problem.placement, devices)
        for own, limit, need in zip(stages, problem.limits, least, strict=True):
            most = devices * sum(held[stage] for stage in own)
            ample = max(limit, min(most, limit + self.in_host))
            limits.append(max(need, limit + level * (ample - limit)))
        sizes = devices, problem.num_microbatches, limits, problem.objective, problem.placement
        search = PlacementSearch(make_problem(problem.costs, *sizes, PARTS), self.seed)
        for each in best_of(search.begin(budget, run), count):
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
        chosen = slacks, self.way.throughout, self.room_in_host
        for rows in with_copies(problem, self._parts_shop(), base.row, *chosen):
            dealt = (refill(problem, rows, delay, m) for delay in delays)
            made += [
                self._made(f"{base.name}, copies", 1, m, row, none, none) for row in (rows, *dealt)
            ]
        return [each for each in made if each is not None]

    def improve(self, candidate: Candidate, steps: int) -> None:
        """Walk as `PlacementSearch` does; of what then exceeds host memory, nothing is left."""
        if self.room_in_host is None:
            return super().improve(candidate, steps)
        for left in range(steps, 0, -WALKED):
            before = improve.State(*(part.copy() for part in candidate.state))
            value = candidate.value
            limits = candidate.low, candidate.high
            improve.walk(candidate.shop, candidate.state, *limits, min(left, WALKED))
            if not self._judge(candidate):
                before.random[0] = candidate.state.random[0]
                candidate.state, candidate.value = before, value
        super().improve(candidate, 0)

    def _judge(self, candidate: Candidate) -> bool:
        return super()._judge(candidate) and self._fits_host(candidate)

    def _fits_host(self, candidate: Candidate) -> bool:
        """Return whether host memory has room for what waits there, of every device."""
        if self.room_in_host is None:
            return True
        problem, m = self.problem, self.problem.num_microbatches
        row, sorts, kinds = self._row(candidate), problem.sorts, problem.kinds
        place = np.empty(len(sorts.lane) * m, np.int64)
        for own in row[: problem.num_devices]:
            there = own[own != improve.NONE]
            place[there] = np.arange(len(there))
        out, forward, backward = map(kinds.index, (COPY_OUT, Kind.F, Kind.B))
        taken = np.asarray(sorts.most)[kinds.index(RELOAD) :: len(kinds)]
        for stages in stages_of(problem.placement, problem.num_devices):
            lane = row[sorts.lane[len(kinds) * stages[0] + out]]
            copies = lane[(lane != improve.NONE) & (lane // m % len(kinds) == out)]
            # a copy begins behind its F, and behind those before it on the link
            begins = np.maximum.accumulate(place[copies + (forward - out) * m])
            moved = taken[copies // m // len(kinds)]
            times = np.concatenate((2 * begins + 1, 2 * place[copies + (backward - out) * m]))
            change = np.concatenate((moved, -moved))[np.argsort(times)]
            if np.cumsum(change).max(initial=0) > self.room_in_host:
                return False
        return True

    def _found(self) -> tuple[int, np.ndarray, str]:
        if self.best is None and self.room_in_host is not None:
            raise ScheduleError(
                f"no order was found within the limits {self.problem.limits} and with at most "
                f"{self.in_host:g} of a device in host memory: make one of the two larger"
            )
        return super()._found()
