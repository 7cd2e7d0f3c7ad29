"""Flags of Megatron-DeepSpeed, estimated as those of Megatron, or rejected."""

from __future__ import annotations

import pytest

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.command_reader import read_command


def command_of(flags: str) -> Command:
    """Return the command with these flags, as it is estimated."""
    return read_command(["pretrain_gpt.py", "--num-layers", "8", *flags.split()])


@pytest.mark.parametrize(
    ("flags", "is_sharded"),
    [
        ("--deepspeed --fp16", True),  # stage 1 is the default
        ("--deepspeed_config ds.json --zero-stage=1 --fp16", True),
        ("--deepspeed --zero-stage 0 --bf16", True),
        ("--deepspeed --zero-stage 0 --fp16", False),
        ("--bf16", False),
    ],
)
def test_the_optimizer_is_sharded_as_by_deepspeed(flags: str, is_sharded: bool) -> None:
    assert command_of(flags).has("--use-distributed-optimizer") == is_sharded


def test_sizes_have_the_names_of_megatron() -> None:
    command = command_of(
        "--zero-stage 1 --num-attention-heads 32 --num-key-value-heads 8 --normalization rmsnorm "
        "--ds-sequence-parallel-size 4 --pp-partition-method type:transformer|embedding "
        "--no-pipeline-parallel --num-experts 1"
    )
    assert command.has("--group-query-attention")
    assert command.number("--num-query-groups", 0) == 8
    assert command.number("--context-parallel-size", 1) == 4
    assert command.value("--cp-comm-type") == "a2a"
    assert command.value("--normalization") == "RMSNorm"
    assert command.has("--account-for-embedding-in-pipeline-split")
    assert command.has("--account-for-loss-in-pipeline-split")
    assert not command.has("--zero-stage")
    assert not command.has("--num-experts")
    assert "its ZeRO stage" in command.notes[0]
    assert not command_of("--zero-stage 0 --num-key-value-heads 0").has("--num-query-groups")


@pytest.mark.parametrize(
    ("flags", "is_local"),
    [
        ("", True),
        ("--use-flash-attn-v2", False),
        ("--ds-sequence-parallel-size 2", False),  # needs Transformer Engine
    ],
)
def test_attention_without_flash_attention_keeps_its_scores(flags: str, is_local: bool) -> None:
    command = command_of(f"--deepspeed {flags}")
    assert (command.value("--transformer-impl") == "local") == is_local
    assert command.has("--no-persist-layer-norm") == is_local


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--zero-stage 3", "--zero-stage 3 is none of the stages 0 and 1"),
        ("--zero-stage $ZERO_STAGE", r"--zero-stage \$ZERO_STAGE is none"),
        ("--deepspeed --num-experts 32 32 64", "--num-experts are DeepSpeed's experts"),
        ("--deepspeed --cpu-optimizer", "--cpu-optimizer keeps the optimizer in host memory"),
    ],
)
def test_other_sharding_and_experts_are_rejected(flags: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        command_of(flags)
