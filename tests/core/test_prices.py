"""Overheads of a pass: host time, collectives, messages; and their effect on split backwards."""

import math
import pickle
import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from core.test_lowering import with_full_backward_cost
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import costs_of

from megatron_vshape import (
    Costs,
    Schedule,
    ScheduleError,
    lower,
    make,
    peak_held,
    plan,
    simulate,
    verify,
)
from megatron_vshape.core.check.bounds import in_passes, lower_bound
from megatron_vshape.core.fusing import fuse_backwards, make_wait_graph, run_step
from megatron_vshape.core.model.amounts import (
    DUMMY_BYTES,
    HIDDEN_EXCHANGE_US,
    SAVED_US,
    STATE_BYTES,
)
from megatron_vshape.core.model.kinds import (
    COPY_OUT,
    FROM_HOST,
    KINDS,
    LOGITS,
    OFFLOAD,
    PARTS,
    PROCESSOR,
    TO_HOST,
    Kind,
    amounts_of,
)
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.pieces import (
    NOTHING,
    Pieces,
    recut,
    regroup,
    with_ends,
)
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.model.stage_costs import StageCosts, stages_of_parts
from megatron_vshape.core.paper.catalogue import NAMES
from megatron_vshape.core.plan import full_backward_saving, plan_request
from megatron_vshape.core.program.lowering import fuse, with_full_backwards
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO

REAL = (1.0, 1.15, 0.85, 0.05)
EXCHANGES = {"forward_exchange_us": (0.5,) * 4, "backward_exchange_us": (0.25,) * 4}


def test_pass_time_includes_compute_collective_and_host() -> None:
    costs = Costs.uniform(2, 4, 1, 2, 3, 0.0, 0.125).having(**EXCHANGES)
    assert [costs.time_us(kind, 1) for kind in (*PARTS, Kind.BW)] == [1.625, 2.375, 3.125, 5.375]
    hidden = costs.having(whole_exchange_us=(0.0,) * 4, whole_backward_us=(4.0,) * 4)
    assert hidden.time_us(Kind.BW, 1) == 4.125
    assert [in_passes(hidden).time_us(kind, 1) for kind in (*PARTS, Kind.BW)] == [
        1.625,
        2.375,
        3.125,
        4.125,
    ]
    # With stages of twice the size: 2 * (1 + .5) + .125 for F, 2 * (5 + .25) + .125 for BW.
    makespan = simulate(make("gpipe", 2, 1), regroup(costs, 2, "GPipe")).makespan
    assert makespan == 2 * (3.125 + 10.625)


def test_half_stages_have_half_the_compute_and_full_host_time() -> None:
    costs = Costs.uniform(2, 8, *REAL, 0.125).having(forward_exchange_us=(0.5,) * 8)
    coarse = regroup(costs, 4, "a V")
    assert coarse.time_us(Kind.F, 0) == 2 * costs.time_us(Kind.F, 0) - 0.125
    assert coarse.by_stage.get(Kind.F.collective) == (1.0,) * 4
    assert (coarse.host_us, coarse.send_us) == (0.125, 0.05)
    assert Costs.uniform(2, 4, *REAL, 0.125).forward_us == coarse.forward_us
    two_chunks, four_chunks = (
        make("interleaved-1f1b", 2, 8, num_chunks=chunks) for chunks in (2, 4)
    )
    # The compute is equal; more stages add host time of their additional passes.
    busy = simulate(four_chunks, costs).busy - simulate(two_chunks, coarse).busy
    assert busy == pytest.approx(8 * 2 * 2 * 0.125)


def test_files_omit_absent_overheads() -> None:
    text = Costs.uniform(2, 4, *REAL).to_json()
    assert not any(name in text for name in ("host", "exchange", "whole", "layers", "sources"))


def test_collectives_and_overhead_follow_the_layers() -> None:
    collectives = {Kind.F.collective: 0.5, Kind.B.collective: 0.25, HIDDEN_EXCHANGE_US: 0.25}
    layer = StageCosts.of(1.0, 1.0, 1.0, 1.0, 0.0).changed(collectives)
    pieces = Pieces(layer, layer.times(0.0), layer.times(0.0), 0.0, 0.125)
    stage_costs = pieces.costs((2, 1))
    assert stage_costs.time_us(Kind.F, 0) == 2 * 1.5 + 0.125
    assert stage_costs.time_us(Kind.BW, 0) == 2 * 2.0 + 0.125
    assert stages_of_parts([stage.as_part() for stage in stage_costs.stages]) == stage_costs.stages


def test_offload_and_reload_run_concurrently() -> None:
    copies = [Pass(kind, 0, 0) for kind in OFFLOAD]
    row = [Pass(Kind.F, 0, 0), *copies]
    row += [Pass(Kind.F, 0, 1), *(work._replace(microbatch=1) for work in copies)]
    row += [Pass(Kind.B, 0, j) for j in (0, 1)] + [Pass(Kind.W, 0, j) for j in (0, 1)]
    schedule = Schedule("copies", 1, 2, (0,), (tuple(row),))
    costs = Costs.uniform(1, 1, 0.5, 0.5, 0.5, kinds=OFFLOAD)  # one stage that counts as two
    assert [queue.resource for queue in schedule.queues()] == [PROCESSOR, TO_HOST, FROM_HOST]
    assert simulate(schedule, costs).makespan == 11


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("name", ["1f1b", "v-half", "dualpipev", "copies", "by microbatch"])
def test_fusing_uses_the_times_of_the_simulation(name: str, objective: Objective) -> None:
    schedule = make("v-half" if " " in name or name == "copies" else name, 4, 8)
    if name == "copies":  # for the first microbatch, on separate queues
        rows = [list(row) for row in schedule.order]
        for stage, device in enumerate(schedule.placement):
            index = rows[device].index(Pass(Kind.F, stage, 0)) + 1
            rows[device][index:index] = [Pass(kind, stage, 0) for kind in OFFLOAD]
        schedule = replace(schedule, order=tuple(map(tuple, rows)))
    stages = schedule.num_stages
    costs = Costs.uniform(4, stages, *REAL, 0.2, kinds=schedule.kinds)
    costs = replace(costs, host_us=0.1).having(forward_us=[1 + 0.1 * s for s in range(stages)])
    if name == "by microbatch":
        costs = replace(costs, by_microbatch=((Kind.F.time, tuple(1 + j % 3 for j in range(8))),))
    passes = [work for queue in schedule.queues() for work in queue.passes]
    graph, merged = make_wait_graph(schedule, passes, costs)
    expected = objective.of(simulate(schedule, costs))
    assert run_step(graph, merged, objective is Objective.SPAN) == pytest.approx(
        expected, rel=1e-12
    )
    fused = fuse_backwards(simulate(schedule, costs), costs, objective)
    assert objective.of(simulate(fused, costs)) <= expected * (1 + 1e-12)


def random_cell(seed: int) -> tuple[Costs, int, int, float]:
    """Return random costs, devices, microbatches and limit."""
    rng = random.Random(seed)
    devices, microbatches = rng.choice([2, 3, 4]), rng.randint(2, 14)
    parts = rng.uniform(0.7, 1.3), rng.uniform(0.7, 1.6), rng.uniform(0.4, 1.2)
    costs = Costs.uniform(devices, 2 * devices, *parts, rng.choice([0.0, 0.1]))
    if seed % 3:
        costs = with_full_backward_cost(costs, 1 - rng.uniform(0.01, 0.4))
    if seed % 3 != 1:
        costs = replace(costs, host_us=rng.uniform(0.01, 0.4))
    if seed % 2:
        exchange = (rng.uniform(0.05, 0.4),) * (2 * devices)
        costs = costs.having(
            backward_exchange_us=exchange, whole_exchange_us=(0.0,) * (2 * devices)
        )
    return costs, devices, microbatches, rng.uniform(devices + 2, 2 * devices)


@pytest.mark.parametrize("seed", range(12))
def test_plan_is_not_slower_than_all_split_or_all_full_backwards(seed: int) -> None:
    costs, devices, microbatches, limit = random_cell(seed)
    assert full_backward_saving(costs) > 0
    # The request searches three times the placements, which share the steps.
    result = plan_request(
        PlanRequest(AUTO, devices, microbatches, costs, limit=limit, steps=12_000)
    )
    verify(result.schedule, result.limits, result.costs)
    sizes = devices, microbatches, limit
    everywhere = plan(costs, *sizes, steps=4_000).schedule
    nowhere = with_full_backwards(plan(costs, *sizes, steps=4_000, whole=True).schedule)
    published = [make(name, devices, microbatches) for name in ("1f1b", "1f1b-v", "zb-h1", "v-zb")]
    for schedule in (everywhere, nowhere, *published):
        stage_costs = regroup(costs, schedule.num_stages, schedule.name)
        if max(peak_held(schedule, stage_costs)) <= limit:
            assert result.plan.value <= simulate(schedule, stage_costs).makespan * (1 + 1e-9)


def complete_costs(num_stages: int) -> Costs:
    """Return costs with all fields set."""
    forward_us = tuple(1.0 + 0.125 * stage for stage in range(num_stages))
    full_backward = {Kind.BW.collective: [0.5 * us for us in forward_us]}
    full_backward[Kind.BW.time] = [1.75 * us for us in forward_us]
    costs = Costs.uniform(num_stages, num_stages, send=0.25, host=0.125)
    return replace(
        costs.having(dict.fromkeys(amounts_of(KINDS), forward_us) | full_backward),
        layers=(2,) * num_stages,
        sources=(("send_us", "measured here"),),
        by_microbatch=((Kind.F.time, (0.5, 1.0, 2.0)),),
        more_send_us=(0.5,) * (num_stages - 1),
    )


FIRST, LAST = StageCosts.of(1, 2, 3, 4, 5), StageCosts.of(5, 4, 3, 2, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda costs: regroup(costs, 4, "it"),
        lambda costs: with_ends(costs, FIRST, LAST),
        lambda costs: with_ends(costs, NOTHING, NOTHING),
        lambda costs: Pieces.of(costs, costs.layers).costs((3, 1, 2, 2, 2, 2, 1, 3)),
        lambda costs: recut(costs, 16, 4, "it"),
        lambda costs: Costs.from_json(costs.to_json()),
        lambda costs: costs.having(forward_us=costs.backward_us),
        lambda costs: pickle.loads(pickle.dumps(costs)),
    ],
)
def test_conversions_keep_all_fields_of_costs(change: Callable[[Costs], Costs]) -> None:
    costs = complete_costs(8)
    converted = change(costs)
    assert converted.lists().keys() == costs.lists().keys() == set(map(str, amounts_of(KINDS)))
    for field in fields(Costs):
        assert bool(getattr(converted, field.name)) == bool(getattr(costs, field.name)), field.name
    for name in ("send_us", "host_us", "by_microbatch", "sources"):
        assert getattr(converted, name) == getattr(costs, name), name


def test_costs_have_amounts_of_all_kinds_of_passes() -> None:
    assert set(amounts_of([])) == {amount for k in (*PARTS, Kind.BW) for amount in k.amounts} | {
        STATE_BYTES,
        DUMMY_BYTES,
    }
    costs = Costs.uniform(2, 4)
    lookups = costs.having(logits_us=(1.0,) * 4, copy_out_us=(2.0,) * 4)
    assert [*lookups.extra_amounts.items()] == [
        (COPY_OUT.time, (2.0,) * 4),
        (LOGITS.time, (1.0,) * 4),
    ]
    assert lookups.without([LOGITS.time, COPY_OUT.time]) == costs
    with pytest.raises(ScheduleError, match="no kind of pass has 'lookups_us'"):
        costs.having(lookups_us=(1.0,) * 4)


def test_pass_time_by_microbatch() -> None:
    schedule = make("v-half", 2, 3)
    uniform = Costs.uniform(2, 4, send=0.25)
    costs = replace(uniform, by_microbatch=((Kind.F.time, (0.5, 1.0, 2.0)),))
    timeline = simulate(schedule, costs)
    for device in range(2):
        for work, start, end in timeline.slots(device):
            share = (0.5, 1.0, 2.0)[work.microbatch] if work.kind is Kind.F else 1.0
            assert end - start == share * uniform.time_us(work.kind, work.stage)
    bound = lower_bound(costs, schedule.placement, 2, 3, (math.inf,) * 2)
    assert bound <= timeline.makespan
    assert bound < lower_bound(uniform, schedule.placement, 2, 3, (math.inf,) * 2)
    with pytest.raises(ScheduleError, match="forward_us of 3 microbatches, the schedule has 4"):
        simulate(make("v-half", 2, 4), costs)
    with pytest.raises(ScheduleError, match="by_microbatch has 'send_us', which is no time of"):
        Costs.of(*((1.0,),) * 3, 0.0, *((1.0,),) * 2, by_microbatch=[("send_us", (1.0,))])


@pytest.mark.parametrize("objective", list(Objective))
def test_message_time_by_boundary(objective: Objective) -> None:
    extra_us = (0.0, 2.0, 0.25, 0.0, 0.25, 3.0, 0.0)
    costs = replace(Costs.uniform(4, 8, *REAL), more_send_us=extra_us)
    schedule = make("v-half", 4, 6)
    timeline = simulate(schedule, costs)
    ends = {slot.work: slot.end for device in range(4) for slot in timeline.slots(device)}
    for device in range(4):
        for work, start, _ in timeline.slots(device):
            for dependency in work.needs(8):
                is_remote = schedule.placement[dependency.stage] != device
                min_lag = extra_us[min(work.stage, dependency.stage)] + 0.05 if is_remote else 0.0
                assert start >= ends[dependency] + min_lag - 1e-9
    assert regroup(costs, 4, "it").more_send_us == (2.0, 0.0, 3.0)
    result = plan(costs, 4, 6, 6.0, objective, steps=20_000)
    assert result.value == pytest.approx(objective.of(simulate(result.schedule, costs)))
    assert result.lower_bound <= result.value <= objective.of(timeline)
    with pytest.raises(ScheduleError, match="one for each of the 7 boundaries between stages"):
        replace(costs, more_send_us=(1.0,))


def test_search_accounts_for_a_slow_boundary() -> None:
    """If the search assumed equal messages, the step would take 179.85."""
    extra_us = tuple(3.0 if boundary == 4 else 0.0 for boundary in range(15))
    costs = replace(Costs.uniform(8, 16, *REAL), more_send_us=extra_us)
    assert plan(costs, 8, 24, 12.0, steps=100_000).value < 175


def test_slow_boundary_delays_only_its_messages() -> None:
    """If all messages were that slow, 29 B and W would be fused and a rank would keep 4 results."""
    schedule = make("v-half", 8, 32)
    extra_us = tuple(0.5 if boundary in (3, 11) else 0.0 for boundary in range(15))
    costs = replace(Costs.uniform(8, 16, *REAL), more_send_us=extra_us)
    timeline = simulate(schedule, costs)
    fused = fuse(timeline)
    assert sum(work.kind is Kind.BW for row in fused.order for work in row) == 52
    assert simulate(fused, costs).makespan == pytest.approx(timeline.makespan)
    program = lower(schedule, timeline, kernels=True)
    assert max(map(program.peak_unreleased, range(8))) == 3


def kinds_of(schedule: Schedule) -> set[Kind]:
    return {work.kind for row in schedule.order for work in row}


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
    if data.draw(st.booleans()):  # overheads as well
        stages = published.num_stages
        costs = replace(costs, host_us=0.2).having(
            backward_exchange_us=(0.4,) * stages, whole_exchange_us=(0.0,) * stages
        )
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
