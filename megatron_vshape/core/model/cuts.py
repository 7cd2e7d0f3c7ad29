"""Split of unequal layers into stages with the least work on the busiest device."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

from megatron_vshape.core.model.placement import Placement

MOST_SHIFTED = 2
"""Layers that a cut moves by in one step of the search."""

MOST_TOGETHER = 8
"""Neighbouring cuts that move together."""


def balanced_cuts(
    times_us: Sequence[float],
    placement: Placement,
    ends_us: tuple[float, float],
    *starts: Sequence[int],
) -> tuple[int, ...]:
    """Compute the number of layers of every stage, in model order.

    Local search: a step shifts one cut, or several neighbouring cuts together, if that lowers the
    load of the busiest device (then of the second busiest, and so on). Then, with no device busier
    than that, as long as it makes the stages more even. Inner stages have at least one layer.

    Args:
        times_us: The time of each layer, in model order.
        placement: The device of each stage.
        ends_us: The time of the embedding in the first stage, and of the output layer in the last.
        starts: Further layer counts of the stages to start from: the busiest device of the result
            is never busier than theirs.
    """
    sums = tuple(accumulate(times_us, initial=0.0))

    def loads(cuts: Sequence[int]) -> list[float]:
        return _loads(cuts, sums, placement, ends_us)

    begins = [_proportional(sums, placement, ends_us)]
    begins += [list(accumulate(layers, initial=0)) for layers in starts]
    found = [*begins, *(_improved(cuts, loads) for cuts in begins)]
    most = min(max(loads(cuts)) for cuts in found)

    def unevenness(cuts: Sequence[int]) -> tuple[float, float]:
        above = max(0.0, max(loads(cuts)) - most)
        return above, _rounded(sum(each**2 for each in _stages(cuts, sums, ends_us)))

    cuts = min((_improved(cuts, unevenness) for cuts in found), key=unevenness)
    return tuple(end - start for start, end in pairwise(cuts))


def _proportional(
    sums: Sequence[float], placement: Placement, ends_us: tuple[float, float]
) -> list[int]:
    """Cut where the time of all layers and ends before is nearest to that of even stages."""
    stages = len(placement)
    each = (sums[-1] + sum(ends_us)) / stages
    cuts = [0]
    for stage in range(1, stages):
        least = cuts[-1] + (stage > 1)
        most = len(sums) - 1 - (stages - 1 - stage)
        at = stage * each - ends_us[0]
        cuts.append(min(range(least, most + 1), key=lambda cut: abs(sums[cut] - at)))
    return [*cuts, len(sums) - 1]


def _improved(cuts: list[int], measure: Callable[[Sequence[int]], Any]) -> list[int]:
    """Shift cuts as long as that lowers the measure."""
    best = measure(cuts)
    while True:
        tried = ((measure(near), near) for near in _shifted(cuts))
        reached, near = min(tried, default=(best, cuts))
        if not reached < best:
            return cuts
        best, cuts = reached, near


def _loads(
    cuts: Sequence[int], sums: Sequence[float], placement: Placement, ends_us: tuple[float, float]
) -> list[float]:
    """Compute the time of every device, the busiest first."""
    loads = [0.0] * (max(placement) + 1)
    for device, time_us in zip(placement, _stages(cuts, sums, ends_us), strict=True):
        loads[device] += time_us
    return sorted(map(_rounded, loads), reverse=True)


def _stages(
    cuts: Sequence[int], sums: Sequence[float], ends_us: tuple[float, float]
) -> list[float]:
    """Compute the time of every stage."""
    stages = [sums[end] - sums[start] for start, end in pairwise(cuts)]
    stages[0] += ends_us[0]
    stages[-1] += ends_us[1]
    return stages


def _rounded(time_us: float) -> float:
    """Drop the last bits, in which sums of the same terms differ."""
    return float(f"{time_us:.9g}")


def _shifted(cuts: Sequence[int]) -> Iterator[list[int]]:
    """Yield cuts of which neighbouring ones are shifted by a few layers, all by the same number."""
    inner = len(cuts) - 1
    for first, behind in combinations(range(1, inner + 1), 2):
        if behind - first > MOST_TOGETHER:
            continue
        for by in range(-MOST_SHIFTED, MOST_SHIFTED + 1):
            near = [*cuts[:first], *(cut + by for cut in cuts[first:behind]), *cuts[behind:]]
            if by and _are_stages(near):
                yield near


def _are_stages(cuts: Sequence[int]) -> bool:
    """Check that every inner stage has a layer, and no end a negative number."""
    first, *inner, last = (end - start for start, end in pairwise(cuts))
    return first >= 0 and last >= 0 and all(count > 0 for count in inner)
