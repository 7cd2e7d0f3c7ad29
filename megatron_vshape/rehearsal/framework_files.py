"""Read configurations of Primus, ms-swift, and overrides of Bridge's recipes.

These frameworks name their model, whose sizes are in another file. A command without these sizes is
rejected by `check_model` of start_rules.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import NODES, PROCESSES, SHARDED_STATE, Command
from megatron_vshape.rehearsal.flagscale_files import command_of_flagscale
from megatron_vshape.rehearsal.performance_scripts import (
    RECIPE,
    config_of_performance,
    options_of_performance,
)
from megatron_vshape.rehearsal.rank_job import LoraConfig, Reference
from megatron_vshape.rehearsal.rl_files import command_of_rl
from megatron_vshape.rehearsal.saved_config import (
    flags_of_arguments,
    flags_of_config,
    lora_of_config,
)
from megatron_vshape.rehearsal.yaml_files import (
    environment_value,
    number,
    read_with_parents,
    scalar,
    section,
    substitute,
    with_references,
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
        return _command_of_primus(path, substitute(content, environment_value), extra_flags)
    actor = content.get("actor")
    backend = actor.get("training_backend", "megatron") if isinstance(actor, dict) else "megatron"
    if "defaults" in content and backend == "megatron":  # includes of RLinf may be elsewhere
        content = read_with_parents(path, "defaults")
    if (command := command_of_flagscale(path, content)) is not None:
        return command
    if (command := command_of_rl(path, content, extra_flags)) is not None:
        return command
    recipe = content.get("recipe") or {}
    if isinstance(recipe, dict) and "_target_" in recipe:  # of NVIDIA-NeMo/Nemotron
        name = str(recipe["_target_"]).rpartition(".")[2]
        config = with_references(content, content)
        peft = config.get("peft") or recipe.get("peft", "lora" if "_peft_" in name else None)
        return _command_with_recipe(path, name, {**config, "peft": peft}, extra_flags)
    if isinstance(content.get("model"), dict):
        checkpoint = section(content, "checkpoint").get("pretrained_checkpoint")
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


def _command_of_primus(
    path: Path, content: Mapping[str, Any], extra_flags: Sequence[str]
) -> Command:
    """Read the trainer of a Primus experiment: its module, its model, then its overrides."""
    trainers = [name for name in content["modules"] if "trainer" in str(name)]
    trainer = section(content["modules"], trainers[0]) if trainers else {}
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
        read_with_parents(root / kind / framework / f"{str(name).removesuffix('.yaml')}.yaml")
        for kind, name in (("modules", trainer.get("config")), ("models", trainer.get("model")))
    )
    settings = model | section(trainer, "overrides")
    if framework == "megatron_bridge":
        config = {
            "model": settings,
            "peft": settings.pop("peft", None),
            "mixed_precision": settings.pop("precision_config", None),
        }
        name = str(settings.get("hf_path") or settings.get("flavor") or "")
        return _command_of_overrides(path, config, extra_flags, name)
    flags, unknown = flags_of_arguments(module | settings)
    _warn_of_unknown(name for name in unknown if settings.get(name))
    return Command("pretrain_gpt.py", tuple(flags))


def command_of_performance(words: Sequence[str]) -> Command | None:
    """Read a command of Megatron-Bridge's scripts/performance, which names a recipe."""
    options = options_of_performance(words)
    if options is None:
        return None
    recipe = str(options[RECIPE])
    command = _command_with_recipe(Path(recipe), recipe, config_of_performance(options), ())
    if options.get("compute_dtype") == "fp8_cs":  # without Bridge's layers in bf16
        command = command.having(first_last_layers_bf16=None)
    if command.has("--use-megatron-fsdp"):
        command = command.having(**SHARDED_STATE)
    if not command.has("--micro-batch-size"):
        logger.warning("%s: microbatches of 1 sample are assumed, set --micro_batch_size", recipe)
        command = command.having(micro_batch_size=1)
    if options.get("num_gpus") in (None, True):  # a variable without a value
        return command
    processes = number(options, "gpus_per_node", 8)
    nodes = -(-number(options, "num_gpus") // processes)
    return replace(command, launched={NODES: str(nodes), PROCESSES: str(processes)})


def command_of_recipe(words: Sequence[str]) -> Command | None:
    """Read a command's recipe of Megatron-Bridge, which names the model, and its overrides."""
    recipe = words[words.index("--recipe") + 1] if "--recipe" in words[:-1] else "-"
    if recipe.startswith("-"):
        return None
    config: dict[str, Any] = {"peft": "lora" if "_peft_" in recipe else None}
    for match in filter(None, (re.fullmatch(r"\+*(\w+)(?:\.(\w+))?=(.*)", word) for word in words)):
        key, name, value = match.groups()
        values = config.get(key)
        if name is not None:
            config[key] = (values if isinstance(values, dict) else {}) | {name: scalar(value)}
        elif key == "mixed_precision":
            config[key] = value
    return _command_with_recipe(Path(recipe), recipe, config, ())


def _command_with_recipe(
    path: Path, recipe: str, config: Mapping[str, Any], extra_flags: Sequence[str]
) -> Command:
    """Read the overrides of a recipe of Megatron-Bridge, whose name has that of the model.

    Raises:
        ScheduleError: Sizes are not overridden, so that only Bridge knows them.
    """
    model = {"cross_entropy_loss_fusion": True} | section(config, "model")
    names = {*model, *(word.removeprefix("--").replace("-", "_") for word in extra_flags)}
    sizes = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}
    if not config.get("train") or not sizes <= names:
        raise ScheduleError(
            f"{recipe} has sizes that only Megatron-Bridge can read. Pass run_config.yaml of its "
            "checkpoint, or pretrain_gpt.py with Megatron-LM's flags of the same run"
        )
    name = re.sub(r"_(pretrain|sft|peft|finetune)_.*", "", recipe)
    return _command_of_overrides(path, {**config, "model": model}, extra_flags, name)


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
    kind = settings.get("rlhf_type", "dpo") if words[start + 1] == "rlhf" else ""
    if kind in ("grpo", "gkd"):
        logger.warning("the rollout and the teacher of megatron rlhf are not estimated")
    if kind in ("dpo", "rm") and not settings.get("packing"):
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
    return Command(
        "pretrain_gpt.py",
        tuple(flags),
        environment,
        launched,
        name,
        lora=lora,
        reference=_REFERENCES.get(kind),
    )


_REFERENCES = {"dpo": Reference.FORWARD, "kto": Reference.FORWARD, "grpo": Reference.IDLE}
"""Reference models of ms-swift by the kind of training (rlhf_mixin.py)."""


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
        content = read_with_parents(Path(name))
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
            values[name] = [*map(scalar, value)]
        else:
            values.setdefault(name, []).append(scalar(word))
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
