"""The peak of all that a device needs: its state, what is held, and what passes work with."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from megatron_vshape import Costs, Schedule, make, peak_held, verify
from megatron_vshape.core.check.simulate import held_curve
from megatron_vshape.core.model.costs import Piece, regroup
from megatron_vshape.core.model.kinds import LOGITS, Kind, ScheduleError
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.model.passes import Pass

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


def test_a_whole_backward_may_work_with_less_than_its_parts() -> None:
    one = row("F0.0 F1.0 F2.0 F3.0 BW3.0 BW2.0 BW1.0 BW0.0")
    told = costs(whole_work_bytes=(1.0,) * STAGES, forward_work_bytes=(0.0,) * STAGES)
    assert peak_held(one, told) == (sum(STATE) + 3 + 33,)


def test_both_passes_of_a_joint_one_work_at_once() -> None:
    made = make("dualpipev", 2, 6)
    alone = costs().of_activations()
    added = [a - b for a, b in zip(peak_held(made, costs()), peak_held(made, alone), strict=True)]
    joint = made.beside()
    assert joint
    for device, passes in enumerate(made.order):
        curves = [held_curve(made, each, device) for each in (costs(), alone)]
        fixed = costs().fixed_bytes(made.placement, 2)[device]
        assert added[device] >= fixed
        for at, (before, work) in enumerate(pairwise(passes), start=1):
            if joint.get(before) == work:
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


def test_a_file_keeps_them_and_settings_of_recompute_have_their_own() -> None:
    full = {"backward_work_bytes": (6.0,) * STAGES, "held_after_forward_bytes": (1.0,) * STAGES}
    given = replace(costs(), recompute=(("full", costs().with_prices("full", full)),))
    read = Costs.from_json(given.to_json())
    assert read == given
    assert read.at(("full", "none", "none", "full")).works(Kind.B) == (6.0, 2.0, 2.0, 6.0)
    with pytest.raises(ScheduleError, match="device_bytes holds 'x', which is not a number"):
        Costs.from_json(given.to_json().replace('"device_bytes": 3.0', '"device_bytes": "x"'))


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
    assert not plain.knows_all
    assert plain.fixed_bytes((0,) * STAGES, 1) == (0,)
    assert plain.works(Kind.BW) == plain.works(LOGITS) == (0,) * STAGES
    assert plain == Costs(*((1.0,) * STAGES,) * 3, 0.0, (8.0,) * STAGES, (7.0,) * STAGES)


def test_a_limit_is_of_all_of_it() -> None:
    made = make("1f1b", STAGES, 8)
    peaks = peak_held(made, costs())
    verify(made, peaks, costs())
    with pytest.raises(ScheduleError, match="device 0 holds"):
        verify(made, (peaks[0] - 0.01, *peaks[1:]), costs())
