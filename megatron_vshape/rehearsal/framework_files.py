"""Read configurations of NeMo-RL, ROLL, Primus, ms-swift and overrides of Bridge's recipes.

These frameworks name their model, whose sizes are in another file. A command without these sizes is
rejected by `check_model` of start_rules.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import NODES, PROCESSES, Command
from megatron_vshape.rehearsal.rank_job import LoraConfig
from megatron_vshape.rehearsal.saved_config import (
    flags_of_arguments,
    flags_of_config,
    lora_of_config,
)

logger = logging.getLogger(__name__)

_MARKERS = {
    "GPT-NeoX": {"pipe_parallel_size", "model_parallel_size"},
    "DeepSpeed": {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"},
    "verl": {"actor_rollout_ref"},
    "Hugging Face (set --model to it)": {"architectures", "model_type"},
    "LLaMA-Factory or TRL": {"model_name_or_path"},
    "NeMo 1": {"trainer", "exp_manager"},
    "ChatLearn": {"runtime_args"},
    "AReaL": {"trial_name"},
}
"""Keys of files that are recognized and not read; one of them is enough."""

_SWIFT_NAMES = {
    "max_length": "seq_length",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
}
"""Arguments of ms-swift that Megatron's parser has under other names."""

_SWIFT_DEFAULTS = """
    --micro_batch_size 1 --global_batch_size 16 --bf16 true --use_distributed_optimizer true
    --cross_entropy_loss_fusion true --expert_tensor_parallel_size 1 --attention_backend flash
    --recompute_granularity selective --moe_grouped_gemm true --moe_token_dispatcher_type alltoall
    --moe_router_dtype fp32 --apply_rope_fusion false
""".split()
"""Defaults of ms-swift's MegatronArguments that differ from Megatron's."""


def check_format(path: Path, content: Any) -> None:
    """Raise ScheduleError if a file is recognized and not read."""
    keys = {str(key).replace("-", "_") for key in content} if isinstance(content, dict) else set()
    for library, markers in _MARKERS.items():
        if keys & markers:
            raise ScheduleError(
                f"{path} is a file of {library}, a format that is not supported. Pass "
                "pretrain_gpt.py with Megatron-LM's flags of the same run"
            )


def command_of_framework(path: Path, content: Any, extra_flags: Sequence[str]) -> Command | None:
    """Return the command of a YAML file, None if it is of none of these frameworks.

    Raises:
        ScheduleError: An included file is missing, files or values refer to each other in a circle,
            or the run does not train with Megatron.
    """
    if not isinstance(content, dict):
        return None
    try:
        return _command_of_mapping(path, content, extra_flags)
    except RecursionError:
        raise ScheduleError(
            f"{path} has a circle: a value ${{...}}, or an included file, refers back to itself. "
            "Set one of these values to a number or text"
        ) from None


def _command_of_mapping(
    path: Path, content: dict[str, Any], extra_flags: Sequence[str]
) -> Command | None:
    if isinstance(content.get("modules"), dict):
        return _command_of_primus(path, _substitute(content, _environment_value), extra_flags)
    if content.keys() & {"defaults", "policy"}:
        content = _read_with_parents(path, "defaults")
        if isinstance(content.get("policy"), dict):
            return _command_of_nemo_rl(path, content, extra_flags)
    if worker := next((name for name in _ROLL_WORKERS if name in content), None):
        return _command_of_roll(path, content, worker, extra_flags)
    if isinstance(content.get("model"), dict):
        checkpoint = (content.get("checkpoint") or {}).get("pretrained_checkpoint")
        return _command_of_overrides(path, content, extra_flags, str(checkpoint or ""))
    return None


def _command_of_overrides(
    path: Path, content: Mapping[str, Any], extra_flags: Sequence[str], model_name: str = ""
) -> Command:
    """Read overrides of a recipe of Megatron-Bridge, which has the model."""
    for name in content["model"]:
        if "vision" in name or name in ("teacher", "crossattn_emb_size"):
            raise ScheduleError(f"{path} sets model.{name}: only language models are estimated")
    if model_name:
        logger.warning("%s: settings of the recipe without an override are not included", path)
    return Command(
        "pretrain_gpt.py",
        tuple(flags_of_config(content, extra_flags)),
        model_name=model_name,
        lora=lora_of_config(content.get("peft")),
    )


def _command_of_nemo_rl(
    path: Path, content: Mapping[str, Any], extra_flags: Sequence[str]
) -> Command:
    """Read the training part of a recipe of NeMo-RL: `policy.megatron_cfg`."""
    policy, cluster = (content.get(name) or {} for name in ("policy", "cluster"))
    policy = _with_references(policy, content)
    megatron = policy.get("megatron_cfg") or {}
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
    quantization, peft = (megatron.get(name) or {} for name in ("fp8_cfg", "peft"))
    if quantization.get("enabled"):
        model |= {name: value for name, value in quantization.items() if name.startswith("fp8")}
    model |= megatron.get("model_overrides") or {}
    model |= {
        "seq_length": policy.get("max_total_sequence_length"),
        "mtp_num_layers": model.get("mtp_num_layers") or None,
        "bf16": policy.get("precision") == "bfloat16",
    }
    sequences = 2 if content.keys() & {"dpo", "rm"} else 1  # of a sample: chosen and rejected
    batches = {
        name: policy[f"train_{name}"] * sequences
        for name in ("global_batch_size", "micro_batch_size")
        if policy.get(f"train_{name}")
    }
    config = {
        "model": model,
        "ddp": megatron.get("distributed_data_parallel_config"),
        "optimizer": megatron.get("optimizer"),
        "train": batches,
    }
    colocated = (policy.get("generation") or {}).get("colocated") or {}
    rollout = {} if colocated.get("enabled", True) else colocated.get("resources") or {}
    nodes = (cluster.get("num_nodes") or 1) - (rollout.get("num_nodes") or 0)
    rollout_gpus = 0 if rollout.get("num_nodes") else rollout.get("gpus_per_node") or 0
    gpus = (cluster.get("gpus_per_node") or 0) - rollout_gpus
    return Command(
        "pretrain_gpt.py",
        tuple(flags_of_config(config, extra_flags)),
        {name: str(value) for name, value in (megatron.get("env_vars") or {}).items()},
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


_ROLL_WORKERS = ("actor_train", "sft_train", "student_train", "student")
"""Parts of a pipeline of ROLL that train; the first one is estimated."""


def _command_of_roll(
    path: Path, content: Mapping[str, Any], worker_name: str, extra_flags: Sequence[str]
) -> Command:
    """Read the training of the actor, or of the model, in a pipeline of ROLL."""
    content = _with_references(content, content)
    worker = content[worker_name]
    strategy, model, training = (
        worker.get(name) or {} for name in ("strategy_args", "model_args", "training_args")
    )
    if strategy.get("strategy_name") != "megatron_train":
        raise ScheduleError(
            f"{path} trains without Megatron: {worker_name}.strategy_args.strategy_name is not "
            "megatron_train"
        )
    settings = _ROLL_DEFAULTS | (strategy.get("strategy_config") or {})
    if settings.get("recompute_granularity") == "full":
        settings = {"recompute_method": "uniform", "recompute_num_layers": 1} | settings
    if settings.pop("moe_layer_recompute", False):
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    if isinstance(modules := settings.get("recompute_modules"), str):
        settings["recompute_modules"] = modules.replace(" ", "").split(",")
    lengths = (content.get(name) or 0 for name in ("prompt_length", "response_length"))
    settings |= {
        "seq_length": content.get("sequence_length") or sum(lengths),
        "bf16": model.get("dtype", "bf16") == "bf16",
    }
    ranges = re.findall(r"range\((\d+), *(\d+)\)", str(worker.get("device_mapping")))
    gpus = sum(int(end) - int(start) for start, end in ranges)
    sizes = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    ranks = prod(settings.get(f"{size}_size") or 1 for size in sizes)
    sequences = 2 if "chosen_key" in content else 1  # of a sample
    microbatch = (training.get("per_device_train_batch_size") or 1) * sequences
    samples = microbatch * (training.get("gradient_accumulation_steps") or 1)
    batches = {"micro_batch_size": microbatch, "global_batch_size": samples * (gpus // ranks or 1)}
    rank, targets = model.get("lora_rank"), str(model.get("lora_target") or "all-linear")
    names = dict.fromkeys(_LORA_NAMES.get(name, name) for name in targets.split(","))
    pretrained = content.get("pretrain") or content.get("student_pretrain")
    return Command(
        "pretrain_gpt.py",
        tuple(flags_of_config({"model": settings, "train": batches}, extra_flags)),
        launched={NODES: "1", PROCESSES: str(gpus)},
        model_name=str(model.get("model_name_or_path") or pretrained or ""),
        lora=LoraConfig(int(rank), tuple(names)) if rank else None,
    )


def _command_of_primus(
    path: Path, content: Mapping[str, Any], extra_flags: Sequence[str]
) -> Command:
    """Read the trainer of a Primus experiment: its module, its model, then its overrides."""
    trainer: Mapping[str, Any] = next(
        (value for name, value in content["modules"].items() if "trainer" in name), {}
    )
    framework = trainer.get("framework")
    if framework not in ("megatron", "megatron_bridge"):
        raise ScheduleError(f"{path} trains with {framework} in Primus: only Megatron is estimated")
    parents = (parent / "primus" / "configs" for parent in path.resolve().parents)
    root = next((parent for parent in parents if parent.is_dir()), None)
    if root is None:
        raise ScheduleError(
            f"{path} includes files of primus/configs, which is in no folder above it: read the "
            "file in a checkout of Primus"
        )
    module, model = (
        _read_with_parents(root / kind / framework / f"{str(name).removesuffix('.yaml')}.yaml")
        for kind, name in (("modules", trainer.get("config")), ("models", trainer.get("model")))
    )
    settings = model | (trainer.get("overrides") or {})
    if framework == "megatron_bridge":
        config = {"model": settings, "peft": settings.pop("peft", None)}
        name = str(settings.get("hf_path") or settings.get("flavor") or "")
        return _command_of_overrides(path, config, extra_flags, name)
    flags, unknown = flags_of_arguments(module | settings)
    _warn_of_unknown(name for name in unknown if settings.get(name))
    return Command("pretrain_gpt.py", tuple(flags))


def command_of_recipe(words: Sequence[str]) -> Command | None:
    """Read a command's recipe of Megatron-Bridge, which names the model, and its overrides."""
    matches = (re.fullmatch(r"\+*(\w+)\.(\w+)=(.*)", word) for word in words)
    recipe = words[words.index("--recipe") + 1] if "--recipe" in words[:-1] else "-"
    if recipe.startswith("-"):
        return None
    config: dict[str, Any] = {"model": {}, "peft": "lora" if "_peft_" in recipe else None}
    for section, name, value in (match.groups() for match in matches if match):
        values = config.get(section)
        config[section] = (values if isinstance(values, dict) else {}) | {name: _scalar(value)}
    if not config["model"] or "train" not in config:
        raise ScheduleError(
            f"--recipe {recipe} has sizes that only Megatron-Bridge can read. Pass run_config.yaml "
            "of its checkpoint, or pretrain_gpt.py with Megatron-LM's flags of the same run"
        )
    model = re.sub(r"_(pretrain|sft|peft|finetune)_.*", "", recipe)
    return _command_of_overrides(Path(recipe), config, (), model)


def command_of_swift(words: Sequence[str]) -> Command | None:
    """Return the training of `megatron sft`, `pt` or `rlhf` of ms-swift; None for others.

    `words` are the command as a shell expands it, with variables before it.

    Raises:
        ScheduleError: The command trains no language model, or its YAML file cannot be read.
    """
    start = words.index("megatron") if "megatron" in words else len(words)
    if not {"sft", "pt", "rlhf"}.intersection(words[start + 1 : start + 2]):
        return None
    environment = dict(word.split("=", 1) for word in words[:start] if re.match(r"\w+=", word))
    settings = _swift_settings(words[start + 2 :])
    if settings.get("freeze_llm"):
        raise ScheduleError("--freeze_llm true trains no language model")
    if settings.get("task_type", "causal_lm") != "causal_lm":
        raise ScheduleError(f"--task_type {settings['task_type']} trains no language model")
    if words[start + 1] == "rlhf":
        logger.warning("models of megatron rlhf other than the trained one are not estimated")
        if settings.get("rlhf_type", "dpo") in ("dpo", "rm") and not settings.get("packing"):
            for batch in ("micro_batch_size", "global_batch_size"):
                settings[batch] *= 2  # a sample has a chosen and a rejected answer
    if settings.get("moe_router_dtype") == "none":
        settings["moe_router_dtype"] = None
    lora = _lora_of_swift(settings)
    launched = {
        NODES: environment.get("NNODES", "1"),
        PROCESSES: environment.get("NPROC_PER_NODE", ""),
    }
    flags, unknown = flags_of_arguments(
        {name: value for name, value in settings.items() if name not in _SWIFT_MEANINGS}
    )
    _warn_of_unknown(name for name in unknown if not name.startswith(_SWIFT_READ))
    name = str(settings.get("model") or "")
    return Command("pretrain_gpt.py", tuple(flags), environment, launched, name, lora=lora)


_SWIFT_READ = ("lora_", "tuner_type", "target_modules", "adapters", "model", "freeze_", "config")
"""Beginnings of arguments of ms-swift that are read, or have no effect on a language model."""


_SWIFT_MEANINGS = {"loss_scale"}
"""Arguments of Megatron that have another meaning in ms-swift."""


def _swift_settings(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of ms-swift: its defaults, a YAML file, and flags after it.

    Raises:
        ScheduleError: the file cannot be read.
    """
    values = _swift_values(_SWIFT_DEFAULTS)
    flags = _swift_values(words)
    for name in (*flags.pop("", ()), *flags.pop("config", ())):
        content = _read_with_parents(Path(name))
        values |= {_SWIFT_NAMES.get(key, key): value for key, value in content.items()}
    values |= flags
    return {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in values.items()
    }


def _swift_values(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of each argument in a list; words before the first one have no name."""
    values: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            flag, *value = word.removeprefix("--").split("=", 1)
            name = flag.replace("-", "_")
            name = _SWIFT_NAMES.get(name, name)
            values[name] = [*map(_scalar, value)]
        else:
            values.setdefault(name, []).append(_scalar(word))
    return values


def _lora_of_swift(settings: Mapping[str, Any]) -> LoraConfig | None:
    """Return the adapters of a command of ms-swift, which has one per expert."""
    if settings.get("tuner_type", "full") == "full" and not settings.get("adapters"):
        return None
    targets = settings.get("target_modules", "all-linear")
    targets = [targets] if isinstance(targets, str) else targets
    targets = tuple(target for target in targets if target != "all-router")  # they are small
    if settings.get("modules_to_save"):
        logger.warning("--modules_to_save: the estimate does not include training these modules")
    return LoraConfig(int(settings.get("lora_rank", 8)), targets, per_expert=True)


def _warn_of_unknown(names: Iterable[str]) -> None:
    if names := [*names]:
        logger.warning("no arguments of Megatron, ignored: %s", ", ".join(names))


def _read_with_parents(path: Path, key: str = "extends") -> dict[str, Any]:
    """Read a YAML file, merged into the files under `key`, whose paths are relative to it.

    Raises:
        ScheduleError: A file cannot be read.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text()) or {}
        if key == "extends":
            content = _substitute(content, _environment_value)
        names = content.pop(key, None) or []
    except (OSError, AttributeError, yaml.YAMLError) as error:
        raise ScheduleError(f"{path} is included and cannot be read: {error}") from None
    merged: dict[str, Any] = {}
    for name in [names] if isinstance(names, str) else names:
        file, at, _ = str(name).partition("@")  # Hydra: envs@_here_ is envs.yaml
        if file != "_self_":
            included = path.parent / (f"{file}.yaml" if at else file)
            merged = _merge(merged, _read_with_parents(included, key))
    return _merge(merged, content)


def _merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base with the overrides, section by section."""
    merged = dict(base)
    for name, value in overrides.items():
        section = merged.get(name)
        is_section = isinstance(section, dict) and isinstance(value, dict)
        replaces = is_section and value.get("_override_")  # NeMo-RL's marker
        merged[name] = _merge(section or {}, value) if is_section and not replaces else value
    return merged


_REFERENCE = re.compile(r"\$\{(\w[\w.]*)(?::([^{}]*))?\}")
"""A reference to a setting or variable, as in ${policy.precision}, or with a default value.

It is an inner one, without another reference in it.
"""


def _substitute(value: Any, value_of: Callable[[re.Match[str]], Any]) -> Any:
    """Replace references in all texts of a configuration."""
    if isinstance(value, dict):
        return {name: _substitute(entry, value_of) for name, entry in value.items()}
    if isinstance(value, list):
        return [_substitute(entry, value_of) for entry in value]
    while isinstance(value, str) and "${" in value:
        if match := _REFERENCE.fullmatch(value):
            return value_of(match)
        text = _REFERENCE.sub(lambda match: str(value_of(match)), value)
        if text == value:
            break
        value = text
    return value


def _with_references(value: Any, content: Mapping[str, Any]) -> Any:
    """Replace ${policy.precision} and similar by that value of the content."""

    def value_of(match: re.Match[str]) -> Any:
        """Return the value, or the product of ${mul:2, 3}; other functions are None."""
        if match[2] is not None:
            factors = match[2].replace(" ", "").split(",")
            numbers = [int(factor) for factor in factors if factor.isdecimal()]
            is_product = match[1] == "mul" and len(numbers) == len(factors)
            return prod(numbers) if is_product else None
        value: Any = content
        for name in match[1].split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return _substitute(value, value_of)

    return _substitute(value, value_of)


def _environment_value(match: re.Match[str]) -> Any:
    """Return the variable of ${NAME:default}, or its default."""
    return _scalar(os.environ.get(match[1], match[2] or match[0]))


def _scalar(text: str) -> Any:
    """Return the number, truth value or null of a text; other texts as they are."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text
