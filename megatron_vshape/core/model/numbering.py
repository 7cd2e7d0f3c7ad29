"""Integer encoding of the passes of a schedule, for loops that may be compiled."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass

NONE = -1

WITHOUT = -2
"""For a pass that a microbatch omits: no pass waits for it."""


COMPILED_FROM = 50_000
"""Passes from which a compiled loop saves more time than the import of the compiler costs."""


class Numbers(Protocol):
    """A list or an array of integers."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, value: int, /) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...


class Lists(NamedTuple):
    """Several numbers per index: those of `at` are `of[begin[at] : begin[at + 1]]`."""

    of: Numbers
    begin: Numbers


def lists_of(rows: Iterable[Sequence[int]]) -> Lists:
    """Concatenate the rows."""
    made = list(rows)
    return Lists(list(chain.from_iterable(made)), [0, *accumulate(map(len, made))])


class Numbered(NamedTuple):
    """Passes by index, resource queue (lane) after lane.

    A pass of stage s has the type len(kinds) * s + the index of its kind. `place_of` is the index
    of the pass that includes the work of a pass type and microbatch: for B and W, it may be a full
    backward.
    """

    begin: Numbers  # first index of each lane; the last entry is the total
    sort: Numbers
    microbatch: Numbers
    place_of: Numbers  # [sort * num_microbatches + microbatch]; NONE if there is none


def number(
    lanes: Sequence[Sequence[Pass]], kinds: Sequence[Kind], num_stages: int, num_microbatches: int
) -> Numbered:
    """Encode the passes of all lanes; `kinds` includes all their kinds and parts.

    Returns arrays if there are enough passes for a compiled loop, otherwise lists.

    Raises:
        IndexError: a stage or a microbatch does not exist. A wrong one could silently address
            another pass, and compiled loops do not check indices.
    """
    count, m = len(kinds), num_microbatches
    own = {kind: at for at, kind in enumerate(kinds)}
    parts = [[own[part] for part in kind.does] for kind in kinds]
    passes = list(chain.from_iterable(lanes))
    begin = [0, *accumulate(map(len, lanes))]
    sort = [count * stage + own[kind] for kind, stage, _ in passes]
    microbatch = [microbatch for _, _, microbatch in passes]
    for each, end in ((sort, count * num_stages), (microbatch, m)):
        if passes and not 0 <= min(each) <= max(each) < end:
            raise IndexError("a pass has a stage or a microbatch that does not exist")
    if len(passes) >= COMPILED_FROM:
        return _in_arrays(begin, sort, microbatch, parts, num_stages, m)
    place_of = [NONE] * (count * num_stages * m)
    for place, (one, of) in enumerate(zip(sort, microbatch, strict=True)):
        kind = one % count
        for part in parts[kind]:
            # `one - kind` is the first type of the stage.
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
    """Return the same encoding in arrays."""
    import numpy as np

    sorts, of = np.array(sort, np.int64), np.array(microbatch, np.int64)
    place_of = np.full(len(parts) * num_stages * num_microbatches, NONE, np.int64)
    kinds = sorts % len(parts)
    for kind, does in enumerate(parts):
        places = np.flatnonzero(kinds == kind)
        # Entry of part 0 for each pass, as in the loop of `number`.
        first = (sorts[places] - kind) * num_microbatches + of[places]
        for part in does:
            place_of[first + part * num_microbatches] = places
    return Numbered(np.array(begin, np.int64), sorts, of, place_of)
