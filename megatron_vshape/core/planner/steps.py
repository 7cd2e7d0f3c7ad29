"""Steps of several passes: a backward that runs whole, and a forward beside one.

What a device runs at once is a step, a tuple of passes with one price. In `stepped` each is one
number, with what all of its passes read, send and hold: so the walk of plain orders walks over
these. Between walks `StepSearch` joins W to the step of its B and parts them, stage by stage and in
ever smaller groups of microbatches, where that makes the order shorter. The pairs of an F and a B
stay: parting each, or joining all that stand side by side, one at a time between walks, gained .6
of 300 at most.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind, find_kind, simple_kinds
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.planner import improve
from megatron_vshape.core.planner.improve import NONE
from megatron_vshape.core.planner.job_shop import (
    Problem,
    choose,
    held_by,
    in_one_row,
    make_problem,
    make_shop,
)
from megatron_vshape.core.planner.race import best_of, better_half, race
from megatron_vshape.core.planner.rows import Codec, padded

TURNS = 4
"""So often an order is walked over and its backwards are joined and parted anew."""

KEPT = 4
"""So many orders go on from the starts, and as many as there are starts at least."""

MOST_TRIED = 2_000_000
"""Passes, of all orders that are timed in one turn to see where a backward is better whole."""


def stepped(
    problem: Problem, shop: improve.Shop, then: np.ndarray, kept: np.ndarray | None = None
) -> improve.Shop:
    """Return the shop in which every step has the number of its first pass, and no other pass is.

    `then` is of every pass the one behind it in its step, NONE of the last; [pass, way] of `kept`
    passes of its lane that stay before it. Passes of a sort whose order is a law keep it, whatever
    steps they are in; within steps of one sort the walk does.
    """
    number, absent = np.arange(len(then)), np.append(then, NONE)
    leads = np.ones(len(then), bool)
    leads[then[then != NONE]] = False
    first = np.append(number, NONE)
    members = [np.where(leads, number, NONE)]
    while (behind := absent[members[-1]]).max() != NONE:
        first[behind[behind != NONE]] = number[behind != NONE]
        members.append(behind)
    sorts = _sorts_of_steps(problem, shop, np.stack(members, axis=1))
    sooner = _in_turn(problem, sorts["sort"][first[:-1]])
    sooner = sooner if kept is None else np.concatenate([sooner, kept], axis=1)
    later, (work, way) = np.full(sooner.shape, NONE), np.nonzero(sooner != NONE)
    later[sooner[work, way], way] = work

    def of_all(*values: np.ndarray) -> np.ndarray:
        """Return, by step, what any of its passes has: passes by number, but those of its own."""
        own = np.concatenate(values, axis=1)
        every = [np.where((each != NONE)[:, None], own[each], NONE) for each in members]
        numbers = first[np.concatenate(every, axis=1)]
        return np.where(numbers == number[:, None], NONE, numbers)

    def lags(values: np.ndarray, more: int = 0) -> np.ndarray:
        own = np.pad(values, ((0, 0), (0, more)))
        return np.concatenate([own[each] for each in members], axis=1)

    before, lag = _packed(of_all(shop.before, sooner), lags(shop.lag, sooner.shape[1]))
    after, after_lag = _packed(of_all(shop.after), lags(shop.after_lag))
    behind = of_all(shop.behind, later)
    return shop._replace(
        before=before,
        lag=lag,
        after=after,
        after_lag=after_lag,
        behind=_packed(behind, np.zeros_like(behind))[0],
        stay=first[shop.stay].astype(np.int32),
        **sorts,
    )


def _packed(passes: np.ndarray, lags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [pass, way] with what there is in the first ways, of which there are no more."""
    order = np.argsort(passes == NONE, axis=1, kind="stable")
    order = order[:, : max(1, (passes != NONE).sum(axis=1).max())]
    packed = np.take_along_axis(passes, order, axis=1).astype(np.int32)
    return packed, np.ascontiguousarray(np.take_along_axis(lags, order, axis=1))


def _in_turn(problem: Problem, sort: np.ndarray) -> np.ndarray:
    """Return, by pass, its like of the microbatch before, if that is in a step of another sort.

    Of kinds of which a stage must run one microbatch after the other; and of W, which adds to a
    gradient: in another order it would be another sum, by its last bits.
    """
    m, kinds = problem.num_microbatches, problem.kinds
    number = np.arange(len(sort))
    lawful = [kind is Kind.W or any(read.kind == kind for read in kind.follows) for kind in kinds]
    is_one = np.array(lawful)[number // m % len(kinds)]
    sooner = is_one & (number % m > 0) & (sort != np.roll(sort, 1))
    return np.where(sooner, number - 1, NONE)[:, None]


def _sorts_of_steps(problem: Problem, shop: improve.Shop, members: np.ndarray) -> dict[str, Any]:
    """Return what a shop says of sorts, with one for each kind of step of several passes."""
    several = np.flatnonzero(members[:, 1:].max(axis=1, initial=NONE) != NONE)
    sort, ticks = shop.sort.copy(), shop.ticks.copy()
    own = np.append(shop.sort, NONE)[members[several]]
    _, shown, which = np.unique(own, axis=0, return_index=True, return_inverse=True)
    sort[several] = len(shop.delta) + which.ravel()
    codec = Codec(problem.num_microbatches, problem.kinds, problem.slices)
    examples = (members[several[each]].tolist() for each in shown)
    priced = [_price(problem, codec.step([n for n in each if n != NONE])) for each in examples]
    lengths, most, change = np.array(priced, np.int64).reshape(-1, 3).T
    ticks[several] = lengths[which.ravel()]
    return {
        "sort": sort,
        "ticks": ticks,
        "delta": np.append(shop.delta, change),
        "over": np.append(shop.over, np.where(most > 0, np.maximum(most - change, 0), 0)),
        "moved": np.append(shop.moved, np.zeros_like(change)),
    }


def _price(problem: Problem, step: Sequence[Pass]) -> tuple[int, int, int]:
    """Return the ticks of a step, and what is held more while it runs and when it has."""
    costs, (kind, stage, _) = problem.costs, step[0]
    if len(step) == 1:
        length_us = costs.time_us(kind, stage)
    else:
        length_us = costs.joint_us(stage, step[1].kind, step[1].stage)
    held = [held_by(costs, *work[:2], problem.units_per_byte) for work in step]
    most, change = map(sum, zip(*held, strict=True))
    return round(length_us * problem.ticks_per_us), most, change


class Steps(NamedTuple):
    """Rows of steps, by lane; of every [stage, microbatch], whether its backward is whole."""

    row: np.ndarray
    whole: np.ndarray
    value: int


class StepSearch:
    """Orders like one, with its placement and its pairs of an F and a B, split where it pays."""

    def __init__(
        self,
        like: Schedule,
        costs: Costs,
        limits: Sequence[float],
        objective: Objective,
        in_host: float = math.inf,
    ) -> None:
        """Take costs of whole microbatches.

        Raises:
            LimitError: a W that comes later than its B fits nowhere.
            ScheduleError: the costs are of other stages.
        """
        self.like, slices = like, like.slices
        costs, kinds = costs.sliced(slices), simple_kinds((*PARTS, *like.kinds))
        sizes = like.num_devices, like.num_microbatches, limits, objective, like.placement
        self.problem = make_problem(costs, *sizes, kinds, in_host, slices)
        self.codec = Codec(like.num_microbatches, kinds, slices)
        self.shop = make_shop(self.problem, like.num_microbatches)
        size = len(self.shop.sort)
        every = np.arange(size).reshape(like.num_stages, len(kinds), like.num_microbatches)
        _, self.backward, self.weight = (every[:, kinds.index(kind)] for kind in PARTS)
        self.then, first = np.full(size, NONE), np.arange(size)
        for forward, backward in like.beside().items():
            pair = self.codec.step_of((forward, backward))[:2]
            self.then[pair[0]], first[pair[1]] = pair[1], pair[0]
        self.first = first[self.backward]  # of the step that a B is in
        self.weight_of = np.full(size, NONE)
        self.weight_of[self.first] = self.weight
        self.stage_of_weight = np.full(size, NONE)
        self.stage_of_weight[self.weight] = np.arange(like.num_stages)[:, None]
        self.apart = stepped(self.problem, self.shop, self.then)
        everywhere = self._then(np.ones(self.backward.shape, bool))
        self.whole_ticks = stepped(self.problem, self.shop, everywhere).ticks[self.first]
        ticks = self.apart.ticks
        self.cheaper = self.whole_ticks < ticks[self.first] + ticks[self.weight]

    def _then(self, whole: np.ndarray) -> np.ndarray:
        """Return, of every pass, the one behind it in its step."""
        then = self.then.copy()
        then[self.backward[whole]] = self.weight[whole]
        return then

    def read(self, schedule: Schedule) -> Steps | None:
        """Return an order with the same pairs in numbers; None if it does not run."""
        lanes: list[list[int]] = [[] for _ in self.problem.room]
        last = set[int]()
        for step in (each for own in self.codec.steps(schedule) for each in own):
            lanes[self.shop.lane[step[0]]].append(step[0])
            last |= {step[-1]} if len(step) > 1 else set()
        whole = np.isin(self.weight, list(last))
        in_turn = [self._in_turn(np.array(own, np.int64), whole).tolist() for own in lanes]
        row = padded(in_turn, int(self.shop.length.max())).astype(np.int32)
        return self._timed(row, whole)

    def _timed(self, row: np.ndarray, whole: np.ndarray) -> Steps | None:
        ticks = self.apart.ticks.copy()
        ticks[self.first[whole]] = self.whole_ticks[whole]
        length = np.count_nonzero(row != NONE, axis=1)
        value = int(improve.measure(self.apart._replace(ticks=ticks, length=length), row))
        return None if value == NONE else Steps(row, whole, value)

    def patterns(self, order: Steps) -> Iterator[Steps]:
        """Yield the order with its backwards split in other places, and as it is."""
        yield order
        stages, count = order.whole.shape
        devices = self.like.num_devices
        microbatch, chunk = np.arange(count)[None, :], np.arange(stages)[:, None] // devices
        splits = [chunk == each for each in range(stages // devices)]
        for most in sorted({-(-devices // 2), devices, 2 * devices}):
            late, early = microbatch >= count - most, microbatch < most
            splits += [late, early | late, ~late, ~(early | late)]
        for each in splits if self.cheaper.any() else ():
            made = self._with(order, ~each & self.cheaper)
            if made is not None:
                yield made

    def _with(self, order: Steps, whole: np.ndarray) -> Steps | None:
        """Return the order with these backwards whole; a W that is parted follows its B at once."""
        parted, gone = (np.zeros(len(self.then), bool) for _ in range(2))
        parted[self.first[order.whole & ~whole]] = True
        gone[self.weight[whole]] = True
        row, stages = order.row.copy(), np.flatnonzero((order.whole != whole).any(axis=1))
        for lane in np.unique(self.shop.lane[self.backward[stages, 0]]):
            own = row[lane, row[lane] != NONE]
            twice = parted[own]
            if twice.any():
                at = np.repeat(own, 1 + twice)
                at[np.cumsum(1 + twice)[twice] - 1] = self.weight_of[own[twice]]
                own = self._weights_in_turn(at)
            own = self._in_turn(own[~gone[own]], whole)
            row[lane] = NONE
            row[lane, : len(own)] = own
        return self._timed(row, whole)

    def _weights_in_turn(self, own: np.ndarray) -> np.ndarray:
        """Return a lane in which the W of every stage keep the order of their microbatches."""
        sort = self.shop.sort[own]
        for each in np.unique(sort[np.isin(own, self.weight)]):
            own[sort == each] = np.sort(own[sort == each])
        return own

    def _in_turn(self, own: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Return a lane in which no whole backward overtakes a W of its stage: that goes before.

        For both add to one gradient, and that sum is to be the same in every order.
        """
        adds = np.where(self.stage_of_weight[own] != NONE, own, NONE)
        is_whole = np.isin(own, self.first[whole])
        adds[is_whole] = self.weight_of[own[is_whole]]
        late, stages = list[tuple[int, int]](), self.stage_of_weight[adds]
        for stage in np.unique(stages[adds != NONE]):
            places = np.flatnonzero((adds != NONE) & (stages == stage))
            least = np.minimum.accumulate(adds[places][::-1])[::-1]  # from each place on
            for at in np.flatnonzero(adds[places] > least):
                sooner = places[at:][adds[places[at:]] < adds[places[at]]]
                late += [(int(places[at]), int(each)) for each in sooner]
        if not late:
            return own
        before: dict[int, int] = {}
        for place, each in sorted(late):
            before.setdefault(each, place)
        order = sorted(range(len(own)), key=lambda at: (before.get(at, at), at not in before, at))
        return own[order]

    def walked(self, order: Steps, steps: int, seed: int) -> Steps:
        """Return the order after so many steps, no slower; as it is where it does not fit."""
        kept = self._kept(order.row)
        chosen = choose(stepped(self.problem, self.shop, self._then(order.whole), kept), order.row)
        shop = chosen.shop
        ways = max(shop.before.shape[1], shop.after.shape[1])
        state = improve.new_state(chosen.row(order.row), seed, ways)
        if not improve.settle(shop, state):
            return order
        # blocks that are made for pairs would dissolve: see joint_walk
        manner = improve.CALM if (self.then != NONE).any() else improve.USUAL
        value = int(improve.walk(shop, state, shop.length, shop.length, steps, manner))
        row = chosen.whole(state.row, len(order.row)).astype(np.int32)
        return Steps(row, order.whole, value)

    def _kept(self, row: np.ndarray) -> np.ndarray:
        """Return [pass, way] what stays before a pass though it does not wait for it.

        What a kind's row says of other microbatches, and what all devices join in one order.
        """
        m, kinds = self.problem.num_microbatches, self.problem.kinds
        number = np.arange(len(self.then))
        kind_of = number // m % len(kinds)
        columns = []
        for at, kind in enumerate(kinds):
            for read in kind.follows:
                if read.kind in kinds and read.kind != kind and not (read.at or read.step):
                    other = number + (kinds.index(find_kind(read.kind)) - at) * m + read.later
                    late = number % m + read.later
                    there = (kind_of == at) & (late >= 0) & (late < m)
                    columns.append(np.where(there, other, NONE))
        joins = np.isin(kind_of, [at for at, kind in enumerate(kinds) if kind.joins])
        if joins.any():
            columns.append(np.full(len(number), NONE))
            for own in row:
                meet = own[own != NONE]
                meet = meet[joins[meet]]
                columns[-1][meet[1:]] = meet[:-1]
        return np.array(columns, np.int64).reshape(len(columns), len(number)).T

    def flipped(self, order: Steps, tries: int) -> Steps:
        """Return the order with groups of backwards joined or parted while that makes it shorter.

        At least every stage is tried as a whole. What is joined without being slower stays so: it
        spares work.
        """
        stages, count = order.whole.shape
        size, groups, left = count, 1, tries
        while size and self.cheaper.any() and (size == count or left >= 2 * stages * groups):
            for stage in range(stages):
                for first in range(0, count, size):
                    order = self._flip(order, stage, slice(first, first + size))
            left -= 2 * stages * groups
            size //= 2
            groups = -(-count // max(size, 1))
        return order

    def _flip(self, order: Steps, stage: int, group: slice) -> Steps:
        for joins in (True, False):
            whole = order.whole.copy()
            whole[stage, group] = self.cheaper[stage, group] & joins
            if np.array_equal(whole, order.whole):
                continue
            made = self._with(order, whole)
            if made is not None and (made.value, not joins) < (order.value, True):
                return made
        return order

    def schedule(self, order: Steps) -> Schedule:
        """Return the order as a schedule, with all else as it was."""
        then = self._then(order.whole)
        rows = in_one_row(self.problem, stepped(self.problem, self.shop, then), order.row)
        steps = {}
        for first in np.flatnonzero(then != NONE).tolist():
            steps[first] = numbers = [first]
            while then[numbers[-1]] != NONE:
                numbers.append(int(then[numbers[-1]]))
        made, joint = self.codec.order(rows, steps)
        return replace(self.like, order=made, joint=joint)


_Runner = tuple[StepSearch, Steps]


def best_steps(
    starts: Sequence[Schedule],
    costs: Costs,
    limits: Sequence[float],
    objective: Objective,
    steps: int,
    in_host: float = math.inf,
) -> Schedule | None:
    """Return the best that walks over these orders, and joining and parting W, lead to.

    They are of one placement, one number of slices. None where
    none of them runs, or no order with a W of its own fits.

    Raises:
        ScheduleError: the costs are of other stages.
    """
    live: list[_Runner] = []
    searches: dict[Any, StepSearch] = {}
    for start in starts:
        key = simple_kinds(start.kinds), frozenset(start.beside())
        try:
            if key not in searches:
                searches[key] = StepSearch(start, costs, limits, objective, in_host)
        except LimitError:
            continue
        read = searches[key].read(start)
        live += ((searches[key], each) for each in searches[key].patterns(read)) if read else ()

    def value_of(runner: _Runner) -> tuple[float, int]:
        """Return what is less for the better; what is equal with other pairs is not the same."""
        search, order = runner
        return order.value / search.problem.ticks_per_us, own.index(search)

    def advance(live: list[_Runner], share: int, turn: int) -> list[_Runner]:
        made = []
        for search, order in live:
            # few groups at first; of the last order, which is the best, all
            tries = MOST_TRIED // len(search.then) // len(live)
            made.append((search, search.flipped(search.walked(order, share, turn + 1), tries)))
        return better_half(made, value_of)

    own = list(searches.values())
    live = best_of(live, max(KEPT, len(starts)), value_of)
    found = race(live, steps, TURNS, advance)
    return found[0][0].schedule(found[0][1]) if found else None
