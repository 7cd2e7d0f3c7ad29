"""Hypothesis strategies for schedules, costs and invalid schedules."""

import itertools
from dataclasses import replace

from hypothesis import strategies as st

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import KINDS, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass, can_overlap
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import NAMES, OPTIONS, make


@st.composite
def catalogue_schedules(
    draw: st.DrawFn, max_devices: int = 12, max_microbatches: int = 40
) -> Schedule:
    """Draw a published schedule with any supported options."""
    name = draw(st.sampled_from(NAMES))
    devices = draw(st.integers(1, max_devices))
    options = {option: draw(st.integers(1, 5)) for option in sorted(OPTIONS.get(name, ()))}
    return make(name, devices, draw(st.integers(1, max_microbatches)), **options)


@st.composite
def costs_of(draw: st.DrawFn, num_stages: int) -> Costs:
    """Draw costs that differ from stage to stage."""

    def values(minimum: float) -> st.SearchStrategy[tuple[float, ...]]:
        amount = st.floats(minimum, 4.0, width=32)
        return st.lists(amount, min_size=num_stages, max_size=num_stages).map(tuple)

    memory = draw(values(0.125))
    return Costs.of(
        draw(values(0.125)),
        draw(values(0.125)),
        draw(values(0.125)),
        draw(st.floats(0.0, 2.0, width=32)),
        memory,
        memory,
    )


@st.composite
def with_boundary_costs(draw: st.DrawFn, costs: Costs) -> Costs:
    """Draw the costs with messages that differ from boundary to boundary."""
    boundaries = costs.num_stages - 1
    extra_us = st.lists(st.sampled_from((0.0, 0.5, 3.0)), min_size=boundaries, max_size=boundaries)
    return replace(costs, more_send_us=draw(extra_us.map(tuple)))


@st.composite
def mutated_schedules(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """Draw the schedule with one or two changes, after which it may still be valid."""
    rows = [list(row) for row in schedule.order]
    for _ in range(draw(st.integers(1, 2))):
        nonempty = [device for device, row in enumerate(rows) if row]
        if not nonempty:
            break
        device = draw(st.sampled_from(nonempty))
        change = draw(st.sampled_from((_swap, _drop, _duplicate, _move, _split_or_fuse, _rename)))
        change(draw, rows, device)
    return replace(schedule, order=tuple(map(tuple, rows)))


def _index(draw: st.DrawFn, row: list[Pass]) -> int:
    return draw(st.integers(0, len(row) - 1))


def _swap(draw: st.DrawFn, rows: list[list[Pass]], device: int) -> None:
    row = rows[device]
    first, second = _index(draw, row), _index(draw, row)
    row[first], row[second] = row[second], row[first]


def _drop(draw: st.DrawFn, rows: list[list[Pass]], device: int) -> None:
    del rows[device][_index(draw, rows[device])]


def _duplicate(draw: st.DrawFn, rows: list[list[Pass]], device: int) -> None:
    row = rows[device]
    row.insert(_index(draw, row), row[_index(draw, row)])


def _move(draw: st.DrawFn, rows: list[list[Pass]], device: int) -> None:
    work = rows[device].pop(_index(draw, rows[device]))
    target = rows[draw(st.integers(0, len(rows) - 1))]
    target.insert(draw(st.integers(0, len(target))), work)


def _split_or_fuse(draw: st.DrawFn, rows: list[list[Pass]], device: int) -> None:
    row = rows[device]
    index = _index(draw, row)
    if row[index].kind is Kind.BW:
        row[index : index + 1] = [
            row[index]._replace(kind=Kind.B),
            row[index]._replace(kind=Kind.W),
        ]
    elif row[index].kind is Kind.B:
        row[index] = row[index]._replace(kind=Kind.BW)


def _rename(draw: st.DrawFn, rows: list[list[Pass]], device: int) -> None:
    row = rows[device]
    index = _index(draw, row)
    row[index] = Pass(
        draw(st.sampled_from(list(KINDS))),
        max(0, row[index].stage + draw(st.integers(-1, 1))),
        max(0, row[index].microbatch + draw(st.integers(-1, 1))),
    )


@st.composite
def with_overlapped_pairs(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """Draw a valid schedule with some adjacent passes F, B or F, BW overlapped."""
    pairs = [
        pair
        for row in schedule.order
        for pair in itertools.pairwise(row)
        if can_overlap(pair) and draw(st.booleans())
    ]
    overlapped = frozenset[Pass]()
    for work, _ in pairs:
        candidate = replace(schedule, overlapped=overlapped | {work})
        try:
            simulate(candidate)
        except ScheduleError:  # the two pairs would wait for each other
            continue
        overlapped = candidate.overlapped
    return replace(schedule, overlapped=overlapped)


@st.composite
def costs_with_collectives(draw: st.DrawFn, costs: Costs) -> Costs:
    """Draw the costs with collectives, which overlapped passes hide."""
    stages = range(costs.num_stages)
    wait_us = st.just(0.0) | st.floats(0.125, 2.0, width=32)
    waits_us = st.lists(wait_us, min_size=len(stages), max_size=len(stages))
    return costs.having(
        forward_exchange_us=tuple(draw(waits_us)), backward_exchange_us=tuple(draw(waits_us))
    )
