"""Costs of variable-length microbatches: the factors of a microbatch in `by_microbatch`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind


def scaled_times_us(costs: Costs, kind: Kind, stage: int) -> Iterator[tuple[str, float]]:
    """Yield the times of a pass that scale with the microbatch, by name."""
    times = costs.amounts(kind.time)
    if times is None:  # the sum of its parts
        for part in kind.does:
            yield from scaled_times_us(costs, part, stage)
    elif any(kind.time == name for name, _ in costs.by_microbatch):
        yield kind.time, times[stage]


def more_us(costs: Costs, kind: Kind, stage: int, microbatch: int) -> float:
    """Return the additional time of a pass of this microbatch over `Costs.time_us`."""
    factors = dict(costs.by_microbatch)
    times = scaled_times_us(costs, kind, stage)
    return sum(us * (factors[name][microbatch] - 1) for name, us in times)


def factor_of(costs: Costs, name: str, microbatch: int) -> float:
    """Return the factor of a microbatch for the amounts of this name."""
    return next((each[microbatch] for own, each in costs.by_microbatch if own == name), 1.0)


def reordered(costs: Costs, order: Sequence[int]) -> Costs:
    """Reorder the microbatches: the k-th becomes the one with number `order[k]`."""
    factors = ((name, tuple(each[real] for real in order)) for name, each in costs.by_microbatch)
    return replace(costs, by_microbatch=tuple(factors))
