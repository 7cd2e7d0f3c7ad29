"""Configurations of other frameworks: flags, GPUs and model names, and clear rejections."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rehearsal.flags import differing_flags, written

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command, launched_gpus
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.rank_job import LoraConfig, Reference
from megatron_vshape.rehearsal.start_rules import check_model
from megatron_vshape.tuning.model_names import find_model

pytest.importorskip("megatron.training.arguments")
yaml = pytest.importorskip("yaml")

MODEL = ("--num-layers", "32", "--hidden-size", "4096", "--num-attention-heads", "32")


NEMO_RL_BASE = """
policy:
  model_name: example/Model-1B
  max_total_sequence_length: 512
  train_global_batch_size: 512
  train_micro_batch_size: 4
  precision: bfloat16
  max_grad_norm: 1.0
  sizes: ${mul:2, 3}
  generation:
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
  megatron_cfg:
    enabled: false
    activation_checkpointing: false
    recompute_granularity: full
    recompute_modules: null
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    pipeline_dtype: ${policy.precision}
    mtp_num_layers: 0
    sequence_parallel: false
    peft: {enabled: false}
    fp8_cfg: {enabled: false, fp8: e4m3}
    optimizer:
      lr: 5.0e-6
      use_distributed_optimizer: true
      clip_grad: ${policy.max_grad_norm}
    distributed_data_parallel_config: {grad_reduce_in_fp32: false, overlap_grad_reduce: true}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
NEMO_RL = """
defaults: ../base.yaml
policy:
  model_name: example/Model-8B
  max_total_sequence_length: 4096
  train_micro_batch_size: 1
  megatron_cfg:
    enabled: true
    activation_checkpointing: true
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 4
    num_layers_in_first_pipeline_stage: 7
    env_vars: {NVTE_FUSED_ATTN: 1}
cluster: {num_nodes: 4}
"""


def nemo_rl(folder: Path, child: str = NEMO_RL) -> Command:
    written(folder, "base.yaml", NEMO_RL_BASE)
    return read_command([written(folder, "recipes/child.yaml", child)])


def test_a_recipe_of_nemo_rl_follows_its_defaults(tmp_path: Path) -> None:
    command = nemo_rl(tmp_path)
    flags = """
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --seq-length 4096
        --decoder-first-pipeline-num-layers 7 --global-batch-size 512 --micro-batch-size 1
        --recompute-granularity full --recompute-num-layers 1 --bf16 --grad-reduce-in-bf16
        --use-distributed-optimizer
    """
    assert differing_flags(command, flags) == {}
    assert not command.has("--mtp-num-layers")
    assert not command.has("--fp8-format")
    assert launched_gpus(command) == (32, "")
    assert command.environment["NVTE_FUSED_ATTN"] == "1"
    assert command.model_name == "example/Model-8B"


@pytest.mark.parametrize("section", ["dpo", "rm"])
def test_a_sample_of_preferences_in_nemo_rl(tmp_path: Path, section: str) -> None:
    command = nemo_rl(tmp_path, f"{NEMO_RL}\n{section}: {{max_num_epochs: 1}}\n")
    assert command.number("--global-batch-size", 0) == 2 * 512
    assert command.number("--micro-batch-size", 0) == 2


def test_nodes_of_generation_do_not_train(tmp_path: Path) -> None:
    generation = "\n  generation: {colocated: {enabled: false, resources: {num_nodes: 1}}}\ncluster"
    command = nemo_rl(tmp_path, NEMO_RL.replace("\ncluster", generation))
    assert launched_gpus(command)[0] == 24


@pytest.mark.parametrize(
    ("peft", "lora"),
    [
        ("enabled: false, dim: 8", None),
        ("enabled: true, dim: 8, target_modules: []", LoraConfig(8, ("all-linear",))),
        ("enabled: true, target_modules: [linear_qkv]", LoraConfig(32, ("linear_qkv",))),
    ],
)
def test_adapters_of_nemo_rl(tmp_path: Path, peft: str, lora: LoraConfig | None) -> None:
    text = NEMO_RL.replace("env_vars:", f"peft: {{{peft}}}\n    env_vars:")
    assert nemo_rl(tmp_path, text).lora == lora


@pytest.mark.parametrize(
    ("changed", "change", "message"),
    [
        ("enabled: true", "enabled: false", "trains without Megatron"),
        (
            "env_vars:",
            "peft: {enabled: true, _target_: DoRA}\n    env_vars:",
            "trains dora adapters",
        ),
        ("base.yaml", "absent.yaml", "absent.yaml is included and cannot be read"),
        ("example/Model-8B", "${policy.model_name}", r"has a circle: a value \$\{...\}"),
        ("../base.yaml", "child.yaml", "has a circle: .* or an included file"),
    ],
)
def test_runs_of_nemo_rl_that_are_not_estimated(
    tmp_path: Path, changed: str, change: str, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        nemo_rl(tmp_path, NEMO_RL.replace(changed, change))


ROLL = """
defaults: [../shared/envs@_here_, _self_]
pretrain: example/Model-8B
prompt_length: 1024
response_length: 3072
actor_train:
  model_args: {dtype: bf16, lora_rank: 16, lora_target: "q_proj,v_proj,o_proj"}
  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 8}
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 4
      virtual_pipeline_model_parallel_size: 2
      use_distributed_optimizer: true
      recompute_granularity: full
      recompute_modules: "core_attn,mlp"
  device_mapping: list(range(8,24))
"""


def roll(folder: Path, text: str = ROLL) -> Command:
    written(folder, "shared/envs.yaml", "prompt_length: 512\nnum_envs: 4\n")
    return read_command([written(folder, "pipelines/run.yaml", text)])


def test_a_pipeline_of_roll_trains_its_actor(tmp_path: Path) -> None:
    command = roll(tmp_path)
    batch = 2 * 8 * 2  # on two replicas
    flags = f"""
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --recompute-num-layers 1
        --num-virtual-stages-per-pipeline-rank 2 --seq-length 4096 --micro-batch-size 2
        --global-batch-size {batch} --no-rope-fusion
    """
    assert differing_flags(command, flags) == {}
    assert launched_gpus(command) == (16, "")
    assert command.model_name == "example/Model-8B"
    assert command.lora == LoraConfig(16, ("linear_qkv", "linear_proj"))


@pytest.mark.parametrize(
    ("changed", "change", "flag", "value"),
    [
        ("prompt_length: 1024", "sequence_length: 2048", "--seq-length", "2048"),
        ("1024", "${mul:${response_length}, 2}", "--seq-length", "9216"),
        ("actor_train", "sft_train", "--seq-length", "4096"),
        ("pretrain", "chosen_key: chosen\npretrain", "--micro-batch-size", "4"),
        ("recompute_granularity: full", "moe_layer_recompute: true", "--recompute-modules", "moe"),
        ("{dtype: bf16, ", "{dtype: fp32, ", "--bf16", None),
    ],
)
def test_settings_of_roll(
    tmp_path: Path, changed: str, change: str, flag: str, value: str | None
) -> None:
    assert roll(tmp_path, ROLL.replace(changed, change)).value(flag) == value


def test_other_strategies_of_roll_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="trains without Megatron: actor_train"):
        roll(tmp_path, ROLL.replace("megatron_train", "fsdp2_train"))


PRIMUS = """
work_group: ${PRIMUS_TEAM:amd}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${PRIMUS_MODEL:small}.yaml
    overrides:
      seq_length: ${PRIMUS_SEQ_LENGTH:4096}
      pipeline_model_parallel_size: ${PRIMUS_PP:2}
      mtp_num_layers: null
      train_data_path: ${PRIMUS_DATA:null}
      use_turbo_attention: true
"""


def primus(folder: Path, text: str = PRIMUS) -> Command:
    configs = folder / "primus" / "configs"
    written(configs, "models/megatron/base.yaml", "hidden_size: 64\nnum_attention_heads: 4\n")
    model = "extends:\n  - base.yaml\nnum_layers: 12\nhidden_size: 128\nswiglu: true\n"
    written(configs, "models/megatron/small.yaml", model)
    module = (
        "micro_batch_size: 2\nglobal_batch_size: 16\nbf16: true\nseq_length: 1024\nload: null\n"
    )
    written(configs, "modules/megatron/pre_trainer.yaml", module)
    return read_command([written(folder, "examples/megatron/run.yaml", text)])


def test_an_experiment_of_primus_extends_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PRIMUS_PP", "4")
    command = primus(tmp_path)
    flags = """
        --num-layers 12 --hidden-size 128 --num-attention-heads 4 --seq-length 4096 --swiglu
        --pipeline-model-parallel-size 4 --global-batch-size 16
    """
    assert differing_flags(command, flags) == {}
    assert not command.has("--train-data-path")
    assert "no arguments of Megatron, ignored: use_turbo_attention" in caplog.text
    check_model(command)


def test_experiments_of_primus_that_are_not_estimated(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="trains with torchtitan in Primus"):
        primus(tmp_path, PRIMUS.replace("framework: megatron", "framework: torchtitan"))
    with pytest.raises(ScheduleError, match="missing.yaml is included and cannot be read"):
        primus(tmp_path, PRIMUS.replace("small}", "missing}"))


SWIFT = r"""
# 8 * 80GiB
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=8 \
NNODES=2 \
megatron sft \
    --model example/Model-32B \
    --dataset some/data#500 \
    --packing true \
    --tensor_model_parallel_size 4 \
    --pipeline_model_parallel_size $PP \
    --virtual_pipeline_model_parallel_size 2 \
    --sequence_parallel true \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --micro_batch_size 2 \
    --max_length=8192
"""


def test_an_experiment_of_primus_needs_its_checkout(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="read the file in a checkout of Primus"):
        read_command([written(tmp_path, "run.yaml", PRIMUS)])


def test_a_command_of_ms_swift_becomes_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PP", "2")
    command = read_command([written(tmp_path, "sft.sh", SWIFT)])
    flags = """
        --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel
        --num-virtual-stages-per-pipeline-rank 2 --seq-length 8192 --micro-batch-size 2
        --global-batch-size 16 --use-distributed-optimizer --recompute-granularity full
    """
    assert differing_flags(command, flags) == {}
    assert not command.has("--packing")
    assert launched_gpus(command) == (16, "")
    assert command.model_name == "example/Model-32B"
    words = SWIFT.replace("\\\n", " ").replace("$PP", "2").replace("'", "").splitlines()[2].split()
    assert read_command(words) == command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--freeze_llm true", "--freeze_llm true trains no language model"),
        ("--task_type embedding", "--task_type embedding trains no language model"),
        ("--config absent.yaml", "absent.yaml is included and cannot be read"),
    ],
)
def test_commands_of_ms_swift_that_are_not_estimated(flags: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_command(["megatron", "sft", "--model", "example/Model-7B", *flags.split()])


@pytest.mark.parametrize(
    ("flags", "lora"),
    [
        ("--tuner_type full --lora_rank 4", None),
        ("--tuner_type lora", LoraConfig(8, ("all-linear",), per_expert=True)),
        ("--adapters output/run", LoraConfig(8, ("all-linear",), per_expert=True)),
        (
            "--tuner_type lora --lora_rank 16 --target_modules linear_qkv linear_proj all-router",
            LoraConfig(16, ("linear_qkv", "linear_proj"), per_expert=True),
        ),
    ],
)
def test_adapters_of_ms_swift(flags: str, lora: LoraConfig | None) -> None:
    words = ["megatron", "sft", "--model", "example/Model-7B", *flags.split()]
    assert read_command(words).lora == lora


@pytest.mark.parametrize(
    ("flags", "sequences", "reference"),
    [
        ("", 2, Reference.FORWARD),
        ("--rlhf_type rm", 2, None),
        ("--rlhf_type grpo", 1, Reference.IDLE),
        ("--rlhf_type kto", 1, Reference.FORWARD),
        ("--packing true", 1, Reference.FORWARD),
    ],
)
def test_a_sample_of_preferences_has_two_answers(
    flags: str, sequences: int, reference: Reference | None
) -> None:
    command = read_command(["megatron", "rlhf", "--model", "example/Model-7B", *flags.split()])
    assert command.number("--micro-batch-size", 1) == sequences
    assert command.number("--global-batch-size", 1) == 16 * sequences
    assert command.reference is reference


@pytest.mark.parametrize(("flags", "dtype"), [("", "fp32"), ("--moe_router_dtype none", None)])
def test_the_router_of_ms_swift_is_in_fp32(flags: str, dtype: str | None) -> None:
    command = read_command(["megatron", "sft", "--model", "example/Model-7B", *flags.split()])
    assert command.value("--moe-router-dtype") == dtype


def test_arguments_of_ms_swift_in_a_file(tmp_path: Path) -> None:
    text = "model: example/Model-7B\nmax_length: 2048\nmicro_batch_size: 4\ntuner_type: lora\n"
    file = written(tmp_path, "sft.yaml", text)
    flags = "--micro_batch_size", "2", "--loss_scale", "last_round"
    for words in ([file, *flags], ["--config", file, *flags]):
        command = read_command(["megatron", "sft", *words])
        assert command.model_name == "example/Model-7B"
        assert differing_flags(command, "--seq-length 2048 --micro-batch-size 2") == {}
        assert command.lora is not None
        assert not command.has("--loss-scale")  # in ms-swift, it weights tokens


def test_overrides_of_a_recipe_need_the_model(tmp_path: Path) -> None:
    text = (
        "model: {seq_length: 4096, pipeline_model_parallel_size: 2}\n"
        "train: {global_batch_size: 32, micro_batch_size: 2}\noptimizer: {lr: 0.0003}\n"
    )
    file = written(tmp_path, "override.yaml", text)
    with pytest.raises(ScheduleError, match="has no --num-layers, --hidden-size, "):
        check_model(read_command([file]))
    command = read_command([file, *MODEL])
    check_model(command)
    flags = "--pipeline-model-parallel-size 2 --global-batch-size 32 --num-layers 32"
    assert differing_flags(command, flags) == {}
    with pytest.raises(ScheduleError, match="sets model.freeze_vision_model"):
        read_command([written(tmp_path, "v.yaml", "model: {freeze_vision_model: true}\n")])
    with pytest.raises(ScheduleError, match="only language models"):
        read_command([written(tmp_path, "w.yaml", "model: {crossattn_emb_size: 64}\n")])


def test_a_checkpoint_of_a_recipe_names_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "checkpoint: {pretrained_checkpoint: /ckpt/Qwen3-8B-Base}\nmodel: {seq_length: 8192}\n"
    command = read_command([written(tmp_path, "sft.yaml", text)])
    assert find_model(command.model_name).stem == "qwen3_8b"
    assert "settings of the recipe without an override are not included" in caplog.text


RECIPE = """
#SBATCH --nodes=2 --gpus-per-node=8
TP=4
CMD="python scripts/training/run_recipe.py --recipe {recipe} model.seq_length=8192"
CMD="$CMD model.tensor_model_parallel_size=$TP mixed_precision=bf16_with_mxfp8_mixed {overrides}"
srun bash -c "$CMD"
"""


def test_a_recipe_with_overrides_is_read(tmp_path: Path) -> None:
    sizes = "model.pipeline_model_parallel_size=2 train.global_batch_size=64 peft.dim=16"
    text = RECIPE.format(recipe="qwen3_600m_peft_128k_config", overrides=sizes)
    command = read_command([written(tmp_path, "sft.sh", text)])
    assert find_model(command.model_name).stem == "qwen3_0_6b"
    assert command.number("--tensor-model-parallel-size", 1) == 4
    assert command.number("--global-batch-size", 1) == 64
    assert command.value("--fp8-recipe") == "mxfp8"
    assert command.has("--cross-entropy-loss-fusion")
    assert launched_gpus(command) == (16, "")
    assert command.lora.rank == 16
    text = RECIPE.format(recipe="qwen3_8b_sft_config", overrides="model.freeze_vision_model=True")
    with pytest.raises(ScheduleError, match="qwen3_8b_sft_config has sizes that only Megatron-Br"):
        read_command([written(tmp_path, "sft.sh", text)])


NEMOTRON = """
recipe:
  _target_: megatron.bridge.recipes.nemotronh.nemotron_3_nano.nemotron_3_nano_peft_config
mixed_precision: {precision}
train: {{global_batch_size: 8, micro_batch_size: 1}}
model:
  seq_length: ${{art:data,pack_size}}
  tensor_model_parallel_size: ${{oc.env:TENSOR_SIZE,4}}
"""


def test_a_configuration_of_nemotron_names_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_SIZE", "2")
    file = written(tmp_path, "sft.yaml", NEMOTRON.format(precision="bf16_mixed"))
    with pytest.raises(ScheduleError, match="nemotron_3_nano_peft_config has sizes that only"):
        read_command([file])
    command = read_command([file, "--pipeline-model-parallel-size", "1"])
    assert find_model(command.model_name).stem == "nemotron_3_nano"
    assert command.number("--tensor-model-parallel-size", 1) == 2
    assert not command.has("--seq-length")
    assert command.lora is not None
    file = written(tmp_path, "pretrain.yaml", NEMOTRON.format(precision="nemotron_h_mixed"))
    with pytest.raises(ScheduleError, match="'nemotron_h_mixed' is a name that only Bridge knows"):
        read_command([file, "--pipeline-model-parallel-size", "1"])


RLINF = """
defaults:
  - override hydra/job_logging: stdout
cluster: {{num_nodes: 2, component_placement: {{"actor,reward": {gpus}, rollout: 0-3}}}}
algorithm: {{group_size: 16, n_minibatches: 4, training_batch_size_per_gpu: 2}}
data: {{rollout_batch_size: 512}}
runner: {{seq_length: 8192, enable_dynamic_batch_size: {packs}, max_tokens_per_mbs: 16384}}
rollout: {{model: {{model_path: /models/DeepSeek-R1-Distill-Qwen-1.5B/}}}}
actor:
  training_backend: {backend}
  model:
    precision: bf16
    activation: swiglu
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    moe_grouped_gemm: null
    seq_length: ${{runner.seq_length}}
  optim: {{bf16: true, use_distributed_optimizer: true, overlap_grad_reduce: true}}
"""


@pytest.mark.parametrize(
    ("packs", "sizes"), [("false", (8192, 2, 2048)), ("true", (16384, 1, 1024))]
)
def test_the_actor_of_rlinf(tmp_path: Path, packs: str, sizes: tuple[int, ...]) -> None:
    text = RLINF.format(gpus="4-11", packs=packs, backend="megatron")
    command = read_command([written(tmp_path, "grpo.yaml", text)])
    names = ("--seq-length", "--micro-batch-size", "--global-batch-size")
    assert tuple(command.number(name, 0) for name in names) == sizes
    assert command.number("--pipeline-model-parallel-size", 1) == 2
    assert command.has("--bf16")
    assert command.has("--overlap-grad-reduce")
    assert not command.has("--moe-grouped-gemm")
    assert launched_gpus(command) == (8, "")
    assert find_model(command.model_name).stem == "deepseek_r1_distill_qwen_1_5b"
    assert "the reference model and the critic are not included" in command.notes[0]


def test_all_gpus_of_rlinf_are_unknown_and_fsdp_is_rejected(tmp_path: Path) -> None:
    text = RLINF.format(gpus="all", packs="false", backend="megatron")
    command = read_command([written(tmp_path, "all.yaml", text)])
    assert command.notes[1] == "It uses all GPUs of 2 nodes: set their number with --gpus."
    text = RLINF.format(gpus="all", packs="false", backend="fsdp")
    with pytest.raises(ScheduleError, match="trains without Megatron: actor.training_backend is "):
        read_command([written(tmp_path, "fsdp.yaml", text)])


AREAL = """
trial_name: trial0
gconfig: {{n_samples: 8, max_new_tokens: 3072}}
train_dataset: {{batch_size: 64, max_length: 1024}}
actor:
  backend: "{backend}"
  path: Qwen/Qwen3-30B-A3B
  gradient_checkpointing: true
  mb_spec: {{max_tokens_per_mb: 8192}}
  megatron: {{recompute_num_layers: 2}}
"""


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("megatron:d4p2t2", (2, 2, 1, 1)),
        ("megatron:d2p2t2e4", (2, 2, 4, 1)),
        ("megatron:(attn:d4p4t2|ffn:d2p4t2e2)", (4, 2, 2, 2)),
    ],
)
def test_the_actor_of_areal(tmp_path: Path, backend: str, sizes: tuple[int, ...]) -> None:
    command = read_command([written(tmp_path, "grpo.yaml", AREAL.format(backend=backend))])
    names = ("pipeline-model", "tensor-model", "expert-model", "expert-tensor")
    parallel_sizes = [command.number(f"--{name}-parallel-size", 1) for name in names]
    assert tuple(parallel_sizes) == sizes
    assert command.number("--seq-length", 0) == 8192
    assert command.number("--global-batch-size", 0) == 256  # two samples in a microbatch
    assert command.number("--recompute-num-layers", 0) == 2
    assert find_model(command.model_name).stem == "qwen3_30b_a3b"
    with pytest.raises(ScheduleError, match="without Megatron: actor.backend is fsdp:d8"):
        read_command([written(tmp_path, "fsdp.yaml", AREAL.format(backend="fsdp:d8"))])


MINDSPEED_RL = """
defaults:
  - model: [small]
megatron_training:
  {{model: small, stage: {stage}, bf16: true, global_batch_size: 32, min-lr: 0,
   use_fused_swiglu: true, is_pairwise_dataset: {pairs}}}
actor_config: {{micro_batch_size: 1, tensor_model_parallel_size: 2, num_layer_list: "15,17"}}
"""
MINDSPEED_RL_BATCHES = """
rl_config:
  {mini_batch_size: 64, n_samples_per_prompt: 4, max_prompt_length: 1024, use_dynamic_bsz: true,
   max_packing_token_size: 8192, actor_resource: {num_npus: 16}}
generate_config: {sampling_config: {max_tokens: 3072}}
"""


def test_mindspeed_rl_has_a_file_for_its_model(tmp_path: Path) -> None:
    model = "small: {num_layers: 32, hidden_size: 4096, num_attention_heads: 32, seq_length: 512}\n"
    written(tmp_path, "model/small.yaml", model)
    sizes = "pipeline_model_parallel_size: 2"
    text = MINDSPEED_RL.replace('"15,17"', f'"15,17", {sizes}')
    names = ("--seq-length", "--micro-batch-size", "--global-batch-size")
    text_of_rl = text.format(stage="ray_grpo", pairs="false") + MINDSPEED_RL_BATCHES
    command = read_command([written(tmp_path, "grpo.yaml", text_of_rl)])
    assert tuple(command.number(name, 0) for name in names) == (8192, 1, 128)
    assert command.layers == 32
    assert command.value("--pipeline-model-parallel-layout") == f"E{15 * 't'}|{17 * 't'}L"
    assert launched_gpus(command) == (16, "")
    command = read_command([written(tmp_path, "dpo.yaml", text.format(stage="dpo", pairs="true"))])
    assert tuple(command.number(name, 0) for name in names) == (512, 2, 64)
    assert command.reference is Reference.FORWARD


FLAGSCALE = """
defaults:
  - _self_
  - train: 7b
experiment:
  task: {{type: train, backend: megatron, entrypoint: flagscale/train/{script}.py}}
  runner: {{nnodes: 4, nproc_per_node: 8}}
  envs: {{NVTE_FUSED_ATTN: 1, LOGLEVEL: INFO}}
  load: null
"""
FLAGSCALE_TRAIN = """
system:
  tensor_model_parallel_size: 2
  sequence_parallel: true
  no_shared_fs: false
  precision: {bf16: true}
  checkpoint: {load: "${experiment.load}"}
model:
  num_layers: 32
  hidden_size: 4096
  num_attention_heads: 32
  swiglu: true
  multiple_of: 256
  hidden_dim_multiplier: 1.3
  finetune: false
  optimizer: {adam_beta1: 0.9}
data: {split: 1, tokenizer: {vocab_size: 100000}}
"""
FLAGSCALE_FLAGS = """
    --tensor-model-parallel-size 2 --sequence-parallel --bf16 --num-layers 32 --hidden-size 4096
    --num-attention-heads 32 --swiglu --adam-beta1 0.9 --split 1 --vocab-size 100000
    --ffn-hidden-size 14336
""".split()


def test_an_experiment_of_flagscale(tmp_path: Path) -> None:
    """FlagScale passes all settings as flags; the width of the MLP is that of Llama 3 8B."""
    train = written(tmp_path, "train/7b.yaml", FLAGSCALE_TRAIN)
    command = read_command([written(tmp_path, "train.yaml", FLAGSCALE.format(script="train_gpt"))])
    assert [*command.flags] == FLAGSCALE_FLAGS
    assert command.environment == {"NVTE_FUSED_ATTN": "1"}
    assert launched_gpus(command)[0] == 32
    assert [*read_command([train, "--fp16"]).flags] == [*FLAGSCALE_FLAGS, "--fp16"]


def test_adapters_of_flagscale(tmp_path: Path) -> None:
    adapters = "{peft_type: lora, lora_dim: 8, lora_alpha: 16, lora_target_modules: [linear_fc1]}"
    text = FLAGSCALE_TRAIN.replace("{adam_beta1: 0.9}", adapters)
    command = read_command([written(tmp_path, "7b.yaml", text)])
    assert command.lora == LoraConfig(8, ("linear_fc1",))
    assert not any(word.startswith("--lora") for word in command.flags)


@pytest.mark.parametrize(
    ("script", "setting", "message"),
    [
        ("train_rwkv", "", "trains a rwkv model"),
        ("train_gpt", "use_dualpipev: true", "DualPipeV cannot be estimated"),
        ("train_gpt", "hetero: {hetero_process_meshes: [1, 1, 2]}", "differ between GPUs"),
    ],
)
def test_experiments_of_flagscale_that_are_not_estimated(
    tmp_path: Path, script: str, setting: str, message: str
) -> None:
    text = FLAGSCALE_TRAIN.replace("no_shared_fs: false", setting or "no_shared_fs: false")
    written(tmp_path, "train/7b.yaml", text)
    with pytest.raises(ScheduleError, match=message):
        read_command([written(tmp_path, "train.yaml", FLAGSCALE.format(script=script))])


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of each setting and section."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        yield (*path, key)
        yield from _paths(entry, (*path, key))


SAMPLES = {
    "NeMo-RL": NEMO_RL_BASE.replace("enabled: false", "enabled: true"),
    "ROLL": ROLL.replace("defaults: [../shared/envs@_here_, _self_]\n", ""),
    "Nemotron": NEMOTRON.format(precision="bf16_mixed") + "  pipeline_model_parallel_size: 2\n",
    "RLinf": RLINF.format(gpus="0-7", packs="true", backend="megatron"),
    "AReaL": AREAL.format(backend="megatron:d1"),
    "MindSpeed-RL": MINDSPEED_RL.format(stage="grpo", pairs="false").replace(
        "  - model: [small]", "  - small"
    )
    + MINDSPEED_RL_BATCHES,
    "FlagScale": FLAGSCALE_TRAIN + FLAGSCALE.format(script="train_gpt").partition("train: 7b")[2],
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_value_of_another_type_is_rejected_or_read(tmp_path: Path, sample: str) -> None:
    written(tmp_path, "small.yaml", "model: {small: {num_layers: 8, hidden_size: 64}}\n")
    for path in _paths(yaml.safe_load(SAMPLES[sample])):
        for value in ("abc", [1], {"a": 1}, None, -3):
            content = yaml.safe_load(SAMPLES[sample])
            section = content
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = value
            with suppress(ScheduleError):
                read_command([written(tmp_path, "changed.yaml", yaml.safe_dump(content))])


NEOX = {"pipe-parallel-size": 4, "model-parallel-size": 2, "num-layers": 44, "hidden-size": 6144}


@pytest.mark.parametrize(
    ("content", "library"),
    [
        (NEOX, "GPT-NeoX"),
        ({name.replace("-", "_"): value for name, value in NEOX.items()}, "GPT-NeoX"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 3}}, "DeepSpeed"),
        ({"actor_rollout_ref": {"actor": {"strategy": "megatron"}}, "trainer": {}}, "verl"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}, "Hugging Face"),
        ({"model_name_or_path": "m", "stage": "sft"}, "LLaMA-Factory"),
        ({"trainer": {"devices": 8}, "model": {"num_layers": 12}}, "NeMo 1"),
        ({"runtime_args": {"train_backend": "megatron"}, "models": {}}, "ChatLearn"),
    ],
)
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_files_of_other_libraries_are_named(
    tmp_path: Path, content: dict[str, object], library: str, suffix: str
) -> None:
    """A file of GPT-NeoX was estimated with one GPU, because its sizes have other names."""
    file = written(tmp_path, f"file.{suffix}", json.dumps(content))
    with pytest.raises(ScheduleError, match=f"is a file of {library}.*, a format that is not"):
        read_command([file])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("defaults.yaml", "defaults: base.yaml\nnum_layers: 3\n"),  # absent file
        ("sections.yaml", "data: {path: x}\nlr: 0.1\n"),  # not a list of flags
        ("vision.sh", "pretrain_gpt.py --model-name some-72b --tensor-model-parallel-size 8\n"),
    ],
)
def test_a_file_that_is_not_understood_is_no_estimate(tmp_path: Path, name: str, text: str) -> None:
    """Files with `defaults` and scripts of a model by name were estimated without layers."""
    file = written(tmp_path, name, text)
    with pytest.raises(ScheduleError):
        check_model(read_command([file]))
