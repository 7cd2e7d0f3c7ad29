"""The race that every search is: what is worth more steps goes on, the worse half drops out."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_One = TypeVar("_One")


def best_of(found: Sequence[_One], at_most: int, value: Callable[[_One], Any]) -> list[_One]:
    """Return those of least value; of equal ones, which are mostly the same, the first."""
    different = {value(each): each for each in reversed(found)}
    return [different[each] for each in sorted(different)][:at_most]


def better_half(live: Sequence[_One], value: Callable[[_One], Any]) -> list[_One]:
    """Return the better half, and one at least."""
    return best_of(live, -(-len(live) // 2), value)


def race(
    live: list[_One],
    steps: int,
    rounds: int,
    advance: Callable[[list[_One], int, int], list[_One]],
    least: int = 0,
) -> list[_One]:
    """Spend steps on some orders in rounds of equal cost; return those of the last.

    `advance` takes the orders, the steps of each and the number of the round, and returns those
    that go on. Where each has `least` steps in a round, there are more or fewer, until all are
    spent.
    """
    left, number = steps, 0
    while live and (left > 0 if least else number < rounds):
        share = steps // (rounds * len(live))
        if least:
            share = min(max(share, least), -(-left // len(live)))
        left -= share * len(live)
        live, number = advance(live, share, number), number + 1
    return live
