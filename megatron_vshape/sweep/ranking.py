"""How well the predicted order agrees with the measured one."""

import itertools
import math
from collections.abc import Iterable, Sequence


def kendall_tau(
    one: Sequence[float], other: Sequence[float], groups: Sequence[object] | None = None
) -> float | None:
    """Return Kendall's tau-b of two rankings: 1 the same order, -1 the reverse, 0 unrelated.

    With `groups`, of every value, only values of one group are compared. None where it means
    nothing: fewer than two values, or one side all equal.
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
    """Return the points (cost, worth) that no other beats in both, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, worth in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or worth > front[-1][1]:
            front.append((cost, worth))
    return front
