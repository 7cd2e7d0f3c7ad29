"""Flags of the zero-bubble fork of Megatron-LM, estimated as schedules of this package."""

from __future__ import annotations

import pytest

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.command_reader import read_command


def command_of(flags: str, layers: int = 16) -> Command:
    """Return the command with these flags on four pipeline ranks, as it is estimated."""
    sizes = f"--num-layers {layers} --pipeline-model-parallel-size 4"
    return read_command(["pretrain_gpt.py", *sizes.split(), *flags.split()])


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ("--zero-bubble-v-schedule --enable-zero-bubble", "v-zb"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half", "v-half"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min", "v-min"),
        ("--enable-1f1b-v --enable-zb-runtime", "1f1b-v"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 4", "zb-h1"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 8", "zb-h2"),
        ("--enable-zero-bubble", "zb-h2"),  # as much memory as is free
        ("--deepspeed --enable-zbh1-pipeline", "zb-h1"),
        ("--enable-zb-runtime", None),
        ("--num-seq-splits 2", "1f1b"),
        ("--enable-zero-bubble --pipeline-schedule v-min", "v-min"),
    ],
)
def test_the_schedule_has_a_name_of_this_package(flags: str, schedule: str | None) -> None:
    command = command_of(flags)
    assert command.value("--pipeline-schedule") == schedule
    assert (schedule or "Megatron's own") in command.notes[-1]
    assert not any("zero-bubble" in word or "zb" in word[2:12] for word in command.flags[::2])


def test_other_options_of_the_fork() -> None:
    command = command_of("--enable-zero-bubble --enable-optimizer-post-validation")
    assert command.has("--optimizer-post-validation")
    assert command.value("--rerun-mode") == "disabled"
    assert command_of("--num-seq-splits 2").number("--pipeline-slices", 1) == 2
    assert not command_of("").notes
    words = ["CUDA_DEVICE_MAX_CONNECTIONS=8", "pretrain_gpt.py", "--enable-zb-runtime"]
    assert read_command(words).environment == {}


@pytest.mark.parametrize(
    ("flags", "split"),
    [
        ("--zero-bubble-v-schedule", "1,2,2,2,2,2,2,1"),
        ("--enable-zero-bubble", "3,4,4,3"),
        ("--enable-zb-runtime", None),
    ],
)
def test_padded_layers_are_missing_at_the_ends(flags: str, split: str | None) -> None:
    command = command_of(f"{flags} --allow-padding-num-layers", layers=14)
    assert command.value("--pipeline-layer-split") == split
    assert command.has("--account-for-embedding-in-pipeline-split")
    assert command.has("--account-for-loss-in-pipeline-split")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--enable-zb-runtime --cpu-offload", "--cpu-offload of the zero-bubble fork cannot"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup all", "none of zb, half"),
    ],
)
def test_schedules_that_are_not_estimated(flags: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        command_of(flags)
