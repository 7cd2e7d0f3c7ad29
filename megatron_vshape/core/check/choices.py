"""Lower bound for schedules with free choices of recomputation and offloading.

The other bounds of `core/check` assume constant activation memory from F to W, which these choices
change. Here each stage has choices for each microbatch: a recomputation setting, and whether its
activations are offloaded. A choice uses compute time of the device, memory over time, and time on
the host link.

A step of time T provides each device with compute time T, limit x T of memory over time, and T per
link direction. So for all weights a, b, c >= 0 of these resources (Lagrange multipliers), T (a + b
x limit + c x links) is at least the cost of the microbatches if each stage uses its cheapest
choice. The search maximizes this bound over the weights. With one stage and offloading alone, this
is a fractional knapsack by lifetime per copied byte.
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
"""Number of weights per axis and round; each round refines around the best weight."""

ROUNDS = 3


class StageChoice(NamedTuple):
    """Resources of one device that one microbatch of a stage uses."""

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
    """Return a lower bound over all schedules within the limits and all choices.

    Args:
        settings: the costs of the same stages for each recomputation setting.
        copies: whether activations can be offloaded.
        span: bound the span instead of the makespan (see `lower_bound`).
    """
    least = least_of(settings)
    nothing = [inf if limit > 0 else 0.0 for limit in limits]
    best = lower_bound(least, placement, num_devices, num_microbatches, nothing, span)
    paths = ways_of(least, placement)
    links = 1 if settings[0].half_duplex else 2
    split = [split_no_slower(costs) for costs in settings]
    for device, stages in enumerate(stages_of(placement, num_devices)):
        # Without a limit, or with an impossible one, memory and links give no bound.
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
    """Return the best bound per microbatch on a device's time over all weights."""
    # exponents: memory relative to time, and links relative to both
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
