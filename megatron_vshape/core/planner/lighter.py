"""Layer splits by memory: until a microbatch fits, or until the peak is smallest."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from megatron_vshape.core.check.bounds import limits_by_device, min_memory
from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.layers import descend
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.model.stage_costs import Share


def lighter_layers(
    schedule: Schedule, costs: Costs, shares: tuple[Share, ...] = ()
) -> tuple[tuple[int, ...], float]:
    """Return the layers per stage with the smallest peak over all devices, and that peak.

    One layer at a time moves to another device while this lowers the peak. The pass order is
    unchanged and its time is ignored. If the costs have no layers, the split is empty.

    Args:
        schedule: the pass order.
        costs: costs of its stages.
        shares: relative costs of the layers, if they differ.
    """
    if costs.layers is None:
        return (), max(peak_held(schedule, costs))
    pieces = Pieces.of(costs, costs.layers, shares)

    def needs(layers: tuple[int, ...]) -> list[float]:
        return sorted(peak_held(schedule, pieces.costs(layers)), reverse=True)

    layers = descend(costs.layers, needs, partial(_moved_layers, placement=schedule.placement))
    return layers, needs(layers)[0]


def fitting_layers(
    pieces: Pieces, layers: tuple[int, ...], placement: Placement, limit: float | Sequence[float]
) -> tuple[int, ...]:
    """Return these layers, or a split closer to the limit if no microbatch fits."""
    num_devices = max(placement) + 1
    limits = limits_by_device(limit, num_devices)

    def excess(layers: tuple[int, ...]) -> list[float]:
        needs = min_memory(pieces.costs(layers), placement, num_devices)
        return [max(0.0, peak - limit) for peak, limit in zip(needs, limits, strict=True)]

    def moved_layers(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if pieces.shares:  # layers differ: a move changes those of all stages in between
            return _moved_layers(layers, placement)
        excesses = excess(layers)
        sources = [s for s in range(len(layers)) if excesses[placement[s]] == max(excesses)]
        return _moved_layers(layers, placement, sources)

    return descend(layers, lambda layers: max(excess(layers)), moved_layers)


def _moved_layers(
    layers: tuple[int, ...], placement: Placement, sources: Collection[int] | None = None
) -> Iterator[tuple[int, ...]]:
    """Yield the splits with one layer of `sources`, by default any, on another device.

    Inner stages keep at least one.
    """
    ends = (0, len(layers) - 1)
    for source in range(len(layers)) if sources is None else sources:
        if layers[source] <= (source not in ends):
            continue
        for target in range(len(layers)):
            if placement[target] != placement[source]:
                new_layers = list(layers)
                new_layers[source] -= 1
                new_layers[target] += 1
                yield tuple(new_layers)
