"""Sliced microbatches: closed forms of peak and overhead, and the order of slices."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_vshape.core.check.simulate import _shared_curve, peak_held, peak_shared, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper import blocks
from megatron_vshape.core.paper.catalogue import JOINT_NAMES, NAMES, make, make_block
from megatron_vshape.core.program.lowering import lower

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
    for d in (2, 3, 4, 6, 8, 13, 16):
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


@pytest.mark.parametrize(
    ("name", "slices", "expected"),
    [
        ("1f1b", 1, (1.0, 175, 87.5, 29.2)),
        ("1f1b", 4, (0.344, 43.8, 21.9, 7.3)),
        ("1f1b", 8, (0.234, 21.9, 10.9, 3.6)),
        ("interleaved-1f1b", 4, (0.406, 21.9, 10.9, 3.6)),
        ("interleaved-1f1b", 8, (0.234, 10.9, 5.5, 1.8)),
        ("v-zb", 1, (1.0, 62.5, 14.6, 4.9)),
        ("v-zb", 2, (0.563, 18.8, 7.3, 2.4)),
        ("v-zb", 4, (0.344, 7.3, 3.6, 1.2)),
        ("v-zb", 8, (0.234, 3.6, 1.8, 0.6)),
        ("v-half", 4, (0.25, 17.7, 8.9, 3.0)),
        ("v-half", 8, (0.188, 8.9, 4.4, 1.5)),
        ("v-min", 8, (0.172, 13.5, 6.8, 2.3)),
    ],
)
def test_table_of_eight_devices(
    name: str, slices: int, expected: tuple[float, float, float, float]
) -> None:
    """Peak relative to 1F1B, and percent above the compute for 4, 8 and 24 microbatches."""
    schedules = [make(name, 8, m, slices=slices) for m in (4, 8, 24)]
    times = [simulate(schedule) for schedule in schedules]
    shares = [100 * timeline.overhead / timeline.busy for timeline in times]
    assert [max(peak_held(schedules[-1])) / 16, *shares] == pytest.approx(list(expected), abs=0.051)


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


@pytest.mark.parametrize(
    ("kind", "message", "reason"),
    [
        (Kind.F, "F0.1 runs before F0.0 on device 0", "from the first to the last\n"),
        (Kind.B, "B0.0 runs before B0.1 on device 0", "from the last to the first\n"),
    ],
)
def test_slices_in_wrong_order_are_rejected(kind: Kind, message: str, reason: str) -> None:
    schedule = make("v-zb", 2, 2, slices=2)
    kinds = [kind] if kind is Kind.F else [kind, Kind.W]  # otherwise W precedes its B
    swap = {
        Pass(pass_kind, 0, slice_index): Pass(pass_kind, 0, 1 - slice_index)
        for pass_kind in kinds
        for slice_index in range(2)
    }
    order = tuple(tuple(swap.get(work, work) for work in row) for row in schedule.order)
    with pytest.raises(ScheduleError) as error:
        verify(replace(schedule, order=order))
    assert str(error.value).startswith(message)
    assert reason in str(error.value)


def test_full_backwards_of_slices_are_ordered() -> None:
    schedule = make("1f1b", 1, 1, slices=2)
    assert [str(work) for work in schedule.order[0]] == ["F0.0", "F0.1", "BW0.1", "BW0.0"]
    order = (tuple(map(Pass.parse, ("F0.0", "F0.1", "BW0.0", "BW0.1"))),)
    with pytest.raises(
        ScheduleError, match="BW0.0 runs before BW0.1 on device 0, .* the last to the first"
    ):
        verify(replace(schedule, order=order))


def test_replays_agree_on_slices(replay) -> None:
    for name in ("1f1b", "interleaved-1f1b", "v-min", "v-half", "v-zb"):
        schedule = make(name, 4, 4, slices=4)
        costs = Costs.uniform(4, schedule.num_stages, 1, 1.15, 0.85, 0.05)
        timeline = simulate(schedule, costs)
        simulated = timeline.makespan, timeline.span, max(peak_held(schedule, costs))
        for figures in replay(schedule, costs.sliced(4)):
            replayed = (figures[key] for key in ("makespan", "span", "peak"))
            assert simulated == pytest.approx(tuple(replayed), abs=1e-6)


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
