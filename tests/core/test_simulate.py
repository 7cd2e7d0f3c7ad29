"""The simulator: drawings, memory, and the same figures as independent replays."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import catalogue_schedules, costs_of

from megatron_vshape import Costs, Schedule, ScheduleError, make, peak_held, simulate
from megatron_vshape.core.check.simulate import held_curve
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(data=st.data(), values=st.sampled_from([None, (1, 1, 1, 0), (1, 2, 1, 0.05)]))
def test_simulator_agrees_with_replays(
    data: st.DataObject, values: tuple[float, ...] | None, replay
) -> None:
    """With equal stages, in which passes end at the same time, and with different ones."""
    schedule = data.draw(catalogue_schedules())
    sizes = schedule.num_devices, schedule.num_stages
    costs = Costs.uniform(*sizes, *values) if values else data.draw(costs_of(sizes[1]))
    timeline = simulate(schedule, costs)
    for figures in replay(schedule, costs):
        assert max(peak_held(schedule, costs)) == pytest.approx(figures["peak"], abs=1e-6)
        for name in ("makespan", "span", "busy", "overhead", "bubble", "span_bubble"):
            assert getattr(timeline, name) == pytest.approx(figures[name], abs=2e-6), name


def test_messages_delay_readers_but_occupy_no_device() -> None:
    schedule = make("1f1b", 2, 1)
    timeline = simulate(schedule, Costs.uniform(2, 2, 1, 1, 1, send=0.5))
    assert timeline.starts == ((0.0, 9.0), (2.5, 4.5))
    assert timeline.makespan == 13


def test_memory_decreases_after_b_and_after_w() -> None:
    schedule = make("zb-h1", 1, 1)
    costs = Costs.of((1,), (1,), (1,), 0, (10,), (4,))
    assert held_curve(schedule, costs, 0) == [10, 10, 4]
    assert peak_held(schedule, costs) == (10,)


def test_makespan_busy_and_overhead() -> None:
    timeline = simulate(make("1f1b", 4, 8))
    assert (timeline.makespan, timeline.busy, timeline.overhead) == (66, 48, 18)
    assert timeline.bubble == pytest.approx(18 / 66)
    assert next(iter(timeline.slots(3))) == (Pass(Kind.F, 3, 0), 6.0, 8.0)


def test_drawing_can_be_scaled() -> None:
    timeline = simulate(make("v-half", 4, 32))
    assert max(map(len, timeline.draw(columns=80).splitlines())) == 80
    assert max(map(len, timeline.draw(columns=1000).splitlines())) == timeline.makespan


def test_drawing_of_unequal_passes_is_proportional() -> None:
    timeline = simulate(make("v-half", 2, 2), Costs.uniform(2, 4, 1, 2, 1))
    assert timeline.draw().splitlines() == ["FF fbbfw  BBbbWw  BBW", " FfFf bbBBWw  bbBBWw"]


def test_costs_for_another_stage_count_are_rejected() -> None:
    with pytest.raises(ScheduleError) as error:
        simulate(make("v-half", 4, 8), Costs.uniform(4, 4))
    assert str(error.value) == "the costs are for 4 stages, the schedule has 8"


def test_error_of_incomplete_schedule_names_the_missing_pass() -> None:
    text = '{"format": 1, "name": "x", "num_devices": 1, "num_microbatches": 1, '
    schedule = Schedule.from_json(text + '"placement": [0], "order": [["B0.0"]]}')
    with pytest.raises(ScheduleError) as error:
        simulate(schedule)
    assert str(error.value) == (
        "the schedule cannot end: B0.0 on device 0 waits for F0.0, which no device runs"
    )
