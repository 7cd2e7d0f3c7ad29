"""Plans with slices: validity, bounds, reference figures, and choice of the number of slices."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_vshape.core.check.bounds import LimitError, lower_bound, min_memory
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.placement import Placement, linear, looping, v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.job_shop import Codec
from megatron_vshape.core.planner.search import plan
from megatron_vshape.core.planner.vocabulary import shared_pieces
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO


def real_costs(devices: int, stages: int, slices: int, *parts: float, added: float) -> Costs:
    """Return costs with messages; `added` is the overhead of a slice's pass."""
    scale = 2 * devices / stages
    host = added * scale * (1 - 1 / slices)
    return Costs.uniform(devices, stages, *parts, send=0.05 + 0.005 * slices, host=host)


def percent_over_work(costs: Costs, placement: Placement, microbatches: int, value: float) -> float:
    """Return the step time above the compute of unsliced microbatches, in percent."""
    bare, devices = replace(costs, host_us=0.0), max(placement) + 1
    return 100 * (value / bare.busy_us(placement, devices, microbatches) - 1)


def test_codec_numbers_passes_in_execution_order() -> None:
    codec = Codec(8, slices=4)
    for kind, number in ((Kind.F, 5), (Kind.B, 6), (Kind.W, 6)):
        work = Pass(kind, 1, 5)
        assert codec.number(work) % 8 == number
        assert codec.work(codec.number(work)) == work
    schedule = make("v-zb", 2, 2, slices=4)
    rows = [np.array(list(map(codec.number, row))) for row in schedule.order]
    assert codec.order(map(np.ndarray.tolist, rows)) == schedule.order
    for row in rows:  # passes of a type are sorted by number
        for pass_type in set(row // 8):
            numbers = row[row // 8 == pass_type]
            assert sorted(numbers) == list(numbers)


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize(
    ("placement", "microbatches", "slices", "limit"),
    [
        (v_shape(3), 3, 2, 3.0),
        (v_shape(4), 2, 4, 2.0),
        (looping(3, 2), 3, 3, 4.0),
        (linear(2), 2, 3, 4.0),
        (looping(2, 4), 4, 2, 2.5),
    ],
)
def test_sliced_plans_run_and_fit(
    replay,
    placement: Placement,
    microbatches: int,
    slices: int,
    limit: float,
    objective: Objective,
) -> None:
    devices = max(placement) + 1
    costs = Costs.uniform(devices, len(placement), 1, 1.3, 0.7, 0.05)
    sizes = devices, microbatches, limit, objective
    result = plan(costs, *sizes, placements=[placement], slices=slices, steps=3000)
    schedule = result.schedule
    assert (schedule.slices, schedule.num_microbatches) == (slices, microbatches * slices)
    verify(schedule, [limit] * devices, costs)
    for figures in replay(schedule, costs.sliced(slices)):
        assert figures[objective.value] == pytest.approx(result.value)
        assert max(result.peak) == pytest.approx(figures["peak"])
    assert max(result.peak) <= limit + 1e-9
    assert result.lower_bound <= result.value
    lowered = lower(schedule, simulate(schedule, costs), kernels=True).schedule
    verify(lowered, [limit] * devices, costs)


def test_minimum_memory_is_one_unsliced_microbatch() -> None:
    costs = Costs.uniform(4, 8)
    assert min_memory(costs.sliced(4), v_shape(4), 4) == (2.0,) * 4
    result = plan(costs, 4, 3, 2.0, placements=[v_shape(4)], slices=4, steps=100)
    assert max(result.peak) == 2.0
    with pytest.raises(LimitError) as error:
        plan(costs, 4, 3, 1.9, placements=[v_shape(4)], slices=4, steps=100)
    assert error.value.min_limit == pytest.approx(2.0)
    weight_costs = costs.sliced(2).having(held_after_backward_bytes=(0.7,) * 8)
    assert min_memory(weight_costs, v_shape(4), 4) == pytest.approx((2.2,) * 4)


@pytest.mark.parametrize("span", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "v-min", "v-half", "v-zb"])
def test_no_sliced_schedule_is_below_its_bound(name: str, span: bool) -> None:
    for devices, microbatches, slices in ((2, 2, 4), (4, 4, 2), (4, 8, 4), (3, 1, 8)):
        schedule = make(name, devices, microbatches, slices=slices)
        costs = Costs.uniform(devices, schedule.num_stages, 1, 1.4, 0.6, 0.05, host=0.02)
        timeline = simulate(schedule, costs)
        sizes = devices, microbatches * slices, peak_held(schedule, costs)
        bound = lower_bound(costs.sliced(slices), schedule.placement, *sizes, span)
        assert bound <= (timeline.span if span else timeline.makespan) * (1 + 1e-9)


def test_bound_includes_the_lifetime_of_all_slices() -> None:
    """Slices queue at a stage in both directions and retain their memory meanwhile."""
    costs, tight = Costs.uniform(8, 8, 1, 2, 1), (8, 4 * 8, (2.0,) * 8)
    bound = lower_bound(costs.sliced(4), linear(8), *tight)
    assert bound > 1.1 * lower_bound(replace(costs.sliced(4), slices=1), linear(8), *tight)
    result = plan(costs, 8, 8, 2.0, placements=[linear(8)], slices=4, steps=10_000)
    assert bound <= result.value


@pytest.mark.parametrize(
    ("placement", "microbatches", "slices", "limit", "cost"),
    [
        (linear(2), 2, 2, 4.0, (1, 1, 1, 0.0)),
        (linear(2), 1, 3, 4.0, (1, 2, 1, 0.1)),
        (v_shape(2), 1, 3, 2.0, (1, 1, 1, 0.0)),
        (v_shape(2), 2, 2, 2.0, (1, 1.15, 0.85, 0.05)),
        (v_shape(2), 2, 2, 3.0, (1, 1, 1, 0.0)),
        (linear(3), 2, 2, 2.0, (1, 1, 1, 0.0)),
    ],
)
def test_bounds_and_plans_match_the_optimum(
    placement: Placement,
    microbatches: int,
    slices: int,
    limit: float,
    cost: tuple[float, float, float, float],
) -> None:
    pytest.importorskip("ortools")
    from exact import prove

    devices = max(placement) + 1
    costs = Costs.uniform(devices, len(placement), *cost)
    result = plan(costs, devices, microbatches, limit, placements=[placement], slices=slices)
    best = prove(replace(result, lower_bound=0.0), costs, limit, seconds=60)
    assert best.lower_bound == pytest.approx(best.value, rel=1e-4)  # solved to optimality
    assert result.lower_bound <= best.value * (1 + 1e-9)
    assert result.value == pytest.approx(best.value, rel=1e-4)
    verify(best.schedule, limit, costs)


@pytest.mark.parametrize(
    ("microbatches", "slices", "share", "cost", "max_percent"),
    [
        (8, 8, 0.2344, (1, 1, 1), 1.83),
        (4, 8, 0.2344, (1, 1.15, 0.85), 9.5),
        pytest.param(8, 8, 0.1875, (1, 1, 1), 4.9, marks=pytest.mark.slow),
        pytest.param(8, 8, 0.125, (1, 1, 1), 31, marks=pytest.mark.slow),
        pytest.param(4, 4, 0.352, (1, 1.7, 0.3), 23.4, marks=pytest.mark.slow),
    ],
)
def test_plans_reach_the_reference_figures(
    microbatches: int,
    slices: int,
    share: float,
    cost: tuple[float, float, float],
    max_percent: float,
) -> None:
    """For a V on 8 devices; memory relative to 1F1B. `slices_table.py` has all cells."""
    has_unit_costs = cost == (1, 1, 1)
    costs = real_costs(8, 16, slices, *cost, added=0.0 if has_unit_costs else 0.005)
    costs = replace(costs, send_us=0.0) if has_unit_costs else costs
    sizes = 8, microbatches, 16 * share
    result = plan(costs, *sizes, placements=[v_shape(8)], slices=slices, steps=10_000)
    assert percent_over_work(costs, v_shape(8), microbatches, result.value) < max_percent


def test_slices_fill_the_gaps_of_messages() -> None:
    """A group of 8 slices on 8 devices returns late by 8 messages; without filling 6.0% remain."""
    costs, placement = real_costs(8, 32, 8, 1, 1.15, 0.85, added=0.005), looping(8, 4)
    result = plan(costs, 8, 4, 16 * 0.234375, placements=[placement], slices=8, steps=1000)
    assert percent_over_work(costs, placement, 4, result.value) < 5.8


def make_request(
    slices: int | tuple[int, ...], host: float, limit: float | None = None
) -> PlanRequest:
    costs = Costs.uniform(4, 8, 1, 1.15, 0.85, 0.05, host)
    return PlanRequest(AUTO, 4, 4, costs, limit=limit, slices=slices, steps=3000)


@pytest.mark.parametrize(("host", "chosen"), [(0.0, 4), (1.0, 1)])
def test_auto_chooses_slices_by_host_time(host: float, chosen: int) -> None:
    result = plan_request(make_request((1, 2, 4), host))
    assert result.schedule.slices == chosen
    for slices in (1, 2, 4):
        single = plan_request(make_request(slices, host))
        assert result.plan.value <= single.plan.value * (1 + 1e-9)
        assert single.plan.lower_bound <= single.plan.value
    assert result.searched_bound <= result.plan.value
    for baseline in result.baselines:
        if max(baseline.peak) <= max(result.limits):
            assert baseline.timeline.makespan >= result.plan.value * (1 - 1e-9)


def test_slices_are_used_when_nothing_else_fits() -> None:
    with pytest.raises(ScheduleError, match="no order was found|no schedule fits"):
        plan_request(make_request(1, 0.02, limit=1.9))
    result = plan_request(make_request((1, 4), 0.5, limit=2.0))
    assert max(result.plan.peak) <= 2.0


def test_schedule_name_requires_one_number_of_slices() -> None:
    request = replace(make_request((1, 2), 0.0), name="v-half")
    with pytest.raises(ScheduleError, match="v-half supports one, not 1, 2"):
        plan_request(request)


def test_plus_name_with_slices() -> None:
    request = replace(make_request(2, 0.0), name="v-half+", limit=None)
    result, published = plan_request(request), make("v-half", 4, 4, slices=2)
    assert result.schedule.slices == 2
    planned_us, published_us = (
        simulate(schedule, request.costs).makespan for schedule in (result.schedule, published)
    )
    assert planned_us <= published_us


def test_slices_with_vocabulary_parallelism_are_rejected() -> None:
    pieces = Pieces.estimated(2.0, 2.0)
    costs = shared_pieces(pieces, 2, 0.1, 0.25).costs((2,) * 4)
    request = PlanRequest(AUTO, 2, 2, costs, limit=4.0, steps=200, slices=2)
    with pytest.raises(ScheduleError, match="slices do not support passes that all ranks share"):
        plan_request(request)
    assert plan_request(replace(request, slices=(1, 2))).schedule.slices == 1
