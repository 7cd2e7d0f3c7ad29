"""Overlapped passes give bitwise equal training and match 1F1B."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mcore.farm import Ended
from mcore.parity import BF16, assert_same_bits, assert_same_training, losses, relative
from mcore.test_composition import EXPERT_PARALLEL, OVERLAP, STEPS

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower, pair_adjacent

Train = Callable[..., Ended]

SIZE = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16")
OVERLAPPED = ("--bf16", "--overlap-moe-expert-parallel-comm")


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


def write_schedule_pair(
    folder: Path, name: str, devices: int, full_backward: bool = False
) -> tuple[str, str]:
    """Write one schedule with and without overlapped passes and return both paths."""
    schedule = make(name, devices, 8)
    if full_backward:
        from megatron_vshape.core.program.lowering import with_full_backwards

        schedule = with_full_backwards(schedule)
    overlapped_schedule = overlap_adjacent_passes(schedule)
    assert len(overlapped_schedule.overlapped) >= 2 * devices
    return write_with_and_without_overlap(folder, overlapped_schedule)


def write_with_and_without_overlap(folder: Path, schedule: Schedule) -> tuple[str, str]:
    paths = []
    for variant in (schedule, replace(schedule, overlapped=frozenset())):
        paths.append(
            folder / f"{variant.name}-{variant.num_devices}-{len(variant.overlapped)}.json"
        )
        paths[-1].write_text(variant.to_json())
    return str(paths[0]), str(paths[1])


assert_same_steps = functools.partial(
    assert_same_bits, keys=("gradients", "parameters"), view=Ended.by_place, norms=True
)

CASES = {
    "V-ZB, split": (4, "v-zb", False, EXPERT_PARALLEL),
    "V-Half, whole, gradients reduced on the way": (
        4,
        "v-half",
        True,
        f"{EXPERT_PARALLEL} {OVERLAP}",
    ),
    "multi-token prediction, shared experts": (
        4,
        "v-half",
        False,
        f"{EXPERT_PARALLEL} --mtp-num-layers 1 --moe-shared-expert-intermediate-size 16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_overlapped_passes_give_bitwise_equal_training(
    train: Train, tmp_path: Path, case: str
) -> None:
    ranks, name, full_backward, options = CASES[case]
    overlapped, sequential = write_schedule_pair(tmp_path, name, 2, full_backward)
    flags = (*STEPS, *SIZE, *options.split(), *OVERLAPPED)
    package_run = train(ranks, "--pipeline-schedule", overlapped, *flags)
    plain = (*STEPS, *SIZE, *options.split(), "--bf16")
    assert_same_steps(package_run, train(ranks, "--pipeline-schedule", sequential, *plain))
    megatron_run = train(ranks, "--pipeline-schedule", "1f1b", *plain)
    assert_same_training(package_run, megatron_run, BF16, Ended.by_place)


def test_adjacent_passes_of_a_schedule_by_name_overlap(train: Train) -> None:
    assert pair_adjacent(make("v-zb", 2, 8)).overlapped
    """Bitwise equal, with overlapped gradient reduction."""
    flags = ("--pipeline-schedule", "v-zb", *STEPS, *SIZE, *f"{EXPERT_PARALLEL} {OVERLAP}".split())
    package_run = train(4, *flags, *OVERLAPPED)
    assert_same_steps(package_run, train(4, *flags, "--bf16"))


AUTO = "--pipeline-schedule auto --pipeline-profile-iterations 2:3"


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["--pipeline-schedule dualpipev", AUTO], ids=["dualpipev", AUTO])
def test_named_and_planned_schedules_with_overlapped_passes(train: Train, chosen: str) -> None:
    flags = (*"--train-iters 6 --bf16".split(), *SIZE, *EXPERT_PARALLEL.split())
    package_run = train(4, *chosen.split(), *flags, *OVERLAPPED[1:])
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags)
    assert len(losses(package_run)) == 6
    assert relative(losses(package_run), losses(megatron_run)) <= 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v-zb", "v-half", "interleaved-1f1b"])
def test_overlapped_passes_on_more_ranks(train: Train, tmp_path: Path, name: str) -> None:
    overlapped, sequential = write_schedule_pair(tmp_path, name, 4)
    size = ("--pipeline-model-parallel-size", "4", "--global-batch-size", "16")
    flags = (*size, *EXPERT_PARALLEL.split())
    package_run = train(8, "--pipeline-schedule", overlapped, *STEPS, *flags, *OVERLAPPED)
    assert_same_steps(
        package_run, train(8, "--pipeline-schedule", sequential, *STEPS, *flags, "--bf16")
    )
    megatron_run = train(8, "--pipeline-schedule", "1f1b", *STEPS, *flags, "--bf16")
    assert_same_training(package_run, megatron_run, BF16, Ended.by_place)


@pytest.mark.slow
def test_looping_schedule_with_four_stages_per_rank(train: Train, tmp_path: Path) -> None:
    published = make("overlapped-interleaved-1f1b", 2, 8, num_chunks=4)
    assert len(published.overlapped) > 16
    overlapped, sequential = write_with_and_without_overlap(tmp_path, published)
    flags = (*STEPS, *SIZE, *EXPERT_PARALLEL.split())
    package_run = train(4, "--pipeline-schedule", overlapped, *flags, *OVERLAPPED)
    assert_same_steps(package_run, train(4, "--pipeline-schedule", sequential, *flags, "--bf16"))
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags, "--bf16")
    assert_same_training(package_run, megatron_run, BF16, Ended.by_place)
