"""The ways to hold less that a plan is chosen from: settings of recompute, copies to the host."""

from collections.abc import Iterator, Sequence
from itertools import permutations

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import NO_RECOMPUTE
from megatron_vshape.core.model.placement import Placement, chunks_of
from megatron_vshape.core.model.schedule import ORDER_ALONE, Way


def ways_to_save(costs: Costs, placement: Placement) -> Iterator[Way]:
    """Yield the few ways that are raced, which begin with the order alone.

    A device's first chunks live longest: their F are first and their B last. So one setting is that
    of the first chunks of all devices, and one that of the others; and copying all of the first
    chunks is what others do.
    """
    yield ORDER_ALONE
    names = (NO_RECOMPUTE, *(name for name, _ in costs.recompute))
    chunks = chunks_of(placement)
    for settings in _by_chunk(names, chunks):
        yield Way(settings)
    if costs.copies:
        first = tuple(stage for stage, chunk in enumerate(chunks) if not chunk)
        yield Way(copies=True, throughout=first)
        for settings in ((), *_by_chunk(names, chunks)):
            yield Way(settings, copies=True)


def _by_chunk(names: Sequence[str], chunks: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for name in names[1:]:
        yield (name,) * len(chunks)
    for first in range(1, max(chunks) + 1):
        for early, late in permutations(names, 2):
            yield tuple(early if chunk < first else late for chunk in chunks)
