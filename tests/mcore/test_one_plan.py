"""The trainer, the command line and the sweep return the same plan for the same request."""

import json
import random
from pathlib import Path

import pytest

from megatron_vshape.cli.main import main
from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import VOCABULARY, ScheduleError
from megatron_vshape.core.model.schedule import Objective, load_schedule
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner import search
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO, PLUS_NAMES
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.tuning.configurations import NONE, Configuration, Layout, SweepError
from megatron_vshape.tuning.predictor import plan_adaptive

NAMES = (AUTO, AUTO, AUTO, *PLUS_NAMES, "v-min", "v-half", "v-zb")
DEVICES = 2


def draw_costs(draw: random.Random) -> Costs:
    """Draw costs of two stages per rank, in half of the cases with vocabulary parallelism."""

    def draw_per_stage(low: float, high: float) -> list[float]:
        return [round(draw.uniform(low, high), 2) for _ in range(2 * DEVICES)]

    data = {
        "forward_us": draw_per_stage(80, 120),
        "backward_us": draw_per_stage(90, 140),
        "weight_us": draw_per_stage(60, 100),
        "send_us": round(draw.uniform(0, 30), 2),
        "held_after_forward_bytes": draw_per_stage(0.8 * GIB, 1.2 * GIB),
        "held_after_backward_bytes": draw_per_stage(0.3 * GIB, 0.7 * GIB),
    }
    if draw.random() < 0.5:
        data |= {str(kind.time): [round(draw.uniform(2, 60), 2)] * 4 for kind in VOCABULARY}
        data["logits_bytes"] = [draw.choice((0.0, 0.1 * GIB))] * 4
    if draw.random() < 0.3:
        data["whole_backward_us"] = draw_per_stage(140, 170)
    return Costs.from_json(json.dumps(data))


def plan_by_trainer(name: str, microbatches: int, costs: Costs, limit: float | None) -> object:
    choice = ScheduleChoice(
        DEVICES,
        name,
        costs=costs,
        limit_bytes=limit,
        shards_output_layer=len(costs.extra_amounts) > 0,
    )
    return Planner(choice).plan_step(microbatches).schedule.order


def plan_by_command(file: Path, name: str, microbatches: int, limit: float | None) -> object:
    """Return the pass order from the `plan` or `export` command."""
    exported = file.with_name("made.json")
    sizes = ["--devices", str(DEVICES), "--microbatches", str(microbatches), "--costs", str(file)]
    if name == AUTO:
        costs = Costs.load(file)
        placement = ScheduleChoice(DEVICES, AUTO, costs=costs).placement
        question = PlanRequest(
            AUTO, DEVICES, microbatches, costs, limit=limit, placements=(placement,)
        )
        return plan_request(question).schedule.order
    assert main(["schedule", name, *sizes, "--export", str(exported)]) == 0
    return load_schedule(exported).order


def plan_by_sweep(microbatches: int, costs: Costs, limit: float) -> object:
    sizes = {"sequence_length": 8, "global_batch_size": microbatches, "pipeline_parallel": DEVICES}
    alone = dict.fromkeys(
        ("data_parallel", "tensor_parallel", "context_parallel", "microbatch_size"), 1
    )
    config = Configuration(AUTO, recompute=NONE, layout=Layout.EVEN, **sizes, **alone)
    placement = ScheduleChoice(DEVICES, AUTO, costs=costs).placement
    limits = [limit] * DEVICES
    return plan_adaptive(config, placement, costs, limits, Objective.MAKESPAN).schedule.order


def call_or_error(answer: object, *arguments: object) -> object:
    assert callable(answer)
    try:
        return answer(*arguments)
    except (ScheduleError, SweepError):
        return "refused"


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_trainer_command_and_sweep_return_equal_plans(
    count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(search, "default_steps", lambda problem: 200)
    draw, file, refused = random.Random(38), tmp_path / "costs.json", 0
    for _ in range(count):
        name, microbatches, costs = draw.choice(NAMES), draw.randrange(2, 5), draw_costs(draw)
        limit = draw.choice((None, draw.uniform(1.8, 5) * GIB)) if name == AUTO else None
        file.write_text(costs.to_json())
        one = call_or_error(plan_by_trainer, name, microbatches, costs, limit)
        assert one == call_or_error(plan_by_command, file, name, microbatches, limit)
        if limit is not None:
            assert one == call_or_error(plan_by_sweep, microbatches, costs, limit)
        refused += one == "refused"
    assert refused < count // 3
