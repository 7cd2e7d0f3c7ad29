"""The planner offloads activations to save memory; an independent replay checks the plans."""

import math
import random
from dataclasses import replace

import pytest
from schedule_replay import is_complete, offloaded_chunks, peaks, replay

from megatron_vshape import Costs, Schedule, ScheduleError, Timeline, plan, simulate, verify
from megatron_vshape.core.check.bounds import LimitError, bound_at
from megatron_vshape.core.check.simulate import peak_moved
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule, MemoryStrategy
from megatron_vshape.core.model.costs import with_copies, without_copies
from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT, OFFLOAD, PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.planner.offloading import memory_strategies

REAL = (1.0, 1.15, 0.85, 0.05)


def costs_of(devices: int, t: float) -> Costs:
    """Return costs of two stages per device, whose copies take `t` times F."""
    return with_copies(Costs.uniform(devices, 2 * devices, *REAL), t)


def check_plan(result: EvaluatedSchedule, costs: Costs, limit: float) -> int:
    """Fail unless the replay of the plan has the same figures and fits; return its offloads."""
    schedule, stage_costs = result.schedule, costs.sliced(result.schedule.slices)
    verify(schedule, limit, costs)
    assert is_complete(schedule)
    times = replay(schedule, stage_costs)
    assert len(times) == sum(map(len, schedule.order))
    assert max(end for _, end in times.values()) == pytest.approx(result.value)
    assert peaks(schedule, stage_costs) == pytest.approx(result.peak)
    assert max(result.peak) <= limit * (1 + 1e-9)
    assert result.lower_bound <= result.value
    return len(offloaded_chunks(schedule))


CELLS = [(32, 10, 10.7), (32, 8, 12.4), (32, 4, 15.4), (64, 8, 13.2), (64, 4, 15.3)]
"""Microbatches, chunks, and the target overhead if a copy takes as long as F."""


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "limit", "max_overhead"), CELLS, ids=map(str, CELLS))
def test_target_overheads_are_reached(microbatches: int, limit: float, max_overhead: float) -> None:
    costs = costs_of(8, 1.0)
    result = plan(costs, 8, microbatches, limit, trades=True)
    check_plan(result, costs, limit)
    assert result.value - 6 * microbatches <= max_overhead + 1e-6
    for evaluated in result.evaluated_strategies:
        assert evaluated.value is None or evaluated.value >= result.value * (1 - 1e-6)


@pytest.mark.parametrize("limit", [2.5, 6.0])
def test_plan_is_not_worse_than_without_offload_or_first_chunk_only(limit: float) -> None:
    costs = costs_of(4, 1.0)
    result = plan(costs, 4, 12, limit, trades=True, steps=60_000)
    check_plan(result, costs, limit)
    strategies = {evaluated.strategy: evaluated for evaluated in result.evaluated_strategies}
    _, first, _ = memory_strategies(True, v_shape(4))
    assert first.throughout == (0, 1, 2, 3)
    assert {MemoryStrategy(), first} <= set(strategies)
    for evaluated in result.evaluated_strategies:
        assert (evaluated.value or evaluated.lower_bound) >= result.value * (1 - 1e-6)
    plain_costs = without_copies(costs)
    if limit > 2.5:
        assert result.value <= plan(plain_costs, 4, 12, limit, steps=60_000).value + 1e-6


def test_plan_chooses_offloaded_activations() -> None:
    """A smaller limit needs more offload and is slower; a large limit needs none."""
    costs, limits = costs_of(4, 1.0), (2.5, 5.0)
    plans = [plan(costs, 4, 12, limit, trades=True, steps=40_000) for limit in limits]
    offload_counts = [
        check_plan(result, costs, limit) for result, limit in zip(plans, limits, strict=True)
    ]
    assert plans[0].value > plans[1].value
    assert plans[0].value < 81  # 82.45 without the selection of all activations
    assert 96 >= offload_counts[0] > offload_counts[1] > 0
    plain = plan(without_copies(costs), 4, 12, 24.0, steps=40_000)
    unlimited = plan(costs, 4, 12, 24.0, trades=True, steps=40_000)
    assert unlimited.value <= plain.value + 0.5


@pytest.mark.parametrize(
    ("microbatches", "limit", "max_value"),
    [(12, 3.0, 82), (8, 5.0, 53.2)],
    ids=["all activations", "smallest peak"],
)
def test_plan_compares_two_selections_if_link_is_full(
    microbatches: int, limit: float, max_value: float
) -> None:
    """With only the other selection, the step times are 96.4 and 53.4."""
    costs = costs_of(4, 2.0)
    result = plan(costs, 4, microbatches, limit, trades=True, steps=20_000)
    assert check_plan(result, costs, limit)
    assert result.value < max_value


def test_host_memory_limit_is_respected() -> None:
    """Less host memory makes the step slower, down to the time without offload."""
    costs = costs_of(4, 0.5)
    values = []
    for host_limit in (100.0, 4.0, 2.0, 0.5):
        result = plan(costs, 4, 12, 3.0, trades=True, in_host=host_limit, steps=40_000)
        check_plan(result, costs, 3.0)
        values.append(result.value)
        peaks = peak_moved(result.schedule, costs)
        assert max(peaks) <= host_limit
        for t in (0.5, 0.1, 2.0):  # for any speed of copies
            timeline = simulate(result.schedule, costs_of(4, t))
            assert max_offloaded_at_once(timeline) <= max(peaks)
    assert result.schedule.kinds <= set(PARTS)  # half a chunk is too small for any activation
    assert values[0] < values[1] < values[2] < values[3]
    plain = plan(without_copies(costs), 4, 12, 3.0, steps=40_000)
    assert values[3] == pytest.approx(plain.value)


def max_offloaded_at_once(timeline: Timeline) -> int:
    """Return the maximum number of microbatches of a device in host memory."""
    max_waiting = 0
    for row, starts, ends in zip(
        timeline.schedule.order, timeline.starts, timeline.ends, strict=True
    ):
        changes = [
            (start, 1) if work.kind is COPY_OUT else (end, -1)
            for work, start, end in zip(row, starts, ends, strict=True)
            if work.kind in (COPY_OUT, COPY_BACK)
        ]
        num_waiting = 0
        for _, change in sorted(changes):
            num_waiting += change
            max_waiting = max(max_waiting, num_waiting)
    return max_waiting


def test_insufficient_device_and_host_memory_is_rejected() -> None:
    costs = costs_of(2, 0.5)
    with pytest.raises(ScheduleError, match=r"at most 0.5 of a device in host memory: make one of"):
        plan(costs, 2, 4, 1.0, trades=True, in_host=0.5, steps=2_000)


def test_extremely_slow_copies_are_not_used() -> None:
    costs = costs_of(3, 500.0)
    result = plan(costs, 3, 8, 4.0, trades=True, steps=30_000)
    assert result.schedule.kinds <= set(PARTS)
    plain = plan(without_copies(costs), 3, 8, 4.0, steps=30_000)
    assert result.value == pytest.approx(plain.value, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_hold_with_offload(seed: int) -> None:
    """Stages have different costs; no plan is below the bound."""
    rng = random.Random(seed)
    devices, microbatches = rng.choice([(2, 5), (3, 6)])
    stages = range(2 * devices)

    def random_amounts(low: float, high: float) -> tuple[float, ...]:
        return tuple(round(rng.uniform(low, high), 3) for _ in stages)

    times = random_amounts(0.5, 2), random_amounts(0.5, 2), random_amounts(0.3, 1.5)
    memory = random_amounts(0.5, 2)
    costs = with_copies(Costs.of(*times, 0.1, memory, memory), rng.uniform(0.3, 2))
    limit = rng.uniform(1.3, 2.5) * max(memory) * 2
    for objective in Objective:
        result = plan(costs, devices, microbatches, limit, objective, trades=True, steps=20_000)
        verify(result.schedule, limit, costs)
        sizes = result.schedule.placement, microbatches, (limit,) * devices, objective
        bound = bound_at(costs, *sizes)
        assert 0 < bound <= result.value * (1 + 1e-9)


def test_verification_includes_link_order() -> None:
    """A link order that contradicts the markers of its device is reported as a deadlock."""
    out = [Pass(kind, 0, j) for j in (0, 1) for kind in OFFLOAD[:2]]
    row = [Pass(Kind.F, 0, 0), Pass(Kind.F, 0, 1), *out]
    first = [Pass(OFFLOAD[2], 0, 0), Pass(OFFLOAD[3], 0, 0), Pass(Kind.B, 0, 0)]
    second = [work._replace(microbatch=1) for work in first]
    weights = [Pass(Kind.W, 0, 0), Pass(Kind.W, 0, 1)]
    valid = Schedule("good", 1, 2, (0,), ((*row, *first, *second, *weights),))
    verify(valid)
    # The link reloads microbatch 1 first, but B0.0 must free memory before that.
    reload_order = [first[0], second[1], first[1], first[2], second[0], second[2]]
    deadlocked = replace(valid, order=((*row, *reload_order, *weights),))
    with pytest.raises(ScheduleError, match=r"deadlocks; each pass below waits for the next"):
        verify(deadlocked)
    incomplete = replace(valid, order=((*row, *first[::2], *second, *weights),))
    with pytest.raises(ScheduleError, match=r"D0.0 on device 0 has no H0.0: of D, L, R, H"):
        verify(incomplete)


@pytest.mark.parametrize(
    ("slices", "limit", "in_host"), [(2, 1.5, math.inf), (4, 1.25, math.inf), (4, 1.5, 1.0)]
)
def test_slices_can_be_offloaded(slices: int, limit: float, in_host: float) -> None:
    """Below one microbatch of a device's layers, the minimum of sliced orders without offload."""
    costs, options = costs_of(2, 1.0), {"trades": True, "steps": 3000, "in_host": in_host}
    result = plan(costs, 2, 4, limit, placements=[v_shape(2)], slices=slices, **options)
    assert check_plan(result, costs, limit)
    assert max(peak_moved(result.schedule, costs)) <= in_host
    options |= {"placements": [v_shape(2)], "slices": slices, "whole": True}
    assert plan(replace(costs, host_us=0.01), 2, 4, limit, **options).schedule.slices == slices
    with pytest.raises(LimitError):
        plan(without_copies(costs), 2, 4, limit, placements=[v_shape(2)], slices=slices)
