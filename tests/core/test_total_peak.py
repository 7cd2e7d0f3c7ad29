"""The total peak of a device: states, activations and workspace."""

from dataclasses import replace
from itertools import pairwise
from operator import sub
from typing import Any

import pytest
from schedule_replay import peaks
from shared_costs import shared_costs

from megatron_vshape import Costs, Schedule, make, peak_held, plan, simulate, verify
from megatron_vshape.core.check.bounds import (
    LimitError,
    bound_at,
    fits,
    limits_by_device,
    min_memory,
)
from megatron_vshape.core.check.simulate import held_curve
from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.kinds import HEAD_WEIGHT, LOGITS, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.pieces import Pieces, regroup, under_megatron
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.vocabulary import (
    share_vocabulary,
    without_shared,
)
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.view.numbers import held_steps

STAGES = 4
STATE = (50.0, 10.0, 10.0, 30.0)
AMOUNTS = {
    "state_bytes": STATE,
    "forward_work_bytes": (0.25, 0.25, 0.25, 4.0),
    "backward_work_bytes": (2.0,) * STAGES,
    "weight_work_bytes": (0.5,) * STAGES,
}


def make_costs(**overrides: tuple[float, ...]) -> Costs:
    activations = (8.0,) * STAGES, (7.0,) * STAGES
    times = ((1.0,) * STAGES,) * 3
    amounts: dict[str, Any] = AMOUNTS | overrides
    return Costs.of(*times, 0.0, *activations, device_bytes=3.0, **amounts)


def one_device_schedule(text: str) -> Schedule:
    passes = tuple(map(Pass.parse, text.split()))
    return Schedule("row", 1, 1, (0,) * STAGES, (passes,))


def test_memory_is_state_activations_and_workspace() -> None:
    schedule = one_device_schedule("F0.0 F1.0 F2.0 F3.0 B3.0 W3.0 B2.0 BW1.0 W2.0 BW0.0")
    fixed = sum(STATE) + 3
    above = [8.25, 16.25, 24.25, 36, 34, 31.5, 26, 25, 15.5, 10]
    assert held_curve(schedule, make_costs(), 0) == [fixed + activations for activations in above]
    assert peak_held(schedule, make_costs()) == (fixed + 36,)


def test_memory_curve_includes_workspace_of_the_running_pass() -> None:
    steps = held_steps(simulate(make("1f1b", STAGES, 4), make_costs()), make_costs(), 0)
    fixed = STATE[0] + 3
    assert steps[3] == (3.0, fixed + 32.25)  # the fourth F
    assert steps[4] == (4.0, fixed + 32)  # while waiting for its B
    assert steps[5] == (10.0, fixed + 34)


def test_full_backward_may_have_a_smaller_workspace() -> None:
    schedule = one_device_schedule("F0.0 F1.0 F2.0 F3.0 BW3.0 BW2.0 BW1.0 BW0.0")
    work_costs = make_costs(whole_work_bytes=(1.0,) * STAGES, forward_work_bytes=(0.0,) * STAGES)
    assert peak_held(schedule, work_costs) == (sum(STATE) + 3 + 33,)


def test_overlapped_passes_add_their_workspaces() -> None:
    schedule = make("dualpipev", 2, 6)
    activation_costs = make_costs().of_activations()
    added = [
        a - b
        for a, b in zip(
            peak_held(schedule, make_costs()), peak_held(schedule, activation_costs), strict=True
        )
    ]
    overlapped = schedule.overlapped_pairs()
    assert overlapped
    for device, passes in enumerate(schedule.order):
        curves = [
            held_curve(schedule, stage_costs, device)
            for stage_costs in (make_costs(), activation_costs)
        ]
        fixed = make_costs().fixed_bytes(schedule.placement, 2)[device]
        assert added[device] >= fixed
        for index, (previous, work) in enumerate(pairwise(passes), start=1):
            if overlapped.get(previous) == work:
                workspace = (
                    make_costs().workspace(work.kind)[work.stage]
                    + make_costs().workspace(Kind.F)[previous.stage]
                )
                assert curves[0][index] - curves[1][index] == pytest.approx(fixed + workspace)


def test_regrouped_stages_sum_state_and_maximize_workspace() -> None:
    two = regroup(make_costs(), 2, "two")
    assert two.lists()["state_bytes"] == (60.0, 40.0)
    assert two.lists()["forward_work_bytes"] == (0.25, 4.0)
    assert two.workspace(Kind.BW) == (2.0, 2.0)
    assert two.device_bytes == 3.0


def test_slices_divide_everything_except_state() -> None:
    half = make_costs().sliced(2)
    assert half.lists()["state_bytes"] == STATE
    assert half.workspace(Kind.B) == (1.0,) * STAGES


def test_state_moves_with_layers_and_workspace_of_outer_stages_stays() -> None:
    layers = (2, 2, 2, 2)
    pieces = Pieces.of(make_costs(), layers)
    assert pieces.layer[STATE_BYTES] == 5
    assert (pieces.first[STATE_BYTES], pieces.last[STATE_BYTES]) == (40, 20)
    moved = pieces.costs((0, 4, 4, 0))
    assert moved.lists()["state_bytes"] == (40, 20, 20, 20)
    assert moved.lists()["forward_work_bytes"] == (0, 0.25, 0.25, 4)
    assert moved.device_bytes == 3
    assert pieces.costs(layers).lists()["state_bytes"] == STATE


def test_consecutive_pieces_have_the_larger_workspace() -> None:
    first = StageCosts.of(1, 1, 1, 1, 1, state_bytes=2, forward_work_bytes=3)
    second = StageCosts.of(1, 1, 1, 1, 1, state_bytes=5, forward_work_bytes=1)
    assert first.plus(second)[STATE_BYTES] == 7
    assert first.plus(second)[Kind.F.workspace] == first.times(4)[Kind.F.workspace] == 3
    assert first.over(second)[Kind.F.workspace] == 3
    assert second.over(first)[Kind.F.workspace] == first.times(0)[Kind.F.workspace] == 0


def test_limit_applies_to_total_memory() -> None:
    schedule = make("1f1b", STAGES, 8)
    peaks = peak_held(schedule, make_costs())
    verify(schedule, peaks, make_costs())
    with pytest.raises(ScheduleError, match="device 0 holds"):
        verify(schedule, (peaks[0] - 0.01, *peaks[1:]), make_costs())


def measured_costs(num_stages: int, **overrides: Any) -> Costs:
    """Return costs whose last stage needs more workspace than its F retains, as a loss does."""
    amounts_by_stage = {
        "state_bytes": (50.0, *(30.0,) * (num_stages - 2), 45.0),
        "forward_work_bytes": (0.25,) * (num_stages - 1) + (5.0,),
        "backward_work_bytes": (2.0,) * num_stages,
        "weight_work_bytes": (0.5,) * num_stages,
    }
    activations = (8.0,) * (num_stages - 1) + (12.0,)
    times = (1.0,) * num_stages, (1.2,) * num_stages, (0.8,) * num_stages
    amounts: dict[str, Any] = amounts_by_stage | {"device_bytes": 1.0} | overrides
    return Costs.of(*times, 0.05, activations, activations, **amounts)


LIMITS = {"equal": 141.0, "of each": (150.0, 120.0, 120.0, 122.0)}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_replayed_peak_of_plan_is_within_limit(limit: Any) -> None:
    stage_costs = measured_costs(8)
    result = plan(stage_costs, 4, 8, limit, placements=[v_shape(4)], steps=20_000)
    limits = limits_by_device(limit, 4)
    assert result.peak == peak_held(result.schedule, stage_costs)
    assert fits(result.peak, limits)
    assert result.peak == pytest.approx(peaks(result.schedule, stage_costs))
    # A plan that ignores workspace would exceed the limits.
    activation_costs = stage_costs.of_activations()
    activation_limits = tuple(map(sub, limits, stage_costs.fixed_bytes(v_shape(4), 4)))
    activation_plan = plan(
        activation_costs, 4, 8, activation_limits, placements=[v_shape(4)], steps=20_000
    )
    assert not fits(peak_held(activation_plan.schedule, stage_costs), limits)


def test_bound_excludes_memory_of_state() -> None:
    stage_costs, placement, goal = measured_costs(8), v_shape(4), Objective.MAKESPAN
    limits = (140.0, 100.0, 100.0, 115.0)
    activation_limits = tuple(map(sub, limits, stage_costs.fixed_bytes(placement, 4)))
    bound = bound_at(stage_costs, placement, 32, limits, goal)
    assert bound == bound_at(stage_costs.without_state(), placement, 32, activation_limits, goal)
    assert bound > bound_at(stage_costs.without_state(), placement, 32, limits, goal)


def test_error_of_small_limit_names_total_memory() -> None:
    stage_costs, placement = measured_costs(8), v_shape(4)
    min_limits = min_memory(stage_costs, placement, 4)
    assert min_limits[0] == 50 + 45 + 1 + 8 + 12 + 5
    assert min_limits[1] == 60 + 1 + 16 + 2
    with pytest.raises(LimitError) as error:
        plan(stage_costs, 4, 8, 120.0, placements=[placement], steps=1000)
    assert (error.value.device, error.value.required) == (0, min_limits[0])
    result = plan(stage_costs, 4, 4, max(min_limits), placements=[placement], steps=1000)
    assert fits(result.peak, (max(min_limits),) * 4)


def test_vocabulary_parallel_plan_includes_workspace() -> None:
    stage_costs_without_ends = measured_costs(8, forward_work_bytes=(0.25,) * 8)
    embedding, head = (
        StageCosts.of(0, 0, 0, 0, 0, state_bytes=20),
        StageCosts.of(2, 2, 2, 0, 0, state_bytes=20, forward_work_bytes=4, weight_work_bytes=8),
    )
    stage_costs = shared_costs(stage_costs_without_ends, embedding, head, 4, 0.1, 3.0)
    assert stage_costs.device_bytes == 1 + (20 + 20) / 4
    assert (max(stage_costs.workspace(LOGITS)), max(stage_costs.workspace(HEAD_WEIGHT))) == (1, 2)
    schedule = share_vocabulary(make("v-half", 4, 12), stage_costs)
    assert max(peak_held(schedule, stage_costs)) > max(
        peak_held(schedule, stage_costs.of_activations())
    )
    limit = max(peak_held(schedule, stage_costs))
    result = plan_request(PlanRequest(AUTO, 4, 12, stage_costs, limit=limit, steps=5000))
    assert max(peak_held(result.schedule, result.costs)) <= limit * (1 + 1e-9)
    remaining = without_shared(stage_costs).lists()
    assert not any(name.startswith(("logits", "head_weight")) for name in remaining)


def test_dummy_gradient_counts_only_for_megatrons_schedules() -> None:
    """For summed stages, stages split into layers, and additional prediction layers."""
    dummies = (0.0,) * (STAGES - 1) + (6.0,)
    layers = (2,) * STAGES
    dummy_costs = replace(make_costs(dummy_bytes=dummies), layers=layers)
    schedule = make("1f1b", 2, 2)
    package_peaks = peak_held(schedule, regroup(dummy_costs, 2, "1f1b"))
    assert package_peaks == peak_held(schedule, regroup(make_costs(), 2, "1f1b"))
    megatron_peaks = peak_held(schedule, under_megatron(regroup(dummy_costs, 2, "1f1b")))
    assert megatron_peaks == (package_peaks[0], package_peaks[1] + 6)
    predicting = Pieces.of(dummy_costs, layers).predicting(1).costs(layers)
    assert predicting.lists()["dummy_bytes"] == dummies
    assert dummy_costs.sliced(2).lists()["dummy_bytes"] == dummies
    assert under_megatron(make_costs()) == make_costs()
