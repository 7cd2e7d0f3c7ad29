"""Overlapped passes give bitwise equal training and match 1F1B."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mcore.farm import Ended, Train
from mcore.parity import (
    BF16,
    EVALUATED,
    EXPERT_PARALLEL,
    OVERLAP,
    PIPELINE,
    assert_same_bits,
    assert_same_training,
    losses,
    relative,
)

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower, pair_adjacent, with_full_backwards

SIZE = f"{PIPELINE} --global-batch-size 16"
OVERLAPPED = ("--overlap-moe-expert-parallel-comm",)


def overlap_adjacent_passes(schedule: Schedule) -> Schedule:
    """Overlap every F with the next B of its rank unless the result would deadlock."""
    for row in schedule.order:
        last_index = -1
        for index, (work, next_work) in enumerate(zip(row, row[1:], strict=False)):
            kinds = work.kind is Kind.F and next_work.kind in (Kind.B, Kind.BW)
            if index > last_index and kinds and work.microbatch != next_work.microbatch:
                overlapped_schedule = replace(schedule, overlapped=schedule.overlapped | {work})
                try:
                    lower(overlapped_schedule, simulate(overlapped_schedule))
                except ScheduleError:
                    continue
                schedule, last_index = overlapped_schedule, index + 1
    return schedule


def overlapped(name: str, devices: int = 2) -> Schedule:
    return overlap_adjacent_passes(make(name, devices, 8))


CASES: dict[str, tuple[Callable[[], Schedule], str]] = {
    "V-ZB, split": (lambda: overlapped("v-zb"), ""),
    "V-Half, whole, gradients reduced on the way": (
        lambda: overlap_adjacent_passes(with_full_backwards(make("v-half", 2, 8))),
        OVERLAP,
    ),
    "multi-token prediction, shared experts": (
        lambda: overlapped("v-half"),
        "--mtp-num-layers 1 --moe-shared-expert-intermediate-size 16",
    ),
    "four stages per rank": (
        lambda: make("overlapped-interleaved-1f1b", 2, 8, num_chunks=4),
        "",
    ),
    "V-ZB, 4 pipeline ranks": (lambda: overlapped("v-zb", 4), ""),
    "interleaved, 4 pipeline ranks": (lambda: overlapped("interleaved-1f1b", 4), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_overlapped_passes_give_bitwise_equal_training(
    train: Train, tmp_path: Path, case: str
) -> None:
    make_schedule, options = CASES[case]
    schedule = make_schedule()
    devices = schedule.num_devices
    assert len(schedule.overlapped) >= 2 * devices
    size = f"--pipeline-model-parallel-size {devices} --global-batch-size 16"
    flags = f"{EVALUATED} {size} {EXPERT_PARALLEL} {options} --bf16".split()
    runs = []
    for variant in (schedule, replace(schedule, overlapped=frozenset())):
        file = tmp_path / f"{len(variant.overlapped)}.json"
        file.write_text(variant.to_json())
        overlap = OVERLAPPED if variant.overlapped else ()
        runs.append(train(2 * devices, "--pipeline-schedule", str(file), *flags, *overlap))
    assert_same_steps(*runs)
    megatron_run = train(2 * devices, "--pipeline-schedule", "1f1b", *flags)
    assert_same_training(runs[0], megatron_run, BF16, Ended.by_place)


assert_same_steps = functools.partial(
    assert_same_bits, keys=("gradients", "parameters"), view=Ended.by_place, norms=True
)


def test_adjacent_passes_of_a_schedule_by_name_overlap(train: Train) -> None:
    """Bitwise equal, with overlapped gradient reduction."""
    assert pair_adjacent(make("v-zb", 2, 8)).overlapped
    flags = (
        f"--pipeline-schedule v-zb {EVALUATED} {SIZE} {EXPERT_PARALLEL} {OVERLAP} --bf16".split()
    )
    assert_same_steps(train(4, *flags, *OVERLAPPED), train(4, *flags))


AUTO = "--pipeline-schedule auto --pipeline-profile-iterations 2:3"


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["--pipeline-schedule dualpipev", AUTO], ids=["dualpipev", AUTO])
def test_named_and_planned_schedules_with_overlapped_passes(train: Train, chosen: str) -> None:
    flags = f"--train-iters 6 --bf16 {SIZE} {EXPERT_PARALLEL}".split()
    package_run = train(4, *chosen.split(), *flags, *OVERLAPPED)
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags)
    assert len(losses(package_run)) == 6
    assert relative(losses(package_run), losses(megatron_run)) <= 2e-3
