"""Plans compared with all published schedules at the same memory limit."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_vshape import Costs, Schedule, ScheduleError, make, peak_held, simulate
from megatron_vshape.core.check.bounds import lower_bound, min_memory
from megatron_vshape.core.evaluation import (
    compare_baselines,
    evaluate_named,
    evaluate_schedule,
    find_schedule,
)
from megatron_vshape.core.model.pieces import Pieces, recut
from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.paper.catalogue import NAMES, OPTIONS, make_block
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner import search
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO, BaselineSpec

CELLS, SEED = 200, 20


@dataclass(frozen=True, slots=True)
class Cell:
    """A random plan request: sizes, costs of a device's layers, and costs of embedding and head."""

    devices: int
    microbatches: int
    pieces: Pieces  # of the layers, the embedding and the output layer
    max_chunks: int
    limit_position: float  # of the limit: 0 is the minimum, 1 twice the peak of 1F1B

    def costs_of_stages(self, num_stages: int, name: str = "") -> Costs:
        layer = replace(self.pieces, layer=self.pieces.layer.times(1 / num_stages))
        return replace(layer.costs((1,) * num_stages), layers=None)

    def request(self) -> PlanRequest:
        d = self.devices
        costs = self.costs_of_stages(d * min(self.max_chunks, 4))
        chunks = tuple(range(1, self.max_chunks + 1))
        request = PlanRequest(
            AUTO, d, self.microbatches, costs, self.costs_of_stages, chunks=chunks, steps=20_000
        )
        placements = [linear(d), v_shape(d), *(looping(d, num_chunks) for num_chunks in chunks)]
        min_limit = min(
            max(min_memory(self.costs_of_stages(len(placement)), placement, d))
            for placement in placements
        )
        max_limit = 2 * max(evaluate_named("1f1b", request).peak)
        limit = min_limit + self.limit_position * max(max_limit - min_limit, 0)
        return replace(request, limit=limit)


def random_cells(count: int, max_devices: int, max_chunks: int) -> Iterator[Cell]:
    rng = random.Random(SEED)
    for _ in range(count):
        d = rng.randint(2, max_devices)
        times = [rng.uniform(0.5, 2.0) * 2 * d for _ in range(3)]
        memory = 2.0 * d
        layer = StageCosts.of(*times, memory, memory * rng.choice((1, rng.uniform(0.3, 1))))
        nothing = layer.times(0)
        ends = [nothing, nothing]
        if rng.random() < 0.5:  # unequal stages: an embedding and a head
            ends = [layer.times(rng.uniform(0, x) / (2 * d)) for x in (0.3, 1.5)]
        pieces = Pieces(layer, *ends, rng.choice((0.0, rng.uniform(0, 0.3))))
        microbatches = rng.randint(2, 2 * d + 4)
        yield Cell(d, microbatches, pieces, rng.randint(2, max_chunks), rng.random())


def catalogue_schedules(cell: Cell) -> Iterator[tuple[str, Schedule]]:
    """Yield the published schedules with every number of stages per device, without the planner."""
    sizes = cell.devices, cell.microbatches
    for name in NAMES:
        for chunks in range(2, cell.max_chunks + 1) if name in OPTIONS else (None,):
            try:
                yield f"{name}:{chunks}", make(name, *sizes, num_chunks=chunks)
            except ScheduleError:
                continue


def faster_baselines(cell: Cell) -> list[str]:
    """Return the published schedules that fit the limit of the cell and beat its plan."""
    request = cell.request()
    result = plan_request(request)
    assert max(peak_held(result.schedule, result.costs)) <= request.limit * (1 + 1e-9)
    planned_makespan = simulate(result.schedule, result.costs).makespan
    assert result.searched_bound <= result.plan.value * (1 + 1e-9)
    faster = []
    for name, schedule in catalogue_schedules(cell):
        costs = cell.costs_of_stages(schedule.num_stages)
        if max(peak_held(schedule, costs)) > request.limit * (1 + 1e-9):
            continue
        makespan = simulate(schedule, costs).makespan
        if makespan < planned_makespan * (1 - 1e-9):
            faster.append(f"{name} {makespan} against {planned_makespan} in {cell}")
    return faster


def test_no_baseline_is_faster_in_small_cells() -> None:
    assert [line for cell in random_cells(8, 4, 6) for line in faster_baselines(cell)] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_no_baseline_is_faster_in_200_cells(part: int) -> None:
    cells = list(random_cells(CELLS, 6, 12))[part::20]
    assert [line for cell in cells for line in faster_baselines(cell)] == []


def test_plan_uses_more_than_four_chunks_when_faster() -> None:
    """A cell in which the best plan with up to four stages per device needs 65.18."""
    cost = (1.0, 1.99, 0.55, 0.0)
    request = PlanRequest(
        AUTO,
        8,
        8,
        Costs.uniform(8, 32, *cost),
        lambda stages, name: Costs.uniform(8, stages, *cost),
        limit=16,
        chunks=(1, 2, 3, 4, 5, 6),
        steps=60_000,
    )
    result = plan_request(request)
    assert result.schedule.num_chunks == 6
    assert result.plan.value <= 62.34
    assert result.searched_bound < result.plan.value


def test_plan_allocates_no_memory_without_benefit() -> None:
    cost = (1.0, 1.0, 1.0, 0.0)
    costs = Costs.uniform(4, 16, *cost)
    results = [plan_request(PlanRequest(AUTO, 4, 12, costs, limit=limit)) for limit in (8, 12, 16)]
    assert len({round(result.plan.value, 9) for result in results}) == 1
    assert {max(result.plan.peak) for result in results} == {8.0}


def test_megatron_1f1b_is_recommended_when_fastest() -> None:
    """A full backward is as fast as B alone, and the stages cannot be split."""
    costs = Costs.uniform(4, 4, 1, 1.2, 0.8, 0.05)
    costly = costs.having(whole_backward_us=costs.backward_us)
    result = plan_request(PlanRequest(AUTO, 4, 8, costly, limit="1f1b"))
    assert result.plan.is_megatrons
    assert result.plan.baseline == BaselineSpec("1f1b")
    assert result.schedule.order == make("1f1b", 4, 8).order
    baselines = {
        evaluated.baseline: evaluated
        for evaluated in compare_baselines(PlanRequest(AUTO, 4, 8, costly, limit=8), result)
    }
    megatron_1f1b = baselines[BaselineSpec("1f1b")]
    assert result.plan.value <= megatron_1f1b.timeline.makespan


def test_interleaved_equals_megatrons_for_full_groups() -> None:
    assert BaselineSpec("interleaved-1f1b", 4).is_megatrons(4, 8)
    assert not BaselineSpec("interleaved-1f1b", 4).is_megatrons(4, 9)
    assert BaselineSpec("1f1b").is_megatrons(4, 9)
    assert not BaselineSpec("zb-h1").is_megatrons(4, 8)


@pytest.mark.parametrize("name", ["interleaved-1f1b:3", "v-half"])
def test_schedule_name_as_limit_means_its_peak(name: str) -> None:
    request = PlanRequest(AUTO, 3, 6, None, limit=name, steps=2000)
    result = plan_request(request)
    peak = max(evaluate_named(name, request).peak)
    assert result.limits == (peak,) * 3
    chunks = {"num_chunks": 3} if ":" in name else {}
    schedule = make(name.partition(":")[0], 3, 6, **chunks)
    assert peak == pytest.approx(max(peak_held(schedule)))


def test_default_limit_is_peak_of_1f1b() -> None:
    """The peak includes the logits of the last stage once, not once per warm-up microbatch."""
    memory = (1.0,) * 7 + (9.0,)
    costs = Costs.of((1.0,) * 8, (1.2,) * 8, (0.8,) * 8, 0.05, memory, memory)
    result = plan_request(PlanRequest(AUTO, 4, 8, costs, steps=2000))
    assert result.limits == (10.0,) * 4
    schedule = make("1f1b", 4, 8)
    assert (
        max(peak_held(schedule, evaluate_named("1f1b", PlanRequest(AUTO, 4, 8, costs)).costs))
        == 10.0
    )


def test_layers_are_redistributed_for_another_stage_count() -> None:
    layer = StageCosts.of(10.0, 12.0, 8.0, 4.0, 3.0)
    pieces = Pieces(layer, layer.times(0.1), layer.times(0.5), 1.0)
    costs = pieces.costs((3,) * 8)
    finer = recut(costs, 12, 4, "a plan")
    assert finer.layers == (2,) * 12
    assert sum(finer.forward_us) == pytest.approx(sum(costs.forward_us))
    assert finer.forward_us[1] == pytest.approx(20)
    unknown = replace(costs, layers=None)
    assert recut(unknown, 12, 4, "a plan", 24).forward_us == pytest.approx(finer.forward_us)
    with pytest.raises(ScheduleError, match="the costs are for 8 stages, a plan has 12"):
        recut(unknown, 12, 4, "a plan")


REAL = (1.0, 1.15, 0.85, 0.05)


@pytest.mark.parametrize(
    ("slow", "limit", "best", "options"),
    [
        ("v-min", 6.0, "v-half", {"placements": (v_shape(4),)}),
        ("v-min", 5.9, "v-min", {"placements": (v_shape(4),)}),
        # With one stage per device requested, no V may replace a slow plan.
        ("1f1b", 16.0, "zb-h2", {}),
    ],
)
def test_best_published_schedule_replaces_a_slower_plan(
    slow: str, limit: float, best: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, published = make(slow, 4, 9), make(best, 4, 9)
    costs = Costs.uniform(4, schedule.num_stages, *REAL)
    bound = lower_bound(costs, schedule.placement, 4, 9, (1e9,) * 4)
    slow_plan = replace(evaluate_schedule(schedule, costs), lower_bound=bound, source="slow")
    monkeypatch.setattr(search, "plan", lambda *_, **__: slow_plan)
    result = plan_request(PlanRequest(AUTO, 4, 9, costs, limit=limit, **options))
    assert result.schedule.order == published.order
    assert result.plan.value == simulate(published, costs).makespan
    assert result.plan.lower_bound <= result.plan.value
    assert result.plan.peak == peak_held(published, costs)
    placements = {evaluated.schedule.placement for evaluated in result.baselines}
    assert placements == {schedule.placement}


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


def test_full_backward_fits_when_split_backward_does_not() -> None:
    """BW retains the memory of its F until it ends, even if B leaves more for its W."""
    costs = Costs.of((1.0,) * 4, (1.0,) * 4, (2.0,) * 4, 0.0, (1.0,) * 4, (4.0,) * 4)
    result = plan_request(PlanRequest(AUTO, 2, 8, costs))
    assert result.limits == (4.0, 4.0)
    assert max(result.plan.peak) <= 4
    assert result.searched_bound <= result.plan.value < 72  # time of 1F1B
