"""A whole backward with a price of its own: in files, simulated, fused, planned and bounded."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import catalogue_schedules, costs_of

from megatron_vshape.core.check.bounds import lower_bound
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.pieces import (
    Piece,
    Pieces,
    costs_from_pieces,
    pieces_from_costs,
    regroup,
)
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.program.lowering import fuse, lower
from megatron_vshape.core.request import AUTO, PlanRequest

REAL = (1.0, 1.15, 0.85, 0.05)


def priced(costs: Costs, share: float) -> Costs:
    """Return the costs with whole backwards of this share of B + W."""
    split = zip(costs.backward_us, costs.weight_us, strict=True)
    return replace(costs, whole_backward_us=tuple(share * (b + w) for b, w in split))


def kinds_of(schedule: Schedule) -> set[Kind]:
    return {work.kind for row in schedule.order for work in row}


def test_the_simulator_takes_the_price() -> None:
    costs = replace(Costs.uniform(2, 2), whole_backward_us=(3.0, 2.5))
    # A stage takes 2 for each of F, B and W: F F on the way there, BW BW on the way back.
    assert simulate(make("gpipe", 2, 1), costs).makespan == 2 + 2 + 2.5 + 3
    assert [costs.time_us(kind, 1) for kind in (*PARTS, Kind.BW)] == [2, 2, 2, 2.5]


def test_it_is_added_up_and_taken_apart_with_the_rest() -> None:
    layer, end = Piece(10.0, 11.0, 9.0, 4.0, 1.0, 3.0), Piece(1.0, 1.0, 1.0, 1.0, 0.0, 0.5)
    costs = Pieces(layer, end, end, 0.0).costs((1, 2, 2, 1))
    assert costs.whole_backward_us == (18.5, 34.0, 34.0, 18.5)
    assert regroup(costs, 2, "1F1B").whole_backward_us == (52.5, 52.5)
    assert Pieces.of(costs, (1, 2, 2, 1)).costs((2, 1, 1, 2)).whole_backward_us == pytest.approx(
        (35.5, 17.0, 17.0, 35.5)
    )
    assert costs_from_pieces(pieces_from_costs(costs), 0.0, costs.layers) == costs
    # Noise may say of a stage without layers that it saves more than it takes.
    (least,) = costs_from_pieces([Piece(1.0, 2.0, 3.0, 1.0, 0.0, 9.0)], 0.0).whole_backward_us or ()
    assert least == 3.0


@settings(max_examples=60)
@given(st.data(), catalogue_schedules(max_devices=5, max_microbatches=9), st.floats(0.3, 1.5))
def test_fusing_delays_nobody_at_any_price(
    data: st.DataObject, schedule: Schedule, share: float
) -> None:
    costs = priced(data.draw(costs_of(schedule.num_stages)), share)
    before = simulate(schedule, costs)
    fused = fuse(before)
    verify(fused)
    after = simulate(fused, costs)
    for device in range(schedule.num_devices):
        ends = {work: end for work, _, end in after.slots(device)}
        for work, _, end in before.slots(device):
            whole = work._replace(kind=Kind.BW)
            if work in ends:
                assert ends[work] <= end * (1 + 1e-9)
            elif work.kind is Kind.W:
                assert ends[whole] <= end * (1 + 1e-9)
    if share > 1.0 + 1e-6:
        assert fused.order == schedule.order


def test_lowering_leaves_split_what_is_dearer_whole() -> None:
    schedule = make("v-half", 3, 6)
    costs = Costs.uniform(3, 6)
    joined = lower(schedule, simulate(schedule, costs)).schedule
    assert Kind.BW in kinds_of(joined)
    assert lower(schedule, simulate(schedule, priced(costs, 1.0))).schedule == joined
    assert lower(schedule, simulate(schedule, priced(costs, 1.1))).schedule == schedule


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
    known = make(name, devices, microbatches)
    costs = priced(data.draw(costs_of(known.num_stages)), share)
    for schedule in (known, fuse(simulate(known, costs))):
        limits = peak_held(schedule, costs)
        spans = objective is Objective.SPAN
        bound = lower_bound(costs, known.placement, devices, microbatches, limits, span=spans)
        assert bound <= objective.of(simulate(schedule, costs)) * (1 + 1e-9)


def test_a_plan_joins_what_is_cheaper_together_and_nothing_that_is_dearer() -> None:
    costs = Costs.uniform(4, 8, *REAL)
    question = PlanRequest(AUTO, 4, 8, costs, limit=4, steps=20_000)
    split = plan_request(question)
    assert Kind.BW not in kinds_of(split.schedule)
    cheap, dear = (
        plan_request(replace(question, costs=priced(costs, share))) for share in (0.7, 1.2)
    )
    assert Kind.BW not in kinds_of(dear.schedule)
    assert dear.plan.value == pytest.approx(split.plan.value)
    assert max(dear.plan.peak) == max(split.plan.peak)
    assert Kind.BW in kinds_of(cheap.schedule)
    apart = simulate(split.schedule, costs).makespan
    assert cheap.plan.value == simulate(cheap.schedule, cheap.costs).makespan < apart
    assert cheap.plan.lower_bound <= cheap.plan.value
    assert max(cheap.plan.peak) <= 4
