"""Sliced microbatches: closed forms of peak and overhead, and the order of slices."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from megatron_vshape.core.check.bounds import LimitError, lower_bound, min_memory
from megatron_vshape.core.check.simulate import _shared_curve, peak_shared
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.placement import Placement, linear, looping, v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.paper import blocks
from megatron_vshape.core.paper.catalogue import JOINT_NAMES, NAMES, make_block
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.job_shop import Codec
from megatron_vshape.core.planner.vocabulary import shared_pieces
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO

SLICES = (1, 2, 3, 4, 8, 16)

PEAKS = {"1f1b": lambda d: d, "v-zb": lambda d: d}
PEAKS |= {"v-half": lambda d: (d + 2) // 2, "v-min": lambda d: (d + 4) // 3}
"""In microbatches of a device's layers, unsliced."""

OVERHEADS = {
    "1f1b": lambda d: 6 * (d - 1),
    "v-zb": lambda d: d - 1,
    "v-half": lambda d: 3 * d - 5 if d == 2 else 3 * d - (4 if d % 2 else 7),
    "v-min": lambda d: 4 * d - (7 if d % 3 == 0 else 5),
}
"""Chunk passes, unsliced."""


def overhead_in_slots(schedule: Schedule) -> float:
    """Return the overhead in slots of a slice."""
    return schedule.slices * simulate(schedule).overhead


def peak_in_slices(schedule: Schedule) -> float:
    """Return the peak in slices of a stage of 2 * devices."""
    return schedule.slices * max(peak_held(schedule))


@pytest.mark.parametrize("name", PEAKS)
def test_peak_and_overhead_match_closed_forms(name: str) -> None:
    """The peak is (P + k - 1) / (k d) of 1F1B's, the overhead that of one microbatch over k.

    V-Min on many devices has up to four more slots of overhead.
    """
    for d in (2, 3, 4, 6, 8, 13):
        for k in SLICES:
            schedule = make(name, d, max(2, math.ceil(3 * d / k)), slices=k)
            verify(schedule)
            assert peak_in_slices(schedule) == pytest.approx(2 * (PEAKS[name](d) + k - 1)), (d, k)
            max_overhead = OVERHEADS[name](d)
            assert (
                overhead_in_slots(schedule)
                <= max_overhead + (4 if name == "v-min" and d > 8 else 0) + 1e-6
            ), (d, k)
            if name in ("1f1b", "v-zb"):
                assert overhead_in_slots(schedule) == pytest.approx(max_overhead), (d, k)


def test_sliced_interleaved_matches_seq1f1b() -> None:
    """The peak is v d + d + k - 2 slices of a stage, overhead (d - 1) / (v k m); k divides d."""
    for d in (2, 4, 8):
        for k in (k for k in SLICES if k > 1 and d % k == 0):
            for v in (2, 3, 4):
                schedule = make("interleaved-1f1b", d, 2 * d, num_chunks=v, slices=k)
                verify(schedule)
                assert peak_in_slices(schedule) == pytest.approx(2 / v * (v * d + d + k - 2)), (
                    d,
                    k,
                    v,
                )
                assert overhead_in_slots(schedule) == pytest.approx(6 * (d - 1) / v), (d, k, v)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_every_schedule_supports_slices(name: str, d: int, m: int, k: int) -> None:
    schedule = make(name, d, m, slices=k)
    verify(schedule)
    assert (schedule.slices, schedule.num_microbatches) == (k, m * k)
    assert peak_in_slices(schedule) <= 2 * d / schedule.num_stages * max(
        make_block(name, d, m, slices=k).peak_bounds()
    )
    lowered = lower(schedule, simulate(schedule), kernels=True).schedule
    verify(lowered)
    assert lowered.slices == k


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(("1f1b", "zb-h2", "1f1b-v", "v-min", "v-half", "v-zb")), st.data())
def test_peak_of_sliced_block_grows_by_one_per_stage_and_slice(
    name: str, data: st.DataObject
) -> None:
    d, k = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 16))
    base = make_block(name, d, 1)
    sliced_block = blocks.sliced(base, k)
    chunks = len(base.placement) // d
    assert max(sliced_block.peaks()) == max(base.peaks()) + chunks * (k - 1)


def test_one_slice_equals_the_unsliced_schedule() -> None:
    for name in NAMES:
        assert make(name, 4, 8, slices=1) == make(name, 4, 8)
    assert "slices" not in make("v-half", 4, 8).to_json()


def test_files_store_slices() -> None:
    schedule = make("v-half", 4, 2, slices=4)
    assert Schedule.from_json(schedule.to_json()) == schedule
    reloaded = Schedule.from_csv(schedule.to_csv(), schedule.placement, "v-half", 4)
    assert reloaded == schedule
    data = json.loads(schedule.to_json()) | {"slices": 3}
    with pytest.raises(ScheduleError, match="slices is 3 and num_microbatches, which counts every"):
        Schedule.from_json(json.dumps(data))


FORWARD = "from the first to the last\n"
BACKWARD = "from the last to the first\n"


@pytest.mark.parametrize(
    ("row", "message", "reason"),
    [
        ("F0.1 F0.0 B0.1 W0.1 B0.0 W0.0", "F0.1 runs before F0.0 on device 0", FORWARD),
        ("F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "B0.0 runs before B0.1 on device 0", BACKWARD),
        ("F0.0 F0.1 BW0.0 BW0.1", "BW0.0 runs before BW0.1 on device 0", BACKWARD),
    ],
)
def test_slices_in_wrong_order_are_rejected(row: str, message: str, reason: str) -> None:
    schedule = make("1f1b", 1, 1, slices=2)
    assert " ".join(map(str, schedule.order[0])) == "F0.0 F0.1 BW0.1 BW0.0"
    with pytest.raises(ScheduleError) as error:
        verify(replace(schedule, order=(tuple(map(Pass.parse, row.split())),)))
    assert str(error.value).startswith(message)
    assert reason in str(error.value)


def test_costs_are_per_unsliced_microbatch() -> None:
    costs = Costs.uniform(4, 8, 1.0, 1.15, 0.85, send=0.05, host=0.01)
    slice_costs = costs.sliced(4)
    assert slice_costs.forward_us == (0.25,) * 8
    assert (slice_costs.send_us, slice_costs.host_us) == (0.0125, 0.01)
    schedule = make("v-zb", 4, 4, slices=4)
    timeline = simulate(schedule, costs)
    assert timeline.busy == pytest.approx(4 * 2 * (3 + 4 * 3 * 0.01))
    assert peak_held(schedule, costs) == peak_held(schedule)


@pytest.mark.parametrize("name", JOINT_NAMES)
def test_overlapped_passes_reject_slices(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"{name} overlaps forward and backward"):
        make(name, 2, 4, slices=2)


def test_shared_memory_of_slices_lasts_from_first_f_to_last_b() -> None:
    """Includes the part of each slice in the costs, and gradients retained until the last B."""
    schedule = make("1f1b", 1, 1, slices=4)
    costs = Costs.uniform(1, 1)
    assert peak_held(schedule, costs) == (2.0,)
    # After F of the first slice, 3/4 more than its part is allocated; then nothing more.
    # After the first B, its part of the shared memory and 3/4 of the retained gradients.
    assert peak_shared(schedule, costs, {0: (8.0, 0.0)}) == (0.5 + 6.0,)
    assert peak_shared(schedule, costs, {0: (0.0, 8.0)}) == (1.5 + 6.0,)
    assert peak_shared(schedule, costs, {}) == (2.0,)
    # One buffer for the gradients of all slices except the last, until B of the first slice.
    owed_bytes = list(_shared_curve(schedule.order[0], schedule, {0: (0.0, 8.0)}))
    assert owed_bytes == [0.0] * 5 + [6.0] * 3


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
    ("placement", "microbatches", "slices", "limit", "cost", "optimum"),
    [
        (linear(2), 2, 2, 4.0, (1, 1, 1, 0.0), 13.0),
        (linear(2), 1, 3, 4.0, (1, 2, 1, 0.1), 10 + 0.2 / 3),
        (v_shape(2), 1, 3, 2.0, (1, 1, 1, 0.0), 7.0),
        (v_shape(2), 2, 2, 2.0, (1, 1.15, 0.85, 0.05), 14.775),
        (v_shape(2), 2, 2, 3.0, (1, 1, 1, 0.0), 12.5),
        (linear(3), 2, 2, 2.0, (1, 1, 1, 0.0), 20.0),
        (v_shape(2), 3, 1, 4.0, (1, 1.15, 0.85, 0.05), 19.3),
    ],
)
def test_bounds_and_plans_match_the_optimum(
    placement: Placement,
    microbatches: int,
    slices: int,
    limit: float,
    cost: tuple[float, float, float, float],
    optimum: float,
) -> None:
    """The optima were proved by OR-tools with tests/exact.py, which commit 7a001fe1 still has."""
    devices = max(placement) + 1
    costs = Costs.uniform(devices, len(placement), *cost)
    result = plan(costs, devices, microbatches, limit, placements=[placement], slices=slices)
    assert result.value == pytest.approx(optimum, rel=1e-6)
    assert result.lower_bound <= optimum * (1 + 1e-9)
    verify(result.schedule, limit, costs)


@pytest.mark.parametrize(
    ("microbatches", "slices", "share", "cost", "max_percent"),
    [
        (8, 8, 0.2344, (1, 1, 1), 1.83),
        (4, 8, 0.2344, (1, 1.15, 0.85), 9.5),
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
