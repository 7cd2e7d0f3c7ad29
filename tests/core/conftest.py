"""Independent replays of schedules: by the tests and, if present, by a program elsewhere."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schedule_replay

from megatron_vshape import Costs, Schedule

EXTERNAL_REPLAY = Path(__file__).parents[2] / ".." / "shared" / "judge" / "replay.py"

Figures = dict[str, float]
Replay = Callable[[Schedule, Costs], list[Figures | str]]


def figures_of_tests(schedule: Schedule, costs: Costs) -> Figures | str:
    """Replay a schedule by the dependency rules; return the reason if it is invalid."""
    if not schedule_replay.is_complete(schedule):
        return "incomplete"
    times = schedule_replay.replay(schedule, costs)
    if len(times) < sum(map(len, schedule.order)):
        return "deadlock"
    slots = [[times[work] for work in row] for row in schedule.order]
    makespan = max(row[-1][1] for row in slots) - min(row[0][0] for row in slots)
    span = max(row[-1][1] - row[0][0] for row in slots)
    busy = max(sum(end - start for start, end in row) for row in slots)
    return {
        "makespan": makespan,
        "span": span,
        "busy": busy,
        "overhead": makespan - busy,
        "bubble": 1 - busy / makespan,
        "span_bubble": 1 - busy / span,
        "peak": max(schedule_replay.peaks(schedule, costs)),
    }


def figures_of_external_replay(
    external_replay: Any, schedule: Schedule, costs: Costs
) -> Figures | str:
    """Replay the schedule file by another program; return the reason if it is invalid."""
    file = {
        "name": schedule.name,
        "num_devices": schedule.num_devices,
        "num_microbatches": schedule.num_microbatches,
        "placement": list(schedule.placement),
        "order": [list(map(str, row)) for row in schedule.order],
    }
    times = {"F": costs.forward_us, "B": costs.backward_us, "W": costs.weight_us}
    try:
        figures: Figures = external_replay.replay(
            file, times, costs.send_us, costs.held_after_forward_bytes
        )
    except external_replay.Invalid as error:
        return str(error)
    return figures


@pytest.fixture(scope="session")
def replay() -> Replay:
    """Return a function that replays a schedule by all available programs."""
    external_replay: Any = None
    if EXTERNAL_REPLAY.exists():
        spec = importlib.util.spec_from_file_location("judge_replay", EXTERNAL_REPLAY)
        assert spec is not None
        assert spec.loader is not None
        external_replay = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(external_replay)

    def figures(schedule: Schedule, costs: Costs) -> list[Figures | str]:
        by_tests = figures_of_tests(schedule, costs)
        return (
            [by_tests, figures_of_external_replay(external_replay, schedule, costs)]
            if external_replay
            else [by_tests]
        )

    return figures
