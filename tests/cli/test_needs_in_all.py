"""Total memory in the output and the limits of commands, if a costs file has model states."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli.conftest import Output

from megatron_vshape import Costs, make, peak_held
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.planner.lighter import lighter_layers

GIB = 2**30
SIZES = ["--devices", "4", "--microbatches", "8"]


def costs() -> Costs:
    """Return costs whose first and last stages need more memory for states and the loss."""
    stages = 8
    return Costs.of(
        *((1000.0,) * stages,) * 3,
        50.0,
        (4.0 * GIB,) * (stages - 1) + (8.0 * GIB,),
        (4.0 * GIB,) * (stages - 1) + (6.0 * GIB,),
        (4,) * stages,
        device_bytes=0.5 * GIB,
        state_bytes=(15.0 * GIB, *(9.0 * GIB,) * (stages - 2), 16.0 * GIB),
        forward_work_bytes=(0.0,) * (stages - 1) + (2.0 * GIB,),
        backward_work_bytes=(0.5 * GIB,) * stages,
    )


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(costs().to_json())
    return str(path)


def test_schedule_prints_total_memory_per_rank(file: str, output_of: Output) -> None:
    text = output_of("schedule", "v-half", *SIZES, "--costs", file)
    schedule = make("v-half", 4, 8)
    peaks = peak_held(schedule, costs())
    assert f"peak memory   {max(peaks) / GIB:g} GiB, largest rank, with model states: " in text
    ranks_text = " ".join(f"{peak / GIB:g}" for peak in peaks)
    assert (
        f"per rank      {ranks_text} GiB, including model states of 31.5 18.5 18.5 18.5 GiB" in text
    )
    assert "chunks" not in text.split("peak memory")[1]


def test_lighter_layers_are_a_local_minimum() -> None:
    schedule, measured_costs = make("v-half", 4, 8), costs()
    layers, peak = lighter_layers(schedule, measured_costs)
    pieces = Pieces.of(measured_costs, (4,) * 8)
    assert sum(layers) == 32
    assert peak == max(peak_held(schedule, pieces.costs(layers)))
    assert peak < max(peak_held(schedule, measured_costs))
    for giving in range(8):
        for taking in range(8):
            moved = list(layers)
            moved[giving] -= 1
            moved[taking] += 1
            if min(moved[1:-1]) >= 1 and min(moved) >= 0:
                assert max(peak_held(schedule, pieces.costs(moved))) >= peak
    assert lighter_layers(schedule, replace(measured_costs, layers=None))[1] == max(
        peak_held(schedule, measured_costs)
    )


def test_limit_in_gib_is_total_and_in_chunks_activation_memory(
    file: str, output_of: Output
) -> None:
    short = ("--costs", file, "--chunks", "2")
    text = output_of("plan", *SIZES, *short, "--memory-limit", "56GiB")
    peak = re.search(r"peak memory +([\d.]+) GiB, limit 56 GiB\n", text)
    assert 31.5 < float(peak[1]) <= 56
    assert re.search(r"per rank +[\d. ]+ GiB, including model states of [\d. ]+ GiB", text)
    alone = output_of("plan", *SIZES, *short, "--memory-limit", "6chunks")
    assert re.search(r"peak memory +[\d.]+ GiB \([\d.]+ chunks\), limit 27 GiB \(6 ch", alone)
    assert "\nper rank" not in alone


def test_infeasible_limit_is_reported_as_total_gib(file: str, error_of: Output) -> None:
    arguments = ["plan", *SIZES, "--costs", file]
    error = error_of(*arguments, "--memory-limit", "30GiB")
    assert re.search(r"rank \d is 30 GiB, and one microbatch needs [\d.]+ GiB", error)


def test_auto_layer_split_makes_a_limit_feasible(
    file: str, output_of: Output, error_of: Output
) -> None:
    """With an even split, one microbatch alone needs 39.5 GiB on the largest rank."""
    arguments = ("plan", *SIZES, "--costs", file, "--chunks", "2", "--memory-limit")
    assert "no schedule fits: the limit of rank" in error_of(*arguments, "37GiB")
    text = output_of(*arguments, "37GiB", "--layer-split", "auto")
    split = re.search(r"--pipeline-layer-split ([\d,]+)", text)
    layers = tuple(map(int, split[1].split(",")))
    assert sum(layers) == 32
    assert layers != (4,) * 8
    peak = re.search(r"peak memory +([\d.]+) GiB, limit 37 GiB\n", text)
    assert float(peak[1]) <= 37
