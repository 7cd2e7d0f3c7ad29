"""The adaptive scheduler: the order of least makespan or span for given costs and memory.

1. Placements: the V and the loop (`default_placements`); where the costs tell four stages of a
   device apart, a loop of four. What follows is done for each, and the budget is spent on the
   orders of all together.
2. Steady orders: `modulo` finds cyclic orders that fit the memory with the least period; the
   published blocks join them, for a loop in groups of several sizes. Each is cut to the few
   microbatches that show its two ends (`cyclic_orders`).
3. Starts: of each the order as it is, with its idle time filled by the paper's step 4, and with W
   dealt out anew as filler (`refilling`). All are judged at the full number of microbatches: a
   whole period in the middle is repeated, which costs nothing to search (`orders`).
4. The ends: a walk over orders that moves a pass, alone or with its neighbours in other
   microbatches, or exchanges two, whenever the objective does not grow (`improve`). The worse half
   of the orders drops out after each round, the best then go on in several ways; W is dealt out
   anew in between. A placement whose bound is above the best order drops out too.
5. All of it again with other random numbers; then a long walk from the best orders of both turns.
   Every order is walked by itself: cores share the work, and the plan is the same on any number.
6. With `trades` each way to save memory is a search of its own, on each placement: those
   with copies begin from orders planned for more memory (`offload_search`). They share one budget,
   and what a bound leaves nothing to gain never begins.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, product
from math import inf

from megatron_vshape.core.check.bounds import LimitError, bound_at, each_limit
from megatron_vshape.core.check.relax import never_split
from megatron_vshape.core.compiling import CORES, say_if_slow
from megatron_vshape.core.model.costs import Costs, regroup
from megatron_vshape.core.model.placement import Placement, default_placements
from megatron_vshape.core.model.schedule import ORDER_ALONE, Objective, Plan, Tried
from megatron_vshape.core.planner.job_shop import Problem, make_problem
from megatron_vshape.core.planner.offload_search import Bases, OffloadSearch, ways_to_save
from megatron_vshape.core.planner.orders import MOST_AT_ONCE, Candidate, PlacementSearch
from megatron_vshape.core.planner.race import better_half, race

__all__ = ["Objective", "Plan", "plan"]

ROUNDS, LEAST = 3, 1000
"""The budget is spent in about so many rounds, each with half as many orders and so many steps."""

WALKS, WALKS_OF_FEW = 2, 6
"""So many orders are walked side by side at least: copies of the better half fill up the rest."""

FEW, STEPS_OF_FEW = 1000, 100_000
"""Fewer passes are soon stuck, so after so many steps of each order copies of them restart.

A copy begins with moves that may make its order longer. d=4, m=8, 1/1.15/.85/.05, 11 chunks:
49.65, without 50.25.
"""

OLD = TURNS = 3
"""One of so many turns goes on from the orders that those before it ended with, and is the last."""

LONGER = 24
"""A turn that goes on has so many times the budget: old orders still gain where new ones do not."""

TURNS_OF_TRADES = 8
"""With copies, where there is more to walk; only the first begins anew."""

NEAR, ENOUGH = 0.003, 0.001
"""So near the bound no further turn of the default budget begins, and one under way ends.

At d=8, m=64, 1/1.15/.85/.05, 10 chunks, a long turn spends a third of a plan's time on the last
.04 %: 400.55 and 400.4, where the bound is 400.15. At .002 it ended at 400.875 a quarter of a
second earlier, and left out copies that pay.
"""

STEPS_OF_PAIR = 5
"""A turn of the default budget has at most so many steps for every two passes."""

_SAME = 1e-9

_Runner = tuple[PlacementSearch, Candidate]

Progress = Callable[[int, float, float], None]
"""Called with the steps taken, the best value so far and the lower bound."""


def plan(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    limit: float | Sequence[float],
    objective: Objective | str = Objective.MAKESPAN,
    *,
    placements: Sequence[Placement] = (),
    slices: int | Sequence[int] = 1,
    whole: bool = False,
    trades: bool = False,
    in_host: float = inf,
    steps: int | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
    begun: Callable[[Callable[[], Plan]], None] | None = None,
    seed: int = 1,
) -> Plan:
    """Search for the fastest schedule whose devices need at most `limit` memory each.

    `limit` is in the unit of the costs' memory, one value or one per device; infinity is none.
    With `steps` (by default what takes a few seconds at 8 devices) the same call gives the same
    plan on any number of cores; with `seconds` it ends then, or at Ctrl-C, with the best so far.
    `placements` are those allowed, by default `default_placements`; costs of more stages than a
    placement has are added up. Every microbatch is cut in so many `slices` along its sequence, of
    several numbers in the best; `costs` are those of whole ones. With `whole` every B stands for a
    BW and takes its time, and no W counts: the order is meant to run without.
    With `trades`, activations may be offloaded if the costs contain the times of copies: chosen by
    microbatch and stage, and never worse than without. At most `in_host` per device at once.
    `begun` is called with what returns the best plan so far, from any thread.

    >>> from megatron_vshape import Costs, plan
    >>> costs = Costs.uniform(4, 8, forward=1, backward=1.2, weight=0.8, send=0.05)
    >>> found = plan(costs, num_devices=4, num_microbatches=8, limit=6, steps=10_000)
    >>> max(found.peak) <= 6, found.lower_bound <= found.value < 60
    (True, True)

    Raises:
        LimitError: nothing fits the limit; it says the least that does, on any placement.
        ScheduleError: counts, costs and placements do not match, or there is no such objective.
    """
    say_if_slow()
    sizes = num_devices, num_microbatches, limit, (goal := Objective(objective))
    counts = (slices,) if isinstance(slices, int) else tuple(slices)
    owns = [
        (placement, regroup(costs, len(placement), f"a placement of {len(placement)} stages"))
        for placement in placements or default_placements(num_devices, costs.num_stages, trades)
    ]
    searches = _searches(owns, sizes, counts, whole, trades, in_host, seed)
    race = _Race(_worth_racing(searches) if trades or counts[1:] else searches, trades)
    if begun is not None:
        begun(race.plan)
    race.run(steps, seconds, progress)
    made = race.plan()
    if not trades:
        return made
    own, limits = made.schedule.placement, each_limit(limit, num_devices)
    bound = bound_at(dict(owns)[own], own, num_microbatches, limits, goal, made.schedule.slices)
    return replace(made, lower_bound=min(bound, made.value))


def _searches(
    owns: Sequence[tuple[Placement, Costs]],
    sizes: tuple[int, int, float | Sequence[float], Objective],
    slices: Sequence[int],
    whole: bool,
    trades: bool,
    in_host: float,
    seed: int,
) -> list[PlacementSearch]:
    """Return a search for every placement, number of slices and way to save memory that fits.

    Raises:
        LimitError: none fits.
    """
    begun: list[PlacementSearch] = []
    refused: list[LimitError] = []
    bases: Bases = {}
    devices, microbatches, limit, goal = sizes
    for (placement, own), cut in product(owns, slices):
        for way in ways_to_save(own.copies, placement) if trades else [ORDER_ALONE]:
            priced = own.sliced(cut)
            priced = never_split(priced) if whole else priced
            kinds = (OffloadSearch if way.copies else PlacementSearch).kinds
            try:
                asked = microbatches * cut, limit, goal, placement, kinds, in_host, cut
                problem = make_problem(priced, devices, *asked)
            except LimitError as error:
                refused.append(error)
                continue
            if way.copies:
                begun.append(OffloadSearch(problem, seed, way, bases))
            else:
                begun.append(PlacementSearch(problem, seed, way))
    if not begun:
        raise min(refused, key=lambda error: error.least)
    return begun


def _worth_racing(searches: Sequence[PlacementSearch]) -> list[PlacementSearch]:
    """Return the searches whose bounds promise most first, and of the same those with copies.

    What their bounds leave nothing below the best order then never begins.
    """
    return sorted(searches, key=lambda each: (each.bound, not isinstance(each, OffloadSearch)))


class _Race:
    """Spends the budget on the orders of all placements together; the better half goes on.

    Every order is walked by itself, so threads share the work and change no plan.
    """

    def __init__(self, searches: list[PlacementSearch], trades: bool = False) -> None:
        self.searches, self.trades = searches, trades
        self.bound = min(search.bound for search in searches)
        self.steps, self.enough = 0, _SAME

    @property
    def best(self) -> PlacementSearch:
        """Return the search with the best order so far; raises ScheduleError if none has one."""
        # Ctrl-C may have come before the last of them had any.
        begun = [search for search in self.searches if search.best is not None]
        return min(begun or self.searches, key=PlacementSearch.value)

    def run(self, steps: int | None, seconds: float | None, progress: Progress | None) -> None:
        """Search with the budget; the default one up to `TURNS` times, until the bound is near.

        With `seconds` again, other and twice as long, until they end.
        """
        ends = None if seconds is None else time.monotonic() + seconds
        budget = steps
        if budget is None:
            budget = max(default_steps(search.problem) for search in self.searches)
        turns = TURNS_OF_TRADES if self.trades else TURNS
        last = 1 if steps is not None and ends is None else turns
        if steps is None and ends is None:
            self.enough = ENOUGH
        stayed: list[_Runner] = []
        try:
            with ThreadPoolExecutor(CORES) as pool:
                try:
                    for turn in count(1):
                        again = turn > 1 if self.trades else turn % OLD == 0
                        live = stayed if again else self._begin(budget, pool)
                        kept = [] if again else stayed
                        share = budget * LONGER if again and not self.trades else budget
                        stayed = kept + self._turn(live, share, ends, progress, pool)
                        if self._closed() or (ends is not None and time.monotonic() >= ends):
                            return
                        if ends is None and (turn == last or self._closed(NEAR)):
                            return
                        for search in self.searches:
                            search.seed += 1
                        budget *= 1 if ends is None else 2
                finally:
                    pool.shutdown(cancel_futures=True)
        except KeyboardInterrupt:
            if all(search.best is None for search in self.searches):
                raise

    def _begin(self, budget: int, pool: ThreadPoolExecutor) -> list[_Runner]:
        return [
            (search, each)
            for search in self.searches
            if self._can_win(search)
            for each in search.begin(budget, pool.map)
        ]

    def _turn(
        self,
        live: list[_Runner],
        budget: int,
        ends: float | None,
        progress: Progress | None,
        pool: ThreadPoolExecutor,
    ) -> list[_Runner]:
        """Improve the orders in rounds; return the last ones.

        After each round half of them stay. Where that leaves few, the best go on in several ways.
        """

        def is_over() -> bool:
            return self._closed(self.enough) or (ends is not None and time.monotonic() >= ends)

        def advance(live: list[_Runner], share: int, number: int) -> list[_Runner]:
            if number and is_over():
                return live
            for steps in _pieces(share):
                jobs = [(*pair, steps) for pair in live]
                for at in range(0, len(jobs), CORES):
                    for search, each, _ in pool.map(_improve, jobs[at : at + CORES]):
                        search.keep(each)
                        self.steps += steps
                        if progress is not None:
                            progress(self.steps, self.best.value(), self.bound)
                    if ends is not None and time.monotonic() >= ends:
                        return live
                if self._closed(self.enough):
                    return live
            return _going_on(self._open(live))

        live = self._open(live)
        return race(live, budget, _rounds_of(live, budget), advance, LEAST)

    def _open(self, live: list[_Runner]) -> list[_Runner]:
        """Return those whose placement can still have a better order."""
        return [pair for pair in live if self._can_win(pair[0])]

    def _can_win(self, search: PlacementSearch) -> bool:
        """Return whether the bound of its placement leaves something below the best order."""
        begun = [each for each in self.searches if each.best is not None]
        return not begun or search.bound * (1 + _SAME) < min(each.value() for each in begun)

    def _closed(self, within: float = _SAME) -> bool:
        return self.best.value() <= self.bound * (1 + within)

    def plan(self) -> Plan:
        """Return the best order found, as a plan."""
        return replace(self.best.plan(), steps=self.steps, tried=tuple(self._tried()))

    def _tried(self) -> Iterator[Tried]:
        """Yield the best of every way to hold less, on any placement."""
        for way in dict.fromkeys(search.way for search in self.searches):
            own = [search for search in self.searches if search.way == way]
            values = [search.value() for search in own if search.best is not None]
            yield Tried(way, min(values, default=None), min(search.bound for search in own))


def _pieces(steps: int) -> list[int]:
    """Return the steps in parts of at most `MOST_AT_ONCE`."""
    parts = -(-steps // MOST_AT_ONCE)
    return [steps * (at + 1) // parts - steps * at // parts for at in range(parts)]


def _improve(job: tuple[PlacementSearch, Candidate, int]) -> tuple[PlacementSearch, Candidate, int]:
    search, candidate, steps = job
    if steps:
        search.improve(candidate, steps)
    return job


def _going_on(live: list[_Runner]) -> list[_Runner]:
    """Return the better half, and where that is few, these again on ways of their own."""
    few = _are_few(live)
    walks = WALKS_OF_FEW if few else WALKS
    live = better_half(live, _value_of)
    copies = [
        (search, search.again(each, number, restart=few))
        for number in range(1, walks)
        for search, each in live
    ]
    return (live + copies)[: max(walks, len(live))]


def _rounds_of(live: list[_Runner], steps: int) -> int:
    return max(ROUNDS, steps // (STEPS_OF_FEW * WALKS_OF_FEW)) if _are_few(live) else ROUNDS


def _are_few(live: list[_Runner]) -> bool:
    return all(_passes_of(search.problem) < FEW for search, _ in live)


def _value_of(runner: _Runner) -> float:
    search, candidate = runner
    return candidate.value / search.problem.ticks_per_us


def _passes_of(problem: Problem) -> int:
    return problem.num_microbatches * len(problem.sorts.ticks)


def default_steps(problem: Problem) -> int:
    """Return the steps of a turn of the default budget.

    More devices make a step dearer, and more microbatches what is done beside the steps; few
    passes need fewer.
    """
    devices, microbatches = problem.num_devices, problem.num_microbatches
    most = 500_000 if devices <= 16 else 160_000
    if devices <= 8:
        most = 700_000 if devices * microbatches <= 256 else 540_000
    return min(most, STEPS_OF_PAIR * _passes_of(problem) ** 2)
