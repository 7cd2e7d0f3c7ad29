"""Vocabulary parallelism: its passes, their order, and the absence of deadlocks."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest
from shared_costs import shared_costs

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
from megatron_vshape.core.check.bounds import LimitError, fits
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.evaluation import compare_baselines
from megatron_vshape.core.model.costs import with_copies
from megatron_vshape.core.model.kinds import (
    COPY_OUT,
    HEAD_WEIGHT,
    LOGITS,
    LOOKUP,
    VOCABULARY,
    Kind,
)
from megatron_vshape.core.model.pieces import Pieces, recut, regroup
from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.paper.catalogue import NAMES
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.vocabulary import (
    PENDING_LOGITS,
    additional_memory,
    is_shared,
    share_forwards,
    share_vocabulary,
    shared_pieces,
    without_shared,
)
from megatron_vshape.core.program.kernels import deadlocks_under_device_sync
from megatron_vshape.core.program.lowering import forward_wave
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO

HEAD = 2.46
"""Cost of an output layer of 128k in layers at h = s = 4096."""


def costs_of(schedule: Schedule, head: float = HEAD, sum_us: float = 0.1) -> Costs:
    """Return costs in chunk passes of a model with twice as many layers as chunks."""
    layers_per_chunk = 4 * schedule.num_devices / schedule.num_stages
    pieces = Pieces.estimated(head, layers_per_chunk)
    bare = replace(pieces, last=pieces.first).costs((int(layers_per_chunk),) * schedule.num_stages)
    return shared_costs(bare, pieces.first, pieces.last, schedule.num_devices, sum_us, 0.25)


def collectives(schedule: Schedule) -> list[list[tuple[Kind, int]]]:
    return [
        [(work.kind, work.microbatch) for work in row if work.kind.is_collective]
        for row in schedule.order
    ]


SIZES = [(2, 5), (4, 1), (4, 13), (6, 18)]


def schedules_of_sizes() -> Iterator[Schedule]:
    """Yield each published schedule in each size that it supports."""
    for name, (devices, microbatches) in product(NAMES, SIZES):
        with contextlib.suppress(ScheduleError):
            yield make(name, devices, microbatches)


@pytest.mark.parametrize(
    "plain",
    list(schedules_of_sizes()),
    ids=lambda plain: f"{plain.name}-{plain.num_devices}-{plain.num_microbatches}",
)
def test_every_schedule_supports_vocabulary_parallelism(plain: Schedule) -> None:
    costs = costs_of(plain)
    shared = share_vocabulary(plain, costs)
    verify(shared, costs=costs)
    assert shared.kinds >= set(VOCABULARY)
    verify(shared)
    assert Schedule.from_json(shared.to_json()) == shared
    assert Schedule.from_csv(shared.to_csv(), shared.placement, shared.name) == shared
    for row in shared.order:
        num_waiting = accumulate((work.kind is LOGITS) - (work.kind is HEAD_WEIGHT) for work in row)
        assert max(num_waiting) <= max(PENDING_LOGITS) + 1
    for passes, row in zip(plain.order, shared.order, strict=True):
        assert sorted(work for work in row if not work.kind.of) == sorted(passes)
    first, *other_rows = collectives(shared)
    assert other_rows == [first] * (plain.num_devices - 1)
    timeline = simulate(shared, costs)
    lower(shared)
    lower(shared, timeline)
    program = lower(shared, timeline, kernels=True)
    assert deadlocks_under_device_sync(program) == {}


def test_step_time_is_near_evenly_distributed_output_layer() -> None:
    """Reference figures of an evenly distributed head, in chunk passes; stock rank 0 has all."""
    layers = (2,) * 16
    for vocabulary, head, spread in ((32, 0.615, 213.0), (128, 2.46, 225.1), (256, 4.92, 241.2)):
        plain = make("v-half", 8, 32)
        costs = costs_of(plain, head)
        makespan = simulate(share_vocabulary(plain, costs), costs).makespan
        assert makespan < 1.02 * spread, vocabulary
        stock = simulate(plain, Pieces.estimated(head, 2.0).costs(layers)).makespan
        assert makespan < {32: 0.93, 128: 0.71, 256: 0.55}[vocabulary] * stock


def test_logits_of_few_microbatches_are_stored() -> None:
    for name in ("v-min", "v-half", "v-zb"):
        plain = make(name, 8, 24)
        costs = costs_of(plain)
        nothing = (0.0,) * 16
        only = costs.having(held_after_forward_bytes=nothing, held_after_backward_bytes=nothing)
        assert max(peak_held(share_vocabulary(plain, costs), only)) <= 5 * 0.25


def test_additional_memory_is_bounded_and_saves_time() -> None:
    plain = make("v-zb", 8, 32)
    costs = costs_of(plain).having(logits_bytes=(0.0,) * 16)
    runs = [share_vocabulary(plain, costs, extra_memory) for extra_memory in (0.0, 1.0)]
    assert [max(peak_held(run, costs)) for run in runs] == [16, 17]
    steps = [simulate(run, costs).makespan for run in runs]
    assert steps[1] < 0.98 * steps[0]
    assert steps[1] < 214.6  # reference figure, with two extra chunks


def test_vocabulary_passes_account_for_a_slow_boundary() -> None:
    """With equal messages, the step time would be 148.05."""
    plain = make("1f1b", 8, 24)
    extra_us = tuple(3.0 if boundary == 2 else 0.0 for boundary in range(7))
    costs = replace(costs_of(plain), more_send_us=extra_us)
    assert simulate(share_vocabulary(plain, costs, 2.0), costs).makespan < 120


def test_logits_of_next_microbatch_precede_head_weight_gradient() -> None:
    plain = make("v-zb", 4, 6)
    shared = share_vocabulary(plain, costs_of(plain))
    for row in shared.order:
        for work in row:
            if work.kind is HEAD_WEIGHT and work.microbatch < 5:
                next_logits = work._replace(kind=LOGITS, microbatch=work.microbatch + 1)
                assert row.index(next_logits) < row.index(work)


def test_1f1b_runs_next_forward_before_a_late_gradient() -> None:
    """Otherwise each microbatch of the last device waits for all devices: 72.5."""
    plain = make("1f1b", 4, 16)
    costs = costs_of(plain)
    shared = share_vocabulary(plain, costs, additional_memory("1f1b", costs))
    assert simulate(shared, costs).makespan < 67


def test_different_collective_orders_are_rejected() -> None:
    plain = make("1f1b", 4, 6)
    shared = share_vocabulary(plain, costs_of(plain))
    swapped = {"S2.2": "J2.0", "J2.0": "S2.2"}
    csv = re.sub(r"S2\.2|J2\.0", lambda match: swapped[match[0]], shared.to_csv())
    wrong = Schedule.from_csv(csv, shared.placement)
    verify(wrong)  # no pass reads the late result
    for kernels in (False, True):
        with pytest.raises(ScheduleError, match=r"device 0 waits in [JS]\d\.\d for"):
            lower(wrong, kernels=kernels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.replace("S2.1,", ""), "T2.1 on device 2 reads S2.1, which no device runs"),
        (lambda row: row.replace("I2.1,", ""), "I of microbatch 1 runs no times on device 2; a"),
        (lambda row: row.replace("C7.1,", ""), "reads C7.1, which no device runs"),
        (lambda row: row.replace("E0.1,", ""), "E of microbatch 1 runs no times on device 0"),
        (lambda row: row.replace("C7.1,", "C0.1,"), "only the last stage has a C"),
        (lambda row: row.replace("T2.1", "T5.1"), "reads S5.1, which no device runs"),
        (lambda row: row.replace("J2.1", "J2.1,J5.1"), "J of microbatch 1 runs 2 times"),
        # Logits without any lookup.
        (
            lambda row: re.sub(r"[IEJ]\d\.\d,?", "", row),
            "I of microbatch 0 runs no times on device 0",
        ),
    ],
)
def test_missing_or_misplaced_vocabulary_pass_is_rejected(change: object, message: str) -> None:
    plain = make("v-half", 4, 6)
    shared = share_vocabulary(plain, costs_of(plain))
    assert callable(change)
    wrong = Schedule.from_csv(change(shared.to_csv()), shared.placement)
    with pytest.raises(ScheduleError) as error:
        verify(wrong)
    assert message in str(error.value)


def test_vocabulary_is_shared_only_once() -> None:
    plain = make("v-half", 4, 6)
    costs = costs_of(plain)
    with pytest.raises(ScheduleError, match="v-half has passes of a shared vocabulary already"):
        share_vocabulary(share_vocabulary(plain, costs), costs)


def test_costs_distribute_embedding_and_head() -> None:
    head, embedding = StageCosts.of(8, 6, 4, 100, 50), StageCosts.of(4, 2, 2, 0, 0)
    bare = Costs.uniform(2, 4)
    costs = shared_costs(bare, embedding, head, 2, 0.25, 7)
    assert without_shared(costs) == bare
    times = [costs.time_us(kind, 0) for kind in VOCABULARY]
    assert times == [2, 0.25, 7, 0.25, 2, 2]
    assert costs.changes(LOGITS) == ((7,) * 4, [0] * 4)
    assert costs.changes(HEAD_WEIGHT)[1] == [-7] * 4


def vocabulary_request(
    limit: float, logits: float = 0.25, steps: int = 10_000, **options: Any
) -> PlanRequest:
    """Return a vocabulary-parallel request on 4 devices, with costs in chunk passes."""
    pieces = Pieces.estimated(HEAD, 2.0, (1, 1.15, 0.85, 0.05))
    costs = shared_pieces(pieces, 4, 0.1, logits).costs((2,) * 8)
    return PlanRequest(AUTO, 4, 12, costs, limit=limit, steps=steps, **options)


def test_shared_costs_give_a_vocabulary_parallel_plan() -> None:
    """The plan and all baselines share the vocabulary within the limit, logits included."""
    request = vocabulary_request(9.0)
    result = plan_request(request)
    verify(result.schedule)
    verify(result.schedule, result.limits, result.costs)
    lower(result.schedule, kernels=True)
    assert max(result.plan.peak) <= 9 + 1e-9
    evaluated = [
        candidate
        for candidate in compare_baselines(request, result)
        if isinstance(candidate, EvaluatedSchedule)
    ]
    assert {"v-half", "1f1b"} <= {candidate.schedule.name for candidate in evaluated}
    assert all(
        is_shared(candidate.schedule) and not candidate.is_megatrons for candidate in evaluated
    )
    inside = [
        candidate.timeline.makespan
        for candidate in evaluated
        if fits(candidate.peak, result.limits)
    ]
    assert result.plan.value <= min(inside)
    # Embedding and head are distributed over all devices, each with two stages.
    ends = sum(
        result.costs.extra_amounts[time_us][0] for time_us in (LOGITS.time, HEAD_WEIGHT.time)
    )
    assert result.plan.value >= result.plan.lower_bound > 12 * (2 * 3 + ends)
    assert result.searched_bound >= 12 * (2 * 3 + ends)


def test_limit_includes_logits() -> None:
    with pytest.raises(LimitError) as error:
        plan_request(vocabulary_request(2.25))
    # The current microbatch and the next one.
    assert error.value.required == pytest.approx(2 + 2 * 0.25)
    assert plan_request(vocabulary_request(error.value.min_limit)).plan.peak


def test_named_schedule_follows_the_costs() -> None:
    request = replace(vocabulary_request(9.0), name="v-half")
    result = plan_request(request)
    assert result.schedule.name == "v-half"
    verify(result.schedule)
    assert not is_shared(plan_request(replace(request, costs=None)).schedule)


def test_vocabulary_share_is_independent_of_stage_count() -> None:
    costs = vocabulary_request(9.0).costs
    coarse, finer = regroup(costs, 4, "a plan"), recut(costs, 16, 4, "a plan", 16)
    for amount, (value, *_) in costs.extra_amounts.items():
        assert coarse.extra_amounts[amount] == (value,) * 4
        assert finer.extra_amounts[amount] == (value,) * 16
    assert coarse.forward_us == tuple(2 * forward_us for forward_us in costs.forward_us[:4])
    timelines = [
        simulate(share_vocabulary(make(name, 4, 8), stage_costs), stage_costs)
        for name, stage_costs in (("v-half", costs), ("zb-h1", coarse))
    ]
    assert sum(timelines[0].work) == pytest.approx(sum(timelines[1].work))


def test_prediction_heads_are_shared_but_their_layers_are_not() -> None:
    pieces = Pieces.estimated(HEAD, 2.0)
    unshared = pieces.predicting(1, 0.25)
    assert unshared.last[Kind.F.time] == pytest.approx(0.5 * (2 * HEAD + 1.25))
    assert unshared.last[Kind.F.allocated] == pieces.layer[Kind.F.allocated]
    shared = shared_pieces(pieces, 4, 0.1, 0.0, 1).predicting(1, 0.25)
    assert shared.last[Kind.F.time] == pytest.approx(0.5 * 1.25)
    assert shared.of_device[HEAD_WEIGHT.time] == pytest.approx(0.5 * 2 * HEAD / 4)


@pytest.mark.parametrize("placement", [v_shape(4), linear(4), looping(4, 2), (0, 3, 1, 2)])
def test_evaluation_supports_vocabulary_parallelism(placement: tuple[int, ...]) -> None:
    shared = share_forwards(forward_wave(placement, 4, 3))
    first, *other_rows = collectives(shared)
    assert all(row == first for row in other_rows)
    assert sorted(first) == sorted((kind, m) for kind in (LOOKUP, LOGITS) for m in range(3))
    for row in shared.order:
        assert row == tuple(dict.fromkeys(row))
    lower(shared)
    assert deadlocks_under_device_sync(lower(shared, kernels=True)) == {}


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_vocabulary_parallelism_with_overlap_and_offload(overlapped: bool, copies: bool) -> None:
    """Passes on other resources delay no collective, and overlapped passes remain pairs."""
    plain = make("dualpipev", 4, 12) if overlapped else make("v-zb", 4, 12)
    stage_costs = costs_of(plain)
    if copies:
        stage_costs = with_copies(stage_costs, 1.0)
        sizes = 4, 12, (5.0,) * 4
        bare = without_shared(stage_costs)
        plain = plan(bare, *sizes, trades=True, steps=20_000).schedule
        assert COPY_OUT in plain.kinds
    shared = share_vocabulary(plain, stage_costs)
    verify(shared, costs=stage_costs)
    assert shared.overlapped == plain.overlapped
    assert shared.overlapped_pairs() == plain.overlapped_pairs()
    assert {kind for kind in shared.kinds if not kind.of} == plain.kinds
    timeline = simulate(shared, stage_costs)
    assert deadlocks_under_device_sync(lower(shared, timeline, kernels=True)) == {}


def test_vocabulary_parallel_plan_with_offload_is_not_slower() -> None:
    pieces = Pieces.estimated(HEAD, 2.0, (1, 1.15, 0.85, 0.05))
    costs = shared_pieces(pieces, 4, 0.1, 0.25).costs((2,) * 8)
    request = PlanRequest(AUTO, 4, 12, limit=4.5, steps=10_000)
    values = []
    for stage_costs in (costs, with_copies(costs, 1.0)):
        result = plan_request(replace(request, costs=stage_costs))
        verify(result.schedule, result.limits, result.costs)
        lower(result.schedule, kernels=True)
        assert is_shared(result.schedule)
        assert result.plan.lower_bound <= result.plan.value
        values.append(result.plan.value)
    assert values[1] < 0.97 * values[0]
