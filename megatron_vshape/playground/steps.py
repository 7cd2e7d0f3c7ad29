"""The four steps of the paper as pictures."""

from collections.abc import Iterator

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.blocks import BuildingBlock, repeat, squeeze
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.playground.picture import Facts, Picture
from megatron_vshape.view.numbers import base_peak

_STEP_TITLES = ("1  Building block", "2  Repeated", "3  Squeezed", "4  Reordered")


def step_pictures(block: BuildingBlock, last: Schedule) -> Iterator[Picture]:
    """Yield the block, its repeats, the squeezed schedule, and `last`, made from them."""
    stages, devices = len(block.placement), block.num_devices
    num_microbatches = last.num_microbatches
    costs = Costs.uniform(devices, stages)
    block_microbatches = min(block.num_microbatches, num_microbatches)
    slot = 2 * devices / stages
    repeated = _scaled(repeat(block, num_microbatches), slot)
    squeezed = squeeze(repeated)
    timelines = (
        _scaled(repeat(block, block_microbatches), slot),
        repeated,
        simulate(squeezed, costs),
        simulate(last, costs),
    )
    notes = (
        f"The passes of one microbatch. The next one starts T = {block.interval} slots later.",
        "A copy every T slots. No two passes meet, and every lifespan is as the block's.",
        "Every rank drops its redundant idle time; the order of its passes stays.",
        "Passes move into the idle slots of warm-up and cool-down, within the same memory."
        if last.order != squeezed.order
        else "Nothing to do: no pass of this schedule finds a better place.",
    )
    base = base_peak(devices)
    for index, timeline in enumerate(timelines):
        facts = Facts(in_passes=True, base_peak=base, title=_STEP_TITLES[index], note=notes[index])
        yield Picture(timeline, costs, facts)


def _scaled(timeline: Timeline, scale: float) -> Timeline:
    def rows(times: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time * scale for time in row) for row in times)

    return Timeline(timeline.schedule, rows(timeline.starts), rows(timeline.ends))


def catalogue_name(schedule: Schedule) -> str:
    """Return the schedule's name if the catalogue makes exactly this schedule; otherwise empty."""
    try:
        catalogue_schedule = make(schedule.name, schedule.num_devices, schedule.num_microbatches)
    except ScheduleError:
        return ""
    return schedule.name if catalogue_schedule == schedule else ""
