"""The ways to hold less that a plan is chosen from: settings of recompute, copies to the host."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from megatron_vshape.core.check.bounds import fits
from megatron_vshape.core.check.simulate import held_curve
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import NO_RECOMPUTE, Kind
from megatron_vshape.core.model.placement import Placement, chunks_of
from megatron_vshape.core.model.schedule import ORDER_ALONE, Schedule, Way


def ways_to_save(costs: Costs, placement: Placement) -> Iterator[Way]:
    """Yield the few ways that are raced, which begin with the order alone.

    A device's first chunks live longest: their F are first and their B last. So one setting is that
    of the first chunks of all devices, and one that of the others; and copying all of the first
    chunks is what others do. The last stage's B may follow its F at once, with nothing to compute
    again: so it is also asked to keep all where the others compute something again.
    """
    yield ORDER_ALONE
    names = (NO_RECOMPUTE, *(name for name, _ in costs.recompute))
    chunks = chunks_of(placement)
    for settings in _by_chunk(names, chunks):
        yield Way(settings)
    for name in names[1:]:
        yield Way((*(name,) * (len(chunks) - 1), NO_RECOMPUTE))
    if costs.copies:
        first = tuple(stage for stage, chunk in enumerate(chunks) if not chunk)
        yield Way(copies=True, throughout=first)
        for settings in ((), *_by_chunk(names, chunks)):
            yield Way(settings, copies=True)


def _by_chunk(names: Sequence[str], chunks: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for name in names[1:]:
        yield (name,) * len(chunks)
    for first in range(1, max(chunks) + 1):
        for early, late in permutations(names, 2):
            yield tuple(early if chunk < first else late for chunk in chunks)


def computing_less(schedule: Schedule, costs: Costs, limits: Sequence[float]) -> Schedule:
    """Return the schedule whose stages compute again only what their devices have no room to keep.

    The last stage is the first to be asked, whose B follow their F at once and so hold the least
    for what they spare. An order with shorter passes takes no longer. `limits` are what each device
    may hold, in the unit of the costs' memory.

    Raises:
        ScheduleError: the costs are of other stages, or lack a setting that a stage has.
    """
    for stage in reversed(range(schedule.num_stages)):
        device, settings = schedule.placement[stage], schedule.recompute
        for setting in _shorter(costs, stage, settings[stage]):
            changed = (*settings[:stage], setting, *settings[stage + 1 :])
            tried = replace(schedule, recompute=changed)
            if fits([max(held_curve(tried, costs, device))], [limits[device]]):
                schedule = tried
                break
    return schedule


def _shorter(costs: Costs, stage: int, setting: str) -> list[str]:
    """Return the settings with which a stage's passes take less than with this, the least first."""
    by_name = costs.by_setting()

    def times(name: str) -> tuple[float, ...]:
        own = by_name[name]
        return tuple(own.time_us(kind, stage) for kind in (Kind.F, Kind.B, Kind.W, Kind.BW))

    now = times(setting)
    shorter = [
        name
        for name in by_name
        if name != setting and all(a <= b for a, b in zip(times(name), now, strict=True))
    ]
    return sorted(shorter, key=lambda name: sum(times(name)))
