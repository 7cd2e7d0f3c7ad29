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

What was tried, as overheads in chunk passes (F/B/W/comm, memory in chunks, published best):

* Ties are what matters. Taking only moves that lower (makespan, sum of ends) gives 40.6 from
  V-Half's order at d=8, m=24, 1/2/1/.05, 10 chunks (59.9); walking along ties as well 33-35 in
  the same time, from whatever start. The sum of ends, even as a mild preference, makes it worse
  (34.5 to 35.9), and so do annealing (50), late acceptance (58) and a band above the best (35-37).
* What is on no critical path must move as well, and two passes of a lane must be able to change
  places, for where the memory is full neither can go by itself. Overheads after as many seconds as
  the first takes for 4 M steps (b, d) or 6 M (a), from one start, means of 8 to 24 seeds: one of 16
  of the uncritical moved, 73.4 (a), 210.7 (b), 465.8 (d); one of 2, 72.7, 210.2, 464.6; and six
  sixteenths exchanges, 72.9, 209.9, 464.2. a is d=4, m=8, 6 chunks; b d=8, m=24, 12; d d=16, m=48,
  18; step times, all 1/2/1/.05. Near exchanges alone are better at a, far ones at b. Moving a pass
  and then the next that makes room for it: nothing (73.8 at a).
* Steady orders against blocks: d=8, m=64, 1/2/1/.05, 10 chunks: 86 from V-Half's order, whose
  period no change of the ends can mend, 39-41 from steady orders (103.9); 8 chunks: 270 and 110
  (286.7).
* W as filler: at d=16, 1/2/1/.05, 32 chunks the best filled order has 46.0, with W dealt out
  anew 33.6 (33.65); at 24 chunks, 1/1.15/.85/.05, 57.4 and 49.2, and after the walk 40.5 (45.75).
* Moving neighbouring microbatches together and mostly passes on a critical path: 5 % less in
  the same time; moving neighbouring stages together: nothing. Greedy list scheduling with 768
  settings of caps and priorities: never better than filled orders but once (23.0 against 26.4 at
  d=8, 12 chunks, before the walk, after which the filled ones lead).
* Looking again only at what a move touches (heads and tails, as in job-shop search) makes a step
  about a microsecond at any number of microbatches; recomputing all took 2 to 6.
* At d=8, m=24, 1/1.15/.85/.05, 10 chunks every start ends at 22.4 (23.7; solver windows 22.5).

* Four stages a device, overheads at d=8, m=24, 1/1.15/.85/.05 and 10, 12, 16 chunks: the V of two
  has 22.4, 18.7, 9.1; a loop of four 16.4, 12.1, 6.1, from grouped interleaved blocks alone
  (annealed orders of a loop only take their turns from them). A V walked twice (0..7, 7..0 and
  again; every steady order of a V of half the stages makes one of the same period) 24.2, 20.5 and
  21: its ends are those of the V. Both other ways to turn (up up down down, up down down up) 25-30.
  Only at d=4, 6 chunks, is the double V ahead: 5.7 and 8.2 (1/2/1) against 6.0 and 10.3.
* Eight stages a device: worth it at V-Half's memory of many devices, which a loop of four exceeds
  (d=16, 18 chunks: 38.4 against 53.8, and 78.7 against 84.3 for 1/2/1); else like four.
* Groups of 4, 5, 6 or 8 eighths of the devices: below half, a group is through before its first
  microbatch is back, and nothing fits the period.

* Ten times the steps of one turn (700,000 at 8 devices) and eighty times, in per cent of the step
  time that they save: 0.3 and no more at V-Half's memory, d=8 (160.15 is then the proven best, as
  the bound of `core.check` says); at V-Min's 1.5 and 1.7 (d=8), 0.5 and 1.0 to 2.4 (d=16). There
  the steady order decides: eight times the share of its annealing takes d=8, m=24, 1/1.15/.85/.05
  from 37.75 to 36.65 and m=64 from 60.3 to 57.8; thirty times, hardly more (36.35, 57.65).

With activations in host memory (`trades`, overheads at d=8, 1/1.15/.85/.05, m=32, a copy as long
as an F; `benchmarks/bench_offload.py` prints more): greedy copies and W dealt out anew alone give
11.55 at 8 chunks, and the walk 9.8 to 10.9 by its random numbers, from V-ZB's order; at 4 chunks
14.5 from grouped interleaved ones of a loop, where the best V has 21.9. Starts that keep some of
host memory free lead to no more than other random numbers do (8 chunks: 16 in the host 10.15, any
10.9); twice the turns do (10.15), for what the steady orders took that no longer are planned there.

Open: below V-Half's memory the period bounds the gain; at the memory of V-ZB d - 1 hops are all
that is left; between them (24 of 32 chunks at d=16) ten times the steps still gain a fifth.
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
from megatron_vshape.core.planner.orders import FEW, MOST_AT_ONCE, Candidate, PlacementSearch
from megatron_vshape.core.planner.race import better_half, race

__all__ = ["Objective", "Plan", "plan"]

ROUNDS, LEAST = 3, 1000
"""The budget is spent in about so many rounds, each with half as many orders and so many steps."""

WALKS, WALKS_OF_FEW = 2, 6
"""So many orders are walked side by side at least, those of the same start in different ways.

With more of them each goes less far: at d=8, m=24, 1/2/1/.05, 12 chunks 2 end at 209.4 and 4 at
210.2. Of orders of fewer than `FEW` passes more are walked, and as many different ones stay: at
d=4, m=8, 6 chunks 2 end at 72.9, without kicks, 6 with as many steps each at 72.3. At 4 chunks the
best come from orders that are bad at first: 90.6 in two of five seeds, where copies of the best
give 91.3.
"""

OLD = TURNS = 3
"""One of so many turns goes on from the orders that those before it ended with, and is the last.

Against six short turns, seconds of processor time and step times, 1/2/1/.05: d=8, m=24, 12 chunks
3.6 and 211.8, now 10.9 and 208.4; d=16, m=48, 18 chunks, where new orders are dear, 8 and 468.5,
now 8 and 462.9. The two at once, old orders beside new ones in a turn: the new drop out too early.
At d=4, m=8, 4 chunks, means of five or six seeds, 91.1 now: more turns that begin anew 91.4, the
best of every start in the last turn 91.2, two or four shorter last turns for one 91.4 and 91.5.
"""

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

        return race(self._open(live), budget, ROUNDS, advance, LEAST)

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
    few = all(_passes_of(search.problem) < FEW for search, _ in live)
    walks = WALKS_OF_FEW if few else WALKS
    live = better_half(live, _value_of, WALKS_OF_FEW if few else 1)
    copies = [
        (search, search.again(each, number)) for number in range(1, walks) for search, each in live
    ]
    return (live + copies)[: max(walks, len(live))]


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
