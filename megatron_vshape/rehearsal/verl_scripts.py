"""Read commands of verl's trainers: overrides, as in actor_rollout_ref.rollout.n=8.

Estimated is the update of the actor, or supervised fine-tuning with verl's Megatron engine. Sources
at commit b178a3cd5 of verl: trainer/config, workers/megatron_workers.py, workers/engine/megatron,
workers/actor/megatron_actor.py, utils/megatron/optimizer.py, utils/seqlen_balancing.py and
models/mcore; of mbridge 0.15.1: core/llm_bridge.py and core/util.py.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile, pairwise
from math import ceil
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import NODES, PROCESSES, Command
from megatron_vshape.rehearsal.rank_job import LoraConfig
from megatron_vshape.rehearsal.saved_config import flags_of_config, lora_of_config

logger = logging.getLogger(__name__)

_ACTOR, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
_ENGINE, _OPTIMIZER = f"{_ACTOR}megatron.", f"{_ACTOR}optim."
_STRATEGY, _PACKED = f"{_ACTOR}strategy", f"{_ACTOR}use_dynamic_bsz"
_MINI_BATCH, _MICRO_BATCH = f"{_ACTOR}ppo_mini_batch_size", f"{_ACTOR}ppo_micro_batch_size_per_gpu"
_TOKENS, _LENGTH = f"{_ACTOR}ppo_max_token_len_per_gpu", "data.max_response_length"
_NODES, _GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
_VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars."

_DEFAULTS = f"""
    {_MINI_BATCH}=256 {_TOKENS}=16384 data.max_prompt_length=512 {_LENGTH}=512 {_GPUS}=8
    {_MODEL}path=deepseek-llm-7b-chat
    {_VARIABLES}CUDA_DEVICE_MAX_CONNECTIONS=1
    {_VARIABLES}PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
""".split()
"""Defaults of ppo_megatron_trainer.yaml, and variables that the trainer and its workers set."""
_SFT_DEFAULTS = """
    data.train_batch_size=256 data.micro_batch_size_per_gpu=4 data.max_token_len_per_gpu=8192
    data.use_dynamic_bsz=True data.max_prompt_length=0 data.max_length=1024
    trainer.n_gpus_per_node=1
""".split()
"""Defaults of sft_trainer_engine.yaml; it has no prompts."""
_SFT_NAMES = {
    "engine": _STRATEGY,
    "data.train_batch_size": _MINI_BATCH,
    "data.micro_batch_size_per_gpu": _MICRO_BATCH,
    "data.max_token_len_per_gpu": _TOKENS,
    "data.use_dynamic_bsz": _PACKED,
    "data.max_length": _LENGTH,
}
_SFT_SECTIONS = {"engine": _ENGINE, "optim": _OPTIMIZER, "model": _MODEL}
"""Names of sft_trainer_engine.yaml, by their names in the PPO trainer."""
_TORCHRUN = {"--nnodes": _NODES, "--nproc-per-node": _GPUS}

_FUSIONS = ("gradient_accumulation_fusion", "apply_rope_fusion")
_FUSIONS_OF_EXPERTS = ("bias_activation_fusion", "bias_dropout_fusion")
"""Off by default in TransformerConfig and on in Megatron's parser; mbridge's models with experts
switch the last two on."""
_EXPERTS = {
    "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
_READ_BY_NAME = re.compile(
    r"(param|grad|optimizer)_offload|(use_)?dist_checkpointing.*|seed|(use|vanilla)_mbridge|dtype|"
    r"use_remove_padding|forward_only|strategy|override_\w+\..*"
)
"""Settings of the engine that are read by name, or do not change the peak."""
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z][\w.@/]*)=(.*)", re.DOTALL)


class _Settings(dict[str, Any]):
    """Values of a configuration by their full names."""

    def number(self, name: str, default: int = 1) -> int:
        """Return a number, or the default for null.

        Raises:
            ScheduleError: The value is no number, such as that of a variable which is not set.
        """
        value = default if self.get(name) is None else self[name]
        if isinstance(value, int) and value >= min(default, 1) and value >= 0:
            return value
        raise ScheduleError(
            f"{name}={value!s:.40} is not a positive number. If a variable of the script sets it, "
            "set this variable, as in NAME=... megatron-vshape ..."
        )

    def section(self, prefix: str) -> dict[str, Any]:
        """Return the settings of a section; those of inner sections have dotted names."""
        return {name[len(prefix) :]: self[name] for name in self if name.startswith(prefix)}


def command_of_verl(words: Sequence[str]) -> Command | None:
    """Return the training of a trainer of verl; None for other commands.

    `words` are the command as a shell expands it, with variables before it.

    Raises:
        ScheduleError: The command trains without Megatron, or a size is missing.
    """
    programs = (index for index, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    start = next(programs, len(words))
    launcher, arguments = words[:start], words[start:]
    is_sft = any(re.search(r"\bverl[./]trainer[./]\w*sft_trainer", word) for word in arguments[:2])
    if not is_sft and not any(re.match(r"\+*actor_rollout_ref\.", word) for word in arguments):
        return None
    defaults = _SFT_DEFAULTS if is_sft else _DEFAULTS
    settings = _Settings(_overrides(defaults, is_sft))
    settings |= {_STRATEGY: "fsdp"} | _settings_of_file(arguments)
    settings |= _sizes_of_torchrun(launcher) | dict(_overrides(arguments, is_sft))
    _check_training(settings)
    tokens, micro_batch, global_batch = _sizes(settings)
    ddp = {"grad_reduce_in_fp32": settings.get(f"{_ENGINE}vanilla_mbridge") is not False}
    config = {
        "model": {"seq_length": tokens, **_model_settings(settings)},
        "ddp": ddp | settings.section(f"{_ENGINE}override_ddp_config."),
        "optimizer": _optimizer_settings(settings),
        "train": {"micro_batch_size": micro_batch, "global_batch_size": global_batch},
    }
    _log_assumptions(settings, tokens)
    variables = {name: str(value) for name, value in settings.section(_VARIABLES).items()}
    variables |= dict(word.split("=", 1) for word in launcher if re.match(r"\w+=", word))
    return Command(
        "pretrain_gpt.py",
        (*flags_of_config(config), *_further_flags(arguments)),
        variables,
        {NODES: str(settings.number(_NODES)), PROCESSES: str(settings.number(_GPUS))},
        _model_name(settings),
        lora=_lora_of(settings),
    )


def _further_flags(words: Sequence[str]) -> list[str]:
    """Return flags of Megatron and of this package after the overrides."""
    flags = dropwhile(lambda word: not word.startswith("--") or "--config-" in word, words)
    return [word for word in flags if not _OVERRIDE.fullmatch(word)]


def _overrides(words: Sequence[str], is_sft: bool) -> Iterator[tuple[str, Any]]:
    """Yield the overrides of a command, under their names in the PPO trainer."""
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        for name, value in _flatten({match[1]: _value(match[2])}) if match else ():
            section, _, setting = name.partition(".")
            full = _SFT_SECTIONS[section] + setting if section in _SFT_SECTIONS else name
            yield _SFT_NAMES.get(name, full) if is_sft else name, value


def _options(words: Sequence[str]) -> dict[str, str]:
    """Return the value of each option: after an equals sign, or the next word."""
    pairs = ((word.partition("="), next_word) for word, next_word in pairwise((*words, "")))
    return {name: value if equals else word for (name, equals, value), word in pairs}


def _sizes_of_torchrun(words: Sequence[str]) -> dict[str, Any]:
    options = {name.replace("_", "-"): value for name, value in _options(words).items()}
    return {name: _value(options[flag]) for flag, name in _TORCHRUN.items() if flag in options}


def _value(text: str) -> Any:
    """Return a number, text, list or mapping in Hydra's grammar, which has no anchors of YAML."""
    import yaml  # type: ignore[import-untyped]

    with suppress(yaml.YAMLError, ValueError, RecursionError):
        if text and not re.search(r"[&*!]", text):
            spaced = re.sub(r":(?=\S)", ": ", text) if text.startswith("{") else text
            return yaml.safe_load(spaced)
    return text


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _settings_of_file(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the file that --config-name selects; verl's files are known.

    Raises:
        ScheduleError: The file cannot be read.
    """
    options = _options(words)
    name = options.get("--config-name", "").removesuffix(".yaml")
    settings = {_STRATEGY: "megatron"} if "megatron" in name else {}
    file = Path(options.get("--config-path", ""), f"{name}.yaml")
    if not name or re.search(r"ppo_(megatron_)?trainer$|^sft_trainer", name):
        return settings
    import yaml

    try:
        content = dict(_flatten(yaml.safe_load(file.read_text())))
    except FileNotFoundError:
        logger.warning("settings of --config-name %s are not included: no file %s", name, file)
        return settings
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise ScheduleError(f"{file} cannot be read: {error}") from None
    if "megatron" in str(content.get("defaults")):
        settings[_STRATEGY] = "megatron"
    return settings | {name: value for name, value in content.items() if "${" not in str(value)}


def _check_training(settings: _Settings) -> None:
    strategy = settings.get("model_engine") or settings[_STRATEGY]
    if strategy != "megatron":
        raise ScheduleError(
            f"the command of verl trains without Megatron, with {strategy!s:.40}: only runs with "
            "--config-name=ppo_megatron_trainer, model_engine=megatron or engine=megatron are "
            "estimated"
        )


def _lora_of(settings: _Settings) -> LoraConfig | None:
    """Return the adapters of Megatron-Bridge; `lora_rank` is for other engines."""
    lora = settings.section(f"{_MODEL}lora.")
    if not (rank := lora.get("rank")):
        return None
    return lora_of_config({**lora, "dim": rank, "_target_": lora.get("type", "lora")})


def _sizes(settings: _Settings) -> tuple[int, int, int]:
    """Return tokens per sequence, and sequences per microbatch and per optimizer step.

    All responses are assumed to have the maximum length. With use_dynamic_bsz, a packed microbatch
    becomes one sequence.

    Raises:
        ScheduleError: The sequences per microbatch are not set.
    """
    kinds = ("tensor_model", "pipeline_model", "context", "virtual_pipeline_model")
    tensor, pipeline, context, chunks = (
        settings.number(f"{_ENGINE}{kind}_parallel_size") for kind in kinds
    )
    gpus = settings.number(_NODES) * settings.number(_GPUS)
    replicas = gpus // (tensor * pipeline * context) or 1
    samples = settings.number(_MINI_BATCH) * settings.number("actor_rollout_ref.rollout.n")
    samples = samples // replicas or 1
    length = settings.number("data.max_prompt_length", 0) + settings.number(_LENGTH)
    if settings.get(_PACKED):
        tokens = min(settings.number(_TOKENS) * context, samples * length)
        microbatches, micro_batch = min(samples, ceil(samples * length / tokens)), 1
        if chunks > 1:
            microbatches = ceil(microbatches / pipeline) * pipeline
    else:
        micro_batch = settings.number(_MICRO_BATCH, 0)
        micro_batch = micro_batch or settings.number(f"{_ACTOR}ppo_micro_batch_size", 0) // replicas
        if not micro_batch:
            raise ScheduleError(f"set {_MICRO_BATCH}, or {_PACKED}=True: neither is in the command")
        tokens, micro_batch = length, min(micro_batch, samples)
        microbatches = ceil(samples / micro_batch)
    multiple = 2 * tensor * context if context > 1 else tensor  # preprocess_packed_seqs pads
    return ceil(tokens / multiple) * multiple, micro_batch, microbatches * micro_batch * replicas


def _model_settings(settings: _Settings) -> dict[str, Any]:
    """Return the fields of TransformerConfig, with the parallel sizes."""
    engine = settings.section(_ENGINE)
    overrides = settings.section(f"{_ENGINE}override_transformer_config.")
    tensor = settings.number(f"{_ENGINE}tensor_model_parallel_size")
    is_mbridge = engine.get("vanilla_mbridge") is not False  # otherwise Megatron-Bridge
    has_experts = (
        settings.number(f"{_ENGINE}expert_model_parallel_size") > 1
        or any(name.startswith("moe_") for name in overrides)
        or re.search(r"(?i)moe|\ba\d+(\.\d+)?b\b", _model_name(settings)) is not None
    )
    model = {
        **dict.fromkeys(_FUSIONS, False),
        **dict.fromkeys(_FUSIONS_OF_EXPERTS, has_experts),
        "gradient_accumulation_fusion": not is_mbridge,
        "attention_backend": "flash",
        "use_distributed_optimizer": True,
        **(_EXPERTS if has_experts else {}),
        **{name: value for name, value in engine.items() if not _READ_BY_NAME.fullmatch(name)},
        "sequence_parallel": tensor > 1 and (is_mbridge or engine.get("sequence_parallel", True)),
        "mtp_num_layers": None if settings.get(f"{_MODEL}mtp.enable") else 0,
        "bf16": engine.get("dtype") != "float16",
        "fp16": engine.get("dtype") == "float16",
        **overrides,
    }
    model["expert_tensor_parallel_size"] = model.get("expert_tensor_parallel_size") or tensor
    model["bias_swiglu_fusion"] = model.pop("bias_activation_fusion")
    if model.get("recompute_granularity") != "selective":
        model.pop("recompute_modules", None)
    return model


def _optimizer_settings(settings: _Settings) -> dict[str, Any]:
    optimizer = {"optimizer": settings.get(f"{_OPTIMIZER}optimizer")}
    if settings.get(f"{_ENGINE}dtype") == "float16":
        optimizer |= {"use_precision_aware_optimizer": True, "store_param_remainders": False}
    return optimizer | settings.section(f"{_OPTIMIZER}override_optimizer_config.")


def _model_name(settings: _Settings) -> str:
    """Return the model's path if it exists, its owner and name, or the last part of its path."""
    path = str(settings.get(f"{_MODEL}path") or "")
    if os.path.exists(os.path.expanduser(path)) or re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return path
    return path.rstrip("/").rpartition("/")[2]


def _log_assumptions(settings: _Settings, tokens: int) -> None:
    packed = f", packed to {tokens:,} tokens" if settings.get(_PACKED) else ""
    notes = [
        f"estimated is the update of verl's trained model with the longest responses{packed}; the "
        "rollout engine, the reference model and the critic are not included"
    ]
    offloads = ("param_offload", "grad_offload", "optimizer_offload")
    if any(settings.get(_ENGINE + name) for name in offloads):
        notes.append(f"{', '.join(offloads)} do not lower its peak: verl loads all before it")
    if settings.get(f"{_ACTOR}entropy_coeff"):
        notes.append("the additional logits of entropy_coeff are not included")
    if settings.get(f"{_MODEL}use_fused_kernels"):
        notes.append("use_fused_kernels needs less memory for logits than estimated")
    logger.warning("%s", ". ".join(notes))
