"""Overlapped passes: published schedules, and pairs of adjacent passes in any schedule.

Reference figures: equal stages, F = B = 1 per chunk. A share of each pass is a collective, hidden
in overlapped passes; W has the rest of F. Another program simulated them.
"""

import pytest
from joint_replay import replay

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs, with_copies
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import JOINT_NAMES, NAMES, make, make_block
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.search import plan
from megatron_vshape.core.program.lowering import lower, pair_adjacent
from megatron_vshape.core.request import PlanRequest


def costs_with_all_to_all(devices: int, share: float, chunks: int = 2) -> Costs:
    """Return the costs of the model in the module's docstring."""
    stages, size = chunks * devices, 2 / chunks
    collective_us = (share * size,) * stages
    equal = Costs.uniform(devices, stages, 1 - share, 1 - share, 1 - share)
    return equal.having(forward_exchange_us=collective_us, backward_exchange_us=collective_us)


def replayed_makespan(schedule: Schedule, costs: Costs) -> float:
    """Return the step time of the replay, which shares no code with the simulator."""
    times = replay(schedule, costs)
    assert list(map(len, times)) == list(map(len, schedule.order))
    return max(end for row in times for _, end in row)


@pytest.mark.parametrize(
    ("microbatches", "share", "published", "interleaved"),
    [
        (32, 0.3, 156.5, (191.7, 158.7, 182.2, 151.3)),
        (64, 0.3, 290.9, (364.5, 293.1, 355.1, 285.8)),
        (32, 0.4, 140.0, (184.6, 140.6, 175.5, 134.3)),
        (64, 0.4, 255.2, (351.0, 255.8, 341.9, 249.5)),
    ],
)
def test_published_schedules_match_the_reference(
    microbatches: int,
    share: float,
    published: float,
    interleaved: tuple[float, float, float, float],
) -> None:
    costs = costs_with_all_to_all(8, share)
    schedule = make("dualpipev", 8, microbatches)
    verify(schedule, max_held=17)
    assert simulate(schedule, costs).makespan == pytest.approx(published, abs=0.051)
    assert replayed_makespan(schedule, costs) == pytest.approx(published, abs=0.051)
    makespans = [
        replayed_makespan(
            make(name, 8, microbatches, num_chunks=chunks),
            costs_with_all_to_all(8, share, chunks=chunks),
        )
        for chunks in (2, 4)
        for name in ("interleaved-1f1b", "overlapped-interleaved-1f1b")
    ]
    assert makespans == pytest.approx(interleaved, abs=0.051)


def test_megatrons_overlap_has_one_more_warm_up_pass() -> None:
    for chunks, peak in ((2, 24.0), (4, 20.0)):
        schedule = make("overlapped-interleaved-1f1b", 8, 32, num_chunks=chunks)
        assert max(peak_held(schedule)) == peak
        for device, row in enumerate(schedule.order):
            warm_up = next(index for index, work in enumerate(row) if work.kind is not Kind.F) - 1
            assert warm_up == 2 * (7 - device) + (chunks - 1) * 8 + 1


@pytest.mark.parametrize(("d", "m"), [(1, 2), (2, 4), (3, 9), (5, 12), (8, 16)])
def test_dualpipev_is_valid_and_within_its_block_memory(d: int, m: int) -> None:
    schedule = make("dualpipev", d, m)
    verify(schedule, max_held=2 * d + 1)
    assert max(make_block("dualpipev", d, m).peaks()) == 2 * d + 1
    assert schedule.placement == v_shape(d)


def test_dualpipev_rejects_few_microbatches() -> None:
    with pytest.raises(ScheduleError, match="at least 2 x ranks microbatches, 8 on 4, not 7"):
        make("dualpipev", 4, 7)


def test_plan_of_a_joint_name_runs_passes_separately() -> None:
    assert not set(JOINT_NAMES) & set(NAMES)
    for name in JOINT_NAMES:
        assert not plan_request(PlanRequest(name, 4, 8)).schedule.overlapped
        assert make(name, 4, 8).overlapped


def paired_and_checked(schedule: Schedule, costs: Costs | None) -> Schedule:
    """Return the schedule with adjacent passes paired, verified with both kinds of messages."""
    paired = pair_adjacent(schedule, costs)
    assert paired.order == schedule.order
    verify(paired)
    timeline = simulate(paired, costs)
    for kernels in (False, True):
        lower(paired, timeline, kernels=kernels)
    assert max(peak_held(paired)) == max(peak_held(schedule))
    return paired


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 3), (4, 12)])
def test_adjacent_passes_of_any_schedule_are_paired(
    name: str, devices: int, microbatches: int
) -> None:
    schedule = make(name, devices, microbatches)
    chunks = schedule.num_chunks
    paired_and_checked(schedule, None)
    costs = costs_with_all_to_all(devices, 0.35, chunks)
    paired = paired_and_checked(schedule, costs)
    assert simulate(paired, costs).makespan <= simulate(schedule, costs).makespan
    assert replayed_makespan(paired, costs) == pytest.approx(simulate(paired, costs).makespan)


@pytest.mark.parametrize(("name", "share"), [("interleaved-1f1b", 0.97), ("v-zb", 0.99)])
def test_pairs_hide_collectives(name: str, share: float) -> None:
    schedule, costs = make(name, 4, 16), costs_with_all_to_all(4, 0.35)
    paired = pair_adjacent(schedule, costs)
    assert len(paired.overlapped) > 16
    assert replayed_makespan(paired, costs) < share * replayed_makespan(schedule, costs)


def test_plan_may_have_pairs() -> None:
    costs = costs_with_all_to_all(4, 0.35)
    schedule = plan(costs, 4, 16, 8.0, placements=[v_shape(4)], steps=5000).schedule
    paired_and_checked(schedule, costs)


def test_pairs_that_cost_more_than_they_hide_are_skipped() -> None:
    for name in ("1f1b-v", "zb-h1"):  # pairs would make them 81% and 9% slower
        assert not pair_adjacent(make(name, 8, 24)).overlapped
    assert pair_adjacent(make("v-zb", 8, 24)).overlapped


def test_pairing_keeps_published_pairs_and_offload_passes() -> None:
    for name in JOINT_NAMES:
        schedule = make(name, 4, 12)
        assert pair_adjacent(schedule) == schedule
    sliced = with_copies(Costs.uniform(4, 8), 1.0)
    copied = plan(sliced, 4, 12, 4.0, trades=True, steps=2000).schedule
    assert copied.copies
    assert pair_adjacent(copied, sliced) == copied


def test_pair_never_waits_for_itself() -> None:
    """In 1F1B, F of the last stage and B of the same microbatch are adjacent."""
    paired = pair_adjacent(make("1f1b", 4, 8))
    assert all(
        work.microbatch != backward.microbatch
        for work, backward in paired.overlapped_pairs().items()
    )
