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

from megatron_vshape.core.check.bounds import limits_by_device
from megatron_vshape.core.check.simulate import costs_of, simulate
from megatron_vshape.core.compiling import compiled_once, compiles, in_arrays
from megatron_vshape.core.model.amounts import Amount
from megatron_vshape.core.model.costs import Costs, scaled_times_us
from megatron_vshape.core.model.kinds import HELD, KINDS, NeedTable
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule

_COMPILED_TRIES, _PYTHON_TRIES = 3000, 60
"""Number of swaps to try with and without numba: tens of milliseconds."""

_MIN_GAIN = 1e-9
"""Minimum relative gain of a better order."""


class PassGraph(NamedTuple):
    """Passes of a schedule in topological order, in arrays.

    For an F&B pair, the first pass represents both. The time of a pass and its change of the
    device's memory are a constant plus a share for each variable amount.
    """

    microbatches: Any  # [passes] microbatch
    plain_us: Any  # [passes]
    shared_us: Any  # [passes x scaled]
    first: Any  # [passes + 1] first index in `waits`
    waits: Any  # passes to wait for
    sends_us: Any  # message times of these
    row_of: Any  # [devices + 1] first index in `rows` of a device
    row_microbatches: Any  # microbatch of each pass, in the devices' order
    allocated: Any  # [rows x scaled + 1] memory allocated at the start; the last column is constant
    change_at_end: Any  # the same at the end
    workspace: Any  # [rows] workspace
    fixed: Any  # [devices]
    timed: int  # number of time amounts, which precede memory amounts


class MicrobatchOrder(NamedTuple):
    """Order of microbatches by position, and the step time before and after, in the costs' unit."""

    order: tuple[int, ...]
    initial_us: float
    best_us: float


def reorder_microbatches(
    schedule: Schedule,
    costs: Costs,
    limits: float | Sequence[float] = math.inf,
    tries: int | None = None,
    graph: PassGraph | None = None,
) -> MicrobatchOrder:
    """Choose the microbatch for each position; the step is never slower than in the given order.

    `costs.by_microbatch` has the size of each microbatch. No device exceeds its limit, or its
    memory in the given order if that is more. The result is deterministic. `graph` can be reused
    from `make_pass_graph` for the same schedule and costs with other sizes.

    Raises:
        ScheduleError: the costs are for another number of stages or microbatches.
    """
    # Times come first.
    variable_amounts = sorted(costs.by_microbatch, key=lambda amount: amount[0] in HELD)
    costs = replace(costs, by_microbatch=tuple(variable_amounts))
    scaled = [amount for amount, _ in variable_amounts]
    count = schedule.unsliced_microbatches
    initial_order = tuple(range(count))
    if not scaled or count < 2 or count < schedule.num_microbatches:
        step_us = simulate(schedule, costs).makespan
        return MicrobatchOrder(initial_order, step_us, step_us)
    costs = costs_of(schedule, costs)
    pass_graph = make_pass_graph(schedule, costs) if graph is None else graph
    shares = _matrix([sizes for _, sizes in costs.by_microbatch], count)
    memory_limits = in_arrays(
        [float(limit) for limit in limits_by_device(limits, schedule.num_devices)]
    )
    starts = _matrix(_starts(initial_order, costs), count).astype("int64")
    if tries is None:
        tries = _COMPILED_TRIES if compiles() else _PYTHON_TRIES
    search = compiled_once(_search, _makespan, _fits)
    best_order, before_us, after_us = search(pass_graph, shares, memory_limits, starts, tries)
    return MicrobatchOrder(
        tuple(int(microbatch) for microbatch in best_order), float(before_us), float(after_us)
    )


def _starts(order: Sequence[int], costs: Costs) -> list[Sequence[int]]:
    """Return start orders: the given one, by length, and with the longest outside or inside."""
    weight = [
        sum(amounts[microbatch] for _, amounts in costs.by_microbatch) for microbatch in order
    ]
    ascending = sorted(order, key=lambda microbatch: (weight[microbatch], microbatch))
    hill = [*ascending[::2], *ascending[1::2][::-1]]
    return [
        order,
        ascending,
        ascending[::-1],
        hill,
        [*hill[len(hill) // 2 :], *hill[: len(hill) // 2]],
    ]


def make_pass_graph(schedule: Schedule, costs: Costs) -> PassGraph:
    """Convert the passes of a schedule to arrays, with costs from `costs_of`."""
    scaled = [amount for amount, _ in costs.by_microbatch]
    number, groups = _numbered_groups(schedule, costs)
    table = NeedTable(schedule.num_stages, [kind for kind in KINDS if kind in schedule.kinds])
    node_of = {
        (part, work.stage, work.microbatch): number[work]
        for work in number
        for part in table.parts_of[work.kind]
    }
    previous: dict[Pass, Pass] = {}
    for queue in schedule.queues():
        previous |= {follower: work for work, follower in pairwise(queue.passes)}
    first, waits, sends_us, plain, shared = [0], list[int](), list[float](), list[float](), []
    for index, group in enumerate(groups):
        for work in group:
            # A pass waits for the previous pass of its resource queue, and for its inputs.
            if work in previous and number[previous[work]] != index:
                waits.append(number[previous[work]])
                sends_us.append(0.0)
            for part, source in table.needs[work.kind][work.stage]:
                node = node_of.get((part, source, work.microbatch))
                if node is None or node == index:
                    continue
                is_sent = schedule.placement[source] != schedule.placement[work.stage]
                waits.append(node)
                sends_us.append(costs.message_us(work.stage, source) if is_sent else 0.0)
        first.append(len(waits))
        row = dict.fromkeys(scaled, 0.0)
        if len(group) == 2:
            plain.append(costs.overlapped_us(group[0].stage, group[1].kind, group[1].stage))
        else:
            (work,) = group
            for amount, us in scaled_times_us(costs, work.kind, work.stage):
                row[amount] += us
            plain.append(costs.time_us(work.kind, work.stage) - sum(row.values()))
        shared.append([*row.values()])
    microbatches = [group[0].microbatch for group in groups]
    row_of, row_microbatches, allocated, change_at_end, workspace, fixed = _memory_rows(
        schedule, costs, scaled
    )
    return PassGraph(
        microbatches=in_arrays(microbatches),
        plain_us=in_arrays(plain),
        shared_us=_matrix(shared, len(scaled)),
        first=in_arrays(first),
        waits=in_arrays(waits),
        sends_us=in_arrays(sends_us),
        row_of=in_arrays(row_of),
        row_microbatches=in_arrays(row_microbatches),
        allocated=_matrix(allocated, len(scaled) + 1),
        change_at_end=_matrix(change_at_end, len(scaled) + 1),
        workspace=in_arrays(workspace),
        fixed=in_arrays(fixed),
        timed=sum(amount not in HELD for amount in scaled),
    )


def _matrix(rows: Any, columns: int) -> Any:
    import numpy as np

    return np.array(rows, np.float64).reshape(-1, columns)


def _numbered_groups(schedule: Schedule, costs: Costs) -> tuple[dict[Pass, int], list[list[Pass]]]:
    """Number all passes in topological order, F&B pairs with one number; return both directions."""
    timeline = simulate(schedule, costs)
    ends: list[tuple[float, int, int]] = []
    for device, row in enumerate(timeline.ends):
        ends += [(end, device, position) for position, end in enumerate(row)]
    number: dict[Pass, int] = {}
    groups: list[list[Pass]] = []
    second = {paired: work for work, paired in schedule.overlapped_pairs().items()}
    for _, device, position in sorted(ends):
        work = schedule.order[device][position]
        leader = second.get(work)
        if leader is not None and leader in number:
            number[work] = number[leader]
            groups[number[leader]].append(work)
        else:
            number[work] = len(groups)
            groups.append([work])
    return number, groups


def _memory_rows(schedule: Schedule, costs: Costs, scaled: Sequence[Amount]) -> tuple[Any, ...]:
    """Return the memory changes of every pass of every device's row, by name."""
    row_of, microbatches, allocated, changes_at_end, workspaces = [0], [], [], [], []
    column_of: dict[Amount | None, int] = {
        amount: column for column, amount in enumerate(scaled) if amount in HELD
    }
    plain = len(scaled)
    for row in schedule.order:
        for work in row:
            kind, stage_costs = work.kind, costs.stages[work.stage]
            memory = stage_costs.memory(kind)
            start, end = [0.0] * (plain + 1), [0.0] * (plain + 1)
            for value, amount, sign, row_amounts in (
                (memory[0], kind.allocated, 1.0, start),
                (memory[1], kind.retained, 1.0, end),
                (memory[2], kind.freed, -1.0, end),
            ):
                row_amounts[column_of.get(amount, plain)] += sign * value
            microbatches.append(work.microbatch)
            allocated.append(start)
            changes_at_end.append(end)
            workspaces.append(stage_costs.workspace(kind))
        row_of.append(len(microbatches))
    fixed = costs.fixed_bytes(schedule.placement, schedule.num_devices)
    return (
        row_of,
        microbatches,
        allocated,
        changes_at_end,
        [float(x) for x in workspaces],
        [float(x) for x in fixed],
    )


def _makespan(graph: Any, shares: Any, order: Any, ends: Any) -> float:
    """Return the simulated step time with microbatches in this order."""
    first = math.inf
    last = 0.0
    for index in range(len(graph.microbatches)):
        start = 0.0
        for entry in range(graph.first[index], graph.first[index + 1]):
            arrival = ends[graph.waits[entry]] + graph.sends_us[entry]
            if arrival > start:
                start = arrival
        length = graph.plain_us[index]
        microbatch = order[graph.microbatches[index]]
        for name in range(graph.timed):
            length += graph.shared_us[index, name] * shares[name, microbatch]
        if start < first:
            first = start
        ends[index] = start + length
        if ends[index] > last:
            last = ends[index]
    return last - first


def _fits(graph: Any, shares: Any, order: Any, limits: Any, raises: bool) -> bool:
    """Return whether every device fits its limit; with `raises`, increase the limits to fit."""
    plain = len(shares)
    for device in range(len(graph.fixed)):
        memory = graph.fixed[device]
        for entry in range(graph.row_of[device], graph.row_of[device + 1]):
            microbatch = order[graph.row_microbatches[entry]]
            memory += graph.allocated[entry, plain]
            change = graph.change_at_end[entry, plain]
            for name in range(plain):
                memory += graph.allocated[entry, name] * shares[name, microbatch]
                change += graph.change_at_end[entry, name] * shares[name, microbatch]
            if memory + graph.workspace[entry] > limits[device]:
                if not raises:
                    return False
                limits[device] = (memory + graph.workspace[entry]) * (1 + 1e-9)
            memory += change
    return True


def _search(graph: Any, shares: Any, limits: Any, starts: Any, tries: int) -> Any:
    """Return the best order found from several starts, with the step time before and after."""
    ends = graph.plain_us.copy()
    count = starts.shape[1]
    # The given order defines the limits of devices that already exceed theirs.
    _fits(graph, shares, starts[0], limits, True)
    initial_us = _makespan(graph, shares, starts[0], ends)
    best, best_us = starts[0].copy(), initial_us
    for index in range(1, len(starts)):
        us = _makespan(graph, shares, starts[index], ends)
        if us < best_us and _fits(graph, shares, starts[index], limits, False):
            best, best_us = starts[index].copy(), us
    # A linear congruential generator, because compiled and plain runs must draw the same swaps.
    state = 12345
    for _ in range(tries):
        state = (1103515245 * state + 12345) % 2147483648
        first = (state >> 8) % count
        state = (1103515245 * state + 12345) % 2147483648
        second = (state >> 8) % count
        best[first], best[second] = best[second], best[first]
        us = _makespan(graph, shares, best, ends)
        if us <= best_us and _fits(graph, shares, best, limits, False):
            best_us = us
        else:
            best[first], best[second] = best[second], best[first]
    if best_us > initial_us * (1 - _MIN_GAIN):
        best, best_us = starts[0].copy(), initial_us
    return best, initial_us, best_us
