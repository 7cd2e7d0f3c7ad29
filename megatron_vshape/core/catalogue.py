"""The schedules by name, each made from its building block in the paper's four steps."""

from collections.abc import Callable

from megatron_vshape.core.building_block import (
    BuildingBlock,
    one_f_one_b,
    v_half,
    v_min,
    v_zb,
)
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.core.reordering import reorder
from megatron_vshape.core.repeating import repeat
from megatron_vshape.core.schedule import Schedule
from megatron_vshape.core.squeezing import squeeze
from megatron_vshape.core.verify import verify


def peak_v_min(num_devices: int) -> int:
    """Return V-Min's peak in chunks: twice (d + 4) // 3 microbatches."""
    return 2 * ((num_devices + 4) // 3)


def peak_v_half(num_devices: int) -> int:
    """Return V-Half's peak in chunks: twice (d + 2) // 2 microbatches."""
    return 2 * ((num_devices + 2) // 2)


def peak_v_zb(num_devices: int) -> int:
    """Return V-ZB's peak in chunks: that of 1F1B, twice d microbatches."""
    return 2 * num_devices


def make_schedule(
    block: BuildingBlock, num_microbatches: int, max_held: int | None = None
) -> Schedule:
    """Return the schedule that `block` stands for, in the paper's four steps.

    Without `max_held`, in stage activations, the last step is left out.
    """
    schedule = squeeze(repeat(block, num_microbatches))
    if max_held is not None:
        schedule = reorder(schedule, max_held)
    verify(schedule)
    return schedule


def _one_f_one_b(num_devices: int, num_microbatches: int) -> Schedule:
    return make_schedule(one_f_one_b(num_devices), num_microbatches)


def _v(
    block: Callable[[int], BuildingBlock], peak: Callable[[int], int]
) -> Callable[[int, int], Schedule]:
    def build(num_devices: int, num_microbatches: int) -> Schedule:
        return make_schedule(block(num_devices), num_microbatches, peak(num_devices))

    return build


_MAKERS: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": _one_f_one_b,
    "v-min": _v(v_min, peak_v_min),
    "v-half": _v(v_half, peak_v_half),
    "v-zb": _v(v_zb, peak_v_zb),
}

NAMES = tuple(_MAKERS)


def make(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    """Return the schedule called `name`.

    Raises:
        ScheduleError: no schedule has this name, or a count is below 1.
    """
    if name not in _MAKERS:
        raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(NAMES)}")
    for what, count in (("devices", num_devices), ("microbatches", num_microbatches)):
        if count < 1:
            raise ScheduleError(f"{name} needs at least 1 of {what}, not {count}")
    return _MAKERS[name](num_devices, num_microbatches)
