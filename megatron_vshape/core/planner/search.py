"""Adaptive scheduler: search for the pass order with the least makespan or span.

1. Placements: those of the costs; by default the V and the loop of all stages; with `trades`, also
   the loop of two stages per device (`default_placements`). The next steps run for each placement;
   one budget is shared by the orders of all of them.
2. Steady orders: for loops of at most two stages per device and for zigzags, `modulo` finds cyclic
   orders within the memory limits with the shortest period.
   Published blocks are added, for a loop with groups of several sizes. Each order is cut to the few
   microbatches that show warm-up and cool-down (`orders.CyclicOrder`).
3. Starting points: each order as it is, with idle time filled by step 4 of the paper, or with W
   reinserted as fillers (`job_shop.reinsert_weights`). All are evaluated for the full number of
   microbatches by repeating a period in the middle, which needs no search (`orders`).
4. Local search for warm-up and cool-down: move a pass, alone or with its neighbors in other
   microbatches, or exchange two, if the objective does not grow (`improve`). After each round the
   worse half of the orders is dropped and the best continue in several copies; W are reinserted
   in between. A placement is dropped if its lower bound is above the best order; placements
   without annealing come first, because they are fast.
5. Unless the gap to the bound is below `NEAR`: repeat with other random numbers, for the placements
   of the last round, then a long local search from the best orders of both turns.
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
    MAX_GAP,
    LimitError,
    bound_at,
    limits_by_device,
    never_split,
)
from megatron_vshape.core.check.simulate import costs_of
from megatron_vshape.core.compiling import compiles, processors, warn_if_slow
from megatron_vshape.core.evaluated_schedule import ORDER_ALONE, EvaluatedSchedule, StrategyResult
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.pieces import regroup
from megatron_vshape.core.model.placement import Placement, default_placements
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.planner.job_shop import Problem, make_problem
from megatron_vshape.core.planner.offloading import BaseOrders, OffloadSearch, memory_strategies
from megatron_vshape.core.planner.orders import (
    MAX_STEPS_AT_ONCE,
    STARTS,
    Candidate,
    PlacementSearch,
    annealing_steps,
)
from megatron_vshape.core.planner.race import best_of, better_half, race

CORES = processors() if compiles() else 1
"""Useful number of threads: only compiled loops release the GIL."""

ROUNDS, MIN_STEPS = 3, 1000
"""Approximate number of rounds, each with half the orders; minimum steps per order."""

ORDERS, ORDERS_OF_FEW = 2, 6
"""Minimum number of orders per round; copies of the better half fill up the rest."""

FEW, STEPS_OF_FEW = 1000, 100_000
"""Below this number of passes orders converge early: copies restart after STEPS_OF_FEW steps.

A copy starts with moves that may lengthen its order. d=4, m=8, 1/1.15/.85/.05, 11 chunks: 49.65;
without restarts 50.25.
"""

_LONG_TURN = TURNS = 3
"""Number of turns; the last one continues with the orders of the turns before."""

_CONTINUED_BUDGET = 24
"""Budget factor of a continued turn: old orders still improve when new ones do not."""

_MANY_SEARCHES = 4
"""From this number of placements on, half the budget: more placements gain more than more steps."""

TURNS_OF_TRADES = 8
"""Number of turns with offloading, whose search space is larger; only the first has new orders."""

NEAR = 0.003
"""Gap to the bound below which no further turn starts in the default budget.

At d=8, m=64, 1/1.15/.85/.05, 10 chunks, a long turn spends a third of a plan's time on the last
0.04%: 400.55 and 400.4, where the bound is 400.15. A single turn ends within this gap.
"""

_STEPS_PER_SECOND = 3_000_000
"""Approximate speed of a search at 8 devices. It limits the first turn to the time limit."""

_ANNEALING_S = 0.4e-6
"""Approximate time of a step of annealing per device."""

_STEPS_PER_PAIR = 5
"""Maximum steps per pair of passes in a turn of the default budget."""

_TOLERANCE = 1e-9

_Entry = tuple[PlacementSearch, Candidate]
"""An order, with the search that improves it."""

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
    begun: Callable[[Callable[[], EvaluatedSchedule]], None] | None = None,
    seed: int = 1,
) -> EvaluatedSchedule:
    """Search for the fastest schedule within a memory limit per device.

    The plan for given `steps` is the same on any number of cores; `seconds` and Ctrl-C end early.

    >>> from megatron_vshape import Costs, plan
    >>> costs = Costs.uniform(4, 8, forward=1, backward=1.2, weight=0.8, send=0.05)
    >>> best = plan(costs, num_devices=4, num_microbatches=8, limit=6, steps=10_000)
    >>> max(best.peak) <= 6, best.lower_bound <= best.value < 60
    (True, True)

    Args:
        costs: per stage, for unsliced microbatches; added up for placements with fewer stages. Or
            the costs of every allowed placement, instead of `placements`.
        limit: memory limit in the costs' unit, one value or one per device; infinity is no limit.
        slices: sequence slices per microbatch, or several numbers to choose from.
        whole: plan for full backwards: B has the time of BW, and W costs nothing.
        trades: allow offloading if the costs contain copy times; never worse than without.
        in_host: host memory limit per device, in the costs' unit.
        steps: search steps (default: a few seconds at 8 devices).
        begun: called with a function that returns the best plan so far, from any thread.

    Raises:
        LimitError: nothing fits the limit; contains the least limit that fits, on any placement.
        ScheduleError: counts, costs and placements do not match, or the objective is unknown.
    """
    warn_if_slow()
    sizes = num_devices, num_microbatches, limit, (goal := Objective(objective))
    slice_counts = (slices,) if isinstance(slices, int) else tuple(slices)
    if isinstance(costs, Costs):
        costs = _by_placement(costs, num_devices, placements, trades)
    searches = _searches(costs, sizes, slice_counts, whole, trades, in_host, seed)
    if trades or slice_counts[1:]:
        # A search whose bound is not below the best order so far never starts, so those with the
        # lowest bounds come first; with equal bounds, offloading does.
        searches.sort(key=lambda search: (search.bound, not isinstance(search, OffloadSearch)))
    orders = _Race(searches, trades)
    if begun is not None:
        begun(orders.best_plan)
    orders.run(steps, seconds, progress)
    result = orders.best_plan()
    placement, limits = result.schedule.placement, limits_by_device(limit, num_devices)
    result = replace(result, costs=costs[placement])
    if not trades:
        return result
    # A search's bound covers its strategy alone, and this one all strategies of the placement.
    bound = bound_at(
        costs_of(result.schedule, costs[placement]), placement, num_microbatches, limits, goal
    )
    return replace(result, lower_bound=min(bound, result.value))


def _by_placement(
    costs: Costs, num_devices: int, placements: Sequence[Placement], trades: bool
) -> dict[Placement, Costs]:
    """Add the costs up to the stages of each allowed placement (default: `default_placements`)."""
    allowed = placements or default_placements(num_devices, costs.num_stages, trades)
    return {
        placement: regroup(costs, len(placement), f"a placement of {len(placement)} stages")
        for placement in allowed
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
    searches: list[PlacementSearch] = []
    rejected: list[LimitError] = []
    base_orders: BaseOrders = {}
    num_devices, num_microbatches, limit, goal = sizes
    for (placement, placement_costs), num_slices in product(costs.items(), slices):
        for strategy in (
            memory_strategies(placement_costs.copies, placement) if trades else [ORDER_ALONE]
        ):
            slice_costs = placement_costs.sliced(num_slices)
            slice_costs = never_split(slice_costs) if whole else slice_costs
            kinds = (OffloadSearch if strategy.copies else PlacementSearch).kinds
            try:
                problem = make_problem(
                    slice_costs,
                    num_devices,
                    num_microbatches * num_slices,
                    limit,
                    goal,
                    placement,
                    kinds,
                    in_host,
                )
            except LimitError as error:
                rejected.append(error)
                continue
            if strategy.copies:
                searches.append(OffloadSearch(problem, seed, strategy, base_orders))
            else:
                searches.append(PlacementSearch(problem, seed, strategy))
    if not searches:
        # The message names the least limit that fits on any placement.
        raise min(rejected, key=lambda error: error.min_limit)
    return searches


class _Race:
    """Distributes the budget over the orders of all placements; the better half continues.

    Each order is searched independently, so threads do not change the plan.
    """

    def __init__(self, searches: list[PlacementSearch], trades: bool = False) -> None:
        self.searches, self.trades = searches, trades
        self.bound = min(search.bound for search in searches)
        self.steps, self.enough = 0, _TOLERANCE

    @property
    def best(self) -> PlacementSearch:
        """Search with the best order so far; raises ScheduleError if none has an order."""
        # After Ctrl-C some searches may have no order yet.
        searches = [search for search in self.searches if search.best is not None]
        return min(searches or self.searches, key=PlacementSearch.value)

    def run(self, steps: int | None, seconds: float | None, progress: Progress | None) -> None:
        """Search in up to `TURNS` turns by default, until the lower bound is near.

        With `seconds`, turns with other random numbers and twice the budget follow until the time
        limit.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        budget = self._default_budget(seconds) if steps is None else steps
        max_turns = TURNS_OF_TRADES if self.trades else TURNS
        num_turns = 1 if steps is not None and deadline is None else max_turns
        if steps is None:
            # Given steps are used in full, unless the order is optimal.
            self.enough = MAX_GAP
        survivors: list[_Entry] = []
        searches = self.searches
        try:
            with ThreadPoolExecutor(CORES) as pool:
                try:
                    for turn in count(1):
                        # A continued turn starts from the last orders, all other turns from new
                        # ones.
                        is_continued = turn > 1 if self.trades else turn % _LONG_TURN == 0
                        entries = (
                            survivors
                            if is_continued
                            else self._start_entries(searches, budget, pool)
                        )
                        previous = [] if is_continued else survivors
                        share = (
                            budget * _CONTINUED_BUDGET
                            if is_continued and not self.trades
                            else budget
                        )
                        survivors = previous + self._turn(entries, share, deadline, progress, pool)
                        is_over = deadline is not None and time.monotonic() >= deadline
                        if is_over or self._is_near_bound(self.enough):
                            return
                        if deadline is None and (turn == num_turns or self._is_near_bound(NEAR)):
                            return
                        # The next new orders are only for placements that have not dropped out.
                        searches = list(dict.fromkeys(search for search, _ in survivors))
                        for search in self.searches:
                            search.seed += 1
                        budget *= 1 if deadline is None else 2
                finally:
                    pool.shutdown(cancel_futures=True)
        except KeyboardInterrupt:
            # Ctrl-C returns the best order so far; without any order it is an interrupt.
            if all(search.best is None for search in self.searches):
                raise

    def _default_budget(self, seconds: float | None) -> int:
        """Return the steps of the first turn."""
        budget = max(default_steps(search.problem) for search in self.searches)
        if len(self.searches) >= _MANY_SEARCHES and not self.trades:
            budget //= 2
        if seconds is None:
            return budget
        budget = min(budget, int(seconds * _STEPS_PER_SECOND))
        if any(search.is_annealed for search in self.searches):
            devices = self.searches[0].problem.num_devices
            annealing_s = _ANNEALING_S * devices * annealing_steps(budget, devices)
            budget = int(budget * min(1.0, seconds / annealing_s))
        return budget

    def _start_entries(
        self, searches: Sequence[PlacementSearch], budget: int, pool: ThreadPoolExecutor
    ) -> list[_Entry]:
        share = budget
        if not self.trades:
            # Published orders need no annealing: they come first and may rule out the others.
            searches = sorted(
                searches,
                key=lambda search: (search.is_annealed, search.is_annealed or search.bound),
            )
            share //= max(1, sum(search.is_annealed for search in searches))
        entries = [
            (search, candidate)
            for search in searches
            if self._can_win(search)
            for candidate in search.start_orders(share, pool.map)
        ]
        if self.trades:
            return entries
        # The best orders may all be of one placement, and optimal there.
        return best_of(self._contenders(entries), STARTS, _value_of)

    def _turn(
        self,
        entries: list[_Entry],
        budget: int,
        deadline: float | None,
        progress: Progress | None,
        pool: ThreadPoolExecutor,
    ) -> list[_Entry]:
        """Improve the orders in rounds; return those of the last round.

        Half of the orders remain after each round, filled up with copies if they are few.
        """

        def is_over() -> bool:
            return self._is_near_bound(self.enough) or (
                deadline is not None and time.monotonic() >= deadline
            )

        def advance(entries: list[_Entry], share: int, number: int) -> list[_Entry]:
            # The first round always runs, so that every order is improved once.
            if number and is_over():
                return entries
            num_parts = -(-share // MAX_STEPS_AT_ONCE)
            for part in range(num_parts):
                steps = share * (part + 1) // num_parts - share * part // num_parts
                jobs = [(*pair, steps) for pair in entries]
                # Batches of one job per core, so that the time limit and progress are checked in
                # between.
                for start in range(0, len(jobs), CORES):
                    for search, candidate, _ in pool.map(
                        _improve_entry, jobs[start : start + CORES]
                    ):
                        search.keep_if_best(candidate)
                        self.steps += steps
                        if progress is not None:
                            progress(self.steps, self.best.value(), self.bound)
                    if deadline is not None and time.monotonic() >= deadline:
                        return entries
                if self._is_near_bound(self.enough):
                    return entries
            return _next_round(self._contenders(entries))

        entries = self._contenders(entries)
        # Few passes converge early, and each round restarts their copies.
        rounds = budget // (STEPS_OF_FEW * ORDERS_OF_FEW) if _are_few(entries) else 0
        return race(entries, budget, max(ROUNDS, rounds), advance, MIN_STEPS)

    def _contenders(self, entries: list[_Entry]) -> list[_Entry]:
        """Return the orders whose placement can still have a better order."""
        return [pair for pair in entries if self._can_win(pair[0])]

    def _can_win(self, search: PlacementSearch) -> bool:
        """Return whether the lower bound of its placement is below the best order."""
        peers = [peer for peer in self.searches if peer.best is not None]
        # The values are comparable: in the costs' unit, whatever the ticks of each search.
        return not peers or search.bound * (1 + _TOLERANCE) < min(peer.value() for peer in peers)

    def _is_near_bound(self, within: float) -> bool:
        return self.best.value() <= self.bound * (1 + within)

    def best_plan(self) -> EvaluatedSchedule:
        """Return the best order as a plan."""
        return replace(
            self.best.best_plan(),
            steps=self.steps,
            evaluated_strategies=tuple(self._strategy_results()),
        )

    def _strategy_results(self) -> Iterator[StrategyResult]:
        """Yield the best value of each strategy to save memory, over all placements."""
        for strategy in dict.fromkeys(search.strategy for search in self.searches):
            searches = [search for search in self.searches if search.strategy == strategy]
            values = [search.value() for search in searches if search.best is not None]
            yield StrategyResult(
                strategy, min(values, default=None), min(search.bound for search in searches)
            )


def _improve_entry(
    job: tuple[PlacementSearch, Candidate, int],
) -> tuple[PlacementSearch, Candidate, int]:
    search, candidate, steps = job
    if steps:
        search.improve(candidate, steps)
    return job


def _next_round(entries: list[_Entry]) -> list[_Entry]:
    """Return the better half of the orders, filled up with reseeded copies if they are few."""
    is_few = _are_few(entries)
    min_orders = ORDERS_OF_FEW if is_few else ORDERS
    entries = better_half(entries, _value_of)
    copies = [
        (search, search.reseeded_copy(candidate, number, restart=is_few))
        for number in range(1, min_orders)
        for search, candidate in entries
    ]
    # The originals come first, so a copy never displaces one.
    return (entries + copies)[: max(min_orders, len(entries))]


def _value_of(entry: _Entry) -> float:
    search, candidate = entry
    return candidate.value / search.problem.ticks_per_us


def _are_few(entries: list[_Entry]) -> bool:
    return all(_num_passes(search.problem) < FEW for search, _ in entries)


def _num_passes(problem: Problem) -> int:
    return problem.num_microbatches * len(problem.types.ticks)


def default_steps(problem: Problem) -> int:
    """Return the steps of a turn of the default budget.

    With more devices a step costs more, with more microbatches the work outside of the steps does.
    Few passes need fewer steps.
    """
    devices, microbatches = problem.num_devices, problem.num_microbatches
    max_steps = 500_000 if devices <= 16 else 160_000
    if devices <= 8:
        max_steps = 700_000 if devices * microbatches <= 256 else 540_000
    return min(max_steps, _STEPS_PER_PAIR * _num_passes(problem) ** 2)
