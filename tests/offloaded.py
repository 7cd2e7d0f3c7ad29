"""Published schedules with offloaded microbatches, and host copies whose sources are poisoned."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import UntypedStorage

from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT, RELEASE, RELOAD, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule


def choose_all(stage: int, microbatch: int) -> bool:
    """Select all microbatches."""
    return True


def choose_every_third(stage: int, microbatch: int) -> bool:
    """Select every third microbatch, shifted by stage."""
    return (stage + microbatch) % 3 == 0


def with_offloads(schedule: Schedule, chosen: Callable[[int, int], bool] = choose_all) -> Schedule:
    """Return the schedule with D directly after F of selected microbatches, and L, R, H before B.

    If F and B are far enough apart, L and R leave one pass for each copy.
    """
    return replace(schedule, order=tuple(_row(row, chosen) for row in schedule.order))


def _row(row: tuple[Pass, ...], chosen: Callable[[int, int], bool]) -> tuple[Pass, ...]:
    indices = {(part, *work[1:]): index for index, work in enumerate(row) for part in work.parts()}
    positioned = [(float(index), work) for index, work in enumerate(row)]
    for kind, stage, microbatch in indices:
        if kind is not Kind.F or not chosen(stage, microbatch):
            continue
        first, last = indices[Kind.F, stage, microbatch], indices[Kind.B, stage, microbatch]
        has_gap = last - first > 2
        positions = {
            COPY_OUT: first + 0.1,
            RELEASE: first + 1.2 if has_gap else first + 0.2,
            RELOAD: last - 1.4 if has_gap else first + 0.3,
            COPY_BACK: last - 1.3 if has_gap else first + 0.4,
        }
        positioned += [
            (position, Pass(copy_kind, stage, microbatch))
            for copy_kind, position in positions.items()
        ]
    return tuple(work for _, work in sorted(positioned, key=lambda entry: entry[0]))


_resize = UntypedStorage.resize_


def poisoning(storage: UntypedStorage, size: int) -> UntypedStorage:
    """Resize, and fill the memory before and after with NaN in every dtype."""
    _fill_with_nan(storage)
    result = _resize(storage, size)
    _fill_with_nan(storage)
    return result


def _fill_with_nan(storage: UntypedStorage) -> None:
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(0xFF)
