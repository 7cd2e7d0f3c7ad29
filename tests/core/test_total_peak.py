"""The peak of all that a device needs: its state, what is held, and what passes work with."""

from dataclasses import replace
from itertools import pairwise
from operator import sub
from typing import Any

import pytest
from shared_costs import shared_costs

from megatron_vshape import Costs, Schedule, make, peak_held, plan, simulate, verify
from megatron_vshape.core.check.bounds import (
    LimitError,
    bound_at,
    each_limit,
    fits,
    least_memory,
)
from megatron_vshape.core.check.simulate import held_curve
from megatron_vshape.core.model.kinds import HEAD_WEIGHT, LOGITS, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.pieces import Piece, Pieces, regroup, under_megatron
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.vocabulary import (
    share_vocabulary,
    without_shared,
)
from megatron_vshape.core.request import AUTO, PlanRequest
from megatron_vshape.view.numbers import held_steps

STAGES = 4
STATE = (50.0, 10.0, 10.0, 30.0)
AMOUNTS = {
    "state_bytes": STATE,
    "forward_work_bytes": (0.25, 0.25, 0.25, 4.0),
    "backward_work_bytes": (2.0,) * STAGES,
    "weight_work_bytes": (0.5,) * STAGES,
}


def costs(**more: tuple[float, ...]) -> Costs:
    held = (8.0,) * STAGES, (7.0,) * STAGES
    times = ((1.0,) * STAGES,) * 3
    own: dict[str, Any] = AMOUNTS | more
    return Costs(*times, 0.0, *held, device_bytes=3.0, **own)


def row(text: str) -> Schedule:
    passes = tuple(map(Pass.parse, text.split()))
    return Schedule("row", 1, 1, (0,) * STAGES, (passes,))


def test_a_device_holds_its_state_what_passes_keep_and_what_the_running_one_works_with() -> None:
    one = row("F0.0 F1.0 F2.0 F3.0 B3.0 W3.0 B2.0 BW1.0 W2.0 BW0.0")
    fixed = sum(STATE) + 3
    above = [8.25, 16.25, 24.25, 36, 34, 31.5, 26, 25, 15.5, 10]
    assert held_curve(one, costs(), 0) == [fixed + each for each in above]
    assert peak_held(one, costs()) == (fixed + 36,)


def test_a_picture_shows_what_a_pass_works_with_while_it_runs_alone() -> None:
    steps = held_steps(simulate(make("1f1b", STAGES, 4), costs()), costs(), 0)
    fixed = STATE[0] + 3
    assert steps[3] == (3.0, fixed + 32.25)  # the fourth F
    assert steps[4] == (4.0, fixed + 32)  # waiting for its B
    assert steps[5] == (10.0, fixed + 34)


def test_a_whole_backward_may_work_with_less_than_its_parts() -> None:
    one = row("F0.0 F1.0 F2.0 F3.0 BW3.0 BW2.0 BW1.0 BW0.0")
    told = costs(whole_work_bytes=(1.0,) * STAGES, forward_work_bytes=(0.0,) * STAGES)
    assert peak_held(one, told) == (sum(STATE) + 3 + 33,)


def test_both_passes_of_a_joint_one_work_at_once() -> None:
    made = make("dualpipev", 2, 6)
    alone = costs().of_activations()
    added = [a - b for a, b in zip(peak_held(made, costs()), peak_held(made, alone), strict=True)]
    overlapped = made.overlapped_pairs()
    assert overlapped
    for device, passes in enumerate(made.order):
        curves = [held_curve(made, each, device) for each in (costs(), alone)]
        fixed = costs().fixed_bytes(made.placement, 2)[device]
        assert added[device] >= fixed
        for at, (before, work) in enumerate(pairwise(passes), start=1):
            if overlapped.get(before) == work:
                both = costs().works(work.kind)[work.stage] + costs().works(Kind.F)[before.stage]
                assert curves[0][at] - curves[1][at] == pytest.approx(fixed + both)


def test_regrouped_stages_add_up_their_states_and_work_with_the_most_of_theirs() -> None:
    two = regroup(costs(), 2, "two")
    assert two.lists()["state_bytes"] == (60.0, 40.0)
    assert two.lists()["forward_work_bytes"] == (0.25, 4.0)
    assert two.works(Kind.BW) == (2.0, 2.0)
    assert two.device_bytes == 3.0


def test_slices_share_all_but_the_state() -> None:
    half = costs().sliced(2)
    assert half.lists()["state_bytes"] == STATE
    assert half.works(Kind.B) == (1.0,) * STAGES


def test_a_file_keeps_them() -> None:
    text = costs().to_json()
    assert Costs.from_json(text) == costs()
    with pytest.raises(ScheduleError, match="device_bytes holds 'x', which is not a number"):
        Costs.from_json(text.replace('"device_bytes": 3.0', '"device_bytes": "x"'))


def test_layers_that_move_take_their_state_along_and_the_ends_keep_what_they_work_with() -> None:
    layers = (2, 2, 2, 2)
    pieces = Pieces.of(costs(), layers)
    assert pieces.layer.state_bytes == 5
    assert (pieces.first.state_bytes, pieces.last.state_bytes) == (40, 20)
    moved = pieces.costs((0, 4, 4, 0))
    assert moved.lists()["state_bytes"] == (40, 20, 20, 20)
    assert moved.lists()["forward_work_bytes"] == (0, 0.25, 0.25, 4)
    assert moved.device_bytes == 3
    assert pieces.costs(layers).lists()["state_bytes"] == STATE


def test_pieces_one_after_the_other_work_with_the_most_of_theirs() -> None:
    one = Piece(1, 1, 1, 1, 1, state_bytes=2, forward_work_bytes=3)
    other = Piece(1, 1, 1, 1, 1, state_bytes=5, forward_work_bytes=1)
    assert one.plus(other).state_bytes == 7
    assert one.plus(other).forward_work_bytes == one.times(4).forward_work_bytes == 3
    assert one.over(other).forward_work_bytes == 3
    assert other.over(one).forward_work_bytes == one.times(0).forward_work_bytes == 0


def test_what_costs_do_not_know_is_nothing() -> None:
    plain = costs().of_activations()
    assert plain.state_bytes is None
    assert plain.fixed_bytes((0,) * STAGES, 1) == (0,)
    assert plain.works(Kind.BW) == plain.works(LOGITS) == (0,) * STAGES
    assert plain == Costs(*((1.0,) * STAGES,) * 3, 0.0, (8.0,) * STAGES, (7.0,) * STAGES)


def test_a_limit_is_of_all_of_it() -> None:
    made = make("1f1b", STAGES, 8)
    peaks = peak_held(made, costs())
    verify(made, peaks, costs())
    with pytest.raises(ScheduleError, match="device 0 holds"):
        verify(made, (peaks[0] - 0.01, *peaks[1:]), costs())


def measured(num_stages: int, **more: Any) -> Costs:
    """Return costs whose last stage works with more than its F keeps, as a loss does."""
    ends = {
        "state_bytes": (50.0, *(30.0,) * (num_stages - 2), 45.0),
        "forward_work_bytes": (0.25,) * (num_stages - 1) + (5.0,),
        "backward_work_bytes": (2.0,) * num_stages,
        "weight_work_bytes": (0.5,) * num_stages,
    }
    held = (8.0,) * (num_stages - 1) + (12.0,)
    times = (1.0,) * num_stages, (1.2,) * num_stages, (0.8,) * num_stages
    own: dict[str, Any] = ends | {"device_bytes": 1.0} | more
    return Costs(*times, 0.05, held, held, **own)


LIMITS = {"equal": 141.0, "of each": (150.0, 120.0, 120.0, 122.0)}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_a_plan_never_needs_more_than_the_limit_by_replay(limit: Any) -> None:
    told = measured(8)
    made = plan(told, 4, 8, limit, placements=[v_shape(4)], steps=20_000)
    limits = each_limit(limit, 4)
    assert made.peak == peak_held(made.schedule, told)
    assert fits(made.peak, limits)
    assert fits(replayed(made.schedule, told), limits)
    # what is blind to what passes work with would need more than that
    blind = told.of_activations()
    left = tuple(map(sub, limits, told.fixed_bytes(v_shape(4), 4)))
    other = plan(blind, 4, 8, left, placements=[v_shape(4)], steps=20_000)
    assert not fits(peak_held(other.schedule, told), limits)


def replayed(schedule: Schedule, told: Costs) -> list[float]:
    """Return the peaks of a schedule of F, B and W, counted pass by pass."""
    lists, peaks = told.lists(), []
    for device, passes in enumerate(schedule.order):
        own = [stage for stage, at in enumerate(schedule.placement) if at == device]
        held: dict[tuple[int, int], float] = {}
        most = []
        for kind, stage, microbatch in passes:
            if kind is Kind.F:
                held[stage, microbatch] = lists["held_after_forward_bytes"][stage]
            works = {"F": "forward", "B": "backward", "W": "weight", "BW": "backward"}[kind]
            most.append(sum(held.values()) + lists[f"{works}_work_bytes"][stage])
            if kind is Kind.B:
                held[stage, microbatch] = lists["held_after_backward_bytes"][stage]
            elif kind is not Kind.F:
                del held[stage, microbatch]
        state = sum(lists["state_bytes"][stage] for stage in own)
        peaks.append(told.device_bytes + state + max(most))
    return peaks


def test_a_bound_counts_on_no_more_memory_than_state_leaves() -> None:
    told, placement, goal = measured(8), v_shape(4), Objective.MAKESPAN
    limits = (140.0, 100.0, 100.0, 115.0)
    left = tuple(map(sub, limits, told.fixed_bytes(placement, 4)))
    bound = bound_at(told, placement, 32, limits, goal)
    assert bound == bound_at(told.without_state(), placement, 32, left, goal)
    assert bound > bound_at(told.without_state(), placement, 32, limits, goal)


def test_what_fits_nowhere_is_told_with_all_that_a_device_needs() -> None:
    told, placement = measured(8), v_shape(4)
    need = least_memory(told, placement, 4)
    assert need[0] == 50 + 45 + 1 + 8 + 12 + 5
    assert need[1] == 60 + 1 + 16 + 2
    with pytest.raises(LimitError) as refused:
        plan(told, 4, 8, 120.0, placements=[placement], steps=1000)
    assert (refused.value.device, refused.value.need) == (0, need[0])
    one = plan(told, 4, 4, max(need), placements=[placement], steps=1000)
    assert fits(one.peak, (max(need),) * 4)


def test_the_default_limit_is_what_the_largest_device_needs_under_1f1b() -> None:
    told = measured(8)
    question = PlanRequest(AUTO, 4, 16, told, steps=20_000, placements=(v_shape(4),))
    alone = peak_held(make("1f1b", 4, 16), regroup(told, 4, "1f1b"))
    made = plan_request(question)
    assert made.limits == (max(alone),) * 4
    assert fits(made.plan.peak, made.limits)


def test_a_shared_vocabulary_is_planned_within_all_that_its_passes_work_with() -> None:
    bare = measured(8, forward_work_bytes=(0.25,) * 8)
    nothing, head = (
        Piece(0, 0, 0, 0, 0, state_bytes=20),
        Piece(2, 2, 2, 0, 0, state_bytes=20, forward_work_bytes=4, weight_work_bytes=8),
    )
    told = shared_costs(bare, nothing, head, 4, 0.1, 3.0)
    assert told.device_bytes == 1 + (20 + 20) / 4
    assert (max(told.works(LOGITS)), max(told.works(HEAD_WEIGHT))) == (1, 2)
    schedule = share_vocabulary(make("v-half", 4, 12), told)
    assert max(peak_held(schedule, told)) > max(peak_held(schedule, told.of_activations()))
    limit = max(peak_held(schedule, told))
    made = plan_request(PlanRequest(AUTO, 4, 12, told, limit=limit, steps=5000))
    assert max(peak_held(made.schedule, made.costs)) <= limit * (1 + 1e-9)
    gone = without_shared(told).lists()
    assert not any(name.startswith(("logits", "head_weight")) for name in gone)


def test_a_proof_counts_what_passes_work_with() -> None:
    pytest.importorskip("ortools")
    from exact import prove

    told, limit, placement = measured(4), 128.0, v_shape(2)
    made = plan(told, 2, 2, limit, placements=[placement], steps=5000)
    proved = prove(made, told, limit, 5)
    assert fits(replayed(proved.schedule, told), (limit,) * 2)
    left = tuple(limit - each for each in told.fixed_bytes(placement, 2))
    blind = plan(told.of_activations(), 2, 2, left, placements=[placement], steps=5000)
    assert proved.lower_bound > blind.value


def test_a_dummy_gradient_is_there_under_megatrons_own_schedules_alone() -> None:
    """Whatever the stages are: added up, taken apart into layers, with further predictions."""
    dummies = (0.0,) * (STAGES - 1) + (6.0,)
    layers = (2,) * STAGES
    known = replace(costs(dummy_bytes=dummies), layers=layers)
    schedule = make("1f1b", 2, 2)
    ours = peak_held(schedule, regroup(known, 2, "1f1b"))
    assert ours == peak_held(schedule, regroup(costs(), 2, "1f1b"))
    theirs = peak_held(schedule, under_megatron(regroup(known, 2, "1f1b")))
    assert theirs == (ours[0], ours[1] + 6)
    predicting = Pieces.of(known, layers).predicting(1).costs(layers)
    assert predicting.lists()["dummy_bytes"] == dummies
    assert known.sliced(2).lists()["dummy_bytes"] == dummies
    assert under_megatron(costs()) == costs()
