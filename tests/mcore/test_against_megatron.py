"""Under auto, Megatron's schedule runs if no plan for the model is faster."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.schedule_names import BaselineSpec
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.setup.megatron_schedules import choose_megatrons
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.stage_plan import plan_stages

RANKS, MICROBATCHES = 4, 4


INTERLEAVED = BaselineSpec("interleaved-1f1b", 2)


def baseline_for(
    tmp_path: Path,
    full_factor: float,
    evaluated: int = 0,
    pattern: str | None = None,
    **changed: object,
) -> BaselineSpec | None:
    """Return Megatron's schedule that auto selects, or None.

    A full backward costs `full_factor` of a split one. `evaluated` is the samples per evaluation.
    """
    costs = Costs.uniform(RANKS, 2 * RANKS, 1000, 1100, 900, 50)
    costs = costs.having(whole_backward_us=(full_factor * 2000,) * 2 * RANKS)
    path = tmp_path / "costs.json"
    path.write_text(costs.to_json())
    settings = {"schedule": "auto", "timeout_seconds": 60.0, "costs_file": str(path)}
    options = Options(**(settings | {"memory_limit_gib": "interleaved-1f1b:2"} | changed))
    args = Namespace(
        pipeline_model_parallel_size=RANKS,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        global_batch_size=MICROBATCHES,
        micro_batch_size=1,
        num_layers=None if pattern else 2 * RANKS,
        hybrid_layer_pattern=pattern,
        eval_iters=int(evaluated > 0),
        eval_global_batch_size=evaluated or None,
    )
    stages = plan_stages(args, options, RankZeroPlanner("", 1.0))
    return stages if isinstance(stages, BaselineSpec) else None


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, INTERLEAVED),
        ({"pattern": "*-" * RANKS}, INTERLEAVED),
        ({"pattern": "|".join(["*-"] * RANKS)}, None),  # whose number of stages is fixed
        ({"evaluated": 1}, None),  # which it cannot run
        ({"evaluated": 6}, None),
        ({"evaluated": 8}, INTERLEAVED),
    ],
)
def test_interleaved_runs_if_splitting_is_expensive(
    tmp_path: Path, changed: dict[str, Any], expected: BaselineSpec | None
) -> None:
    assert baseline_for(tmp_path, 0.55, **changed) == expected


def test_megatrons_schedule_marks_the_stages_of_a_pattern() -> None:
    args = Namespace(pipeline_model_parallel_size=2, hybrid_layer_pattern="*-" * 4, hidden_size=64)
    choose_megatrons(args, INTERLEAVED)
    assert args.hybrid_layer_pattern == "*-|*-|*-|*-"
    assert args.num_virtual_stages_per_pipeline_rank is None


def test_a_plan_runs_where_splitting_costs_nothing(tmp_path: Path) -> None:
    assert baseline_for(tmp_path, 1.0) is None


@pytest.mark.parametrize(
    "changed",
    [{"memory_limit_gib": 20.0}, {"profile_steps": (4, 6)}, {"post_validates": True}],
)
def test_a_run_that_needs_a_schedule_of_this_package_gets_one(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    assert baseline_for(tmp_path, 0.55, **changed) is None
