"""Rules of plan requests for all users of `plan`."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_vshape.core.check.bounds import lower_bound
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.evaluation import evaluate_schedule, find_schedule
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.paper.catalogue import NAMES, make, make_block
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner import search
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO

REAL = (1.0, 1.15, 0.85, 0.05)


def make_slow_plan(
    schedule_name: str, devices: int, microbatches: int, costs: Costs
) -> EvaluatedSchedule:
    """Return a published schedule in the form of a search result."""
    schedule = make(schedule_name, devices, microbatches)
    bound = lower_bound(costs, schedule.placement, devices, microbatches, (1e9,) * devices)
    evaluated = evaluate_schedule(schedule, costs)
    return replace(evaluated, lower_bound=bound, source="slow", steps=1)


@pytest.mark.parametrize(
    ("limit", "best"), [(4.0, "v-min"), (6.0, "v-half"), (8.0, "v-zb"), (5.9, "v-min")]
)
def test_best_published_schedule_replaces_a_slower_plan(
    limit: float, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs.uniform(4, 8, *REAL)
    slow_plan = make_slow_plan("v-min", 4, 9, costs)
    monkeypatch.setattr(search, "plan", lambda *_, **__: slow_plan)
    result = plan_request(PlanRequest(AUTO, 4, 9, costs, limit=limit, placements=(v_shape(4),)))
    published = make(best, 4, 9)
    assert result.schedule.order == published.order
    assert result.plan.value == simulate(published, costs).makespan
    assert result.plan.lower_bound <= result.plan.value
    assert result.plan.peak == peak_held(published, costs)
    assert all(evaluated.schedule.placement == v_shape(4) for evaluated in result.baselines)


def test_baselines_have_the_requested_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one stage per device requested, no V may replace a slow plan."""
    costs = Costs.uniform(4, 4, *REAL)
    slow_plan = make_slow_plan("1f1b", 4, 9, costs)
    monkeypatch.setattr(search, "plan", lambda *_, **__: slow_plan)
    result = plan_request(PlanRequest(AUTO, 4, 9, costs, limit=16))
    assert result.schedule.order == make("zb-h2", 4, 9).order


def test_block_reaches_its_peaks_at_two_microbatches_per_device() -> None:
    """The planner can thus skip schedules that do not fit without making them."""
    for name in NAMES:
        for d in (1, 2, 3, 5, 8, 12):
            for m in (2 * d, 2 * d + 1, 3 * d):
                schedule, block = make(name, d, m), make_block(name, d, m)
                scale = 2 * d / schedule.num_stages
                pairs = zip(peak_held(schedule), block.peaks(), strict=True)
                assert all(memory >= peak * scale for memory, peak in pairs), (name, d, m)


def test_request_by_name_or_file(tmp_path: Path) -> None:
    result = plan_request(PlanRequest("v-half", 4, 8))
    assert result.block == make_block("v-half", 4, 8)
    assert result.costs == Costs.uniform(4, 8)
    with pytest.raises(ScheduleError, match="v-half was requested by name, not planned"):
        _ = result.plan
    path = tmp_path / "mine.json"
    path.write_text(result.schedule.to_json())
    assert (
        plan_request(PlanRequest(str(path), 4, 8)).schedule
        == result.schedule
        == find_schedule(str(path))
    )
    assert find_schedule("v-half+") == "v-half+"
    chosen = plan_request(PlanRequest("interleaved-1f1b:3", 2, 4))
    assert chosen.costs.num_stages == chosen.schedule.num_stages == 6


def test_error_names_the_invalid_file(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text(make("v-half", 2, 3).to_json().replace("F0.1", "F0.0"))
    with pytest.raises(ScheduleError, match=r"the schedule file .*twice\.json cannot run: F0\.0"):
        find_schedule(str(path))


def test_full_backward_fits_when_split_backward_does_not() -> None:
    """BW retains the memory of its F until it ends, even if B leaves more for its W."""
    costs = Costs.of((1.0,) * 4, (1.0,) * 4, (2.0,) * 4, 0.0, (1.0,) * 4, (4.0,) * 4)
    result = plan_request(PlanRequest(AUTO, 2, 8, costs))
    assert result.limits == (4.0, 4.0)
    assert max(result.plan.peak) <= 4
    assert result.searched_bound <= result.plan.value < 72  # time of 1F1B
