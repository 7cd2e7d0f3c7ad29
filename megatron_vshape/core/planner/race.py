"""Successive halving: the better half of the candidates gets further search steps."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_One = TypeVar("_One")


def best_of(found: Sequence[_One], at_most: int, value: Callable[[_One], Any]) -> list[_One]:
    """Return at most `at_most` items with the least values, one per value (mostly duplicates)."""
    different = {value(each): each for each in reversed(found)}
    return [different[each] for each in sorted(different)][:at_most]


def better_half(live: Sequence[_One], value: Callable[[_One], Any]) -> list[_One]:
    """Return the better half, at least one item."""
    return best_of(live, -(-len(live) // 2), value)


def race(
    live: list[_One],
    steps: int,
    rounds: int,
    advance: Callable[[list[_One], int, int], list[_One]],
    least: int = 0,
) -> list[_One]:
    """Distribute steps over items in rounds of equal cost; return the items of the last round.

    Args:
        live: items of the first round.
        steps: total steps.
        rounds: number of rounds.
        advance: receives the items, the steps per item and the round number; returns the items of
            the next round.
        least: minimum steps per item and round; rounds then continue until all steps are used.
    """
    left, number = steps, 0
    while live and (left > 0 if least else number < rounds):
        share = steps // (rounds * len(live))
        if least:
            share = min(max(share, least), -(-left // len(live)))
        left -= share * len(live)
        live, number = advance(live, share, number), number + 1
    return live
