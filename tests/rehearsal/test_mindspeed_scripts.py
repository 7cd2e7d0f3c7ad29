"""Flags of MindSpeed-LLM, estimated as those of Megatron."""

from __future__ import annotations

import pytest
from rehearsal.flags import differing_flags

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.rank_job import LoraConfig


def command_of(flags: str) -> Command:
    """Return the command with these flags, as it is estimated."""
    return read_command(["pretrain_gpt.py", *flags.split()])


def test_layers_without_operations_are_removed() -> None:
    command = command_of(
        "--num-layers 8 --noop-layers 0,7 --pipeline-model-parallel-size 2 --mtp-num-layers 1 "
        "--num-layers-per-virtual-pipeline-stage 2 --num-experts 4 --first-k-dense-replace 3 "
        "--moe-layer-freq 2"
    )
    assert command.layers == 6
    assert command.value("--pipeline-model-parallel-layout") == "Et|tt|tt|tmL"
    assert not command.has("--num-layers-per-virtual-pipeline-stage")
    assert command.value("--moe-layer-freq") == "([0]*3+[1]*1+[0]*1+[1]*1)"  # layers 4 and 6


@pytest.mark.parametrize("flags", ["--first-k-dense-replace -1", "--first-k-dense-replace 0"])
def test_all_layers_have_experts_without_dense_ones(flags: str) -> None:
    command = command_of(f"--num-layers 4 --num-experts 4 {flags} --moe-layer-freq 1")
    assert command.value("--moe-layer-freq") == "1"
    assert not command.has("--first-k-dense-replace")


def test_stages_have_listed_numbers_of_layers() -> None:
    command = command_of("--num-layers 8 --pipeline-model-parallel-size 3 --num-layer-list 2,3,3")
    assert command.value("--pipeline-model-parallel-layout") == "Ett|ttt|tttL"
    assert command.layers == 8


def test_experts_on_tensor_ranks_are_expert_parallel() -> None:
    command = command_of(
        "--num-layers 4 --num-experts 16 --tensor-model-parallel-size 2 --moe-tp-extend-ep "
        "--expert-model-parallel-size 4 --moe-ffn-hidden-size 96 --n-shared-experts 2 "
        "--moe-token-dispatcher-type alltoall_seq --moe-router-load-balancing-type softmax_topk"
    )
    flags = """
        --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
        --moe-shared-expert-intermediate-size 192 --moe-token-dispatcher-type alltoall
        --moe-router-load-balancing-type aux_loss
    """
    assert differing_flags(command, flags) == {}


def test_attention_is_translated() -> None:
    flags = "--num-layers 8 --context-parallel-size 4 --use-fused-rmsnorm --transformer-impl local "
    command = command_of(
        f"{flags} --context-parallel-algo ulysses_cp_algo "
        "--full-attention-interval 4 --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec"
    )
    assert command.value("--cp-comm-type") == "a2a"
    assert command.number("--linear-attention-freq", 0) == 4
    assert not command.has("--spec")
    assert not command.has("--transformer-impl")  # local layers with the NPU's fused kernels
    ring = command_of(f"{flags} --context-parallel-algo megatron_cp_algo")
    assert not ring.has("--cp-comm-type")


def test_adapters_are_read() -> None:
    flags = "--num-layers 8 --lora-r 16 --lora-alpha 32 --lora-target-modules linear_qkv linear_fc1"
    assert command_of(flags).lora == LoraConfig(16, ("linear_qkv", "linear_fc1"), per_expert=True)


def test_commands_of_megatron_are_unchanged() -> None:
    command = command_of("--num-layers 8 --transformer-impl local --spec mine layers")
    assert command.flags[2:] == ("--transformer-impl", "local", "--spec", "mine", "layers")
    assert command.notes == ()


@pytest.mark.parametrize(
    ("flag", "model"), [("--num-zero-experts 256", "LongCat"), ("--kv-compress 4", "DeepSeek-V4")]
)
def test_models_without_layers_in_megatron_are_rejected(flag: str, model: str) -> None:
    with pytest.raises(ScheduleError, match=f"trains a {model} model"):
        command_of(f"--num-layers 8 {flag}")
