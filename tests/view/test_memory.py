"""The memory curve of a device reaches the peak and ends at zero."""

import pytest

from megatron_vshape import Costs, Timeline, make, peak_held, simulate
from megatron_vshape.core.check.simulate import unit_costs
from megatron_vshape.core.paper.catalogue import NAMES
from megatron_vshape.view.numbers import held_steps


@pytest.mark.parametrize("name", NAMES)
def test_steps_reach_the_peak_and_end_empty(name):
    schedule = make(name, 4, 8)
    timeline = simulate(schedule)
    for device, peak in enumerate(peak_held(schedule)):
        steps = held_steps(timeline, unit_costs(schedule), device)
        assert max(memory for _, memory in steps) == pytest.approx(peak)
        assert steps[-1] == (timeline.ends[device][-1], 0.0)
        times = [time for time, _ in steps]
        assert times == sorted(set(times))


def test_memory_after_b_and_after_w():
    schedule = make("v-zb", 1, 1)
    costs = Costs.of((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, 0.0, (8.0, 8.0), (3.0, 3.0))
    steps = held_steps(simulate(schedule, costs), costs, 0)
    assert [memory for _, memory in steps[:2]] == [8.0, 16.0]
    assert {memory for _, memory in steps} <= {16.0, 11.0, 8.0, 6.0, 3.0, 0.0}
    assert steps[-1][1] == 0.0


def test_idle_time_excludes_activations_of_the_next_forward():
    schedule = make("1f1b", 2, 2)
    simulated = simulate(schedule)
    delayed = Timeline(
        schedule,
        tuple(
            tuple(time + 10 * index for index, time in enumerate(row)) for row in simulated.starts
        ),
        tuple(tuple(time + 10 * index for index, time in enumerate(row)) for row in simulated.ends),
    )
    # device 1 runs F BW F BW with pauses: it is empty between the first BW and the second F
    assert [memory for _, memory in held_steps(delayed, unit_costs(schedule), 1)] == [2, 0, 2, 0]
