"""Errors of reordering."""

from dataclasses import replace

import pytest

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.paper.reordering import reorder


def test_error_of_small_limit_names_the_pass() -> None:
    with pytest.raises(ScheduleError) as error:
        reorder(make("v-half", 3, 5), 1)
    assert str(error.value) == (
        "F3.0 does not fit on device 2, which holds 1 stage activations then and its limit is 1"
    )


def test_error_names_the_missing_pass() -> None:
    schedule = make("1f1b", 2, 2)
    first_row, *remaining_rows = schedule.order
    incomplete_row = tuple(work for work in first_row if str(work) != "F0.1")
    with pytest.raises(ScheduleError, match="waits for F0.1, which no device runs"):
        reorder(replace(schedule, order=(incomplete_row, *remaining_rows)), 2)
