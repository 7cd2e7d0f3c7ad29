"""The trial of `auto`: its plan and the best named schedule alternate; the faster is selected."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mcore.farm import MODEL, Farm, Train
from mcore.parity import UNTIED, assert_same_bits, losses

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.schedule import load_schedule
from megatron_vshape.mcore.observe.profiling import NAMED, PLAN, RUNS, TURN, TURNS, Profiler, Trial
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.rehearsal.command import words_by_flag
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.tuning.training_run import TrainingLog
from megatron_vshape.tuning.trial import WARM_UP, Variant, with_schedule

GIB = 2**30


class FakePlanner:
    """Stores the schedule of the next step; this process decides alone."""

    rank_zero = None
    training: Callable[[int], Any]
    best_by_name: Callable[[Any], Any]

    def use(self, step: Any) -> None:
        self.runs = step


def schedule_step(name: str, num_microbatches: int = 8) -> Any:
    return SimpleNamespace(schedule=SimpleNamespace(name=name, num_microbatches=num_microbatches))


def run_trial(real_s: list[float], stretched: Callable[[], float]) -> int:
    """Run a trial of two schedules with these step times; return the winner."""
    planner, schedules = FakePlanner(), [schedule_step("auto"), schedule_step("v-half")]
    trial = Trial(planner, *schedules)  # type: ignore[arg-type]
    previous_s = None
    for step in range(2 * TURN * TURNS):
        running = schedules.index(planner.runs)
        assert running == RUNS[step]
        winner = trial.end_step(previous_s, 8)
        previous_s = real_s[running] * stretched()
        if winner is not None:
            assert planner.runs is schedules[winner]
            assert step == len(RUNS) - 1
            return winner
    raise AssertionError("the trial does not end")


@pytest.mark.parametrize(("real_s", "winner"), [([1.0, 1.02], PLAN), ([1.02, 1.0], NAMED)])
def test_trial_selects_the_faster_schedule_despite_disturbed_steps(
    real_s: list[float], winner: int
) -> None:
    right = 0
    for seed in range(100):
        rng = random.Random(seed)

        def stretched(rng: random.Random = rng) -> float:
            noise = 1 + abs(rng.gauss(0, 0.005))
            return noise + (rng.random() / 2 if rng.random() < 1 / 6 else 0.0)

        right += run_trial(real_s, stretched) == winner
    assert right >= 95


def test_trial_ignores_a_slow_first_step() -> None:
    first = iter([100.0, 1.0, 1.0])  # of the plan, which is faster
    assert run_trial([1.0, 1.1], lambda: next(first, 1.0)) == PLAN


def test_trial_keeps_the_plan_without_step_times() -> None:
    trial = Trial(FakePlanner(), schedule_step("auto"), schedule_step("v-half"))  # type: ignore[arg-type]
    assert [trial.end_step(None, 8) for _ in RUNS] == [None] * (len(RUNS) - 1) + [PLAN]


def test_changed_number_of_microbatches_ends_the_trial() -> None:
    planner, plan = FakePlanner(), schedule_step("auto")
    trial = Trial(planner, plan, schedule_step("v-half"))  # type: ignore[arg-type]
    for _ in range(TURN):
        assert trial.end_step(1.0, 8) is None
    assert planner.runs is not plan
    assert trial.end_step(1.0, 16) == PLAN
    assert planner.runs is plan


@pytest.mark.parametrize("schedule_name", [None, "v-half"])
def test_pass_order_is_final_after_the_trial(
    monkeypatch: pytest.MonkeyPatch, schedule_name: str | None
) -> None:
    """Megatron's paged stash records the first final order and requires it in every later step."""
    monkeypatch.setattr(Profiler, "_log", lambda *_: None)
    plan, named_step = schedule_step("auto"), schedule_name and schedule_step(schedule_name)
    planner = FakePlanner()
    planner.plan_step, planner.best_by_name = lambda _: plan, lambda _: named_step
    pipeline = SimpleNamespace(
        options=SimpleNamespace(profile_steps=(2, 2), checked_steps=(4, 4), trace_folder=None),
        choice=SimpleNamespace(plans_by_costs=True),
        has_trial=True,
    )
    report = SimpleNamespace(last_step_s=None, remeasure=lambda: None)
    profiler = Profiler(pipeline, planner, report)  # type: ignore[arg-type]
    profiler._costs = Costs.uniform(2, 4)
    orders = []
    for step in range(1, 8 + len(RUNS)):
        profiler.begin_step(torch.device("cpu"))
        if profiler.order_is_last:
            orders.append(getattr(planner, "runs", plan))
        profiler._end_trial_step(plan.schedule)
        if step == 4:
            profiler._start_trial(plan.schedule)
    assert orders == [plan] * (3 if schedule_name else 3 + len(RUNS))


@pytest.mark.parametrize(
    ("limit", "name"), [(None, "v-zb"), ("v-half", "v-half"), ("v-min", "v-min"), (2.5, None)]
)
def test_the_plan_is_compared_with_the_fastest_schedule_within_the_limit(
    limit: float | str | None, name: str | None
) -> None:
    costs = Costs.uniform(4, 8, 1000, 1150, 850, 50).having(
        held_after_forward_bytes=(GIB,) * 8, held_after_backward_bytes=(GIB,) * 8
    )
    bytes_ = limit * GIB if isinstance(limit, float) else None
    choice = ScheduleChoice(4, "auto", costs=costs, limit_bytes=bytes_)
    if isinstance(limit, str):
        choice = replace(choice, limit_of=limit)
    planner = Planner(choice)
    plan = Planner(ScheduleChoice(4, "1f1b-v")).plan_step(8)
    best = planner.best_by_name(plan)
    assert name == (best and best.schedule.name)
    if best is not None:  # a plan that is this schedule needs no trial
        assert planner.best_by_name(best) is None


def test_run_selects_the_faster_of_plan_and_named_schedule(
    train: Train, farm: Farm, tmp_path: Path
) -> None:
    """All schedules of the trial give bitwise equal steps.

    All of them add weight gradients in microbatch order.
    """
    small = ("--num-layers", "4", "--global-batch-size", "4", "--seq-length", "16")
    many = ("--train-iters", "36", *small, "--clip-grad", "0", UNTIED)
    megatron_run = train(2, "--pipeline-schedule", "1f1b", *many)
    limit = ("--pipeline-memory-limit", ".05", "--pipeline-trace", str(tmp_path))
    flags = ("--pipeline-profile-iterations", "2:3", *limit, *many)
    plugin = "plugins:named_wins"
    package_run = farm.run(2, "--pipeline-schedule", "auto", *flags, plugin=plugin).check()
    assert losses(package_run) == losses(megatron_run)
    text = package_run.output[0]
    compared = re.search(r"comparing the plan with (\S+) in the next steps", text)
    assert compared is not None, text[-3000:]
    schedule_name = compared[1]
    measured = rf"measured steps: auto [\d.]+ ms, {schedule_name} [\d.]+ ms; keeping "
    assert re.search(measured, text), text[-3000:]
    # The selected schedule is then compared with its prediction.
    assert f"predicted for {schedule_name}, and measured later: passes " in text
    assert text.count("measured costs: ") == 1
    # The run writes costs and schedule and logs how a later run can use them.
    assert load_schedule(tmp_path / "schedule.json").name == schedule_name
    costs = Costs.load(tmp_path / "costs.json")
    assert re.search(
        r"\d{4}-\d\d-\d\d, .*, 4 microbatches, 64 tokens", dict(costs.sources)["forward_us"]
    )
    second_run = farm.run(2, "--pipeline-schedule", "auto", *limit, *many[2:]).check()
    assert f"{tmp_path}/costs.json was measured in training on 2 ranks" in second_run.output[0]


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pass_order_can_change_in_every_step(farm: Farm, replicas: int) -> None:
    """Losses and parameters are bitwise equal: fixed order, a new order in each step, and 1F1B."""
    steps = ("--train-iters", "6", "--num-layers", "4", "--clip-grad", "0", UNTIED)
    flags = (*steps, "--pipeline-model-parallel-size", "2")
    plugin = "any_order"
    megatron_run, v_half_run, mixed_run = (
        farm.run(2 * replicas, "--pipeline-schedule", name, *flags, plugin=step_plugin).check()
        for name, step_plugin in (("1f1b", None), ("v-half", None), ("v-half", plugin))
    )
    assert len(losses(mixed_run)) == 6
    orders = set(re.findall(r"order (\w+) runs", mixed_run.output[0]))
    assert len(orders) == 6
    for expected_run in (v_half_run, megatron_run):
        assert_same_bits(mixed_run, expected_run)


RANKS = 4
FLAGS = (*MODEL, UNTIED, "--clip-grad", "0", "--ckpt-format", "torch_dist")


def test_schedules_train_from_one_checkpoint_with_equal_losses(farm: Farm, tmp_path: Path) -> None:
    weights, board = tmp_path / "weights", tmp_path / "board"
    farm.run(RANKS, *FLAGS, "--save", str(weights), "--save-interval", "1").check()
    files = {path: path.stat().st_mtime_ns for path in weights.rglob("*")}
    user_flags = ("--load", str(weights), "--save", str(weights), "--save-interval", "1")
    user_flags += ("--tensorboard-dir", str(board), "--eval-iters", "3", "--eval-interval", "2")
    sizes = ("--pipeline-model-parallel-size", str(RANKS), "--train-iters", "1000")
    command = read_command(["pretrain_gpt.py", *FLAGS, *sizes, *user_flags])
    losses = []
    for name in ("1f1b", "v-half", "v-zb"):
        flags = Variant(name, with_schedule(command, name)).command_of(2).flags
        run = farm.run(RANKS, *flags, without=[*words_by_flag(MODEL)]).check()
        log = TrainingLog(tmp_path / name)
        log.path.write_text("\n".join(run.output))
        log.update()
        assert list(log.step_s) == list(range(1, WARM_UP + 3))
        assert log.num_ranks == RANKS
        assert set(log.peak_bytes) == set(range(RANKS))
        assert "validation loss" not in log.path.read_text()
        losses.append(log.losses)
    assert losses[0].keys() == set(range(1, WARM_UP + 3))
    assert losses[1:] == [losses[0]] * 2
    assert {path: path.stat().st_mtime_ns for path in weights.rglob("*")} == files
    assert not board.exists()
