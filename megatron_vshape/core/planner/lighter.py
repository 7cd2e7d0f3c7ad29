"""Layers with which the largest device of a schedule needs least."""

from collections.abc import Iterator

from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.model.schedule import Schedule


def lighter_layers(schedule: Schedule, costs: Costs) -> tuple[tuple[int, ...], float]:
    """Return the layers of every stage with which the largest device needs least, and its peak.

    The order stays as it is, and what it takes is not looked at. A layer at a time moves from the
    largest device to where it helps most. Costs that do not know their layers keep them.
    """
    layers = costs.layers
    if layers is None:
        return (), max(peak_held(schedule, costs))
    pieces, best = Pieces.of(costs, layers), sorted(peak_held(schedule, costs), reverse=True)
    while True:
        found = [
            (sorted(peak_held(schedule, pieces.costs(moved)), reverse=True), moved)
            for moved in _moved(layers, schedule)
        ]
        reached, moved = min(found, default=(best, layers))
        if not reached < best:
            return layers, best[0]
        best, layers = reached, moved


def _moved(layers: tuple[int, ...], schedule: Schedule) -> Iterator[tuple[int, ...]]:
    """Yield the splits in which one layer is on another device; inner stages keep one."""
    placement, ends = schedule.placement, (0, len(layers) - 1)
    for giving, count in enumerate(layers):
        if count <= (giving not in ends):
            continue
        for taking in range(len(layers)):
            if placement[taking] != placement[giving]:
                made = list(layers)
                made[giving] -= 1
                made[taking] += 1
                yield tuple(made)
