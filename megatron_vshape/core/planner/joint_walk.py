"""The best order with joint passes: of the blocks made for them, walked over.

In the walk a pair is one pass with what both read and send, and stays a pair. Equal stages of F = B
= 1 of which 40 % is exchange, all of it hidden, W what is left of F, d = 8, m = 64: the step of the
block, its W moved up where it would not fit, and walked over:

    chunks | block       | walked
    10     | half  346.6 |  333.8 (353.4 with nothing joint)
    11     | half  311.2 |  309.8
    12     | half  311.6 |  306.8
    14     | 2/3   295.2 |  283.4
    15     | 2/3   294.6 |  271.4
    16     | 2/3   260.4 |  256.2
    17     | all   253.8 |  252.2

Parting every pair, or joining every F and B that stand side by side, one at a time between walks,
gained .6 at most, and mostly nothing; parting pairs where they do not fit was no better than the
next block.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import Any, NamedTuple

import numpy as np

from megatron_vshape.core.check.bounds import LimitError, fits, room_in
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.planner import improve
from megatron_vshape.core.planner.job_shop import (
    Problem,
    choose,
    make_problem,
    make_shop,
)
from megatron_vshape.core.planner.joint_orders import joint_orders
from megatron_vshape.core.planner.rows import Codec
from megatron_vshape.core.planner.search import default_steps

_SAME = 1e-9

TURNS = 4
"""The steps are spent in so many rounds, each with half as many orders."""


def best_joint(
    costs: Costs,
    num_microbatches: int,
    limits: Sequence[float],
    objective: Objective,
    placement: Placement,
    steps: int | None = None,
) -> Schedule | None:
    """Return the best order of a placement with joint passes that was found; None if none fits.

    `costs` are those of its stages, `steps` what is walked in all, by default some seconds' worth.
    The same call gives the same order everywhere.
    """
    sizes = len(limits), num_microbatches
    try:
        problem = make_problem(costs, *sizes, limits, objective, placement)
    except LimitError:
        return None
    walk = JointWalk(problem)
    steps = default_steps(problem) if steps is None else steps
    made = (within(each, costs, limits) for each in joint_orders(*sizes, placement))
    live = [each for each in made if each is not None]
    for turn in range(TURNS if live else 0):
        share = steps // (TURNS * len(live))
        found = [walk.improved(each, share, turn + 1) for each in live]
        found.sort(key=lambda each: objective.of(simulate(each, costs)))
        live = found[: -(-len(found) // 2)]
    return live[0] if live else None


def within(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> Schedule | None:
    """Return the order with W moved up to where an F would not fit; None if that is not enough.

    A W waits for its own B alone, so what could run still can.
    """
    alone, rooms = room_in(costs, schedule.placement, limits)
    changes = {kind: alone.changes(kind) for kind in PARTS}
    most = tuple(map(add, changes[Kind.F][0], alone.works(Kind.F)))
    rows = []
    for device, row in enumerate(schedule.order):
        left, made, held = list(row), list[Pass](), 0.0
        done: set[tuple[int, int]] = set()
        while left:
            at, (kind, stage, _) = 0, left[0]
            if kind is Kind.F and held + most[stage] > rooms[device] * (1 + _SAME):
                late = (w.kind is Kind.W and w[1:] in done for w in left)
                at = next((place for place, is_late in enumerate(late) if is_late), 0)
            beside = left.pop(1) if left[at] in schedule.joint else None
            for work in filter(None, (left.pop(at), beside)):
                held += sum(each[work.stage] for each in changes[work.kind])
                done |= {work[1:]} if work.kind is Kind.B else set()
                made.append(work)
        rows.append(tuple(made))
    moved = replace(schedule, order=tuple(rows))
    return moved if fits(peak_held(moved, costs), limits) else None


class _Paired(NamedTuple):
    """A shop in which an F stands for its pair, and the rows without what runs beside it."""

    shop: improve.Shop
    row: np.ndarray


class JointWalk:
    """Walks over orders of one problem, of the passes F, B and W; their pairs stay."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._shop = make_shop(problem, problem.num_microbatches)
        self._codec = Codec(problem.num_microbatches)

    def improved(self, schedule: Schedule, steps: int, seed: int) -> Schedule:
        """Return the order after so many steps, no slower; as it is where it does not fit."""
        beside = schedule.beside()
        paired = self._paired(schedule, beside)
        chosen = choose(paired.shop, paired.row)
        shop = chosen.shop
        ways = max(shop.before.shape[1], shop.after.shape[1])
        state = improve.new_state(chosen.row(paired.row), seed, ways)
        if not improve.settle(shop, state):
            return schedule
        improve.walk(shop, state, shop.length, shop.length, steps)
        rows = chosen.whole(state.row, len(schedule.order))
        pairs = {work: (work, other) for work, other in beside.items()}
        return replace(schedule, order=self._codec.order(rows, pairs))

    def _paired(self, schedule: Schedule, beside: dict[Pass, Pass]) -> _Paired:
        """Return the shop in which each pair is its F, and the rows of that."""
        shop, m = self._shop, self._problem.num_microbatches
        size = len(shop.sort)
        number_of = self._codec.number
        forward = np.array([number_of(work) for work in beside], np.int64)
        other = np.array([number_of(work) for work in beside.values()], np.int64)
        stands_for = np.append(np.arange(size), improve.NONE)  # so that NONE stays what it is
        stands_for[other] = forward
        of_both = np.full(size, improve.NONE)
        of_both[forward] = other

        def both(values: np.ndarray, absent: int) -> np.ndarray:
            """Return, by pass, what either of its two has."""
            beside_it = np.where((of_both >= 0)[:, None], values[of_both], absent)
            return np.concatenate([values, beside_it], axis=1)

        number = np.arange(size)
        sooner = np.where(number % m > 0, number - 1, improve.NONE)[:, None]
        later = np.where(number % m < m - 1, number + 1, improve.NONE)[:, None]
        nothing = np.zeros_like(sooner)
        # of a sort the microbatches stay in turn, whether they are joint or not
        before = both(np.concatenate([shop.before, sooner], axis=1), improve.NONE)
        lag = both(np.concatenate([shop.lag, nothing], axis=1), 0)
        behind = both(np.concatenate([shop.behind, later], axis=1), improve.NONE)
        paired = shop._replace(
            before=stands_for[before].astype(np.int32),
            lag=lag,
            after=stands_for[both(shop.after, improve.NONE)].astype(np.int32),
            after_lag=both(shop.after_lag, 0),
            behind=stands_for[behind].astype(np.int32),
            ticks=self._ticks(beside, forward),
            **self._sorts(forward, other),
        )
        joined = set(beside.values())
        rows = [[work for work in own if work not in joined] for own in schedule.order]
        return _Paired(paired, self._codec.rows(rows))

    def _ticks(self, beside: dict[Pass, Pass], forward: np.ndarray) -> np.ndarray:
        costs, ticks = self._problem.costs, self._shop.ticks.copy()
        prices = {
            (f.stage, b.stage): costs.joint_us(f.stage, b.kind, b.stage) for f, b in beside.items()
        }
        for number, (f, b) in zip(forward.tolist(), beside.items(), strict=True):
            ticks[number] = round(prices[f.stage, b.stage] * self._problem.ticks_per_us)
        return ticks

    def _sorts(self, forward: np.ndarray, other: np.ndarray) -> dict[str, Any]:
        """Return the sorts with one for each two that are joint: what they hold together."""
        shop = self._shop
        sort, own = shop.sort.copy(), np.stack([shop.sort[forward], shop.sort[other]], axis=1)
        different, which = np.unique(own, axis=0, return_inverse=True)
        sort[forward] = len(shop.delta) + which.ravel()
        change = shop.delta[different[:, 1]]
        delta = shop.delta[different[:, 0]] + change
        working = np.maximum(shop.over[different[:, 1]] + change, 0)  # the B, beyond what is held
        over = np.maximum(shop.over[different[:, 0]] + working - change, 0)
        return {
            "sort": sort,
            "delta": np.append(shop.delta, delta),
            "over": np.append(shop.over, over),
        }
