"""Measured time of full backwards: files, simulation, fusing, plans and bounds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import catalogue_schedules, costs_of

from megatron_vshape.core.check.bounds import lower_bound
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.amounts import SAVED_US
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.pieces import Pieces, regroup
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.model.stage_costs import StageCosts, stages_of_parts
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.program.lowering import fuse, lower
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO

REAL = (1.0, 1.15, 0.85, 0.05)


def with_full_backward_cost(costs: Costs, share: float) -> Costs:
    """Return the costs with full backwards of this share of B + W."""
    split = zip(costs.backward_us, costs.weight_us, strict=True)
    return costs.having(whole_backward_us=[share * (b + w) for b, w in split])


def kinds_of(schedule: Schedule) -> set[Kind]:
    return {work.kind for row in schedule.order for work in row}


def test_simulation_uses_full_backward_time() -> None:
    costs = Costs.uniform(2, 2).having(whole_backward_us=(3.0, 2.5))
    # A stage needs 2 for each of F, B and W: F F in one direction, BW BW in the other.
    assert simulate(make("gpipe", 2, 1), costs).makespan == 2 + 2 + 2.5 + 3
    assert [costs.time_us(kind, 1) for kind in (*PARTS, Kind.BW)] == [2, 2, 2, 2.5]


def test_full_backward_time_is_regrouped_with_layers() -> None:
    layer, end = (
        StageCosts.of(10.0, 11.0, 9.0, 4.0, 1.0).changed({SAVED_US: 3.0}),
        StageCosts.of(1.0, 1.0, 1.0, 1.0, 0.0).changed({SAVED_US: 0.5}),
    )
    costs = Pieces(layer, end, end, 0.0).costs((1, 2, 2, 1))
    assert costs.by_stage.get(Kind.BW.time) == (18.5, 34.0, 34.0, 18.5)
    assert regroup(costs, 2, "1F1B").by_stage.get(Kind.BW.time) == (52.5, 52.5)
    other_split = Pieces.of(costs, (1, 2, 2, 1)).costs((2, 1, 1, 2))
    full_backwards_us = other_split.by_stage.get(Kind.BW.time)
    assert full_backwards_us == pytest.approx((35.5, 17.0, 17.0, 35.5))
    assert stages_of_parts([stage.as_part() for stage in costs.stages]) == costs.stages
    # Because of noise, a stage without layers may save more than its time.
    noisy = StageCosts.of(1.0, 2.0, 3.0, 1.0, 0.0).changed({SAVED_US: 9.0})
    assert stages_of_parts([noisy])[0][Kind.BW.time] == 3.0


@settings(max_examples=60)
@given(st.data(), catalogue_schedules(max_devices=5, max_microbatches=9), st.floats(0.3, 1.5))
def test_fusing_delays_no_pass_for_any_full_backward_time(
    data: st.DataObject, schedule: Schedule, share: float
) -> None:
    costs = with_full_backward_cost(data.draw(costs_of(schedule.num_stages)), share)
    timeline = simulate(schedule, costs)
    fused = fuse(timeline)
    verify(fused)
    fused_timeline = simulate(fused, costs)
    for device in range(schedule.num_devices):
        ends = {work: end for work, _, end in fused_timeline.slots(device)}
        for work, _, end in timeline.slots(device):
            full_backward = work._replace(kind=Kind.BW)
            if work in ends:
                assert ends[work] <= end * (1 + 1e-9)
            elif work.kind is Kind.W:
                assert ends[full_backward] <= end * (1 + 1e-9)
    if share > 1.0 + 1e-6:
        assert fused.order == schedule.order


def test_lowering_does_not_fuse_slower_full_backwards() -> None:
    schedule = make("v-half", 3, 6)
    costs = Costs.uniform(3, 6)
    fused = lower(schedule, simulate(schedule, costs)).schedule
    assert Kind.BW in kinds_of(fused)
    assert (
        lower(schedule, simulate(schedule, with_full_backward_cost(costs, 1.0))).schedule == fused
    )
    assert (
        lower(schedule, simulate(schedule, with_full_backward_cost(costs, 1.1))).schedule
        == schedule
    )


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 8),
    st.floats(0.01, 1.5),
    st.sampled_from(list(Objective)),
)
def test_no_schedule_is_below_the_bound(
    data: st.DataObject,
    name: str,
    devices: int,
    microbatches: int,
    share: float,
    objective: Objective,
) -> None:
    published = make(name, devices, microbatches)
    costs = with_full_backward_cost(data.draw(costs_of(published.num_stages)), share)
    for schedule in (published, fuse(simulate(published, costs))):
        limits = peak_held(schedule, costs)
        spans = objective is Objective.SPAN
        bound = lower_bound(costs, published.placement, devices, microbatches, limits, span=spans)
        assert bound <= objective.of(simulate(schedule, costs)) * (1 + 1e-9)


def test_plan_fuses_only_faster_full_backwards() -> None:
    costs = Costs.uniform(4, 8, *REAL)
    request = PlanRequest(AUTO, 4, 8, costs, limit=4, steps=20_000)
    split = plan_request(request)
    assert Kind.BW not in kinds_of(split.schedule)
    cheap, expensive = (
        plan_request(replace(request, costs=with_full_backward_cost(costs, share)))
        for share in (0.7, 1.2)
    )
    assert Kind.BW not in kinds_of(expensive.schedule)
    assert expensive.plan.value == pytest.approx(split.plan.value)
    assert max(expensive.plan.peak) == max(split.plan.peak)
    assert Kind.BW in kinds_of(cheap.schedule)
    split_makespan = simulate(split.schedule, costs).makespan
    assert cheap.plan.value == simulate(cheap.schedule, cheap.costs).makespan < split_makespan
    assert cheap.plan.lower_bound <= cheap.plan.value
    assert max(cheap.plan.peak) <= 4
