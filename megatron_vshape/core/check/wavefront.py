"""Vectorized simulation of a long schedule: the next passes of all devices at once.

The times are bitwise equal to those of `simulate`: the same sums, computed for all devices in one
operation. This is faster for many devices, and slower for few.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.numbering import COMPILED_FROM, number
from megatron_vshape.core.model.passes import NeedTable
from megatron_vshape.core.model.schedule import Schedule

LEAST_DEVICES = 24
"""With fewer devices, the overhead of calls on short arrays exceeds the gain."""

Rows = tuple[tuple[float, ...], ...]


def pays(schedule: Schedule, table: NeedTable) -> bool:
    """Return whether vectorization applies (one queue per device, no optional pass) and pays."""
    long = sum(map(len, schedule.order)) >= COMPILED_FROM
    alike = not (schedule.overlapped or table.at_will)
    return long and alike and schedule.num_devices >= LEAST_DEVICES


def run(
    schedule: Schedule,
    table: NeedTable,
    time_us: Mapping[Kind, Sequence[float]],
    send_us: Callable[[int, int], float],
) -> tuple[Rows, Rows] | None:
    """Return the start and end times of all passes; None for a deadlock or a repeated pass.

    `send_us(stage, other)` is the message time from stage `other` to `stage`.
    """
    import numpy as np

    arrays = _arrays(schedule, table, time_us, send_us)
    if arrays is None:
        return None
    lengths, needs, begin = arrays
    never = len(lengths)  # index of a pass that never starts; the next has ended
    following = np.append(np.arange(1, never + 1), never)
    following[begin[1:] - 1] = never
    lengths = np.append(lengths, 0.0)
    starts, ends = np.zeros(never + 1), np.full(never + 2, np.inf)
    ends[never + 1] = 0.0
    at, clock = np.where(begin[:-1] < begin[1:], begin[:-1], never), np.zeros(len(begin) - 1)
    while True:
        start = clock.copy()
        # A pass starts at the latest of its inputs; an input that has not ended is infinitely late.
        for read, sent_us in needs:
            np.maximum(start, ends.take(read.take(at)) + sent_us.take(at), out=start)
        ready = start < np.inf
        if not ready.any():
            # No device can go on: either all passes have run, or the order deadlocks.
            break
        end = start + lengths.take(at)
        starts[at], ends[at] = start, end
        np.copyto(clock, end, where=ready)
        at = np.where(ready, following.take(at), at)
    if not (ends[:never] < np.inf).all():
        return None
    own = list(pairwise(begin.tolist()))
    rows = ([tuple(row[a:b]) for a, b in own] for row in (starts.tolist(), ends.tolist()))
    started, ended = map(tuple, rows)
    return started, ended


def _arrays(
    schedule: Schedule,
    table: NeedTable,
    time_us: Mapping[Kind, Sequence[float]],
    send_us: Callable[[int, int], float],
) -> tuple[Any, list[tuple[Any, Any]], Any] | None:
    """Return the passes' durations, their inputs with message times, and the rows' first indices.

    None if a pass is repeated. Missing inputs are padded with a pass that has already ended; inputs
    that no device runs, with one that never ends.
    """
    import numpy as np

    kinds = [*dict.fromkeys((*time_us, *table.parts))]
    count, m, stages = len(kinds), schedule.num_microbatches, schedule.num_stages
    numbered = number(schedule.order, kinds, stages, m)
    sorts, of, place_of, begin = (
        np.asarray(each)
        for each in (numbered.sort, numbered.microbatch, numbered.place_of, numbered.begin)
    )
    runs = np.array([len(kind.does) for kind in kinds])[sorts % count].sum()
    if np.count_nonzero(place_of >= 0) < runs:
        return None
    by_sort = np.array([time_us.get(kind, [0.0] * stages) for kind in kinds]).T.reshape(-1)
    placement, never = schedule.placement, len(sorts)
    most = max(len(needs) for kind in time_us for needs in table.needs[kind])
    first = np.full((most, count * stages), -1, np.int64)
    sent = np.zeros((most, count * stages))
    for kind_at, kind in enumerate(kinds):
        for stage, needs in enumerate(table.needs[kind] if kind in time_us else ()):
            for each, (part, other) in enumerate(needs):
                sort = count * stage + kind_at
                first[each, sort] = (count * other + kinds.index(table.parts[part])) * m
                away = placement[other] != placement[stage]
                sent[each, sort] = send_us(stage, other) if away else 0.0
    found = []
    for own, sent_us in zip(first, sent, strict=True):
        base = own[sorts]
        places = place_of[base + of]
        reads = np.where(base < 0, never + 1, np.where(places < 0, never, places))
        found.append((np.append(reads, never), np.append(sent_us[sorts], 0.0)))
    return by_sort[sorts], found, begin
