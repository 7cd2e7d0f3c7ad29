"""Read the training part of configurations of NeMo-RL, ROLL, RLinf, AReaL and MindSpeed-RL.

They name a model of Hugging Face, whose sizes are in another file; only MindSpeed-RL's have
Megatron's arguments. Estimated is the update of the trained model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import NODES, PROCESSES, Command, flags_of
from megatron_vshape.rehearsal.rank_job import LoraConfig
from megatron_vshape.rehearsal.saved_config import flags_of_config, lora_of_config
from megatron_vshape.rehearsal.yaml_files import number, section, with_references

_LONGEST = (
    "Estimated is the update of the trained model with the longest responses; the rollout engine, "
    "the reference model and the critic are not included."
)

_ROLL_WORKERS = ("actor_train", "sft_train", "student_train", "student")
"""Parts of a pipeline of ROLL that train; the first one is estimated."""


def command_of_rl(
    path: Path, content: Mapping[str, Any], extra_flags: Sequence[str]
) -> Command | None:
    """Return the command of a configuration, None if it is of none of these frameworks.

    Raises:
        ScheduleError: It does not train with Megatron.
    """
    if isinstance(content.get("policy"), dict):
        return _command_of_nemo_rl(path, content, extra_flags)
    if isinstance(content.get("megatron_training"), dict):
        return _command_of_mindspeed_rl(content, extra_flags)
    if worker := next((name for name in _ROLL_WORKERS if name in content), None):
        return _command_of_roll(path, content, worker, extra_flags)
    if "training_backend" in section(content, "actor"):
        return _command_of_rlinf(path, content, extra_flags)
    if "trial_name" in content:
        return _command_of_areal(path, content, extra_flags)
    return None


def _command_of_nemo_rl(
    path: Path, content: Mapping[str, Any], extra_flags: Sequence[str]
) -> Command:
    """Read the training part of a recipe of NeMo-RL: `policy.megatron_cfg`."""
    policy, cluster = (section(content, name) for name in ("policy", "cluster"))
    policy = with_references(policy, content)
    megatron = section(policy, "megatron_cfg")
    if not megatron.get("enabled"):
        raise ScheduleError(
            f"{path} trains without Megatron: policy.megatron_cfg.enabled is not true"
        )
    model = {name: value for name, value in megatron.items() if not isinstance(value, dict)}
    if not model.pop("activation_checkpointing", None):
        model |= dict.fromkeys(("recompute_granularity", "recompute_modules"))
    elif model.get("recompute_granularity", "full") == "full":
        model |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        model |= {"recompute_num_layers": 1, "recompute_modules": None}
    quantization, peft = (section(megatron, name) for name in ("fp8_cfg", "peft"))
    if quantization.get("enabled"):
        model |= {name: value for name, value in quantization.items() if name.startswith("fp8")}
    model |= section(megatron, "model_overrides")
    model |= {
        "seq_length": policy.get("max_total_sequence_length"),
        "mtp_num_layers": model.get("mtp_num_layers") or None,
        "bf16": policy.get("precision") == "bfloat16",
    }
    sequences = 2 if content.keys() & {"dpo", "rm"} else 1  # of a sample: chosen and rejected
    batches = {
        name: number(policy, f"train_{name}") * sequences or None
        for name in ("global_batch_size", "micro_batch_size")
    }
    config = {
        "model": model,
        "ddp": section(megatron, "distributed_data_parallel_config"),
        "optimizer": section(megatron, "optimizer"),
        "train": batches,
    }
    colocated = section(section(policy, "generation"), "colocated")
    rollout = {} if colocated.get("enabled", True) else section(colocated, "resources")
    nodes = number(cluster, "num_nodes", 1) - number(rollout, "num_nodes")
    rollout_gpus = 0 if rollout.get("num_nodes") else number(rollout, "gpus_per_node")
    gpus = number(cluster, "gpus_per_node") - rollout_gpus
    return Command(
        "pretrain_gpt.py",
        tuple(flags_of_config(config, extra_flags)),
        {name: str(value) for name, value in section(megatron, "env_vars").items()},
        {NODES: str(nodes), PROCESSES: str(gpus)},
        str(policy.get("model_name") or ""),
        lora=lora_of_config(peft if peft.get("enabled") else None),
    )


_ROLL_DEFAULTS = {
    "moe_token_dispatcher_type": "allgather",
    "expert_tensor_parallel_size": 1,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
}
"""Defaults of ROLL's mcore_adapter (training_args.py) that differ from Megatron's."""

_LORA_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv"),
    "o_proj": "linear_proj",
    **dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1"),
    "down_proj": "linear_fc2",
}
"""Megatron's linear layers by their names in Hugging Face models."""


def _command_of_roll(
    path: Path, content: Mapping[str, Any], worker_name: str, extra_flags: Sequence[str]
) -> Command:
    """Read the training of the actor, or of the model, in a pipeline of ROLL."""
    content = with_references(content, content)
    worker = section(content, worker_name)
    strategy, model, training = (
        section(worker, name) for name in ("strategy_args", "model_args", "training_args")
    )
    if strategy.get("strategy_name") != "megatron_train":
        raise ScheduleError(
            f"{path} trains without Megatron: {worker_name}.strategy_args.strategy_name is not "
            "megatron_train"
        )
    settings = _ROLL_DEFAULTS | section(strategy, "strategy_config")
    if settings.get("recompute_granularity") == "full":
        settings = {"recompute_method": "uniform", "recompute_num_layers": 1} | settings
    if settings.pop("moe_layer_recompute", False):
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    if isinstance(modules := settings.get("recompute_modules"), str):
        settings["recompute_modules"] = modules.replace(" ", "").split(",")
    lengths = (number(content, name) for name in ("prompt_length", "response_length"))
    settings |= {
        "seq_length": number(content, "sequence_length", sum(lengths)),
        "bf16": model.get("dtype", "bf16") == "bf16",
    }
    ranges = re.findall(r"range\((\d+), *(\d+)\)", str(worker.get("device_mapping")))
    gpus = sum(int(end) - int(start) for start, end in ranges)
    sequences = 2 if "chosen_key" in content else 1  # of a sample
    microbatch = number(training, "per_device_train_batch_size", 1) * sequences
    samples = microbatch * number(training, "gradient_accumulation_steps", 1)
    batches = {
        "micro_batch_size": microbatch,
        "global_batch_size": samples * _replicas(settings, gpus),
    }
    rank, targets = number(model, "lora_rank"), str(model.get("lora_target") or "all-linear")
    names = dict.fromkeys(_LORA_NAMES.get(name, name) for name in targets.split(","))
    pretrained = content.get("pretrain") or content.get("student_pretrain")
    return Command(
        "pretrain_gpt.py",
        tuple(flags_of_config({"model": settings, "train": batches}, extra_flags)),
        launched={NODES: "1", PROCESSES: str(gpus)},
        model_name=str(model.get("model_name_or_path") or pretrained or ""),
        lora=LoraConfig(rank, tuple(names)) if rank else None,
    )


def _command_of_rlinf(
    path: Path, content: Mapping[str, Any], extra_flags: Sequence[str]
) -> Command:
    """Read the training of the actor in a configuration of RLinf."""
    content = with_references(content, content)
    actor, algorithm, data, runner, cluster = (
        section(content, name) for name in ("actor", "algorithm", "data", "runner", "cluster")
    )
    if actor["training_backend"] != "megatron":
        raise ScheduleError(
            f"{path} trains without Megatron: actor.training_backend is {actor['training_backend']}"
        )
    model, optimizer = (section(actor, name) for name in ("model", "optim"))
    rollout = section(section(content, "rollout"), "model")
    settings = {name: value for name, value in model.items() if name not in _RLINF_NAMES}
    settings |= {
        "seq_length": number(model, "seq_length", number(runner, "seq_length")),
        "moe_grouped_gemm": bool(model.get("moe_grouped_gemm")),
        "bf16": model.get("precision") == "bf16",
        "fp16": model.get("precision") == "fp16",
    }
    samples = number(data, "rollout_batch_size", 1) * number(algorithm, "group_size", 1)
    samples //= number(algorithm, "n_minibatches", 1)
    batches = {
        "global_batch_size": number(actor, "global_batch_size", samples),
        "micro_batch_size": number(
            actor, "micro_batch_size", number(algorithm, "training_batch_size_per_gpu", 1)
        ),
    }
    launched = _rlinf_gpus(cluster)
    if runner.get("enable_dynamic_batch_size"):
        samples, limit = batches["global_batch_size"], number(runner, "max_tokens_per_mbs")
        settings, batches = _packed(settings, samples, limit, int(launched[PROCESSES] or 0))
    config = {"model": settings, "ddp": optimizer, "train": batches}
    notes: tuple[str, ...] = (_LONGEST,)
    if not launched[PROCESSES]:
        notes += (f"It uses all GPUs of {launched[NODES]} nodes: set their number with --gpus.",)
    return Command(
        "pretrain_gpt.py",
        tuple(flags_of_config(config, extra_flags)),
        launched=launched,
        model_name=str(rollout.get("model_path") or model.get("model_path") or ""),
        notes=notes,
    )


_RLINF_NAMES = frozenset(
    """
    activation encoder_seq_length is_lora megatron_checkpoint model_path model_type normalization
    precision
    """.split()
)
"""Settings of RLinf's models that are read by name, or follow from the model."""


def _rlinf_gpus(cluster: Mapping[str, Any]) -> dict[str, str]:
    """Return the GPUs of the actor: all nodes, or a range of GPUs as in `actor: 24-63`."""
    placements = {
        role.strip(): str(gpus)
        for roles, gpus in section(cluster, "component_placement").items()
        for role in str(roles).split(",")
    }
    ranges = re.findall(r"(\d+)(?:-(\d+))?", placements.get("actor", ""))
    if not ranges:
        return {NODES: str(number(cluster, "num_nodes", 1)), PROCESSES: ""}
    gpus = sum(int(last or first) - int(first) + 1 for first, last in ranges)
    return {NODES: "1", PROCESSES: str(gpus)}


_AREAL_DEFAULTS = {"moe_router_dtype": "fp32", "moe_token_dispatcher_type": "alltoall"}
_AREAL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""Defaults of AReaL's MegatronEngineConfig (areal/api/cli_args.py)."""
_AREAL_SIZES = {
    "p": "pipeline_model_parallel_size",
    "t": "tensor_model_parallel_size",
    "c": "context_parallel_size",
    "e": "expert_model_parallel_size",
}
"""Parallel sizes by their letters in a backend, as in `megatron:d4p2t2`."""


def _command_of_areal(
    path: Path, content: Mapping[str, Any], extra_flags: Sequence[str]
) -> Command:
    """Read the training of the actor in a configuration of AReaL."""
    content = with_references(content, content)
    actor, samples = section(content, "actor"), section(content, "gconfig")
    backend, data = str(actor.get("backend")), section(content, "train_dataset")
    if not backend.startswith("megatron:"):
        raise ScheduleError(f"{path} trains without Megatron: actor.backend is {backend:.40}")
    megatron = section(actor, "megatron")
    settings = _AREAL_DEFAULTS | {
        name: value for name, value in megatron.items() if not isinstance(value, dict)
    }
    chunks = settings.pop("virtual_pipeline_parallel_size", None)
    if quantization := section(megatron, "fp8_config"):
        settings["fp8"] = quantization.get("mode", "e4m3")
        settings["fp8_recipe"] = quantization.get("recipe", "delayed")
    if actor.get("gradient_checkpointing"):
        settings = _AREAL_RECOMPUTE | settings
    else:
        settings |= dict.fromkeys(_AREAL_RECOMPUTE)
    sizes, gpus = _areal_sizes(backend.removeprefix("megatron:"))
    settings |= sizes | {
        "virtual_pipeline_model_parallel_size": chunks,
        "sequence_parallel": sizes["tensor_model_parallel_size"] > 1,
        "seq_length": number(data, "max_length") + number(samples, "max_new_tokens"),
        "bf16": actor.get("dtype", "bfloat16") == "bfloat16",
    }
    batch = number(data, "batch_size", 1) * number(samples, "n_samples", 1)
    limit = number(section(actor, "mb_spec"), "max_tokens_per_mb")
    if not limit:
        raise ScheduleError(f"{path} has no actor.mb_spec.max_tokens_per_mb: set the tokens")
    batch //= number(actor, "ppo_n_minibatches", 1)
    settings, batches = _packed(settings, batch, limit, gpus)
    ddp = {"use_distributed_optimizer": True} | section(megatron, "ddp")
    rank = number(actor, "lora_rank") if actor.get("use_lora") else 0
    return Command(
        "pretrain_gpt.py",
        tuple(flags_of_config({"model": settings, "ddp": ddp, "train": batches}, extra_flags)),
        launched={NODES: "1", PROCESSES: str(gpus)},
        model_name=str(actor.get("path") or ""),
        notes=(_LONGEST,),
        lora=LoraConfig(rank, ("all-linear",)) if rank else None,
    )


def _areal_sizes(text: str) -> tuple[dict[str, int], int]:
    """Return the parallel sizes and the GPUs of d4p4t2 or (attn:d4p4t2|ffn:d2p4e4).

    The second part of the latter has the sizes of the experts.
    """
    layers, _, experts = text.partition("|")
    letters = dict(re.findall(r"([dptce])(\d+)", layers.replace("attn", "")))
    sizes = {name: int(letters.get(letter, 1)) for letter, name in _AREAL_SIZES.items()}
    expert_letters = dict(re.findall(r"([te])(\d+)", experts))
    sizes["expert_tensor_parallel_size"] = int(expert_letters.get("t", 1))
    if "e" in expert_letters:
        sizes["expert_model_parallel_size"] = int(expert_letters["e"])
    return sizes, prod(int(letters.get(letter, 1)) for letter in "dptc")


def _command_of_mindspeed_rl(content: Mapping[str, Any], extra_flags: Sequence[str]) -> Command:
    """Read the training of the actor in a configuration of MindSpeed-RL: Megatron's arguments."""
    training, actor, rl, generation = (
        {str(name).replace("-", "_"): value for name, value in section(content, key).items()}
        for key in ("megatron_training", "actor_config", "rl_config", "generate_config")
    )
    settings = training | actor
    models = section(content, "model")
    settings = section(models, str(settings.pop("model", None))) | settings
    gpus = number(section(rl, "actor_resource"), "num_npus")
    if rl:
        samples = number(rl, "mini_batch_size", 1) * number(rl, "n_samples_per_prompt", 1)
        response = number(section(generation, "sampling_config"), "max_tokens")
        longest = number(rl, "max_prompt_length") + response
        settings |= {"seq_length": longest, "global_batch_size": samples}
        if rl.get("use_dynamic_bsz"):
            limit = number(rl, "max_packing_token_size")
            settings, sizes = _packed(settings, samples, limit, gpus)
            settings |= sizes
        settings["max_position_embeddings"] = settings["seq_length"]
    return Command(
        "pretrain_gpt.py",
        (*flags_of(settings), *extra_flags),
        launched={NODES: "1", PROCESSES: str(gpus)} if gpus else {},
        notes=(_LONGEST,),
    )


def _packed(
    settings: Mapping[str, Any], samples: int, limit: int, gpus: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the settings and batch sizes of samples that are packed to `limit` tokens.

    A microbatch becomes one sequence, of at least one sample with the greatest length.
    """
    length = number(settings, "seq_length")
    tokens = max(limit, length)
    replicas = _replicas(settings, gpus)
    microbatches = ceil(ceil(samples / replicas) * length / tokens) if tokens else samples
    batches = {"micro_batch_size": 1, "global_batch_size": microbatches * replicas}
    return {**settings, "seq_length": tokens}, batches


def _replicas(settings: Mapping[str, Any], gpus: int) -> int:
    """Return the number of data-parallel pipelines on these GPUs, at least 1."""
    sizes = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    return gpus // prod(number(settings, f"{size}_size", 1) for size in sizes) or 1
