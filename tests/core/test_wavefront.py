"""Long schedules on many devices are simulated a pass of each at a time, to the same bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import costs_of, made

from megatron_vshape.core.check import wavefront
from megatron_vshape.core.check.simulate import _Simulation, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make


@contextmanager
def for_all() -> Iterator[None]:
    """Have all schedules simulated so that can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wavefront, "COMPILED_FROM", 0)
        patch.setattr(wavefront, "LEAST_DEVICES", 1)
        yield


def times_or_error(schedule: Schedule, costs: Costs) -> object:
    try:
        timeline = simulate(schedule, costs)
    except ScheduleError as error:
        return str(error)
    return timeline.starts, timeline.ends


@settings(max_examples=60)
@given(st.data())
def test_the_times_are_the_same_and_so_is_a_deadlock(data: st.DataObject) -> None:
    schedule = data.draw(made(max_devices=6, max_microbatches=12))
    costs = data.draw(costs_of(schedule.num_stages))
    rows = [list(row) for row in schedule.order]
    if data.draw(st.booleans()):
        row = data.draw(st.sampled_from(rows))
        one, other = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        row[one], row[other] = row[other], row[one]
        twice = data.draw(st.booleans())
        rows[0] += rows[0][:1] * twice
    schedule = replace(schedule, order=tuple(map(tuple, rows)))
    usual = times_or_error(schedule, costs)
    with for_all():
        assert times_or_error(schedule, costs) == usual


def test_a_long_schedule_on_many_devices_takes_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = []
    monkeypatch.setattr(_Simulation, "_run_lanes", lambda *_: lanes.append(1) or ((), ()))
    simulate(make("v-half", 32, 300))
    assert not lanes
    simulate(make("v-half", 16, 32))
    assert lanes
