"""The four steps of the paper as pictures, and the period of a timeline: its repeating part."""

import math
from collections.abc import Iterator, Mapping, Sequence

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.building_block import BuildingBlock, repeat, squeeze
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.playground.picture import Facts, Period, Picture
from megatron_vshape.view.numbers import base_peak


def period_of(timeline: Timeline, microbatches: int | None) -> Period | None:
    """Return the repeating part in the middle of the steady phase; None if there is none.

    `microbatches` is the number of microbatches in the building block; None without a block. The
    length is measured at the last stage, because forwards of stage 0 may run ahead. If the schedule
    is too short to repeat, the length is the work of the busiest device for these microbatches: the
    block's interval.
    """
    schedule = timeline.schedule
    if microbatches is None:
        return None
    first = (schedule.num_microbatches // 2 // microbatches) * microbatches
    if first + microbatches >= schedule.num_microbatches:
        return None
    last = schedule.num_stages - 1
    begin = _starts(timeline, Kind.F, 0, (first,))
    turns = _starts(timeline, Kind.B, last, (first, first + microbatches))
    if len(begin) != 1 or len(turns) != 2 or turns[1] <= turns[0]:
        return None
    length = turns[1] - turns[0]
    own = range(first, first + microbatches)
    both = range(first, first + 2 * microbatches)
    if not _repeats(_all_starts(timeline, both), own, microbatches, length):
        length = timeline.busy * microbatches / schedule.num_microbatches
    return Period(begin[0], length, first, microbatches)


def _all_starts(timeline: Timeline, microbatches: range) -> dict[Pass, float]:
    return {
        work: start
        for row, starts in zip(timeline.schedule.order, timeline.starts, strict=True)
        for work, start in zip(row, starts, strict=True)
        if work.microbatch in microbatches
    }


def _same(difference: float, length: float) -> bool:
    return math.isclose(difference, length, abs_tol=1e-9)


def _repeats(starts: Mapping[Pass, float], middle: range, size: int, length: float) -> bool:
    """Return whether all passes in the middle repeat after `length`, `size` microbatches later."""
    return all(
        _same(
            starts.get(work._replace(microbatch=work.microbatch + size), math.nan) - start, length
        )
        for work, start in starts.items()
        if work.microbatch in middle
    )


def _starts(timeline: Timeline, kind: Kind, stage: int, microbatches: Sequence[int]) -> list[float]:
    """Return the start times of this part of a stage for these microbatches, in time order."""
    return [
        start
        for work, start, _ in timeline.slots(timeline.schedule.placement[stage])
        if work.stage == stage and work.microbatch in microbatches and kind in work.parts()
    ]


STEP_TITLES = ("1  Building block", "2  Repeated", "3  Squeezed", "4  Reordered")


def step_pictures(block: BuildingBlock, last: Schedule) -> Iterator[Picture]:
    """Yield the block, its repeats, the squeezed schedule, and `last`, made from them."""
    stages, devices = len(block.placement), block.num_devices
    num_microbatches = last.num_microbatches
    costs = Costs.uniform(devices, stages)
    alone = min(block.num_microbatches, num_microbatches)
    slot = 2 * devices / stages
    repeated = _scaled(repeat(block, num_microbatches), slot)
    squeezed = squeeze(repeated)
    timelines = (
        _scaled(repeat(block, alone), slot),
        repeated,
        simulate(squeezed, costs),
        simulate(last, costs),
    )
    notes = (
        f"The passes of one microbatch. The next one starts T = {block.interval} slots later.",
        "A copy every T slots. No two passes meet, and every lifespan is as the block's.",
        "Every device drops its redundant idle time; the order of its passes stays.",
        "Passes move into the idle slots of warm-up and cool-down, within the same memory."
        if last.order != squeezed.order
        else "Nothing to do: no pass of this schedule finds a better place.",
    )
    base = base_peak(devices)
    for at, timeline in enumerate(timelines):
        length = block.interval * slot
        period = Period(0.0, length, 0, alone) if at < 2 else period_of(timeline, alone)
        facts = Facts(
            in_passes=True, base_peak=base, period=period, title=STEP_TITLES[at], note=notes[at]
        )
        yield Picture(timeline, costs, facts)


def _scaled(timeline: Timeline, scale: float) -> Timeline:
    def rows(times: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time * scale for time in row) for row in times)

    return Timeline(timeline.schedule, rows(timeline.starts), rows(timeline.ends))


def catalogue_name(schedule: Schedule) -> str:
    """Return the schedule's name if the catalogue makes exactly this schedule; otherwise empty."""
    try:
        made = make(schedule.name, schedule.num_devices, schedule.num_microbatches)
    except ScheduleError:
        return ""
    return schedule.name if made == schedule else ""
