"""The adaptive scheduler: the order of least makespan or span for given costs and memory.

1. Steady orders: `modulo` finds cyclic orders that fit the memory with the least period; the
   published blocks join them. Each is cut to the few microbatches that show its two ends
   (`rings`).
2. Starts: of each the order as it is, with its idle time filled, and with W dealt out anew as
   filler (`filling`). All are judged at the full number of microbatches: a whole period in the
   middle is repeated, which costs nothing to search.
3. The ends: a walk over orders that moves a pass, alone or with its neighbours in other
   microbatches, whenever the objective does not grow (`improve`). The worse half of the orders
   drops out after each turn; W is dealt out anew in between.

What was tried, as overheads in chunk passes (F/B/W/comm, memory in chunks, published best):

* Ties are what matters. Taking only moves that lower (makespan, sum of ends) gives 40.6 from
  V-Half's order at d=8, m=24, 1/2/1/.05, 10 chunks (59.9); walking along ties as well 33-35 in
  the same time, from whatever start. The sum of ends, even as a mild preference, makes it worse
  (34.5 to 35.9), and so do annealing (50), late acceptance (58) and a band above the best (35-37).
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

Open: below V-Half's memory the period bounds the gain; at the memory of V-ZB d - 1 hops are all
that is left; between them (24 of 32 chunks at d=16) ten times the steps still gain a fifth.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from megatron_vshape.core import blocks, bounds, improve
from megatron_vshape.core.building_block import BuildingBlock
from megatron_vshape.core.costs import Costs
from megatron_vshape.core.filling import fill, refill
from megatron_vshape.core.modulo import find_steady_orders
from megatron_vshape.core.passes import PARTS, Pass, ScheduleError
from megatron_vshape.core.placement import Placement, check_placement, linear, looping, v_shape
from megatron_vshape.core.rings import (
    Ring,
    is_period,
    ring_of_block,
    ring_of_order,
    sequential,
    splice,
)
from megatron_vshape.core.schedule import Schedule

STARTS = 8
"""So many orders are improved at first."""

DELAYS = (0, 2, 4)
"""How much a W may delay what follows, in eighths of its time, when it is dealt out anew."""

DEALT = ", W dealt"

SHARES = (1.0, 0.85)
"""Steady orders are made for the limit, and for less, which leaves the ends more room."""

MOST_AT_ONCE = 300_000
"""So many steps at most until progress is shown and W is dealt out anew."""

ROUNDS = 4
"""The budget is spent in about so many rounds, each with half as many orders."""


MOST_TICKS = 1e18
"""Of all passes of a step and their messages one after the other; times are 64 bits."""


class Objective(StrEnum):
    """What is made small: the time of all devices, or of the longest one (no barrier)."""

    MAKESPAN = "makespan"
    SPAN = "span"


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule that fits, what it costs, and how far it may be from the best.

    `value` is the makespan or span in the costs' unit; no order within the limits is below
    `lower_bound`. `source` names what the search began from.
    """

    schedule: Schedule
    objective: Objective
    value: float
    busy: float
    lower_bound: float
    peak: tuple[float, ...]
    source: str
    steps: int

    @property
    def overhead(self) -> float:
        """Return the value beyond the work of the busiest device."""
        return self.value - self.busy

    @property
    def bubble(self) -> float:
        """Return the share of the value in which the busiest device is idle."""
        return self.overhead / self.value

    @property
    def gap(self) -> float:
        """Return how far the value may be above the best, as a share of the lower bound."""
        return self.value / self.lower_bound - 1


Progress = Callable[[int, float, float], None]
"""Called with the steps taken, the best value so far and the lower bound."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is asked, in whole ticks and whole units of memory."""

    costs: Costs
    placement: Placement
    num_devices: int
    num_microbatches: int
    limits: tuple[float, ...]
    objective: Objective
    ticks_per_us: float
    units_per_byte: float


def plan(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    limit: float | Sequence[float],
    objective: Objective | str = Objective.MAKESPAN,
    *,
    placements: Sequence[Placement] = (),
    steps: int | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
    seed: int = 1,
) -> Plan:
    """Return the best schedule found whose devices hold at most `limit` each.

    `limit` is in the unit of the costs' memory, one value or one per device. With `steps` (by
    default what takes about a second at 8 devices) the same call gives the same plan everywhere;
    with `seconds` the search goes on until they are over, and Ctrl-C ends it with the best so far.
    `placements` are those allowed: by default the V, linear for one stage per device, looping for
    three and more. The first run compiles the inner loops, which numba keeps for later ones.

    Raises:
        ScheduleError: nothing fits the limit (the text says the least that does), or the counts
            and the costs do not match.
    """
    allowed = list(placements) or [default_placement(num_devices, costs.num_stages)]
    made = []
    for placement in allowed:
        problem = _problem(
            costs, num_devices, num_microbatches, limit, Objective(objective), placement
        )
        search = _Search(problem, seed)
        share = None if seconds is None else seconds / len(allowed)
        search.run(steps, share, progress)
        made.append(search.plan())
    return min(made, key=lambda each: each.value)


def _problem(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    limit: float | Sequence[float],
    objective: Objective,
    placement: Placement,
) -> _Problem:
    for what, count in (("devices", num_devices), ("microbatches", num_microbatches)):
        if count < 1:
            raise ScheduleError(f"a plan needs at least 1 of {what}, not {count}")
    limits = (limit,) * num_devices if isinstance(limit, int | float) else tuple(limit)
    if len(limits) != num_devices:
        raise ScheduleError(f"there are {len(limits)} limits for {num_devices} devices")
    check_placement(placement, num_devices)
    if len(placement) != costs.num_stages:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, the placement has {len(placement)}"
        )
    times = (*costs.forward_us, *costs.backward_us, *costs.weight_us)
    held = (*costs.held_after_forward_bytes, *costs.held_after_backward_bytes, *limits)
    problem = _Problem(
        costs,
        placement,
        num_devices,
        num_microbatches,
        limits,
        objective,
        _time_scale(times, costs.send_us, num_microbatches),
        _scale(max(held) or 1.0, 1e11),
    )
    least = bounds.least_memory(costs, placement, num_devices)
    for device, (need, has) in enumerate(zip(least, limits, strict=True)):
        if need > has * (1 + 1e-9):
            raise ScheduleError(
                f"no schedule fits: device {device} may hold {has:g}, but one microbatch alone "
                f"needs {need:g} there; the least limit for all devices is {max(least):g}"
            )
    return problem


def published_blocks(placement: Placement, num_devices: int) -> Iterator[BuildingBlock]:
    """Yield the published building blocks that have this placement."""
    chunks = len(placement) // num_devices
    made = [
        make(num_devices)
        for make in (
            *(blocks.v_min, blocks.v_half, blocks.v_zb, blocks.one_f_one_b_v),
            *(blocks.two_thirds, blocks.one_f_one_b, blocks.zb_h1, blocks.zb_h2),
        )
    ]
    if chunks > 1:
        made.append(blocks.interleaved(num_devices, chunks))
        for group in sorted({num_devices, -(-num_devices // 2)}):
            made.append(blocks.grouped_interleaved(num_devices, chunks, group))
    for block in made:
        if block.placement == placement:
            yield block


def default_placement(num_devices: int, num_stages: int) -> Placement:
    """Return the V for two stages per device, linear for one, looping for more."""
    chunks, rest = divmod(num_stages, num_devices)
    if rest or not chunks:
        raise ScheduleError(f"{num_stages} stages cannot be dealt to {num_devices} devices")
    if chunks == 1:
        return linear(num_devices)
    return v_shape(num_devices) if chunks == 2 else looping(num_devices, chunks)


def _scale(value: float, at_least: float) -> float:
    """Return the power of ten that lifts `value` to `at_least`; decimals then stay exact."""
    scale = 1.0
    while value * scale < at_least:
        scale *= 10
    while value * scale >= 10 * at_least:
        scale /= 10
    return scale


def _time_scale(times: Sequence[float], send_us: float, num_microbatches: int) -> float:
    """Return the ticks of a unit of time: fine for the shortest pass, whole steps in 64 bits."""
    step = num_microbatches * (sum(times) + 3 * len(times) * send_us)
    scale = _scale(min(times), 1e5)
    while step * scale > MOST_TICKS:
        scale /= 10
    return scale


def make_shop(problem: _Problem, num_microbatches: int) -> improve.Shop:
    """Return the passes of `num_microbatches` microbatches for the inner loops."""
    costs, placement = problem.costs, problem.placement
    stages, m = len(placement), num_microbatches
    sorts = 3 * stages
    before = np.full(sorts, -1)
    lag = np.zeros(sorts, np.int64)
    send = round(costs.send_us * problem.ticks_per_us)
    for sort in range(sorts):
        kind, stage = PARTS[sort % 3], sort // 3
        # the last need is the latest: whatever else a pass reads was there before it
        for need in Pass(kind, stage, 0).needs(stages):
            before[sort] = 3 * need.stage + PARTS.index(need.kind)
            lag[sort] = send * (placement[need.stage] != placement[stage])
    times = zip(costs.forward_us, costs.backward_us, costs.weight_us, strict=True)
    ticks = np.array([[round(t * problem.ticks_per_us) for t in each] for each in times])
    device = np.repeat(np.array(placement), 3)
    after, weight = np.full(sorts, -1), np.full(sorts, -1)
    for sort, need in enumerate(before):
        if need >= 0:
            (weight if sort % 3 == 2 else after)[need] = sort
    micro = np.tile(np.arange(m), sorts)

    def passes(of: np.ndarray) -> np.ndarray:
        wide = np.repeat(of, m)
        return np.where(wide >= 0, wide * m + micro, -1).astype(np.int32)

    return improve.Shop(
        before=passes(before),
        after=passes(after),
        weight=passes(weight),
        ticks=np.repeat(ticks.ravel(), m).astype(np.int64),
        lag=np.repeat(lag, m),
        device=np.repeat(device, m).astype(np.int32),
        sort=np.repeat(np.arange(sorts), m).astype(np.int32),
        delta=_deltas(problem),
        limit=np.array([int(x * problem.units_per_byte * (1 + 1e-9)) for x in problem.limits]),
        due=_due(problem, ticks, send),
    )


def _deltas(problem: _Problem) -> np.ndarray:
    scale, costs = problem.units_per_byte, problem.costs
    deltas = []
    held = zip(costs.held_after_forward_bytes, costs.held_after_backward_bytes, strict=True)
    for after_forward, after_backward in held:
        full, rest = round(after_forward * scale), round(after_backward * scale)
        deltas += [full, rest - full, -rest]
    return np.array(deltas, np.int64)


def _due(problem: _Problem, ticks: np.ndarray, send: int) -> np.ndarray:
    """Return minus each device's first start for the span: no order can move it."""
    due = np.zeros(problem.num_devices, np.int64)
    if problem.objective is Objective.SPAN:
        clock = 0
        seen: set[int] = set()
        for stage, device in enumerate(problem.placement):
            clock += send if stage and device != problem.placement[stage - 1] else 0
            if device not in seen:
                seen.add(device)
                due[device] = -clock
            clock += int(ticks[stage, 0])
    return due


@dataclass(slots=True)
class _Candidate:
    """An order under improvement: of all microbatches, or cut short and spliced when judged."""

    name: str
    period: int  # microbatches
    microbatches: int
    state: improve.State
    low: np.ndarray
    high: np.ndarray
    value: int = 0


def _best_of(candidates: list[_Candidate], count: int) -> list[_Candidate]:
    """Return the candidates of least value; of equal ones, which are mostly the same, one."""
    different = {each.value: each for each in reversed(candidates)}
    return sorted(different.values(), key=lambda each: each.value)[:count]


class _Search:
    """Holds the candidates and the best order so far."""

    def __init__(self, problem: _Problem, seed: int) -> None:
        self.problem = problem
        self.seed = seed
        self.shops: dict[int, improve.Shop] = {}
        self.best: tuple[int, np.ndarray, str] | None = None
        self.steps = 0
        self.bound = bounds.lower_bound(
            problem.costs,
            problem.placement,
            problem.num_devices,
            problem.num_microbatches,
            problem.limits,
            span=problem.objective is Objective.SPAN,
        )

    def run(self, steps: int | None, seconds: float | None, progress: Progress | None) -> None:
        """Search with the budget; with `seconds` again, other and twice as long, until they end."""
        ends = None if seconds is None else time.monotonic() + seconds
        budget = default_steps(self.problem) if steps is None else steps
        try:
            while True:
                self._round(budget, ends, progress)
                if self._closed() or ends is None or time.monotonic() >= ends:
                    return
                self.seed += 1
                budget *= 2
        except KeyboardInterrupt:
            if self.best is None:
                raise

    def _round(self, budget: int, ends: float | None, progress: Progress | None) -> None:
        """Improve the candidates in turns; half of them stay after each."""
        live = self._begin(budget)
        left = budget
        while live and left > 0 and not self._closed():
            share = min(max(budget // (ROUNDS * len(live)), 1000), MOST_AT_ONCE)
            for each in live:
                self._improve(each, min(share, left))
                left -= min(share, left)
                if progress is not None:
                    progress(self.steps, self._value(), self.bound)
                if ends is not None and time.monotonic() >= ends:
                    return
            live = _best_of(live, max(len(live) // 2, 1))

    def _begin(self, budget: int) -> list[_Candidate]:
        """Return the orders to improve: of the best rings, with W dealt out anew."""
        starts = STARTS if self.problem.num_devices <= 8 else STARTS // 2
        found: list[_Candidate] = []
        for ring in self._rings(budget):
            found += self._candidates(ring)
        for each in _best_of(found, 2 * starts):
            found += [again for delay in DELAYS if (again := self._dealt(each, delay)) is not None]
        return _best_of(found, starts)

    def _closed(self) -> bool:
        return self._value() <= self.bound * (1 + 1e-9)

    def _value(self) -> float:
        return self._found()[0] / self.problem.ticks_per_us

    def _found(self) -> tuple[int, np.ndarray, str]:
        """Return the best order so far; raises ScheduleError where none could be made to fit."""
        if self.best is None:
            raise ScheduleError(f"no order was found within the limits {self.problem.limits}")
        return self.best

    def _rings(self, budget: int) -> Iterator[Ring]:
        problem = self.problem
        devices = problem.num_devices
        yield sequential(problem.placement, devices)
        for block in published_blocks(problem.placement, devices):
            yield ring_of_block(block)
        least = bounds.least_memory(problem.costs, problem.placement, devices)
        for share, steps in zip(SHARES, (budget // 48, budget // 96), strict=True):
            limits = [max(x, share * y) for x, y in zip(least, problem.limits, strict=True)]
            orders = find_steady_orders(
                problem.costs, problem.placement, devices, limits, steps, self.seed
            )
            for at, order in enumerate(orders):
                yield ring_of_order(order, f"steady-{at} at {share:.0%}")

    def _shop(self, num_microbatches: int) -> improve.Shop:
        if num_microbatches not in self.shops:
            self.shops[num_microbatches] = make_shop(self.problem, num_microbatches)
        return self.shops[num_microbatches]

    def _candidates(self, ring: Ring) -> Iterator[_Candidate]:
        """Yield what fits of the ring and of the ring with its idle time filled.

        Both are cut to as few microbatches as show the ends, if a period then stays whole.
        """
        m, k = self.problem.num_microbatches, ring.microbatches
        least, most = ring.reach()
        full = max(8, self.problem.num_devices // k)
        short = most - least + (full + 1) * k
        short += (m - short) % k
        window = ring.window(short) if short < m else None
        if window is None:
            short = m
        shop = self._shop(short)
        row = ring.unroll(short)
        none = np.full(self.problem.num_devices, row.shape[1])
        for name, own in (
            (ring.name, row),
            (ring.name + ", filled", fill(shop, row, self.problem.num_devices)),
            (ring.name + ", filled throughout", fill(shop, row, m)),
            (ring.name + DEALT, refill(shop, row, 0)),
        ):
            made = self._made(name, k, short, own, *(window or (none, none)))
            if made is not None:
                yield made

    def _made(
        self,
        name: str,
        period: int,
        short: int,
        row: np.ndarray | None,
        low: np.ndarray,
        high: np.ndarray,
    ) -> _Candidate | None:
        """Return the order as a candidate; None if it does not fit, run or stay periodic."""
        whole = int(low[0]) == int(high[0])
        if row is None or not (whole or is_period(row, low, high, short, period)):
            return None
        state = improve.new_state(row, self.seed)
        if not improve.settle(self._shop(short), state):
            return None
        made = _Candidate(name, period, short, state, low, high)
        return made if self._judge(made) else None

    def _dealt(self, candidate: _Candidate, delay: int) -> _Candidate | None:
        """Return the candidate with its W dealt out anew."""
        short = candidate.microbatches
        row = refill(self._shop(short), candidate.state.row, delay)
        name = candidate.name.removesuffix(DEALT) + DEALT
        return self._made(name, candidate.period, short, row, candidate.low, candidate.high)

    def _improve(self, candidate: _Candidate, steps: int) -> None:
        shop = self._shop(candidate.microbatches)
        improve.walk(shop, candidate.state, candidate.low, candidate.high, steps)
        self.steps += steps
        self._judge(candidate)
        for delay in DELAYS:
            again = self._dealt(candidate, delay)
            if again is not None and again.value <= candidate.value:
                candidate.state, candidate.value = again.state, again.value
                candidate.state.random[0] = (self.steps * 40503 + 1) & 0x7FFFFFFF

    def _judge(self, candidate: _Candidate) -> bool:
        """Set the candidate's value at all microbatches, keep the best; return if it can run."""
        m, short = self.problem.num_microbatches, candidate.microbatches
        row, shop = candidate.state.row, self._shop(m)
        if short < m:
            # what a whole period adds to the memory it takes away: it fits as often as once
            row = splice(row, candidate.low, candidate.high, candidate.period, short, m)
            value = int(improve.measure(shop, row))
            if value == improve.NONE:
                return False
            candidate.value = value
        else:
            candidate.value = int(improve.objective(shop, candidate.state))
        if self.best is None or candidate.value < self.best[0]:
            self.best = (candidate.value, row.copy(), candidate.name)
        return True

    def plan(self) -> Plan:
        """Return the best order found, as a plan."""
        problem = self.problem
        value, row, source = self._found()
        m = problem.num_microbatches
        made = [
            [Pass(kind, stage, j) for j in range(m)]
            for stage in range(len(problem.placement))
            for kind in PARTS
        ]
        order = tuple(tuple(made[work // m][work % m] for work in own) for own in row.tolist())
        schedule = Schedule("plan", problem.num_devices, m, problem.placement, order)
        held = np.cumsum(_deltas(problem)[row // m], axis=1).max(axis=1)
        return Plan(
            schedule=schedule,
            objective=problem.objective,
            value=value / problem.ticks_per_us,
            busy=problem.costs.busy_us(problem.placement, problem.num_devices, m),
            lower_bound=min(self.bound, value / problem.ticks_per_us),
            peak=tuple(float(x) / problem.units_per_byte for x in held),
            source=source,
            steps=self.steps,
        )


def default_steps(problem: _Problem) -> int:
    """Return the steps of the default budget; more devices make a step dearer."""
    return 1_000_000 if problem.num_devices <= 8 else 1_100_000
