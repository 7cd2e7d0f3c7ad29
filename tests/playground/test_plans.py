"""Plans in the playground: up to four stages per device; picture, command and training file."""

import functools
import json
import shlex
from typing import Any

import numpy as np
import pytest
from playground.answers import read_payload, request

from megatron_vshape import Costs, Schedule, load_schedule, peak_held, simulate
from megatron_vshape.cli.main import main
from megatron_vshape.core.check.simulate import held_curve
from megatron_vshape.playground.answer import make_answer
from megatron_vshape.playground.request import parse_request

pytest.importorskip("numba", reason="without numba a plan takes minutes")

COST = {"forward": 1, "backward": 1.15, "weight": 0.85, "send": 0.05}
DEVICES, MICROBATCHES = 5, 9


def planned(
    answer_kind: str = "timeline", costs: dict[str, Any] | None = None, **plan: Any
) -> bytes:
    """Return the answer to the request for a plan."""
    schedule = {"source": "plan", "limit": 7, **plan}
    body = request(
        answer_kind,
        devices=DEVICES,
        microbatches=MICROBATCHES,
        costs=costs or COST,
        schedule=schedule,
    )
    return answered(json.dumps(body))


@functools.cache
def answered(body: str) -> bytes:
    return make_answer(parse_request(json.loads(body)), lambda _: None)


def shown(**options: Any) -> dict[str, Any]:
    _, (header,) = read_payload(planned(**options))
    return header


def costs_file(stages: int) -> dict[str, Any]:
    """Return a costs file as JSON; with two chunks per device, a chunk has 1 GiB of activations."""
    share = 2 * DEVICES / stages
    times = [(1000.0 * time * share,) * stages for time in (1, 1.15, 0.85)]
    activation_bytes = (2.0**30 * share,) * stages
    return {
        "file": {
            "name": "costs.json",
            "text": Costs.of(*times, 50.0, activation_bytes, activation_bytes).to_json(),
        }
    }


def test_plan_has_four_stages_per_device():
    header = shown()
    schedule = Schedule.from_json(planned("schedule-file").decode())
    assert schedule.num_stages == 4 * DEVICES == len(header["placement"])
    assert sorted(set(header["chunks"])) == [0, 1, 2, 3]
    costs = Costs.uniform(DEVICES, 4 * DEVICES, *COST.values())
    timeline = simulate(schedule, costs)
    numbers, facts = header["numbers"], header["facts"]
    assert numbers["makespan"] == timeline.makespan
    assert numbers["bubble"] == timeline.bubble
    assert numbers["peaks"] == list(peak_held(schedule, costs))
    memory = [value for device in range(DEVICES) for value in held_curve(schedule, costs, device)]
    assert header["held"].tolist() == np.float32(memory).tolist()
    assert max(header["held"]) == max(numbers["peaks"]) <= facts["limit"] == 7
    assert facts["base_peak"] == 2 * DEVICES
    assert facts["lower_bound"] <= timeline.makespan
    assert facts["note"].endswith("4 chunks per rank, looping")


@pytest.mark.parametrize(("stages", "planned_for"), [(10, 10), (20, 20), (5, 5), (40, 20)])
def test_costs_file_determines_the_number_of_stages(stages, planned_for):
    header = shown(costs=costs_file(stages), limit=7, limit_in_gib=True)
    assert len(header["placement"]) == planned_for
    assert header["facts"]["recipe"] == (
        "plan --devices 5 --microbatches 9 --costs costs.json --memory-limit 7GiB "
        f"--chunks {planned_for // DEVICES}"
    )
    assert max(header["numbers"]["peaks"]) <= 7 * 2.0**30


def test_command_reproduces_the_plan_and_training_loads_it(tmp_path):
    plans = pytest.importorskip("megatron_vshape.mcore.setup.plans")
    choice = pytest.importorskip("megatron_vshape.mcore.setup.choice")
    options = pytest.importorskip("megatron_vshape.mcore.options")
    path = tmp_path / "plan.json"
    costs = {**COST, "embedding": [0.25, 0, 0], "head": [0.5, 0.25, 0.5]}
    recipe = shlex.split(shown(costs=costs)["facts"]["recipe"])
    assert recipe[recipe.index("--head") + 1] == "0.5,0.25,0.5"
    assert main([*recipe, "--export", str(path)]) == 0
    schedule = Schedule.from_json(planned("schedule-file", costs=costs).decode())
    assert load_schedule(path) == schedule
    planner = plans.Planner(choice.resolve_schedule(options.Options(str(path)), DEVICES))
    assert planner.plan_step(MICROBATCHES).schedule == schedule
    assert shown(costs=costs)["facts"]["train"] == ""  # the page names the file
