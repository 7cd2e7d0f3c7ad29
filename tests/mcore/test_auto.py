"""Training with the adaptive scheduler's plans, from a costs file or from profiled steps."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from mcore.farm import Farm, Train
from mcore.parity import TWO, UNTIED, assert_same_bits, assert_same_training
from mcore.rejections import rejection
from mcore.test_bad_input import rejection_text

from megatron_vshape.core.compiling import processors
from megatron_vshape.core.model.costs import Costs

SIX = ("--train-iters", "6")
KIB = 1024


@pytest.fixture(scope="module")
def costs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return costs of 8 uneven stages with 64 KiB of activations each."""
    costs = Costs.of(
        forward_us=(1000.0,) * 7 + (1400.0,),
        backward_us=(1150.0,) * 7 + (1500.0,),
        weight_us=(850.0,) * 8,
        send_us=50.0,
        held_after_forward_bytes=(64.0 * KIB,) * 8,
        held_after_backward_bytes=(48.0 * KIB,) * 8,
    )
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(costs.to_json())
    return path


@pytest.mark.parametrize("schedule", ["auto", pytest.param("v-half+", marks=pytest.mark.slow)])
def test_planned_from_costs_trains_like_1f1b(train: Train, schedule: str, costs_file: Path) -> None:
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *TWO.split())
    package_run = train(
        4, "--pipeline-schedule", schedule, "--pipeline-costs", str(costs_file), *TWO.split()
    )
    assert_same_training(package_run, megatron_run)
    assert f"pipeline schedule {schedule}, 4 ranks" in package_run.output[0]
    assert "; costs: as given" in package_run.output[0]


@pytest.mark.parametrize("flags", [(), ("--pipeline-memory-limit", "v-half")])
def test_auto_plans_and_trains_a_zigzag_of_four_chunks(
    train: Train, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Losses and parameters equal 1F1B bit for bit; the costs are for a V."""
    path = tmp_path / "costs.json"
    path.write_text(Costs.uniform(2, 4, 1000, 1150, 850, 50).to_json())
    exact = ("--clip-grad", "0", UNTIED, *TWO.split())
    megatron_run = train(2, "--pipeline-schedule", "1f1b", *exact)
    plan = ("--pipeline-schedule", "auto", "--pipeline-costs", str(path))
    package_run = train(2, *plan, *flags, *exact)
    assert_same_bits(package_run, megatron_run, ["gradients", "parameters"])
    layers = [layers_of(record["parameters"]) for record in package_run.records]
    assert layers == [{0, 3, 4, 7}, {1, 2, 5, 6}]


def layers_of(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := re.search(r"layers\.(\d+)\.", name))}


def test_auto_plans_again_from_profiled_steps(train: Train, farm: Farm, tmp_path: Path) -> None:
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *SIX)
    flags = ("--pipeline-profile-iterations", "2:3", "--pipeline-trace", str(tmp_path))
    limit = ("--pipeline-memory-limit", "0.05")
    package_run = farm.run(
        4, "--pipeline-schedule", "auto", *flags, *limit, *SIX, plugin="plugins:other_hosts"
    ).check()
    assert_same_training(package_run, megatron_run)
    assert "measured costs: v-half step" in package_run.output[0]
    assert "-> auto step" in package_run.output[0]
    assert "predicted for auto, and measured later: passes " in package_run.output[0]
    ratio = re.search(r"\(measured / predicted ([0-9.]+)\)", package_run.output[0])
    assert ratio is not None
    assert 0.1 < float(ratio[1]) < 10  # on one clock; the machine may be busy
    table = package_run.output[0].partition("tokens/s; peak activation memory")[2].splitlines()[1:]
    assert table[0].split() == ["auto", "predicted", "measured", "ratio"]
    labels = [f"activations of rank {rank}, MiB" for rank in range(4)]
    if processors() >= 4:  # else ranks share cores, and times are not comparable
        times = ["step, ms", "  passes, ms", "  gradients, optimizer, ..., ms", "bubble, %"]
        labels = times + labels
    rows = table[1 : 1 + len(labels)]
    assert [line[:33].rstrip() for line in rows] == labels
    for line in rows[-4:]:
        assert float(line.split()[-1]) == pytest.approx(1, rel=0.05)
    assert package_run.output[0].count("GiB per rank: parameters, gradients, optimizer") == 1
    costs = Costs.load(tmp_path / "costs.json")
    assert costs.num_stages == 8
    assert min(costs.forward_us) > 0
    assert min(costs.held_after_forward_bytes) > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"{word}, device {d}" for word in ("planned", "measured") for d in range(4)}
    ran = sum(event["ph"] == "X" for event in events)
    assert ran % 2 == 0
    assert ran >= 2 * 2 * 8 * 8  # both timelines; F and BW at least, 8 stages, 8 microbatches


EVALUATION = "--skip-train --train-iters 2 --eval-iters 2 --eval-interval 1 --global-batch-size 3"


@pytest.mark.parametrize("schedule", ["dualpipev", "auto"])
def test_evaluation_alone_needs_no_schedule(
    train: Train, farm: Farm, costs_file: Path, schedule: str
) -> None:
    megatron_run = train(4, *EVALUATION.split())
    flags = ["--pipeline-schedule", schedule]
    if schedule == "auto":  # without an optimizer, there is no static memory in the limit
        flags += ["--pipeline-costs", str(costs_file), "--pipeline-memory-limit", "0.0001"]
    package_run = farm.run(4, *flags, *EVALUATION.split()).check()
    assert megatron_run.record["evaluations"]
    for package_evaluation, megatron_evaluation in zip(
        package_run.record["evaluations"], megatron_run.record["evaluations"], strict=True
    ):
        assert package_evaluation["lm loss"] == pytest.approx(
            megatron_evaluation["lm loss"], rel=1e-6
        )
    assert "estimated bubble" not in package_run.output[0]


def test_memory_limit_below_any_plan_is_rejected(farm: Farm, costs_file: Path) -> None:
    flags = ("--pipeline-costs", str(costs_file), "--pipeline-memory-limit", "0.0001")
    text = rejection_text(farm, "--pipeline-schedule", "auto", *flags)
    assert text.startswith("nothing fits --pipeline-memory-limit 0.0001: rank 0: 0.")
    assert "the least limit is 0." in text


def test_memory_limit_below_measured_memory_is_rejected(farm: Farm) -> None:
    flags = ("--pipeline-profile-iterations", "2:2", "--pipeline-memory-limit", "0.0001")
    run = farm.run(4, "--pipeline-schedule", "auto", *flags, *SIX)
    assert run.codes == [1] * 4, run.output
    assert not any("Traceback" in text for text in run.output)
    messages = [text.partition("megatron-vshape: ")[2] for text in run.output]
    assert messages[0].startswith("nothing fits --pipeline-memory-limit 0.0001: rank 0: 0.")
    assert messages[1:] == [""] * 3


def test_costs_of_other_stages(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(Costs.uniform(2, 4).to_json())
    text = rejection("--pipeline-schedule", "auto", "--pipeline-costs", str(path))
    assert "--pipeline-costs is for 4 stages" in text
    assert "on 4 pipeline ranks has 8" in text
