"""The judge: an independent replay of schedule files, where the checkout has one beside it."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.schedule import Schedule

JUDGE = Path(__file__).parents[2] / ".." / "shared" / "judge" / "replay.py"

Replay = Callable[[Schedule, Costs], "dict[str, Any] | str"]


@pytest.fixture(scope="session")
def replay() -> Replay:
    """Return a function to the judge's figures, or to the reason why it refuses a schedule."""
    if not JUDGE.exists():
        pytest.skip("no judge: put shared/judge/replay.py beside the checkout to compare with it")
    spec = importlib.util.spec_from_file_location("judge_replay", JUDGE)
    assert spec is not None
    assert spec.loader is not None
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)

    def figures(schedule: Schedule, costs: Costs) -> dict[str, Any] | str:
        data = {
            "name": schedule.name,
            "num_devices": schedule.num_devices,
            "num_microbatches": schedule.num_microbatches,
            "placement": list(schedule.placement),
            "order": [list(map(str, row)) for row in schedule.order],
        }
        times = {"F": costs.forward_us, "B": costs.backward_us, "W": costs.weight_us}
        try:
            return judge.replay(data, times, costs.send_us, costs.held_after_forward_bytes)
        except judge.Invalid as reason:
            return str(reason)

    return figures
