"""Adaptive scheduler: search for the pass order with the least makespan or span.

1. Placements: the V and the loop of all stages; with `trades`, also the loop of two stages per
   device (`default_placements`). The next steps run for each placement; one budget is shared by
   the orders of all of them.
2. Steady orders: with at most two stages per device, `modulo` finds cyclic orders within the memory
   limits with the shortest period.
   Published blocks are added, for a loop with groups of several sizes. Each order is cut to the few
   microbatches that show warm-up and cool-down (`orders.CyclicOrder`).
3. Starting points: each order as it is, with idle time filled by step 4 of the paper, and with W
   placed again as filler (`job_shop.refill`). All are evaluated for the full number of
   microbatches by repeating a period in the middle, which needs no search (`orders`).
4. Local search for warm-up and cool-down: move a pass, alone or with its neighbors in other
   microbatches, or exchange two, if the objective does not grow (`improve`). After each round the
   worse half of the orders is dropped and the best continue in several copies; W are placed again
   in between. A placement is dropped if its lower bound is above the best order.
5. Unless the gap to the bound is below `NEAR`: repeat with other random numbers, then a long local
   search from the best orders of both turns.
   Each order is searched independently, so the plan is the same on any number of cores.
6. With `trades`, each strategy to save memory is a separate search on each placement. Those with
   offloading start from orders planned for more memory (`offloading`). All share one budget; a
   search that cannot win by its bound never starts.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, product
from math import inf

from megatron_vshape.core.check.bounds import (
    ENOUGH,
    LimitError,
    bound_at,
    each_limit,
    never_split,
)
from megatron_vshape.core.check.simulate import costs_of
from megatron_vshape.core.compiling import compiles, processors, say_if_slow
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.pieces import regroup
from megatron_vshape.core.model.placement import Placement, default_placements
from megatron_vshape.core.model.schedule import ORDER_ALONE, Objective, Plan, StrategyResult
from megatron_vshape.core.planner.job_shop import Problem, make_problem
from megatron_vshape.core.planner.offloading import Bases, OffloadSearch, ways_to_save
from megatron_vshape.core.planner.orders import MOST_AT_ONCE, Candidate, PlacementSearch
from megatron_vshape.core.planner.race import better_half, race

CORES = processors() if compiles() else 1
"""Useful number of threads: only compiled loops release the GIL."""

ROUNDS, LEAST = 3, 1000
"""Approximate number of rounds, each with half the orders; minimum steps per order."""

ORDERS, ORDERS_OF_FEW = 2, 6
"""Minimum number of orders per round; copies of the better half fill up the rest."""

FEW, STEPS_OF_FEW = 1000, 100_000
"""Below this number of passes orders converge early: copies restart after STEPS_OF_FEW steps.

A copy starts with moves that may lengthen its order. d=4, m=8, 1/1.15/.85/.05, 11 chunks: 49.65;
without restarts 50.25.
"""

LONG_TURN = TURNS = 3
"""Number of turns; the last one continues with the orders of the turns before."""

LONGER = 24
"""Budget factor of a continued turn: old orders still improve when new ones do not."""

TURNS_OF_TRADES = 8
"""Number of turns with offloading, whose search space is larger; only the first has new orders."""

NEAR = 0.003
"""Gap to the bound below which no further turn starts in the default budget.

At d=8, m=64, 1/1.15/.85/.05, 10 chunks, a long turn spends a third of a plan's time on the last
0.04%: 400.55 and 400.4, where the bound is 400.15. A single turn ends below `ENOUGH`.
"""

STEPS_PER_SECOND = 1_000_000
"""Approximate speed of a search at 8 devices. It limits the first turn to the time limit."""

STEPS_OF_PAIR = 5
"""Maximum steps per pair of passes in a turn of the default budget."""

_SAME = 1e-9

_Runner = tuple[PlacementSearch, Candidate]

Progress = Callable[[int, float, float], None]
"""Called with the steps so far, the best value so far and the lower bound."""


def plan(
    costs: Costs | Mapping[Placement, Costs],
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
    """Search for the fastest schedule within a memory limit per device.

    The plan for given `steps` is the same on any number of cores; `seconds` and Ctrl-C end early.

    >>> from megatron_vshape import Costs, plan
    >>> costs = Costs.uniform(4, 8, forward=1, backward=1.2, weight=0.8, send=0.05)
    >>> found = plan(costs, num_devices=4, num_microbatches=8, limit=6, steps=10_000)
    >>> max(found.peak) <= 6, found.lower_bound <= found.value < 60
    (True, True)

    Args:
        costs: per stage, for unsliced microbatches; added up for placements with fewer stages. Or
            the costs of every allowed placement, instead of `placements`.
        limit: memory limit in the costs' unit, one value or one per device; infinity is no limit.
        slices: sequence slices per microbatch, or several numbers to choose from.
        whole: plan for unsplit backward: B has the time of BW, and W costs nothing.
        trades: allow offloading if the costs contain copy times; never worse than without.
        in_host: host memory limit per device, in the costs' unit.
        steps: search steps (default: a few seconds at 8 devices).
        begun: called with a function that returns the best plan so far, from any thread.

    Raises:
        LimitError: nothing fits the limit; contains the least limit that fits, on any placement.
        ScheduleError: counts, costs and placements do not match, or the objective is unknown.
    """
    say_if_slow()
    sizes = num_devices, num_microbatches, limit, (goal := Objective(objective))
    counts = (slices,) if isinstance(slices, int) else tuple(slices)
    if isinstance(costs, Costs):
        costs = _by_placement(costs, num_devices, placements, trades)
    searches = _searches(costs, sizes, counts, whole, trades, in_host, seed)
    orders = _Race(_worth_racing(searches) if trades or counts[1:] else searches, trades)
    if begun is not None:
        begun(orders.best_plan)
    orders.run(steps, seconds, progress)
    made = orders.best_plan()
    if not trades:
        return made
    own, limits = made.schedule.placement, each_limit(limit, num_devices)
    # A search's bound covers its strategy alone, and this one all strategies of the placement.
    bound = bound_at(costs_of(made.schedule, costs[own]), own, num_microbatches, limits, goal)
    return replace(made, lower_bound=min(bound, made.value))


def _by_placement(
    costs: Costs, num_devices: int, placements: Sequence[Placement], trades: bool
) -> dict[Placement, Costs]:
    """Add the costs up to the stages of each allowed placement (default: `default_placements`)."""
    allowed = placements or default_placements(num_devices, costs.num_stages, trades)
    return {
        each: regroup(costs, len(each), f"a placement of {len(each)} stages") for each in allowed
    }


def _searches(
    costs: Mapping[Placement, Costs],
    sizes: tuple[int, int, float | Sequence[float], Objective],
    slices: Sequence[int],
    whole: bool,
    trades: bool,
    in_host: float,
    seed: int,
) -> list[PlacementSearch]:
    """Return a search for every placement, number of slices and strategy that fits the limit.

    Raises:
        LimitError: none fits.
    """
    begun: list[PlacementSearch] = []
    refused: list[LimitError] = []
    bases: Bases = {}
    devices, microbatches, limit, goal = sizes
    for (placement, own), cut in product(costs.items(), slices):
        for way in ways_to_save(own.copies, placement) if trades else [ORDER_ALONE]:
            priced = own.sliced(cut)
            priced = never_split(priced) if whole else priced
            kinds = (OffloadSearch if way.copies else PlacementSearch).kinds
            try:
                problem = make_problem(
                    priced, devices, microbatches * cut, limit, goal, placement, kinds, in_host
                )
            except LimitError as error:
                refused.append(error)
                continue
            if way.copies:
                begun.append(OffloadSearch(problem, seed, way, bases))
            else:
                begun.append(PlacementSearch(problem, seed, way))
    if not begun:
        # The message names the least limit that fits on any placement.
        raise min(refused, key=lambda error: error.least)
    return begun


def _worth_racing(searches: Sequence[PlacementSearch]) -> list[PlacementSearch]:
    """Sort the searches by lower bound; with equal bounds, offloading comes first.

    A search whose bound is not below the best order so far never starts.
    """
    return sorted(searches, key=lambda each: (each.bound, not isinstance(each, OffloadSearch)))


class _Race:
    """Distributes the budget over the orders of all placements; the better half continues.

    Each order is searched independently, so threads do not change the plan.
    """

    def __init__(self, searches: list[PlacementSearch], trades: bool = False) -> None:
        self.searches, self.trades = searches, trades
        self.bound = min(search.bound for search in searches)
        self.steps, self.enough = 0, _SAME

    @property
    def best(self) -> PlacementSearch:
        """Search with the best order so far; raises ScheduleError if none has an order."""
        # After Ctrl-C some searches may have no order yet.
        begun = [search for search in self.searches if search.best is not None]
        return min(begun or self.searches, key=PlacementSearch.value)

    def run(self, steps: int | None, seconds: float | None, progress: Progress | None) -> None:
        """Search in up to `TURNS` turns by default, until the lower bound is near.

        With `seconds`, turns with other random numbers and twice the budget follow until the time
        limit.
        """
        ends = None if seconds is None else time.monotonic() + seconds
        budget = steps
        if budget is None:
            budget = max(default_steps(search.problem) for search in self.searches)
        if steps is None and seconds is not None:
            budget = min(budget, int(seconds * STEPS_PER_SECOND))
        turns = TURNS_OF_TRADES if self.trades else TURNS
        last = 1 if steps is not None and ends is None else turns
        if steps is None:
            # Given steps are used in full, unless the order is optimal.
            self.enough = ENOUGH
        stayed: list[_Runner] = []
        try:
            with ThreadPoolExecutor(CORES) as pool:
                try:
                    for turn in count(1):
                        # A continued turn starts from the last orders, all other turns from new
                        # ones.
                        again = turn > 1 if self.trades else turn % LONG_TURN == 0
                        live = stayed if again else self._begin(budget, pool)
                        kept = [] if again else stayed
                        share = budget * LONGER if again and not self.trades else budget
                        stayed = kept + self._turn(live, share, ends, progress, pool)
                        is_over = ends is not None and time.monotonic() >= ends
                        if is_over or self._closed(self.enough):
                            return
                        if ends is None and (turn == last or self._closed(NEAR)):
                            return
                        for search in self.searches:
                            search.seed += 1
                        budget *= 1 if ends is None else 2
                finally:
                    pool.shutdown(cancel_futures=True)
        except KeyboardInterrupt:
            # Ctrl-C returns the best order so far; without any order it is an interrupt.
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
        """Improve the orders in rounds; return those of the last round.

        Half of the orders remain after each round, filled up with copies if they are few.
        """

        def is_over() -> bool:
            return self._closed(self.enough) or (ends is not None and time.monotonic() >= ends)

        def advance(live: list[_Runner], share: int, number: int) -> list[_Runner]:
            # The first round always runs, so that every order is improved once.
            if number and is_over():
                return live
            for steps in _pieces(share):
                jobs = [(*pair, steps) for pair in live]
                # Batches of one job per core, so that the time limit and progress are checked in
                # between.
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
        """Return the orders whose placement can still have a better order."""
        return [pair for pair in live if self._can_win(pair[0])]

    def _can_win(self, search: PlacementSearch) -> bool:
        """Return whether the lower bound of its placement is below the best order."""
        begun = [each for each in self.searches if each.best is not None]
        # The values are comparable: in the costs' unit, whatever the ticks of each search.
        return not begun or search.bound * (1 + _SAME) < min(each.value() for each in begun)

    def _closed(self, within: float = _SAME) -> bool:
        return self.best.value() <= self.bound * (1 + within)

    def best_plan(self) -> Plan:
        """Return the best order as a plan."""
        return replace(self.best.best_plan(), steps=self.steps, tried=tuple(self._tried()))

    def _tried(self) -> Iterator[StrategyResult]:
        """Yield the best value of each strategy to save memory, over all placements."""
        for way in dict.fromkeys(search.way for search in self.searches):
            own = [search for search in self.searches if search.way == way]
            values = [search.value() for search in own if search.best is not None]
            yield StrategyResult(
                way, min(values, default=None), min(search.bound for search in own)
            )


def _pieces(steps: int) -> list[int]:
    """Split the steps into parts of at most `MOST_AT_ONCE`."""
    parts = -(-steps // MOST_AT_ONCE)
    return [steps * (at + 1) // parts - steps * at // parts for at in range(parts)]


def _improve(job: tuple[PlacementSearch, Candidate, int]) -> tuple[PlacementSearch, Candidate, int]:
    search, candidate, steps = job
    if steps:
        search.improve(candidate, steps)
    return job


def _going_on(live: list[_Runner]) -> list[_Runner]:
    """Return the better half of the orders, filled up with reseeded copies if they are few."""
    few = _are_few(live)
    least = ORDERS_OF_FEW if few else ORDERS
    live = better_half(live, _value_of)
    copies = [
        (search, search.again(each, number, restart=few))
        for number in range(1, least)
        for search, each in live
    ]
    # The originals come first, so a copy never displaces one.
    return (live + copies)[: max(least, len(live))]


def _rounds_of(live: list[_Runner], steps: int) -> int:
    return max(ROUNDS, steps // (STEPS_OF_FEW * ORDERS_OF_FEW)) if _are_few(live) else ROUNDS


def _are_few(live: list[_Runner]) -> bool:
    return all(_passes_of(search.problem) < FEW for search, _ in live)


def _value_of(runner: _Runner) -> float:
    search, candidate = runner
    return candidate.value / search.problem.ticks_per_us


def _passes_of(problem: Problem) -> int:
    return problem.num_microbatches * len(problem.sorts.ticks)


def default_steps(problem: Problem) -> int:
    """Return the steps of a turn of the default budget.

    With more devices a step costs more, with more microbatches the work outside of the steps does.
    Few passes need fewer steps.
    """
    devices, microbatches = problem.num_devices, problem.num_microbatches
    most = 500_000 if devices <= 16 else 160_000
    if devices <= 8:
        most = 700_000 if devices * microbatches <= 256 else 540_000
    return min(most, STEPS_OF_PAIR * _passes_of(problem) ** 2)
