"""The layers of every stage, chosen together with the order.

Layers that leave the busiest device least to do are a good beginning and seldom the best: with
unequal stages the order has holes that other layers do not leave. What was tried, at d=8, m=32, 64
layers, a head of 6, 10 chunks, 1/1.15/.85/.05 (balanced: 252.8): moving layers while the order
stays as it is finds nothing in 15 cells of 17, since the order was made for these very stages;
planning anew after each change, with a share of the budget, finds 244 to 252 here by what is drawn,
and up to 3 % elsewhere.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple

from megatron_vshape.core.ask import Planned, Question, best_order
from megatron_vshape.core.check.bounds import LimitError, bound_at
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.planner.lighter import lighter_layers

TRIALS = 24
"""Splits that are planned for."""

TRIALS_OF_TRADES = 8
"""With offloading, which is slower to evaluate."""

TRIAL_STEPS = 100_000
"""The budget of each."""

MOST_MOVED = 3
"""Layers that change their stage from one trial to the next."""

_DRAWN = 50
"""Splits drawn for a trial; where the bounds of all of them are too high, there is none."""

_LESS = 1 - 1e-9
"""A value must be below this share of another to be less."""


class Layered(NamedTuple):
    """A plan, the layers of its stages in model order, and its value with balanced ones."""

    answer: Planned
    layers: tuple[int, ...]
    balanced: float


def choose_layers(question: Question, answer: Planned) -> Layered:
    """Return the plan, or a faster one of the same placement with other layers in its stages.

    `answer` is what `best_order` answers to the question, which has `layers`. The same call chooses
    the same layers everywhere.

    Raises:
        ScheduleError: the question does not say the layers.
    """
    if question.layers is None:
        raise ScheduleError("choosing the layer split needs the costs of a layer")
    pieces, num_layers = question.layers
    placement, limits = answer.schedule.placement, answer.limits
    first = answer.costs.layers or pieces.balanced(num_layers, placement)
    asked = replace(question, layers=None, cut=None, chunks=(), slices=answer.schedule.slices)
    asked = replace(asked, placements=(placement,), limit=limits)
    steps = min(question.steps or TRIAL_STEPS, TRIAL_STEPS)
    trial = replace(asked, steps=steps, seconds=None, progress=None, holds_less=False)

    def planned(asked: Question, layers: tuple[int, ...]) -> Planned:
        return best_order(replace(asked, costs=pieces.costs(layers)))

    def value_of(layers: tuple[int, ...]) -> float:
        try:
            return planned(trial, layers).plan.value
        except ScheduleError:  # nothing fits, or no order was found to
            return inf

    lighter, _ = lighter_layers(answer.schedule, answer.costs, pieces.shares)
    # These leave an order more room.
    starts = dict.fromkeys((first, lighter or first))
    value, layers = min((value_of(each), each) for each in starts)
    draw = random.Random(1)
    trades = pieces.costs(first).trades
    for _ in range(TRIALS_OF_TRADES if trades else TRIALS):
        near = _near(draw, layers)
        tried = next((each for each in near if _promises(asked, pieces, each, value)), None)
        if tried is None or question.stopped():
            break
        reached = value_of(tried)
        if reached <= value and reached < inf:
            layers, value = tried, reached
    balanced = answer.plan.value
    if layers != first:
        other = planned(asked, layers)
        if other.plan.value < balanced * _LESS:
            kept = replace(other, known=answer.known, others=answer.others)
            return Layered(kept, layers, balanced)
    return Layered(answer, first, balanced)


def _near(draw: random.Random, layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield splits in which a few layers are in other stages."""
    ends = (0, len(layers) - 1)
    for _ in range(_DRAWN):
        moved = list(layers)
        for _ in range(draw.randint(1, MOST_MOVED)):
            giving = [stage for stage, count in enumerate(moved) if count > (stage not in ends)]
            if giving:
                moved[draw.choice(giving)] -= 1
                moved[draw.randrange(len(moved))] += 1
        if tuple(moved) != layers:
            yield tuple(moved)


def _promises(asked: Question, pieces: Pieces, layers: tuple[int, ...], value: float) -> bool:
    """Return whether an order with such layers may take less than this value."""
    (placement,), limits = asked.placements, asked.limit
    assert isinstance(limits, tuple)
    costs, sizes = pieces.costs(layers), (asked.num_microbatches, limits)
    (slices,) = asked.slice_counts()
    try:
        least = bound_at(costs, placement, *sizes, asked.objective, slices)
    except LimitError:
        return False
    return least < value * _LESS
