"""Saved configurations of Megatron-Bridge become flags of the same configuration."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rehearsal.flags import differing_flags
from rehearsal.warm import Warm, rehearse

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal import saved_config
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.rank_job import DEFAULT_TARGETS, LoraConfig

pytest.importorskip("megatron.training.arguments")
yaml = pytest.importorskip("yaml")

SAVED = Path(__file__).parent / "saved_configs"
WORLD = {"dense": 4, "experts": 8}

DIFFERENT = {
    "autocast_dtype": "Bridge fills it in when it builds the model",
    "timers": "an object of the run",
    "finalize_model_grads_func": "a function of the run",
    "grad_scale_func": "a function of the run",
    "init_method": "a function",
    "output_layer_init_method": "a function",
    "embedding_init_method": "a function",
    "activation_func": "a function; compared by its name",
    "cuda_graph_scope": "deprecated",
    "inference_sampling_seed": "Megatron takes the run's seed",
    "cross_entropy_fusion_impl": "Megatron's command line refuses TE's; told",
    "softmax_scale": "no flag; told",
    "deallocate_pipeline_outputs": "Megatron's command line always does",
    "cp_comm_type": "p2p where nothing is said",
    "tensor_parallel_num_weight_shards": "as many as ranks where nothing is said",
    "expert_tensor_parallel_num_weight_shards": "as many as ranks where nothing is said",
    "use_cpu_initialization": "None where it is off",
    "microbatch_group_size_per_vp_stage": "left to the pipeline's size, which is its default",
}
"""Settings that can differ from the file, and the reason."""


WEIGHT_DECAY = ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style")
"""Not compared: Megatron rejects the values that Bridge computes for the first two."""


def saved(name: str) -> dict[str, Any]:
    """Return a sample's content."""
    content: dict[str, Any] = yaml.safe_load((SAVED / f"{name}.yaml").read_text())
    return content


def written(folder: Path, content: dict[str, Any]) -> str:
    """Return the name of a file with this content."""
    file = folder / "run_config.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


def parsed(flags: tuple[str, ...], world: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the flags as arguments of Megatron's parser, validated by Megatron."""
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags, "--mock-data"])
    for module in ("arguments", "utils", "utils.common_utils"):
        name = f"megatron.training.{module}.get_device_arch_version"
        monkeypatch.setattr(name, lambda: 9, raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    args = parse_args()
    validate_args(args)
    return args


def as_written(value: Any) -> Any:
    """Return a value as in the YAML: an enum by its name, a dtype as a target."""
    if hasattr(value, "name") and hasattr(value, "value"):
        return value.name
    if type(value).__name__ == "dtype":
        return {"_target_": str(value), "_call_": False}
    if isinstance(value, list | tuple):
        return [as_written(entry) for entry in value]
    return value


def as_read(value: Any) -> Any:
    """Return a value of the YAML, an enum by its name."""
    return value.get("_name_", value) if isinstance(value, dict) else value


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_megatrons_arguments_make_the_configuration_that_was_saved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training.arguments import core_transformer_config_from_args

    content = saved(name)
    command = read_command([str(SAVED / f"{name}.yaml")])
    assert command.script == "pretrain_gpt.py"
    args = parsed(command.flags, WORLD[name], monkeypatch)
    config = core_transformer_config_from_args(args)
    model = content["model"]
    precision = content.get("mixed_precision") or {}  # which Bridge puts in when a run starts
    model |= {key: value for key, value in precision.items() if key in model and value is not None}
    unlike = {}
    for field in fields(config):
        if field.name in model and field.name not in DIFFERENT:
            mine, its = as_written(getattr(config, field.name)), as_read(model[field.name])
            if mine != its:
                unlike[field.name] = (mine, its)
    assert unlike == {}
    assert model["activation_func"]["_target_"].endswith(config.activation_func.__name__)
    assert args.seq_length == model["seq_length"]
    assert args.untie_embeddings_and_output_weights
    assert args.swiglu
    for section in ("train", "scheduler", "optimizer"):
        for key, value in content[section].items():
            heard = key not in model and key not in content["ddp"]  # which come first
            if heard and hasattr(args, key) and value is not None and key not in WEIGHT_DECAY:
                assert as_written(getattr(args, key)) in (as_read(value), value), key


def test_encoder_is_not_included(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = saved("dense")
    assert content["model"]["position_embedding_type"] == "rope"
    content["model"] |= {"vision_config": {"_target_": "transformers.Qwen3VLVisionConfig"}}
    content["model"] |= {"position_embedding_type": "mrope", "mrope_section": [2, 3, 3]}
    with caplog.at_level(logging.WARNING):
        command = read_command([written(tmp_path, content)])
    assert command.flags == read_command([str(SAVED / "dense.yaml")]).flags
    assert "the estimate does not include the image encoder" in caplog.text
    assert "vision_config" not in caplog.text


def test_dtypes_of_gradients_and_moments_follow_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(read_command([str(SAVED / "experts.yaml")]).flags, 8, monkeypatch)
    assert args.grad_reduce_in_bf16
    assert not args.accumulate_allreduce_grads_in_fp32
    assert args.ddp_bucket_size == 20_000_000
    assert str(args.exp_avg_dtype) == str(args.exp_avg_sq_dtype) == "torch.bfloat16"
    assert args.virtual_pipeline_model_parallel_size == 2
    assert args.padded_vocab_size == 4096  # 4000 in steps of 64 for each of two ranks


VERL = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": None,
    "sequence_parallel": True,
    "params_dtype": "torch.bfloat16",
    "pipeline_dtype": "torch.bfloat16",
    "bf16": True,
    "num_layers": 28,
    "hidden_size": 1536,
    "ffn_hidden_size": 8960,
    "num_attention_heads": 12,
    "num_query_groups": 2,
    "kv_channels": 128,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "normalization": "RMSNorm",
    "attention_backend": "AttnBackend.flash",
    "cuda_graph_modules": [],
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "recompute_modules": ["core_attn"],
    "variable_seq_lengths": True,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": True,
    "softmax_scale": 0.5,
    "seq_length": 32768,
    "vocab_size": 151936,
    "should_pad_vocab": False,
}
"""Fields of Qwen2.5 1.5B as verl's checkpoint manager writes them into transformer_config.json."""


def test_a_configuration_of_verl_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "transformer_config.json"
    file.write_text(json.dumps(VERL))
    with caplog.at_level(logging.WARNING):
        command = read_command([str(file), "--seq-length", "8192"])
    assert "left out: variable_seq_lengths, softmax_scale" in caplog.text
    flags = """
        --num-layers 28 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
        --ffn-hidden-size 8960 --num-query-groups 2 --padded-vocab-size 151936 --seq-length 8192
        --max-position-embeddings 32768 --recompute-num-layers 1 --bf16 --sequence-parallel --swiglu
        --add-qkv-bias --use-distributed-optimizer --attention-backend flash
    """
    assert differing_flags(command, flags) == {}
    assert not command.has("--untie-embeddings-and-output-weights")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [('{"hidden_size": 64}', "has no model of Megatron-Bridge"), ("{", "is not valid JSON")],
)
def test_other_json_is_rejected(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ScheduleError, match=wrong):
        read_command([str(file)])


def test_a_layout_is_converted_to_the_flag(tmp_path: Path) -> None:
    content = saved("dense")
    layout = [["embedding", "decoder"], ["decoder"] * 3, ["decoder"] * 3, ["decoder", "loss"]]
    content["model"]["pipeline_model_parallel_layout"] = layout
    command = read_command([written(tmp_path, content)])
    assert command.value("--pipeline-model-parallel-layout") == "Et|ttt|ttt|tL"
    content["model"]["pipeline_model_parallel_layout"] = {"_target_": "Layout", "_call_": True}
    file = written(tmp_path, content)
    with pytest.raises(ScheduleError, match="Bridge wrote no layers .* give it after the file"):
        read_command([file])
    layout_flags = "--pipeline-model-parallel-layout", "Et|ttt|ttt|tL"
    assert read_command([file, *layout_flags]).flags[-2:] == layout_flags


def test_a_named_precision_is_applied(tmp_path: Path) -> None:
    content = saved("dense") | {"mixed_precision": "bf16_mixed"}
    assert read_command([written(tmp_path, content)]).has("--bf16")
    content["mixed_precision"] = "bf16_with_fp8_current_scaling_mixed"
    command = read_command([written(tmp_path, content)])
    assert command.value("--fp8-recipe") == "tensorwise"
    assert command.has("--first-last-layers-bf16")
    content["mixed_precision"] = "nemotron_h_bf16_mixed"
    with pytest.raises(ScheduleError, match="'nemotron_h_bf16_mixed' is a name that only Bridge"):
        read_command([written(tmp_path, content)])


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"peft": {"_target_": "a.dora.DoRA"}}, "trains dora adapters .* Set peft to null"),
        ({"model": {"_target_": "a.t5_provider.T5ModelProvider"}}, "trains a T5 model"),
    ],
)
def test_unsupported_configurations_are_rejected(tmp_path: Path, change: Any, wrong: str) -> None:
    with pytest.raises(ScheduleError, match=wrong):
        read_command([written(tmp_path, saved("dense") | change)])


def test_the_adapters_of_a_configuration(tmp_path: Path) -> None:
    peft = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 8, "share_expert_adapters": False}
    config = saved("dense") | {"peft": peft}
    lora = LoraConfig(8, DEFAULT_TARGETS, per_expert=True)
    assert read_command([written(tmp_path, config)]).lora == lora
    assert read_command([written(tmp_path, config | {"peft": None})]).lora is None


def test_missing_megatron_arguments_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", None)
    saved_config._arguments.cache_clear()
    with pytest.raises(ScheduleError, match="read with Megatron's own arguments, which are not"):
        read_command([str(SAVED / "dense.yaml")])


BY_HAND = """
    --num-layers 8 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --kv-channels 16 --seq-length 128
    --max-position-embeddings 128 --padded-vocab-size 384 --micro-batch-size 1
    --global-batch-size 8 --pipeline-model-parallel-size 4
    --untie-embeddings-and-output-weights --position-embedding-type rope --disable-bias-linear
    --swiglu --norm-epsilon 1e-6 --qk-layernorm --attention-dropout 0
    --hidden-dropout 0 --no-rope-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
    --use-distributed-optimizer --no-create-attention-mask-in-dataloader
""".split()


@pytest.mark.parametrize(
    "layers", ["local", pytest.param("transformer_engine", marks=pytest.mark.slow)]
)
def test_a_saved_run_takes_the_bytes_of_the_same_flags(
    request: pytest.FixtureRequest, warm: Warm, tmp_path: Path, layers: str
) -> None:
    norm = "LayerNorm" if layers == "local" else "RMSNorm"
    precision = None if layers == "local" else "bf16_mixed"
    if layers != "local":
        request.getfixturevalue("te_python")
    content = saved("dense") | {"mixed_precision": precision}
    content["model"] |= {"transformer_impl": layers, "normalization": norm}
    ranks, file = ("--ranks", "first,last"), written(tmp_path, content)
    _, of_file = rehearse(warm, tmp_path, [], *ranks, script=file)
    impl = ["--transformer-impl", layers, "--normalization", norm]
    impl += ["--bf16"] if precision else []
    _, of_flags = rehearse(warm, tmp_path, [*BY_HAND, *impl], *ranks)
    for file_rank, flags_rank in zip(of_file["ranks"], of_flags["ranks"], strict=True):
        assert file_rank["parameters"] == flags_rank["parameters"]
        assert file_rank["parts"] == flags_rank["parts"]
        assert (
            file_rank["peak_bytes"]
            == flags_rank["peak_bytes"]
            > file_rank["held_bytes"]
            == flags_rank["held_bytes"]
        )
