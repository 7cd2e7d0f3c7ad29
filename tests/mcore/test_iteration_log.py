"""Logs, losses and profiles of a run under a V schedule, compared with Megatron's 1F1B."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from mcore.farm import Farm, Train
from mcore.parity import UNTIED, Scalars, logged_scalars
from mcore.ranks import run_ranks

from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.observe import iteration_log
from megatron_vshape.mcore.observe.iteration_log import IterationLog
from megatron_vshape.mcore.observe.profiling import BubbleMeter, Figures
from megatron_vshape.mcore.step.losses import LossGatherer
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


LAYER = "decoder.layers.0."
LINEARS = ["mlp.linear_fc2", "mlp.linear_fc1", "self_attention.linear_proj"]
LINEARS += ["self_attention.linear_qkv"]


def test_a_profile_of_megatrons_shows_every_pass(farm: Farm, tmp_path: Path) -> None:
    flags = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2".split()
    folder = ("--tensorboard-dir", str(tmp_path / "board"))
    run = ("--pipeline-schedule", "v-half", "--train-iters", "3", UNTIED, "--num-layers", "4")
    farm.run(2, *run, *flags, *folder).check()
    schedule = make("v-half", 2, 8)
    for rank in range(2):
        with gzip.open(tmp_path / "torch_profile" / f"rank-{rank}.json.gz", "rt") as stream:
            events = json.load(stream)["traceEvents"]
        events.sort(key=lambda event: event.get("ts", 0))
        jobs = [event for event in events if event["name"].startswith("job ")]
        passes = [e for e in events if re.fullmatch(r"(F|B|W|BW)\d+\.\d+", e["name"])]
        # Where a B has its W right after it, the two run as one pass.
        apart = [re.sub(r"^BW(.*)", r"B\1 W\1", event["name"]) for event in passes]
        assert " ".join(apart).split() == [str(work) for work in schedule.order[rank]]
        split = [event for event in passes if event["name"].startswith("W")]
        assert split
        for event in passes:
            end = event["ts"] + event["dur"]
            within = [job["name"] for job in jobs if event["ts"] <= job["ts"] < end]
            head = ["job output_layer"] if event["name"].startswith("W3.") else []
            full_jobs = [*head, *(f"job {LAYER}{name}" for name in LINEARS)]
            assert within == (full_jobs if event in split else [])
        assert any(event["name"].startswith("wait ") for event in events)


class Losses(NamedTuple):
    value: torch.Tensor
    count: int


def make_reports(step: int) -> list[Any]:
    """Return possible reports of a loss function for 64 microbatches, and one more in step 2."""
    torch.manual_seed(step)
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)
    results: list[Any] = [
        {
            "loss": Losses(torch.randn(2, requires_grad=True), 3),
            "rest": [
                (
                    index,
                    torch.randn(3, index % 3).to(kinds[index % 5]).t(),
                    torch.tensor(0.1 * index),
                )
            ],
        }
        for index in range(64)
    ]
    return [*results, "more"] if step == 2 else results


def check_reports(brought: list[Any], expected: list[Any]) -> None:
    assert len(brought) == len(expected)
    for received, expected_report in zip(brought[:64], expected, strict=False):
        assert isinstance(received["loss"], Losses)
        assert received["loss"].count == 3
        (index, *received_tensors), (number, *expected_tensors) = (
            received["rest"][0],
            expected_report["rest"][0],
        )
        assert index == number
        for tensor, expected_tensor in zip(
            [received["loss"].value, *received_tensors],
            [expected_report["loss"].value, *expected_tensors],
            strict=True,
        ):
            assert (tensor.dtype, tensor.shape) == (expected_tensor.dtype, expected_tensor.shape)
            assert not tensor.requires_grad
            assert torch.equal(tensor, expected_tensor)


def send_reports(rank: int) -> list[int]:
    """Bring the reports of four steps from rank 0 to rank 1; return how often each step copies.

    Only calls that wait for a device or copy tensors are counted.
    """
    copies: Counter[str] = Counter()
    elsewhere: list[Any] = []
    counts, received = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_token, "take_metrics", lambda: {"values": torch.arange(3.0)})
        patch.setattr(multi_token, "add_metrics", elsewhere.append)
        stores = [make_reports(step) if rank == 0 else [] for step in range(4)]
        for name in ("to", "cpu", "cuda", "tolist", "item", "numpy", "__int__"):
            original = getattr(torch.Tensor, name)

            def counted(self: Any, *args: Any, _of: Any = original, _name: str = name) -> Any:
                copies[_name] += 1
                return _of(self, *args)

            patch.setattr(torch.Tensor, name, counted)
        courier = LossGatherer()
        for store in stores:
            copies.clear()
            received.append(
                courier.send_to_last_rank(store, 0, dist.group.WORLD, torch.device("cpu"))
            )
            counts.append(sum(copies.values()))
            courier.wait_for_sends()
    for step, brought in enumerate(received if rank == 1 else ()):
        check_reports(brought, make_reports(step))
    assert [report["values"].tolist() for report in elsewhere] == [[0, 1, 2]] * (4 * rank)
    return counts


def test_losses_are_sent_in_one_message_without_changes(farm: Farm) -> None:
    """Values that are not tensors are sent only if they differ from the previous step."""
    send_counts, received = run_ranks(farm, 2, send_reports)
    assert send_counts == [1, 0, 1, 1]
    assert received == [3, 1, 3, 3]
