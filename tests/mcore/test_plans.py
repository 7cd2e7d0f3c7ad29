"""Plans by name and by file, for any number of microbatches."""

from pathlib import Path

import pytest
from mcore.other_trainer import DeferredConfig

from megatron_vshape.core.check import simulate
from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.evaluation import find_schedule
from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import VOCABULARY, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import EVERY_NAME, JOINT_NAMES, NAMES, make
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.vocabulary import share_vocabulary
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.mcore.observe.report import opening_lines
from megatron_vshape.mcore.options import Options, options_from
from megatron_vshape.mcore.setup.choice import resolve_schedule
from megatron_vshape.mcore.setup.configure import pipeline_from_config
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice


@pytest.mark.parametrize("kernels", [False, True])
def test_a_new_number_of_microbatches_is_simulated_once(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation that excludes deadlocks also computes the times of the plan."""
    ran: list[object] = []
    run = simulate._Simulation.run
    monkeypatch.setattr(simulate._Simulation, "run", lambda self: (ran.append(self), run(self))[1])
    planner = Planner(ScheduleChoice(3, "v-half", kernels=kernels))
    for count in (11, 12):
        ran.clear()
        timeline = planner.plan_step(count).timeline
        assert timeline.schedule.num_microbatches == count
        assert len(ran) == 1


@pytest.mark.parametrize("chunks", [2, 4])
def test_auto_without_a_limit_plans_for_the_memory_of_1f1b(chunks: int) -> None:
    """For any number of stages in the costs; V-ZB uses all of that memory."""
    costs = Costs.uniform(4, 4 * chunks, 1.0, 1.15, 0.85, 0.05)
    schedule = Planner(ScheduleChoice(4, "auto", costs=costs)).plan_step(12).schedule
    assert max(peak_held(schedule, costs)) == pytest.approx(8)


def test_adjacent_passes_overlap_if_supported() -> None:
    for name in ("v-zb", "interleaved-1f1b"):
        step = Planner(ScheduleChoice(4, name, may_overlap=True)).plan_step(16)
        assert step.schedule.overlapped
        assert step.schedule.order == Planner(ScheduleChoice(4, name)).plan_step(16).schedule.order
        assert not Planner(ScheduleChoice(4, name)).plan_step(16).schedule.overlapped


def test_schedule_file_with_reordered_microbatches_is_rejected(tmp_path: Path) -> None:
    """The trainer reads batches in data order, so the schedule must use that order."""
    file = tmp_path / "turned.json"
    rows = (("F0.1", "F0.0", "BW0.0", "BW0.1"), ("F1.0", "BW1.0", "F1.1", "BW1.1"))
    order = tuple(tuple(map(Pass.parse, row)) for row in rows)
    file.write_text(Schedule("turned", 2, 2, (0, 1), order).to_json())
    for read in (lambda: resolve_schedule(Options(str(file)), 2), lambda: find_schedule(str(file))):
        with pytest.raises(
            ScheduleError,
            match=r"F0\.1 runs before F0\.0 on device 0, .* order of the microbatches, 0, 1, 2",
        ):
            read()


@pytest.mark.parametrize("name", [*NAMES, "v-half+"])
def test_exported_schedules_load_as_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / "own.json"
    schedule = (
        plan_request(PlanRequest(name, 4, 8)).schedule if name.endswith("+") else make(name, 4, 8)
    )
    file.write_text(schedule.to_json())
    assert resolve_schedule(Options(str(file)), 4).from_file == schedule


def test_schedule_file_enables_vocabulary_parallelism(tmp_path: Path) -> None:
    plain = make("v-half", 2, 2)
    file = tmp_path / "shared.json"
    costs = Costs.uniform(2, 4, kinds=VOCABULARY)
    file.write_text(share_vocabulary(plain, costs).to_json())
    assert resolve_schedule(Options(str(file)), 2).shards_output_layer
    file.write_text(plain.to_json())
    assert not resolve_schedule(Options(str(file)), 2).shards_output_layer


def costs_with_state() -> Costs:
    """Return costs of 4 ranks with model state and 2 GiB of workspace in the loss."""
    return Costs.of(
        *((1000.0,) * 8,) * 3,
        50.0,
        (4.0 * GIB,) * 8,
        (4.0 * GIB,) * 8,
        (1,) * 8,
        state_bytes=(15.0 * GIB, *(9.0 * GIB,) * 6, 16.0 * GIB),
        forward_work_bytes=(0.0,) * 7 + (2.0 * GIB,),
    )


def test_memory_limit_includes_model_state_and_workspace() -> None:
    costs, limit, state_bytes = costs_with_state(), 56 * GIB, (32.0 * GIB, *(18.5 * GIB,) * 3)
    planner = Planner(ScheduleChoice(4, "auto", costs=costs, limit_bytes=limit))
    planner.reserve(state_bytes)
    schedule = planner.plan_step(8).schedule
    within = peak_held(schedule, costs.without_state())
    rank_bytes = [
        activation_bytes + rank_state
        for activation_bytes, rank_state in zip(within, state_bytes, strict=True)
    ]
    assert 48 * GIB < max(rank_bytes) <= limit
    planner = Planner(ScheduleChoice(4, "auto", costs=costs, limit_bytes=41 * GIB))
    planner.reserve(state_bytes)
    with pytest.raises(ScheduleError, match=r"at least 10\.000 GiB of them.*is 42\.000 GiB"):
        planner.plan_step(8)


def test_first_log_lines_report_the_peak_of_every_rank(tmp_path: Path) -> None:
    file, costs = tmp_path / "costs.json", costs_with_state()
    file.write_text(costs.to_json())
    config = DeferredConfig(num_layers=8, hidden_size=32, num_attention_heads=4)
    config.pipeline_model_parallel_size = 4
    options = options_from({"schedule": "v-half", "costs_file": str(file)})
    pipeline = pipeline_from_config(config, options)
    log = opening_lines(pipeline, Planner(pipeline.choice), 8)
    peaks = [peak / GIB for peak in peak_held(make("v-half", 4, 8), costs)]
    # A library's last rank has the embedding and the output layer.
    by_rank = " ".join(f"{peak:g}" for peak in reversed(peaks))
    share = 100 * max(peaks) / (15 + 9 + 4 * 8)
    assert f"peak {share:.0f} % of 1F1B at PP 4, by rank {by_rank} GiB, incl" in log
    assert "including model states of 18 18 18 31 GiB" in log


@pytest.mark.parametrize(
    ("placement", "rows", "relative_peak"),
    [
        ((0, 1), ("F0.0 BW0.0", "F1.0 BW1.0"), 1 / 2),
        ((0, 1, 0), ("F0.0 F2.0 BW2.0 BW0.0", "F1.0 BW1.0"), 2 / 3),  # 1F1B has two stages
    ],
)
def test_peak_is_relative_to_1f1b(
    placement: tuple[int, ...], rows: tuple[str, ...], relative_peak: float
) -> None:
    order = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    schedule = Schedule("one at a time", 2, 1, placement, order)
    costs = Costs.uniform(2, len(placement))
    choice = ScheduleChoice(2, schedule.name, from_file=schedule, costs=costs)
    plan = Planner(choice).plan_step(1)
    assert plan.relative_peak == pytest.approx(relative_peak)


def stages_by_last_wgrad(program: Program) -> list[list[int]]:
    """Return the stages of every rank in the order of their last weight gradients."""
    return [
        list(dict.fromkeys(work.stage for work in reversed(row) if work.kind in (Kind.W, Kind.BW)))
        for row in program.schedule.order
    ]


@pytest.mark.parametrize(
    ("name", "slices"), [*((name, 1) for name in EVERY_NAME), *((name, 2) for name in NAMES)]
)
def test_chunk_completion_order_is_independent_of_microbatches(name: str, slices: int) -> None:
    """Replicas with different numbers of microbatches reduce their chunks in the same order."""
    planner = Planner(ScheduleChoice(4, name, slices=slices, may_overlap=name in JOINT_NAMES))
    counts = range(8, 40, 4) if name in JOINT_NAMES else range(1, 19)
    orders = [stages_by_last_wgrad(planner.plan_step(count).program) for count in counts]
    assert orders == [orders[0]] * len(orders)
