"""The best order with joint passes: of the blocks made for them, walked over.

In the walk (`steps`) a pair is one step, and stays one; W joins it where that pays. Equal stages
of F = B = 1 of which 40 % is exchange, all of it hidden, W what is left of F, d = 8, m = 64: the
step of the block, its W moved up where it would not fit, and walked over:

    chunks | block       | walked
    10     | half  346.6 |  331.8 (353.4 with nothing joint)
    11     | half  311.2 |  309.8
    12     | half  311.2 |  306.4
    14     | 2/3   295.2 |  284.2
    15     | 2/3   294.6 |  270.8
    16     | 2/3   260.4 |  255.8
    17     | all   253.8 |  251.8

The walk is a calm one: as walks are elsewhere, 10 chunks end at 342.8, as the blocks dissolve.
Parting pairs where they do not fit was no better than the next block.

Where activations may wait in host memory, copies are put into each block as into any order
(`offloading`), its pairs one after the other, which then are steps again. Of 30 % exchange, m = 24,
copies as long as an F and messages of .05:

    chunks | copies alone | both
    12     |        136.9 | 119.5
    8      |        139.4 | 120.9
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import add

from megatron_vshape.core.check.bounds import LimitError, fits, room_in
from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.planner.job_shop import (
    Problem,
    in_one_row,
    make_problem,
    make_shop,
    with_parts_alone,
)
from megatron_vshape.core.planner.joint_orders import joint_orders
from megatron_vshape.core.planner.offload_search import SLACKS, OffloadSearch
from megatron_vshape.core.planner.offloading import with_copies
from megatron_vshape.core.planner.rows import Codec, padded
from megatron_vshape.core.planner.search import default_steps
from megatron_vshape.core.planner.steps import best_steps

_SAME = 1e-9


def best_joint(
    costs: Costs,
    num_microbatches: int,
    limits: Sequence[float],
    objective: Objective,
    placement: Placement,
    steps: int | None = None,
    in_host: float = math.inf,
) -> Schedule | None:
    """Return the best order of a placement with joint passes that was found; None if none fits.

    `costs` are those of its stages, `steps` what is walked in all, by default some seconds' worth.
    Of a device at most `in_host` waits in host memory, if the costs tell of copies. The same call
    gives the same order everywhere.
    """
    sizes = len(limits), num_microbatches
    try:
        problem = make_problem(costs, *sizes, limits, objective, placement)
    except LimitError:
        return None
    steps = 2 * default_steps(problem) if steps is None else steps
    orders = list(joint_orders(*sizes, placement))
    starts = [made for each in orders if (made := within(each, costs, limits)) is not None]
    if costs.copies:
        asked = costs, *sizes, limits, objective, placement, OffloadSearch.kinds, in_host
        starts += _copied(orders, make_problem(*asked))
    return best_steps(starts, costs, limits, objective, steps, in_host)


def _copied(orders: Sequence[Schedule], problem: Problem) -> Iterator[Schedule]:
    """Yield the orders with copies to the host, if they fit then."""
    m, kinds = problem.num_microbatches, problem.kinds
    parts, shop = make_shop(with_parts_alone(problem), m), make_shop(problem, m)
    for order in orders:
        alone = padded([list(chain(*row)) for row in Codec(m).steps(order.parted())])
        for rows in with_copies(problem, parts, alone, SLACKS, (), problem.room_in_host):
            made, _ = Codec(m, kinds).order(in_one_row(problem, shop, rows))
            one_way = problem.costs.half_duplex
            copied = _rejoined(replace(order, order=made, half_duplex=one_way), order.beside())
            if fits(peak_held(copied, problem.costs), problem.limits):
                yield copied


def _rejoined(schedule: Schedule, pairs: Mapping[Pass, Pass]) -> Schedule:
    """Return the schedule with those of the pairs that no F or B has come between.

    What else has runs before, and what is of the F itself behind.
    """
    rows, joint = [], set[Pass]()
    for row in schedule.order:
        made = list(row)
        for forward, backward in pairs.items():
            if schedule.placement[forward.stage] != schedule.placement[made[0].stage]:
                continue
            first, last = made.index(forward), made.index(backward)
            between = made[first + 1 : last]
            if last < first or any(work.kind in (Kind.F, Kind.B) for work in between):
                continue
            own = [work for work in between if work[1:] == forward[1:]]
            rest = [work for work in between if work[1:] != forward[1:]]
            made[first : last + 1] = [*rest, forward, backward, *own]
            joint.add(forward)
        rows.append(tuple(made))
    return replace(schedule, order=tuple(rows), joint=frozenset(joint))


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
