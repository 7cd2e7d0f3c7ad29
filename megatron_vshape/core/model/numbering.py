"""The passes of a schedule as numbers, for loops that may be compiled."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass

NONE = -1

WITHOUT = -2
"""In place of a pass that a microbatch does without: nobody waits for it."""


COMPILED_FROM = 50_000
"""Passes from which a compiled loop saves more time than loading the compiler costs."""


class Numbers(Protocol):
    """A list of numbers, or an array of them."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, value: int, /) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


class Lists(NamedTuple):
    """Some numbers for every sort, or lane: those of `at` are `of[begin[at] : begin[at + 1]]`."""

    of: Numbers
    begin: Numbers


def lists_of(rows: Iterable[Sequence[int]]) -> Lists:
    """Return the rows one after the other."""
    made = list(rows)
    return Lists(list(chain.from_iterable(made)), [0, *accumulate(map(len, made))])


class Numbered(NamedTuple):
    """Passes by their places, lane after lane.

    A pass of stage s has the sort len(kinds) * s + the place of its kind there. `place_of` is where
    the pass runs that does what another of its sort and microbatch would: that of a whole backward
    under B and W.
    """

    begin: Numbers  # of a lane; at last where all end
    sort: Numbers
    microbatch: Numbers
    place_of: Numbers  # [sort * num_microbatches + microbatch], NONE if there is none


def number(
    lanes: Sequence[Sequence[Pass]], kinds: Sequence[Kind], num_stages: int, num_microbatches: int
) -> Numbered:
    """Return the passes of all lanes as numbers; `kinds` are all that they have and do.

    In arrays where there are so many that a compiled loop pays.
    """
    count, m = len(kinds), num_microbatches
    own = {kind: at for at, kind in enumerate(kinds)}
    parts = [[own[part] for part in kind.does] for kind in kinds]
    passes = list(chain.from_iterable(lanes))
    begin = [0, *accumulate(map(len, lanes))]
    sort = [count * stage + own[kind] for kind, stage, _ in passes]
    microbatch = [microbatch for _, _, microbatch in passes]
    if len(passes) >= COMPILED_FROM:
        return _in_arrays(begin, sort, microbatch, parts, num_stages, m)
    place_of = [NONE] * (count * num_stages * m)
    for place, (one, of) in enumerate(zip(sort, microbatch, strict=True)):
        kind = one % count
        for part in parts[kind]:
            place_of[(one - kind + part) * m + of] = place
    return Numbered(begin, sort, microbatch, place_of)


def _in_arrays(
    begin: Sequence[int],
    sort: Sequence[int],
    microbatch: Sequence[int],
    parts: Sequence[Sequence[int]],
    num_stages: int,
    num_microbatches: int,
) -> Numbered:
    """Return the same in arrays.

    Raises:
        IndexError: a pass is of no stage or no microbatch, which compiled loops do not look for.
    """
    import numpy as np

    sorts, of = np.array(sort, np.int64), np.array(microbatch, np.int64)
    if not (of.min() >= 0 and of.max() < num_microbatches and sorts.min() >= 0):
        raise IndexError("a pass is of a stage or a microbatch that there is not")
    place_of = np.full(len(parts) * num_stages * num_microbatches, NONE, np.int64)
    kinds = sorts % len(parts)
    for kind, does in enumerate(parts):
        places = np.flatnonzero(kinds == kind)
        first = (sorts[places] - kind) * num_microbatches + of[places]
        for part in does:
            place_of[first + part * num_microbatches] = places
    return Numbered(np.array(begin, np.int64), sorts, of, place_of)


def soonest(
    num_passes: int, function: Callable[..., int], called: Sequence[Callable[..., Any]], *data: Any
) -> tuple[Any, ...]:
    """Return the function and its data in lists, or compiled and in arrays where that pays.

    `called` is what it calls. The results are the same; what it changes is what this returns.
    """
    if num_passes < COMPILED_FROM:
        return function, *data
    # Brings numba along, which takes a third of a second to import.
    from megatron_vshape.core.compiling import compiled_once, in_arrays

    compiled = compiled_once(function, *called)
    convert = in_lists if compiled is function else in_arrays
    return compiled, *map(convert, data)


def in_lists(data: Any) -> Any:
    """Return arrays, and those in named tuples, as lists; what else is as it is."""
    if isinstance(data, tuple):
        return type(data)(*map(in_lists, data))
    return data.tolist() if hasattr(data, "tolist") else data
