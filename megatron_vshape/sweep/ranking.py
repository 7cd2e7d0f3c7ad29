"""Agreement of predicted and measured rankings."""

import itertools
import math
from collections.abc import Iterable, Sequence


def kendall_tau(
    one: Sequence[float], other: Sequence[float], groups: Sequence[object] | None = None
) -> float | None:
    """Compute Kendall's tau-b of two rankings: 1 same order, -1 reverse order, 0 unrelated.

    With `groups` (one per value), only values of the same group are compared. None if undefined:
    fewer than two values, or all values of one side are equal.
    """
    agree = ties_one = ties_other = pairs = 0
    among = zip(one, other, groups or [None] * len(one), strict=True)
    for (a, b, group), (c, d, its) in itertools.combinations(among, 2):
        if group != its:
            continue
        pairs += 1
        ties_one += a == c
        ties_other += b == d
        agree += ((a > c) - (a < c)) * ((b > d) - (b < d))
    scale = math.sqrt((pairs - ties_one) * (pairs - ties_other))
    return agree / scale if scale else None


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front: points (cost, worth) that no other point beats, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, worth in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or worth > front[-1][1]:
            front.append((cost, worth))
    return front
