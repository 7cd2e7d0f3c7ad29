"""Successive halving: the better half of the candidates gets further search steps."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_One = TypeVar("_One")


def best_of(candidates: Sequence[_One], at_most: int, value: Callable[[_One], Any]) -> list[_One]:
    """Return at most `at_most` candidates with the least values, one per value."""
    different = {value(candidate): candidate for candidate in reversed(candidates)}
    return [different[key] for key in sorted(different)][:at_most]


def better_half(candidates: Sequence[_One], value: Callable[[_One], Any]) -> list[_One]:
    """Return the better half, at least one candidate."""
    return best_of(candidates, -(-len(candidates) // 2), value)


def race(
    candidates: list[_One],
    steps: int,
    rounds: int,
    advance: Callable[[list[_One], int, int], list[_One]],
    min_share: int = 0,
) -> list[_One]:
    """Distribute steps over candidates in rounds of equal cost; return those of the last round.

    Args:
        candidates: candidates of the first round.
        steps: total steps.
        rounds: number of rounds.
        advance: receives the candidates, the steps of each and the round number; returns the
            candidates of the next round.
        min_share: minimum steps per candidate and round; rounds then continue until all steps are
            used.
    """
    remaining_steps, number = steps, 0
    while candidates and (remaining_steps > 0 if min_share else number < rounds):
        share = steps // (rounds * len(candidates))
        if min_share:
            share = min(max(share, min_share), -(-remaining_steps // len(candidates)))
        remaining_steps -= share * len(candidates)
        candidates, number = advance(candidates, share, number), number + 1
    return candidates
