"""Values in the log, TensorBoard and W&B under a V schedule, compared with Megatron's 1F1B."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mcore.farm import Farm, Train
from mcore.parity import Scalars, logged_scalars

from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.observe import iteration_log
from megatron_vshape.mcore.observe.iteration_log import IterationLog
from megatron_vshape.mcore.observe.profiling import BubbleMeter, Figures
from megatron_vshape.runtime.measure import PassTimer

OURS = {"bubble", "predicted-bubble"}
# Measured times, and what follows from them.
TIMES = {"throughput", "iteration-time", "forward-backward-time", "optimizer-time"}
FLAGS = (
    *("--train-iters", "4", "--log-interval", "2", "--eval-interval", "4", "--eval-iters", "1"),
    *("--log-throughput", "--log-timers-to-tensorboard", "--tensorboard-log-interval", "1"),
    *("--log-params-norm", "--log-validation-ppl-to-tensorboard"),
    *("--wandb-project", "project", "--wandb-exp-name", "name"),
)


def of_tensorboard(folder: Path) -> Scalars:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    # Megatron counts some scalars by step and others by samples; neither is a restart.
    events = accumulator.EventAccumulator(str(folder), purge_orphaned_data=False).Reload()
    return {
        tag: [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def assert_equal_scalars(package_scalars: Scalars, megatron_scalars: Scalars) -> None:
    assert package_scalars.keys() == megatron_scalars.keys() | OURS
    assert package_scalars.keys() >= OURS | {"lm loss", "grad-norm", "learning-rate", "throughput"}
    for tag in package_scalars.keys() - OURS:
        assert [step for step, _ in package_scalars[tag]] == [
            step for step, _ in megatron_scalars[tag]
        ], tag
        if not tag.endswith("-time") and tag not in TIMES:
            mine = [value for _, value in package_scalars[tag]]
            assert mine == pytest.approx([value for _, value in megatron_scalars[tag]], rel=1e-5), (
                tag
            )


def test_everything_that_is_logged_is_as_under_1f1b(train: Train, tmp_path: Path) -> None:
    boards, wandbs = [], []
    for schedule in ("1f1b", "v-half"):
        folder = tmp_path / schedule
        places = ("--tensorboard-dir", str(folder), "--wandb-save-dir", str(folder))
        run = train(4, "--pipeline-schedule", schedule, *FLAGS, *places)
        boards.append(of_tensorboard(folder))
        wandbs.append(logged_scalars(run))
        assert all(not record["wandb"] for record in run.records[:-1])
        # Megatron's estimate is of its own order; the peaks of ours are told at the end
        assert ("Theoretical memory footprints" in run.output[0]) == (schedule == "1f1b")
        lines = [line for line in run.output[3].splitlines() if "elapsed time per" in line]
        printed = [
            float(percent) for percent in re.findall(r"\| bubble: ([0-9.]+) %", "".join(lines))
        ]
        if schedule == "1f1b":
            assert printed == []
            continue
        written = [100 * value for _, value in boards[-1]["bubble"]]
        assert [step for step, _ in boards[-1]["bubble"]] == [2, 4]  # the logged ones alone
        assert printed == pytest.approx(written, abs=0.051)
        assert all(0 < value < 100 for value in printed)
        predicted = boards[-1]["predicted-bubble"][-1][1]
        assert predicted == pytest.approx(0.094, abs=5e-3)
    megatron_scalars, package_scalars = boards
    assert_equal_scalars(package_scalars, megatron_scalars)
    megatron_scalars, package_scalars = wandbs
    assert_equal_scalars(package_scalars, megatron_scalars)


def test_the_passes_of_other_steps_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    args = SimpleNamespace(curr_iteration=0, log_interval=2)
    monkeypatch.setattr(iteration_log, "get_args", lambda: args)
    session = Session()
    meter = BubbleMeter(session.logs, predict=lambda num_microbatches: num_microbatches / 100)
    assert meter.begin_step(8, cpu) is None  # no trainer runs, so nothing is logged
    session.training.iteration_log = IterationLog()
    assert meter.begin_step(8, cpu) is None  # step 1, and every second is logged
    profiled = PassTimer(cpu)
    assert meter.begin_step(8, cpu, profiled) is profiled
    args.curr_iteration = 1
    assert isinstance(meter.begin_step(8, cpu), PassTimer)
    assert meter.begin_step(8, cpu, profiled) is profiled


class Board:
    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag] = (value, step)


LINE = " iteration 7/ 9 | elapsed time per iteration (ms): 500.0 | lm loss: 1 |"


def test_an_iteration_is_completed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    monkeypatch.setattr(iteration_log, "get_tensorboard_writer", lambda: board)
    monkeypatch.setattr(iteration_log, "get_wandb_writer", lambda: None)
    log = IterationLog(Figures(7, predicted_bubble=0.0204, bubble=0.0311))
    assert log.complete("something else") == "something else"
    assert log.complete(LINE) == LINE + " bubble: 3.1 % | predicted bubble: 2.0 % |"
    assert board.scalars == {"bubble": (0.0311, 7), "predicted-bubble": (0.0204, 7)}
    assert log.complete(LINE) == LINE


def test_a_loss_that_only_one_rank_has_is_logged(farm: Farm) -> None:
    # Megatron sums it over the pipeline, and leaves out a rank without such layers: a hang.
    plugin = "plugins:indexer_on_one_rank"
    flags = ("--pipeline-schedule", "v-half", "--dsa-indexer-loss-coeff", "0.01")
    run = farm.run(2, *flags, plugin=plugin, timeout_s=60).check()
    assert "indexer loss: 3.125000E-02" in run.output[1]  # 0.25, the mean over 8 layers
