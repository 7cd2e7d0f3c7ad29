"""Layers per stage, chosen together with the schedule.

Layers with the least work on the busiest device are a good start but rarely optimal: with unequal
stages, the schedule has idle gaps that other layers avoid. Experiments with d=8, m=32, 64 layers,
an output layer of 6 layers, 10 chunks, and F/B/W/message 1/1.15/0.85/0.05 (balanced: 252.8,
simulated):

* Moving layers with a fixed schedule gains nothing in 15 of 17 cases, because the schedule was
  optimized for its stages.
* Planning again after each change, with a share of the budget, finds 244 to 252 (it depends on the
  random seed), and gains up to 3% in other cases.
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
"""Number of layer splits to plan for."""

TRIALS_OF_TRADES = 8
"""With offloading, which is slower to evaluate."""

TRIAL_STEPS = 100_000
"""Search steps per split."""

MOST_MOVED = 3
"""Maximum layers that change their stage from one trial to the next."""

_DRAWN = 50
"""Splits drawn for a trial; if the bounds of all are too high, the search ends."""

_LESS = 1 - 1e-9
"""A value must be below this share of another to count as lower."""


class Layered(NamedTuple):
    """A plan, the layers of its stages in model order, and the value with balanced layers."""

    answer: Planned
    layers: tuple[int, ...]
    balanced: float


def choose_layers(question: Question, answer: Planned) -> Layered:
    """Return the plan, or a faster one for the same placement with other layers.

    `answer` is the result of `best_order` for the request, which must have `layers`. The choice is
    deterministic.

    Raises:
        ScheduleError: the request has no layers.
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
        except ScheduleError:  # infeasible, or no schedule was found
            return inf

    lighter, _ = lighter_layers(answer.schedule, answer.costs, pieces.shares)
    # The lighter split leaves the schedule more memory.
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
        # Continue from equal values too, to leave plateaus.
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
    """Yield splits with a few layers in other stages."""
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
    """Return whether a schedule with these layers may be faster than this value."""
    (placement,), limits = asked.placements, asked.limit
    assert isinstance(limits, tuple)
    costs, sizes = pieces.costs(layers), (asked.num_microbatches, limits)
    (slices,) = asked.slice_counts()
    try:
        least = bound_at(costs, placement, *sizes, asked.objective, slices)
    except LimitError:
        return False
    return least < value * _LESS
