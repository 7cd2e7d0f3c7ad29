"""Passes of other kinds put into an order of F, B and W, which stays as it is."""

from collections.abc import Sequence

import numpy as np

from megatron_vshape.core.model.kinds import PARTS
from megatron_vshape.core.model.passes import NeedTable
from megatron_vshape.core.planner.improve import NONE, Shop, run_rows
from megatron_vshape.core.planner.job_shop import Problem

_NEVER = 1 << 62


def insert(problem: Problem, parts: Shop, row: np.ndarray) -> np.ndarray:
    """Return the order with a pass of every kind; `row` is one of F, B and W, of the shop `parts`.

    What takes memory runs as late as delays none of F, B and W, anything else as soon as what it
    reads is there. Whatever waits for whom, all lanes run passes in the order of these times.
    """
    m = problem.num_microbatches
    place, head = np.empty(row.size, np.int32), np.empty(row.size, np.int64)
    for own in row:
        place[own] = np.arange(len(own))
    run_rows(parts, row, place, head)
    in_turn = _in_turn(problem)
    due = _due_times(problem, in_turn, (head - parts.ticks).reshape(-1, m))
    turn = {sort: at for at, sort in enumerate(in_turn)}
    lane_of, rows = np.asarray(problem.sorts.lane), []
    for lane in range(len(problem.room)):
        own = np.flatnonzero(lane_of == lane)
        microbatch = np.tile(np.arange(m), len(own))
        turns = np.repeat([turn[each] for each in own.tolist()], m)
        passes = np.repeat(own * m, m) + microbatch
        rows.append(passes[np.lexsort((microbatch, turns, due[own].ravel()))])
    made = np.full((len(rows), max(map(len, rows))), NONE, np.int32)
    for lane, passes in enumerate(rows):
        made[lane, : len(passes)] = passes
    return made


def _in_turn(problem: Problem) -> list[int]:
    """Return the sorts, each behind those that it reads."""
    kinds = problem.kinds
    table = NeedTable(len(problem.placement), kinds)
    return [len(kinds) * stage + kinds.index(table.parts[part]) for part, stage in table.in_turn()]


def _due_times(problem: Problem, in_turn: Sequence[int], starts: np.ndarray) -> np.ndarray:
    """Return when passes are to start, as [sort, microbatch]; `starts` are those of F, B and W."""
    sorts, kinds = problem.sorts, problem.kinds
    count, m = len(sorts.ticks), starts.shape[1]
    given = [at for at in range(count) if kinds[at % len(kinds)] in PARTS]
    late, due = np.full((count, m), _NEVER), np.full((count, m), _NEVER)
    late[given] = due[given] = starts
    fixed = set(given)

    def needs(sort: int) -> list[tuple[int, int]]:
        """Return what the sort reads, and the ticks from the start of that until it may start."""
        places = range(sorts.needs.begin[sort], sorts.needs.begin[sort + 1])
        pairs = ((sorts.needs.of[at], sorts.away[at]) for at in places)
        return [(need, sorts.ticks[need] + problem.send * away) for need, away in pairs]

    for sort in reversed(in_turn):
        for need, ticks in needs(sort):
            if need not in fixed:
                late[need] = np.minimum(late[need], late[sort] - ticks)
    for sort in in_turn:
        if sort in fixed:
            continue
        soon = np.zeros(m, np.int64)
        least = np.zeros(m, np.int64)
        for need, ticks in needs(sort):
            soon = np.maximum(soon, due[need] + ticks)
            least = np.maximum(least, due[need])
        waits = sorts.most[sort] > 0 and late[sort, 0] < _NEVER // 2
        due[sort] = np.maximum(least, late[sort] if waits else np.minimum(soon, late[sort]))
    return due
