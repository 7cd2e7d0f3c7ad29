"""A proven lower bound where it is open what is computed again and what waits in host memory.

Every other bound of `core/check` takes it that a microbatch holds the same from F to W, which no
longer is so. Here a stage has choices for each microbatch, a setting of recompute, and with it that
the activations stay or are copied: they take so much of a device's time, of its memory over time
and of its link's time. In a step of T a device has T of time, its limit x T of memory, and T of
each link. So for all prices a, b, c >= 0 of these three, T (a + b x limit + c x links) is at least
what the microbatches cost if each stage takes what is cheapest for it; the prices for which this
says most are looked for. With one stage and copies alone that is the line of a knapsack in which
what lives longest per copied byte goes first.
"""

from collections.abc import Iterator, Sequence
from math import inf, isinf
from typing import NamedTuple

import numpy as np

from megatron_vshape.core.check.bounds import lower_bound
from megatron_vshape.core.check.relax import least_of, split_no_slower
from megatron_vshape.core.check.ways import Ways, ways_of
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.placement import Placement, stages_of

FINENESS = 24
"""Costs of each kind per trial, repeated between the neighbours of the best one."""

ROUNDS = 3


class StageChoice(NamedTuple):
    """What a stage takes of its device for one microbatch."""

    work: float
    area: float  # memory x time
    link: float  # time of all links


def bound_of_choices(
    settings: Sequence[Costs],
    copies: bool,
    placement: Placement,
    num_devices: int,
    num_microbatches: int,
    limits: Sequence[float],
    span: bool = False,
) -> float:
    """Return a value that no order within the limits is below, whatever is chosen.

    `settings` are the costs of the same stages, of which each may have any; with `copies` each may
    be copied to the host and back. For the span see `lower_bound`.
    """
    least = least_of(settings)
    nothing = [inf if limit > 0 else 0.0 for limit in limits]
    best = lower_bound(least, placement, num_devices, num_microbatches, nothing, span)
    paths = ways_of(least, placement)
    links = 1 if settings[0].half_duplex else 2
    split = [split_no_slower(costs) for costs in settings]
    for device, stages in enumerate(stages_of(placement, num_devices)):
        if isinf(limits[device]) or limits[device] <= 0:
            continue
        choices = [list(_choices(split, stage, paths, copies)) for stage in stages]
        shared = num_microbatches * _priced(choices, limits[device], links)
        best = max(best, shared + (0.0 if span else paths.forward[stages[0]]))
    return best


def _choices(
    settings: Sequence[Costs], stage: int, paths: Ways, copies: bool
) -> Iterator[StageChoice]:
    for costs in settings:
        both = costs.forward_us[stage] + costs.backward_us[stage]
        weight = costs.weight_us[stage]
        held = costs.held_after_forward_bytes[stage]
        after = costs.held_after_backward_bytes[stage] * weight
        trip = paths.round_trip[stage]
        yield StageChoice(both + weight, held * trip + after, 0.0)
        if not copies:
            continue
        out, back = costs.copies_us(stage)
        moved = min(held, costs.offloaded_bytes[stage])
        here = min(trip, both + out + back)
        yield StageChoice(both + weight, (held - moved) * trip + moved * here + after, out + back)


def _priced(choices: Sequence[Sequence[StageChoice]], limit: float, links: int) -> float:
    """Return the most that any prices say of a device's time for one microbatch."""
    # of time over memory, and of links over both
    low, high = np.array([-6.0, -6.0]), np.array([6.0, 6.0])
    best = 0.0
    for _ in range(ROUNDS):
        memory, link = (np.logspace(a, b, FINENESS) for a, b in zip(low, high, strict=True))
        memory, link = np.meshgrid(np.append(0.0, memory), np.append(0.0, link), indexing="ij")
        cost = np.zeros(memory.shape)
        for own in choices:
            each = [work + memory * area / limit + link * copied for work, area, copied in own]
            cost += np.minimum.reduce(each)
        bound = cost / (1 + memory + links * link)
        best = max(best, float(bound.max()))
        at = np.array(np.unravel_index(int(bound.argmax()), bound.shape)) - 1
        step = (high - low) / (FINENESS - 1)
        middle = low + np.maximum(at, 0) * step
        low, high = middle - step, middle + step
    return best * (1 - 1e-9)
