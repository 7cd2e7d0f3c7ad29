"""Where a plan splits a backward into B and W, and where it runs whole, where that is cheaper.

B hands its gradient on before W has run, and W fills idle time; BW costs less where it hides an
exchange or spares the host a pass. So what pays depends on the place: in the steady state, where
nobody waits, BW may; at the ends, where a chain of B is all that runs, B.

Orders begin from three plans: everything split, B and W joined where that delays nobody, nothing
split. `_Search` goes on from each: it splits at the ends, in the steady state, in one chunk alone,
walks over orders with these prices (`improve`), and then joins and splits stage by stage and in
ever smaller groups of microbatches what makes the step shorter. With F/B/W/message 1/1.15/.85/.05:

    devices, microbatches, limit, saved | split everywhere | B, W joined | nowhere | chosen
    4, 8, 8 chunks, 10 %                |             51.9 |        51.9 |    54.6 |   50.0
    8, 24, 10 chunks, 15 %              |            166.4 |       166.1 |   188.2 |  164.5
    8, 24, 16 chunks, 30 %              |            153.1 |       149.5 |   136.2 |  133.7

(`python scripts/bench_split.py`)
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.check.bounds import LimitError, fits
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import OFFLOAD, PARTS, Kind
from megatron_vshape.core.model.passes import Pass, turned
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.planner import improve
from megatron_vshape.core.planner.job_shop import make_problem, make_shop
from megatron_vshape.core.planner.rows import Codec
from megatron_vshape.core.program.lowering import fuse

WORTH = 0.002
"""Whole backwards that save less of the busiest device's work are joined and not planned with."""

TURNS = 4
"""So often an order is walked over and its backwards are joined and split anew."""

KEPT = 4
"""So many orders go on from those that were begun with."""

MOST_TRIED = 2_000_000
"""Passes, of all orders that are timed in one turn to see where a backward is better whole."""


def saves(costs: Costs) -> float:
    """Return the share of all passes' time that whole backwards save; 0 where they save nothing."""
    split = [sum(costs.time_us(kind, at) for kind in PARTS) for at in range(costs.num_stages)]
    forward = [costs.time_us(Kind.F, stage) for stage in range(costs.num_stages)]
    whole = costs.whole_us
    if whole is None:
        return 0.0
    return max(0.0, 1 - (sum(forward) + sum(whole)) / sum(split))


def where_split(schedule: Schedule) -> str:
    """Return in words where backwards are split: everywhere, nowhere, in the middle, at the ends.

    The ends are as many microbatches as devices at the beginning, and as many at the end.
    """
    devices, microbatches = schedule.num_devices, schedule.num_microbatches
    inside = range(devices, microbatches - devices)
    counts = {True: [0, 0], False: [0, 0]}  # by "inside": split, all
    for kind, _, microbatch in (work for row in schedule.order for work in row):
        if Kind.B in kind.does:
            own = counts[microbatch in inside]
            own[0] += kind is Kind.B
            own[1] += 1
    split, total = map(sum, zip(*counts.values(), strict=True))
    if split in (0, total):
        return "everywhere" if split else "nowhere"
    shares = [own[0] / own[1] if own[1] else 0.0 for own in (counts[True], counts[False])]
    middle, ends = (f"{100 * share:.0f} %" for share in shares)
    if not counts[True][1]:
        return f"{ends} of the backwards"
    return f"{middle} of the backwards in the steady state, {ends} at the ends"


def joined(schedule: Schedule, costs: Costs, objective: Objective) -> Schedule:
    """Return the schedule with B and W that stand together run as BW where that is not slower.

    Only where BW has a price of its own, alone or beside an F; else `lower` does it, and it changes
    no time. First those that delay nobody, then all, and if that is too much, those of one stage
    after the other.
    """
    if costs.at(schedule.recompute).whole_us is None and not costs.joint:
        return schedule
    best = fuse(simulate(schedule, costs))
    value = objective.of(simulate(best, costs))
    everywhere, apart = range(best.num_stages), _better_apart(best, costs)
    for stages in (everywhere, *((stage,) for stage in everywhere)):
        tried = _join(best, stages, apart)
        reached = objective.of(simulate(tried, costs))
        if reached <= value:
            best, value = tried, reached
    return best


def _better_apart(schedule: Schedule, costs: Costs) -> set[Pass]:
    """Return the B whose W takes longer with them than behind, where joint passes have them too.

    Where nobody waits for them the time would not tell.
    """
    at = costs.at(schedule.recompute)
    stages = {
        stage
        for stage in range(schedule.num_stages)
        if at.time_us(Kind.BW, stage) > at.time_us(Kind.B, stage) + at.time_us(Kind.W, stage) + 1e-9
    }
    dear = cache(
        lambda f, b: (
            costs.joint_us(f, Kind.BW, b) >= costs.joint_us(f, Kind.B, b) + costs.time_us(Kind.W, b)
        )
    )
    beside = schedule.beside()
    alone = {
        work
        for row in schedule.order
        for work in row
        if work.kind is Kind.B and work.stage in stages
    }
    return {b for f, b in beside.items() if dear(f.stage, b.stage)} | alone.difference(
        beside.values()
    )


def _join(schedule: Schedule, stages: Sequence[int], apart: set[Pass]) -> Schedule:
    """Return the schedule with every W of these stages that follows its B run with it.

    But for those of the B that are `apart`.
    """
    rows = []
    for own in schedule.order:
        row: list[Pass] = []
        for work in own:
            before = row[-1] if row else None
            follows = before == (Kind.B, *work[1:]) and before not in apart
            if work.kind is Kind.W and work.stage in stages and follows:
                row[-1] = work._replace(kind=Kind.BW)
            else:
                row.append(work)
        rows.append(tuple(row))
    return replace(schedule, order=tuple(rows))


def split_where_it_pays(
    starts: Sequence[Schedule],
    costs: Costs,
    limits: Sequence[float],
    objective: Objective,
    steps: int,
) -> Schedule:
    """Return the best order found from these, of one placement, with as many walking steps.

    None of these, which fit the limits and have the same settings of recompute, is faster. Of
    orders with copies to the host they are the only ones.

    Raises:
        ScheduleError: the costs are of other stages.
    """
    found = list(starts)
    plain = [each for each in starts if each.kinds.isdisjoint(OFFLOAD)]
    try:
        like = (plain or starts)[0]
        search = _Search(like, costs.at(like.recompute), limits, objective)
    except LimitError:  # a W that comes later than its B does not fit: nothing is split
        pass
    else:
        found += search.run(plain, steps) if plain else ()
    fitting = [each for each in found if fits(peak_held(each, costs), limits)]
    return min(fitting, key=lambda each: objective.of(simulate(each, costs)))


class _Order(NamedTuple):
    """Rows of passes by number, B and W apart, and which pairs run as one: [stage, microbatch]."""

    row: np.ndarray
    whole: np.ndarray
    value: int


class _Search:
    """Orders of one placement whose backwards are split or whole one by one.

    For `improve` a whole backward is a B that takes all of its time but a tick, and a W that takes
    that: the walk needs every pass to end later than what it waits for.
    """

    def __init__(
        self, like: Schedule, costs: Costs, limits: Sequence[float], objective: Objective
    ) -> None:
        self.like = like
        self.microbatches = like.num_microbatches
        sizes = like.num_devices, self.microbatches
        costs, slices = costs.sliced(like.slices), like.slices
        problem = make_problem(costs, *sizes, limits, objective, like.placement, slices=slices)
        self.shop = make_shop(problem, self.microbatches)
        self.codec = Codec(self.microbatches, slices=slices)
        _, backward, weight = self._by_kind(self.shop.ticks)
        bw = [costs.time_us(Kind.BW, stage) for stage in range(costs.num_stages)]
        ticks = np.array([[round(each * problem.ticks_per_us)] for each in bw], np.int64)
        self.whole_ticks = np.broadcast_to(ticks, backward.shape)
        self.cheaper = self.whole_ticks < backward + weight

    def run(self, starts: Sequence[Schedule], steps: int) -> Iterator[Schedule]:
        """Yield the best orders found."""
        orders = [order for start in starts if (order := self._read(start)) is not None]
        tried = [each for order in orders for each in self._patterns(order)]
        live = _best_of(tried, KEPT)
        for turn in range(TURNS):
            share = steps // (TURNS * max(len(live), 1))
            # Few groups at first; of the last order, which is the best, all.
            tries = MOST_TRIED // self.shop.ticks.size // len(live)
            live = [self._flipped(self._walked(each, share, turn), tries) for each in live]
            live = _best_of(live, max(len(live) // 2, 1))
        yield from map(self._schedule, live)

    def _by_kind(self, values: np.ndarray) -> np.ndarray:
        """Return a view of one value per pass: of F, B and W, by stage and microbatch."""
        return np.moveaxis(values.reshape(-1, len(PARTS), self.microbatches), 1, 0)

    def _read(self, schedule: Schedule) -> _Order | None:
        """Return the schedule in numbers; None if it does not run."""
        whole = np.zeros(self.whole_ticks.shape, bool)
        for kind, stage, microbatch in chain.from_iterable(schedule.order):
            whole[stage, turned(microbatch, schedule.slices)] |= kind is Kind.BW
        return self._order(self._gathered(self.codec.rows(schedule.order), whole), whole)

    def _order(self, row: np.ndarray, whole: np.ndarray) -> _Order | None:
        value = int(improve.measure(self._priced(whole), row.astype(np.int32)))
        return None if value == improve.NONE else _Order(row, whole, value)

    def _priced(self, whole: np.ndarray) -> improve.Shop:
        shop = self.shop._replace(ticks=self.shop.ticks.copy())
        _, backward, weight = self._by_kind(shop.ticks)
        backward[whole], weight[whole] = self.whole_ticks[whole] - 1, 1
        return shop

    def _patterns(self, order: _Order) -> Iterator[_Order]:
        """Yield the order with its backwards split in other places, and as it is."""
        yield order
        stages, count = order.whole.shape
        devices = self.like.num_devices
        microbatch, chunk = np.arange(count)[None, :], np.arange(stages)[:, None] // devices
        splits = [chunk == each for each in range(stages // devices)]
        for most in sorted({-(-devices // 2), devices, 2 * devices}):
            late, early = microbatch >= count - most, microbatch < most
            splits += [late, early | late, ~late, ~(early | late)]
        for each in splits:
            whole = ~each & self.cheaper
            made = self._order(self._gathered(order.row, whole), whole)
            if made is not None:
                yield made

    def _gathered(self, row: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Return the rows with every W of a whole backward right behind its B.

        Or, as passes of a stage keep the order of their microbatches, behind an earlier W.
        """
        there, count = row != improve.NONE, self.microbatches
        place = np.empty(self.shop.ticks.size, np.int64)
        place[row[there]] = 2 * count * np.flatnonzero(there)
        _, backward, weight = self._by_kind(place)
        weight[whole] = backward[whole] + count
        weight[:] = np.maximum.accumulate(weight, axis=1) + np.arange(count)
        key = np.full(row.shape, 2 * count * row.size)
        key[there] = place[row[there]]
        return np.take_along_axis(row, np.argsort(key, axis=1), axis=1)

    def _walked(self, order: _Order, steps: int, seed: int) -> _Order:
        """Return the order after so many steps, no slower; as it is where it does not fit."""
        shop = self._priced(order.whole)
        state = improve.new_state(order.row, seed, max(shop.before.shape[1], shop.after.shape[1]))
        if not improve.settle(shop, state):
            return order
        improve.walk(shop, state, shop.length, shop.length, steps)
        row = self._gathered(state.row.astype(np.int64), order.whole)
        return self._order(row, order.whole) or order

    def _flipped(self, order: _Order, tries: int) -> _Order:
        """Return the order with groups of backwards joined or split while that makes it shorter.

        At least every stage is tried as a whole. What is joined without being slower stays so: it
        spares work.
        """
        stages, count = order.whole.shape
        size, left = count, tries
        while size and (size == count or left >= 2 * stages * -(-count // size)):
            for stage in range(stages):
                for first in range(0, count, size):
                    order = self._flip(order, stage, slice(first, first + size))
            left -= 2 * stages * -(-count // size)
            size //= 2
        return order

    def _flip(self, order: _Order, stage: int, group: slice) -> _Order:
        for joins in (True, False):
            whole = order.whole.copy()
            whole[stage, group] = self.cheaper[stage, group] & joins
            if np.array_equal(whole, order.whole):
                continue
            row = self._gathered(order.row, whole) if joins else order.row
            made = self._order(row, whole)
            if made is not None and (made.value, not joins) < (order.value, True):
                return made
        return order

    def _schedule(self, order: _Order) -> Schedule:
        row, (_, backward, weight) = (
            self._gathered(order.row, order.whole),
            self._by_kind(np.arange(self.shop.ticks.size)),
        )
        work = self.codec.work
        steps: dict[Pass, tuple[Pass, ...]] = {
            work(each): (work(each)._replace(kind=Kind.BW),)
            for each in backward[order.whole].tolist()
        }
        steps |= {work(each): () for each in weight[order.whole].tolist()}  # its W is part of it
        return replace(self.like, order=self.codec.order(row, steps))


def _best_of(orders: Sequence[_Order], count: int) -> list[_Order]:
    """Return the orders of least value; of equal ones, which are mostly the same, one."""
    different = {each.value: each for each in reversed(orders)}
    return [different[value] for value in sorted(different)][:count]
