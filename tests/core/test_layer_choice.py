"""Layers that are chosen together with the order."""

import random
from dataclasses import replace

import pytest

from megatron_vshape.core.ask import AUTO, Question, best_order
from megatron_vshape.core.check.bounds import bound_at, fits
from megatron_vshape.core.check.simulate import peak_held, peak_in_host, simulate
from megatron_vshape.core.check.verify import verify
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
    with pytest.raises(ScheduleError, match="needs the costs of a layer"):
        choose_layers(QUESTION, best_order(QUESTION))


@pytest.mark.parametrize("seed", range(3))
def test_layers_are_chosen_beside_copies(seed: int) -> None:
    """Never slower than balanced ones, within both limits, and no plan is below its bound."""
    luck = random.Random(seed)
    devices, num_layers, microbatches = luck.choice([2, 3]), luck.randint(8, 14), luck.randint(4, 8)
    times = tuple(luck.uniform(0.5, 2) for _ in range(3))
    pieces = Pieces.estimated(luck.uniform(0, 4), num_layers / (2 * devices), (*times, 0.05))
    pieces = pieces.with_copies(luck.uniform(0.3, 2), luck.random() < 0.5)
    limit, in_host = luck.uniform(1.5, 2) * devices, luck.choice([1.0, 2.0, 100.0])
    first = pieces.costs(pieces.balanced(num_layers, looping(devices, 2)))
    sizes = devices, microbatches
    asked = Question(AUTO, *sizes, first, limit=limit, in_host=in_host, steps=3_000)
    asked = replace(asked, layers=(pieces, num_layers))
    answer = best_order(asked)
    found = choose_layers(asked, answer)
    made, own = found.answer.schedule, pieces.costs(found.layers)
    assert (sum(found.layers), found.answer.costs) == (num_layers, own)
    assert found.answer.plan.value <= found.balanced == answer.plan.value
    verify(made, limit, own)
    assert simulate(made, own).makespan == pytest.approx(found.answer.plan.value)
    if own.copies and made.kinds - {"F", "B", "W"}:
        assert fits(peak_in_host(made, own), (in_host,) * devices)
    for placement in (v_shape(devices), looping(devices, 2)):  # of any layers
        layers = [1] * (2 * devices)
        for _ in range(num_layers - len(layers)):
            layers[luck.randrange(len(layers))] += 1
        costs = pieces.costs(layers)
        limits = (limit + 2.0 * max(costs.held_after_forward_bytes),) * devices
        one = Question(
            AUTO, *sizes, costs, limit=limits, placements=(placement,), steps=3_000, chunks=()
        )
        bound = bound_at(costs, placement, microbatches, limits, one.objective)
        assert 0 < bound <= best_order(one).plan.value * (1 + 1e-9)
