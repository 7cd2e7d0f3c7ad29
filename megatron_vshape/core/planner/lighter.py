"""Layers dealt out by memory: until something fits, or the largest device needs least."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_vshape.core.check.bounds import each_limit, least_memory
from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.layers import Pieces, Share
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule


def lighter_layers(
    schedule: Schedule, costs: Costs, shares: tuple[Share, ...] = ()
) -> tuple[tuple[int, ...], float]:
    """Return the layers of every stage with which the largest device needs least, and its peak.

    The order stays as it is, and what it takes is not looked at. A layer at a time moves from the
    largest device to where it helps most. Costs that do not know their layers keep them. `shares`
    are those of the layers, if they are not identical.
    """
    if costs.layers is None:
        return (), max(peak_held(schedule, costs))
    pieces = Pieces.of(costs, costs.layers, shares)

    def needs(layers: tuple[int, ...]) -> list[float]:
        return sorted(peak_held(schedule, pieces.costs(layers)), reverse=True)

    layers = _least(costs.layers, schedule.placement, needs)
    return layers, needs(layers)[0]


def fitting_layers(
    pieces: Pieces, layers: tuple[int, ...], placement: Placement, limit: float | Sequence[float]
) -> tuple[int, ...]:
    """Return these layers, or where no microbatch fits those that come nearest to it."""
    devices = max(placement) + 1
    limits = each_limit(limit, devices)

    def beyond(layers: tuple[int, ...]) -> float:
        needs = least_memory(pieces.costs(layers), placement, devices)
        return max(0.0, *(need - limit for need, limit in zip(needs, limits, strict=True)))

    return _least(layers, placement, beyond)


def _least(
    layers: tuple[int, ...],
    placement: Placement,
    measure: Callable[[tuple[int, ...]], Any],
) -> tuple[int, ...]:
    """Return layers of which no single move to another device makes the measure less."""
    best = measure(layers)
    while best:
        found = [(measure(moved), moved) for moved in _moved(layers, placement)]
        reached, moved = min(found, default=(best, layers))
        if not reached < best:
            break
        best, layers = reached, moved
    return layers


def _moved(layers: tuple[int, ...], placement: Placement) -> Iterator[tuple[int, ...]]:
    """Yield the splits in which one layer is on another device; inner stages keep one."""
    ends = (0, len(layers) - 1)
    for giving, count in enumerate(layers):
        if count <= (giving not in ends):
            continue
        for taking in range(len(layers)):
            if placement[taking] != placement[giving]:
                made = list(layers)
                made[giving] -= 1
                made[taking] += 1
                yield tuple(made)
