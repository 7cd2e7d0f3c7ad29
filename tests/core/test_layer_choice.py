"""Layers that are chosen together with the order."""

from dataclasses import replace

import pytest

from megatron_vshape.core.ask import AUTO, Question, best_order
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.layer_choice import choose_layers
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.paper.catalogue import make

REAL = (1.0, 1.15, 0.85, 0.05)
LAYERS = 15
PIECES = Pieces.estimated(2.0, LAYERS / 6, REAL)
QUESTION = Question(
    AUTO, 3, 6, PIECES.costs(PIECES.balanced(LAYERS, looping(3, 2))), limit=5.0, steps=20_000
)
ASKED = replace(QUESTION, layers=(PIECES, LAYERS))


def test_other_layers_are_never_slower_and_fit() -> None:
    answer = best_order(ASKED)
    found = choose_layers(ASKED, answer)
    assert sum(found.layers) == LAYERS
    assert min(found.layers[1:-1]) >= 1
    assert found.answer.schedule.placement == answer.schedule.placement
    own = PIECES.costs(found.layers)
    assert found.answer.costs == own
    timeline = simulate(found.answer.schedule, own)
    assert timeline.makespan == pytest.approx(found.answer.plan.value)
    assert max(peak_held(found.answer.schedule, own)) <= 5.0 * (1 + 1e-9)
    assert found.answer.plan.value <= answer.plan.value == found.balanced
    assert found.answer.plan.lower_bound <= found.answer.plan.value
    assert choose_layers(ASKED, answer) == found  # on every rank the same


def test_layers_that_do_not_balance_the_work_may_let_the_order_be_faster() -> None:
    found = choose_layers(ASKED, best_order(ASKED))
    assert found.answer.plan.value < found.balanced * 0.995


def test_every_schedule_is_compared_with_its_own_layers_balanced() -> None:
    """The last stage of a V is on device 0, and that of a loop on the last device."""
    answer = best_order(replace(ASKED, limit="1f1b"))
    for each in answer.known:
        placement = each.schedule.placement
        assert each.costs.layers == PIECES.balanced(LAYERS, placement)
    costs = ASKED.costs_of(v_shape(3), "v-half")
    assert costs.layers == PIECES.balanced(LAYERS, v_shape(3)) != costs.layers[::-1]
    published = simulate(make("v-half", 3, 6), costs).makespan
    if max(peak_held(make("v-half", 3, 6), costs)) <= max(answer.limits):
        assert answer.plan.value <= published * (1 + 1e-9)


def test_what_layers_cost_must_be_said() -> None:
    with pytest.raises(ScheduleError, match="must say what they cost"):
        choose_layers(QUESTION, best_order(QUESTION))
