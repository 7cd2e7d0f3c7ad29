"""Order of variable-length microbatches in a plan made for uniform ones.

A plan runs the same passes whatever microbatch is at each position. With variable lengths, long
microbatches hide better at some positions. This search swaps microbatches while the simulated step
gets shorter. A gradient is a sum over microbatches, so only the order of summation changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_vshape.core.check.bounds import each_limit
from megatron_vshape.core.check.simulate import costs_of, simulate
from megatron_vshape.core.compiling import compiled_once, compiles, in_arrays
from megatron_vshape.core.model.costs import Costs, scaled_times_us
from megatron_vshape.core.model.kinds import HELD, KINDS, NeedTable
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule

TRIES = 3000 if compiles() else 60
"""Number of swaps to try: tens of milliseconds."""

GAIN = 1e-9
"""Minimum relative gain of a better order."""


class PassGraph(NamedTuple):
    """Passes of a schedule in topological order, in arrays.

    For an F&B pair, the first pass represents both. The time of a pass and its change of the
    device's memory are a constant plus a share for each variable amount.
    """

    places: Any  # [passes] microbatch
    plain_us: Any  # [passes]
    shared_us: Any  # [passes x names]
    first: Any  # [passes + 1] first index in `waits`
    waits: Any  # passes to wait for
    sends_us: Any  # message times of these
    row_of: Any  # [devices + 1] first index in `rows` of a device
    rows: Any  # microbatch of each pass, in the devices' order
    takes: Any  # [rows x names + 1] memory allocated at the start; the last column is constant
    gives: Any  # the same at the end
    works: Any  # [rows] workspace
    fixed: Any  # [devices]
    timed: int  # number of time amounts, which precede memory amounts


class MicrobatchOrder(NamedTuple):
    """Order of microbatches by position, and the step time before and after, in the costs' unit."""

    order: tuple[int, ...]
    given_us: float
    found_us: float


def reorder_microbatches(
    schedule: Schedule,
    costs: Costs,
    limits: float | Sequence[float] = math.inf,
    tries: int = TRIES,
    graph: PassGraph | None = None,
) -> MicrobatchOrder:
    """Choose the microbatch for each position; the step is never slower than in the given order.

    `costs.by_microbatch` has the size of each microbatch. No device exceeds its limit, or its
    memory in the given order if that is more. The result is deterministic. `graph` can be reused
    from `graph_of` for the same schedule and costs with other sizes.

    Raises:
        ScheduleError: the costs are for another number of stages or microbatches.
    """
    unlike = sorted(costs.by_microbatch, key=lambda each: each[0] in HELD)  # times first
    costs = replace(costs, by_microbatch=tuple(unlike))
    names = [name for name, _ in unlike]
    count = schedule.whole_microbatches
    given = tuple(range(count))
    if not names or count < 2 or count < schedule.num_microbatches:
        whole_us = simulate(schedule, costs).makespan
        return MicrobatchOrder(given, whole_us, whole_us)
    costs = costs_of(schedule, costs)
    own = graph_of(schedule, costs) if graph is None else graph
    shares = _matrix([each for _, each in costs.by_microbatch], count)
    most = in_arrays([float(each) for each in each_limit(limits, schedule.num_devices)])
    starts = _matrix(_starts(given, costs), count).astype("int64")
    found, before_us, after_us = _searching()(own, shares, most, starts, tries)
    return MicrobatchOrder(tuple(int(each) for each in found), float(before_us), float(after_us))


def _starts(given: Sequence[int], costs: Costs) -> list[Sequence[int]]:
    """Return start orders: as given, by length, and with the longest outside or inside."""
    weight = [sum(each[at] for _, each in costs.by_microbatch) for at in given]
    rising = sorted(given, key=lambda at: (weight[at], at))
    hill = [*rising[::2], *rising[1::2][::-1]]
    return [given, rising, rising[::-1], hill, [*hill[len(hill) // 2 :], *hill[: len(hill) // 2]]]


def graph_of(schedule: Schedule, costs: Costs) -> PassGraph:
    """Convert the passes of a schedule to arrays, with costs from `costs_of`."""
    names = [name for name, _ in costs.by_microbatch]
    number, groups = _in_turn(schedule, costs)
    table = NeedTable(schedule.num_stages, [each for each in KINDS if each in schedule.kinds])
    node_of = {
        (part, work.stage, work.microbatch): number[work]
        for work in number
        for part in table.parts_of[work.kind]
    }
    before: dict[Pass, Pass] = {}
    for lane in schedule.lanes():
        before |= {after: work for work, after in pairwise(lane.passes)}
    first, waits, sends_us, plain, shared = [0], list[int](), list[float](), list[float](), []
    for at, group in enumerate(groups):
        for work in group:
            # A pass waits for the previous pass of its resource queue, and for its inputs.
            if work in before and number[before[work]] != at:
                waits.append(number[before[work]])
                sends_us.append(0.0)
            for part, other in table.needs[work.kind][work.stage]:
                node = node_of.get((part, other, work.microbatch))
                if node is None or node == at:
                    continue
                away = schedule.placement[other] != schedule.placement[work.stage]
                waits.append(node)
                sends_us.append(costs.message_us(work.stage, other) if away else 0.0)
        first.append(len(waits))
        row = dict.fromkeys(names, 0.0)
        if len(group) == 2:
            plain.append(costs.overlapped_us(group[0].stage, group[1].kind, group[1].stage))
        else:
            (work,) = group
            for name, us in scaled_times_us(costs, work.kind, work.stage):
                row[name] += us
            plain.append(costs.time_us(work.kind, work.stage) - sum(row.values()))
        shared.append([*row.values()])
    places = [group[0].microbatch for group in groups]
    row_of, rows, takes, gives, works, fixed = _held(schedule, costs, names)
    return PassGraph(
        places=in_arrays(places),
        plain_us=in_arrays(plain),
        shared_us=_matrix(shared, len(names)),
        first=in_arrays(first),
        waits=in_arrays(waits),
        sends_us=in_arrays(sends_us),
        row_of=in_arrays(row_of),
        rows=in_arrays(rows),
        takes=_matrix(takes, len(names) + 1),
        gives=_matrix(gives, len(names) + 1),
        works=in_arrays(works),
        fixed=in_arrays(fixed),
        timed=sum(name not in HELD for name in names),
    )


def _matrix(rows: Any, columns: int) -> Any:
    import numpy as np

    return np.array(rows, np.float64).reshape(-1, columns)


def _in_turn(schedule: Schedule, costs: Costs) -> tuple[dict[Pass, int], list[list[Pass]]]:
    """Number all passes in topological order, F&B pairs with one number; return both directions."""
    timeline = simulate(schedule, costs)
    ends: list[tuple[float, int, int]] = []
    for device, row in enumerate(timeline.ends):
        ends += [(end, device, at) for at, end in enumerate(row)]
    number: dict[Pass, int] = {}
    groups: list[list[Pass]] = []
    second = {other: work for work, other in schedule.overlapped_pairs().items()}
    for _, device, at in sorted(ends):
        work = schedule.order[device][at]
        leader = second.get(work)
        if leader is not None and leader in number:
            number[work] = number[leader]
            groups[number[leader]].append(work)
        else:
            number[work] = len(groups)
            groups.append([work])
    return number, groups


def _held(schedule: Schedule, costs: Costs, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the memory changes of every pass of every device's row, by name."""
    row_of, rows, takes, gives, works = [0], [], [], [], []
    at = {name: column for column, name in enumerate(names) if name in HELD}
    plain = len(names)
    for row in schedule.order:
        for work in row:
            kind = work.kind
            amounts = costs.held(kind)
            start, end = [0.0] * (plain + 1), [0.0] * (plain + 1)
            for each, name, sign, to in (
                (amounts[0], kind.takes, 1.0, start),
                (amounts[1], kind.keeps, 1.0, end),
                (amounts[2], kind.frees, -1.0, end),
            ):
                to[at.get(name, plain)] += sign * each[work.stage]
            rows.append(work.microbatch)
            takes.append(start)
            gives.append(end)
            works.append(costs.works(kind)[work.stage])
        row_of.append(len(rows))
    fixed = costs.fixed_bytes(schedule.placement, schedule.num_devices)
    return row_of, rows, takes, gives, [float(x) for x in works], [float(x) for x in fixed]


def _makespan(graph: Any, shares: Any, order: Any, ends: Any) -> float:
    """Return the simulated step time with microbatches in this order."""
    first = math.inf
    last = 0.0
    for at in range(len(graph.places)):
        start = 0.0
        for wait in range(graph.first[at], graph.first[at + 1]):
            there = ends[graph.waits[wait]] + graph.sends_us[wait]
            if there > start:
                start = there
        length = graph.plain_us[at]
        real = order[graph.places[at]]
        for name in range(graph.timed):
            length += graph.shared_us[at, name] * shares[name, real]
        if start < first:
            first = start
        ends[at] = start + length
        if ends[at] > last:
            last = ends[at]
    return last - first


def _fits(graph: Any, shares: Any, order: Any, most: Any, raises: bool) -> bool:
    """Return whether every device fits its limit; with `raises`, increase the limits to fit."""
    plain = len(shares)
    for device in range(len(graph.fixed)):
        held = graph.fixed[device]
        for at in range(graph.row_of[device], graph.row_of[device + 1]):
            real = order[graph.rows[at]]
            held += graph.takes[at, plain]
            after = graph.gives[at, plain]
            for name in range(plain):
                held += graph.takes[at, name] * shares[name, real]
                after += graph.gives[at, name] * shares[name, real]
            if held + graph.works[at] > most[device]:
                if not raises:
                    return False
                most[device] = (held + graph.works[at]) * (1 + 1e-9)
            held += after
    return True


def _search(graph: Any, shares: Any, most: Any, starts: Any, tries: int) -> Any:
    """Return the best order found from several starts, with the step time before and after."""
    ends = graph.plain_us.copy()
    count = starts.shape[1]
    # The given order defines the limits of devices that already exceed theirs.
    _fits(graph, shares, starts[0], most, True)
    given_us = _makespan(graph, shares, starts[0], ends)
    best, best_us = starts[0].copy(), given_us
    for at in range(1, len(starts)):
        us = _makespan(graph, shares, starts[at], ends)
        if us < best_us and _fits(graph, shares, starts[at], most, False):
            best, best_us = starts[at].copy(), us
    # A linear congruential generator, because compiled and plain runs must draw the same swaps.
    state = 12345
    for _ in range(tries):
        state = (1103515245 * state + 12345) % 2147483648
        one = (state >> 8) % count
        state = (1103515245 * state + 12345) % 2147483648
        other = (state >> 8) % count
        best[one], best[other] = best[other], best[one]
        us = _makespan(graph, shares, best, ends)
        if us <= best_us and _fits(graph, shares, best, most, False):
            best_us = us
        else:
            best[one], best[other] = best[other], best[one]
    if best_us > given_us * (1 - GAIN):
        best, best_us = starts[0].copy(), given_us
    return best, given_us, best_us


def _searching() -> Any:
    return compiled_once(_search, _makespan, _fits)
