"""Memory is traded for time: the planner chooses activations to offload.

Plans are judged by `link_replay`, which knows nothing of the package.
"""

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from link_replay import Figures, StageCosts, replay

from megatron_vshape.core.check.bounds import LimitError, bound_at
from megatron_vshape.core.check.simulate import peak_moved, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs, with_copies, without_copies
from megatron_vshape.core.model.kinds import (
    COPY_BACK,
    COPY_OUT,
    OFFLOAD,
    PARTS,
    RELOAD,
    Kind,
    ScheduleError,
)
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.model.schedule import MemoryStrategy, Objective, Plan, Schedule, Timeline
from megatron_vshape.core.planner import improve, job_shop
from megatron_vshape.core.planner.offloading import OffloadSearch, ways_to_save
from megatron_vshape.core.planner.search import plan

REAL = (1.0, 1.15, 0.85, 0.05)


def costs_of(devices: int, t: float) -> Costs:
    """Return costs of two stages a device, whose copies take `t` F."""
    return with_copies(Costs.uniform(devices, 2 * devices, *REAL), t)


def judged(made: Plan, costs: Costs, limit: float) -> Figures:
    """Return what the replay says of a plan; raise unless the plan says the same and fits."""
    schedule, own = made.schedule, costs.sliced(made.schedule.slices)
    stages = []
    for stage in range(schedule.num_stages):
        kinds = (*PARTS, COPY_OUT, COPY_BACK) if own.copies else PARTS
        times = {str(kind): own.time_us(kind, stage) for kind in kinds}
        moved = own.held(RELOAD)[0][stage] if own.copies else 0.0
        held = own.held_after_forward_bytes[stage], own.held_after_backward_bytes[stage]
        stages.append(StageCosts(times, *held, moved))
    found = replay(schedule.to_json(), stages, own.send_us)
    verify(schedule, limit, costs)
    assert found.makespan == pytest.approx(made.value)
    assert found.peak == pytest.approx(made.peak)
    assert max(found.peak) <= limit * (1 + 1e-9)
    assert made.lower_bound <= made.value
    return found


CELLS = [(32, 10, 10.7), (32, 8, 12.4), (32, 4, 15.4), (64, 8, 13.2), (64, 4, 15.3)]
"""Microbatches, chunks, and the overhead to reach if a copy takes one F."""


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "limit", "most"), CELLS, ids=map(str, CELLS))
def test_the_overheads_asked_for(microbatches: int, limit: float, most: float) -> None:
    costs = costs_of(8, 1.0)
    made = plan(costs, 8, microbatches, limit, trades=True)
    assert judged(made, costs, limit).makespan - 6 * microbatches <= most + 1e-6
    for each in made.tried:
        assert each.value is None or each.value >= made.value * (1 - 1e-6)


@pytest.mark.parametrize("limit", [2.5, 4.0, 6.0])
def test_no_worse_than_order_alone_or_the_first_chunk(limit: float) -> None:
    costs = costs_of(4, 1.0)
    made = plan(costs, 4, 12, limit, trades=True, steps=60_000)
    judged(made, costs, limit)
    ways = {each.way: each for each in made.tried}
    _, first, _ = ways_to_save(True, v_shape(4))
    assert first.throughout == (0, 1, 2, 3)
    assert {MemoryStrategy(), first} <= set(ways)
    for each in made.tried:
        assert (each.value or each.lower_bound) >= made.value * (1 - 1e-6)
    alone = without_copies(costs)
    if limit > 2.5:
        assert made.value <= plan(alone, 4, 12, limit, steps=60_000).value + 1e-6


def test_what_is_copied_is_chosen() -> None:
    """The less room there is, the more is copied; with room for all of it nothing has to be."""
    costs = costs_of(4, 1.0)
    copied = [
        judged(plan(costs, 4, 12, limit, trades=True, steps=40_000), costs, limit).num_offloaded
        for limit in (2.5, 5.0)
    ]
    assert 96 >= copied[0] > copied[1] > 0
    alone = plan(without_copies(costs), 4, 12, 24.0, steps=40_000)
    roomy = plan(costs, 4, 12, 24.0, trades=True, steps=40_000)
    assert roomy.value <= alone.value + 0.5


def test_host_memory_has_a_limit() -> None:
    """The less of it there is the longer a step takes, down to the order alone at nothing."""
    costs = costs_of(4, 0.5)
    values = []
    for room in (100.0, 4.0, 2.0, 0.5):
        made = plan(costs, 4, 12, 3.0, trades=True, in_host=room, steps=40_000)
        judged(made, costs, 3.0)
        values.append(made.value)
        peaks = peak_moved(made.schedule, costs)
        assert max(peaks) <= room
        for t in (0.5, 0.1, 2.0):  # however fast copies are
            timeline = simulate(made.schedule, costs_of(4, t))
            assert waiting_at_once(timeline) <= max(peaks)
    assert made.schedule.kinds <= set(PARTS)  # half a chunk is too little for any
    assert values[0] < values[1] < values[2] < values[3]
    alone = plan(without_copies(costs), 4, 12, 3.0, steps=40_000)
    assert values[3] == pytest.approx(alone.value)


@pytest.mark.parametrize("t", [0.5, 1.0])
def test_more_room_is_never_slower(t: float) -> None:
    """On the device, and in host memory; that this holds of every cell is not proved."""
    costs, sizes = costs_of(4, t), (4, 12)
    values = [plan(costs, *sizes, limit, trades=True, steps=60_000).value for limit in (2.5, 3, 5)]
    assert values == sorted(values, reverse=True)
    rooms = (1.0, 2.0, 4.0, 8.0, math.inf)
    in_host = [
        plan(costs, *sizes, 3.0, trades=True, steps=60_000, in_host=room).value for room in rooms
    ]
    assert in_host == sorted(in_host, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "rooms"), [(8.0, (4.0, 8.0, 12.0, 16.0)), (4.0, (8.0, 12.0))])
def test_more_room_in_host_memory_is_not_slower(limit: float, rooms: tuple[float, ...]) -> None:
    """Up to half a percent: for each room, a local search ends in another order."""
    costs = costs_of(8, 1.0)
    made = [plan(costs, 8, 32, limit, trades=True, in_host=room) for room in (*rooms, math.inf)]
    values = [judged(each, costs, limit).makespan for each in made]
    assert all(more <= 1.005 * less for less, more in pairwise(values)), values


def waiting_at_once(timeline: Timeline) -> int:
    """Return how many microbatches of a stage of a device wait in host memory at most."""
    most = 0
    for row, starts, ends in zip(
        timeline.schedule.order, timeline.starts, timeline.ends, strict=True
    ):
        changes = [
            (start, 1) if work.kind is COPY_OUT else (end, -1)
            for work, start, end in zip(row, starts, ends, strict=True)
            if work.kind in (COPY_OUT, COPY_BACK)
        ]
        held = 0
        for _, change in sorted(changes):
            held += change
            most = max(most, held)
    return most


def test_what_fits_neither_here_nor_there_is_told() -> None:
    costs = costs_of(2, 0.5)
    with pytest.raises(ScheduleError, match=r"at most 0.5 of a device in host memory: make one of"):
        plan(costs, 2, 4, 1.0, trades=True, in_host=0.5, steps=2_000)


def test_copies_that_take_for_ever_buy_nothing() -> None:
    costs = costs_of(3, 500.0)
    made = plan(costs, 3, 8, 4.0, trades=True, steps=30_000)
    assert made.schedule.kinds <= set(PARTS)
    alone = plan(without_copies(costs), 3, 8, 4.0, steps=30_000)
    assert made.value == pytest.approx(alone.value, rel=0.02)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_whatever_is_chosen(seed: int) -> None:
    """With stages that all differ, no plan is below the bound."""
    luck = random.Random(seed)
    devices, microbatches = luck.choice([(2, 5), (3, 6)])
    each = range(2 * devices)

    def some(low: float, high: float) -> tuple[float, ...]:
        return tuple(round(luck.uniform(low, high), 3) for _ in each)

    times = some(0.5, 2), some(0.5, 2), some(0.3, 1.5)
    held = some(0.5, 2)
    costs = with_copies(Costs(*times, 0.1, held, held), luck.uniform(0.3, 2))
    limit = luck.uniform(1.3, 2.5) * max(held) * 2
    for objective in Objective:
        made = plan(costs, devices, microbatches, limit, objective, trades=True, steps=20_000)
        verify(made.schedule, limit, costs)
        sizes = made.schedule.placement, microbatches, (limit,) * devices, objective
        bound = bound_at(costs, *sizes)
        assert 0 < bound <= made.value * (1 + 1e-9)


@pytest.mark.parametrize("placement", [v_shape(4), looping(4, 2)])
def test_the_walk_keeps_everything_up_to_date_where_passes_are_left_out(
    placement: tuple[int, ...],
) -> None:
    costs = costs_of(4, 1.0)
    kinds = (*PARTS, *OFFLOAD)
    problem = job_shop.make_problem(costs, 4, 10, 4.0, Objective.MAKESPAN, placement, kinds)
    search = OffloadSearch(problem, 1, MemoryStrategy(copies=True))
    found = search.begin(2000, map)
    assert found
    copied = []
    for each in found[:3]:
        shop, ways = each.shop, max(each.shop.before.shape[1], each.shop.after.shape[1])
        before = improve.objective(shop, each.state)
        value = improve.local_search(shop, each.state, shop.length, shop.length, 10_000)
        again = improve.new_state(each.state.row, 1, ways)
        assert improve.settle(shop, again)
        assert value == improve.objective(shop, again) <= before
        for name in ("place", "head", "tail", "held"):
            size = shop.length.sum() if name != "held" else None
            old, new = getattr(each.state, name), getattr(again, name)
            assert np.array_equal(old[:size], new[:size]) or name == "held"
        search.keep(each)
        copied.append(int(shop.length.sum()))
    assert min(copied) < 7 * 80  # some passes are left out
    judged(search.best_plan(), costs, 4.0)


def test_links_are_part_of_the_proof() -> None:
    """A link whose order its device's markers cannot follow is a deadlock, and told as one."""
    out = [Pass(kind, 0, j) for j in (0, 1) for kind in OFFLOAD[:2]]
    row = [Pass(Kind.F, 0, 0), Pass(Kind.F, 0, 1), *out]
    first = [Pass(OFFLOAD[2], 0, 0), Pass(OFFLOAD[3], 0, 0), Pass(Kind.B, 0, 0)]
    second = [each._replace(microbatch=1) for each in first]
    rest = [Pass(Kind.W, 0, 0), Pass(Kind.W, 0, 1)]
    good = Schedule("good", 1, 2, (0,), ((*row, *first, *second, *rest),))
    verify(good)
    # the link brings back microbatch 1 first, for which room is made only behind B0.0
    late = [first[0], second[1], first[1], first[2], second[0], second[2]]
    bad = replace(good, order=((*row, *late, *rest),))
    with pytest.raises(ScheduleError, match=r"deadlocks; each pass below waits for the next"):
        verify(bad)
    lacking = replace(good, order=((*row, *first[::2], *second, *rest),))
    with pytest.raises(ScheduleError, match=r"D0.0 on device 0 has no H0.0: of D, L, R, H"):
        verify(lacking)


@pytest.mark.parametrize(
    ("slices", "limit", "in_host"), [(2, 1.5, math.inf), (4, 1.25, math.inf), (4, 1.5, 1.0)]
)
def test_slices_wait_too(slices: int, limit: float, in_host: float) -> None:
    """Below one microbatch of a device's layers, which no order of slices alone is."""
    costs, asked = costs_of(2, 1.0), {"trades": True, "steps": 3000, "in_host": in_host}
    made = plan(costs, 2, 4, limit, placements=[v_shape(2)], slices=slices, **asked)
    assert judged(made, costs, limit).num_offloaded
    assert max(peak_moved(made.schedule, costs)) <= in_host
    asked |= {"placements": [v_shape(2)], "slices": slices, "whole": True}
    assert plan(replace(costs, host_us=0.01), 2, 4, limit, **asked).schedule.slices == slices
    with pytest.raises(LimitError):
        plan(without_copies(costs), 2, 4, limit, placements=[v_shape(2)], slices=slices)
