"""Read a training command: words of a shell, a script, or the configuration of a framework."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.files import fault_of
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.setup.judged_arguments import TOPICS
from megatron_vshape.rehearsal.command import (
    NODES,
    PROCESSES,
    Command,
    flags_of,
    split_words,
)
from megatron_vshape.rehearsal.deepspeed_scripts import with_deepspeed_flags
from megatron_vshape.rehearsal.dry_run_flags import FILES, variables_of_step
from megatron_vshape.rehearsal.framework_files import (
    check_format,
    command_of_framework,
    command_of_performance,
    command_of_recipe,
    command_of_swift,
)
from megatron_vshape.rehearsal.hybrid_ratios import with_pattern
from megatron_vshape.rehearsal.mindspeed_scripts import with_translated_flags
from megatron_vshape.rehearsal.saved_config import (
    config_of_verl,
    flags_of_config,
    is_saved_config,
    lora_of_config,
)
from megatron_vshape.rehearsal.shell_script import (
    SlurmSizes,
    expand_script,
    sbatch_words,
    training_command,
)
from megatron_vshape.rehearsal.slime_scripts import SLIME_SIZES, with_slime_settings
from megatron_vshape.rehearsal.verl_scripts import command_of_verl
from megatron_vshape.rehearsal.yaml_files import section
from megatron_vshape.rehearsal.zero_bubble_scripts import with_zero_bubble_flags

_WITH_ENCODER = "vision-language"
"""Models whose configuration contains that of the language model, which is estimated."""

_OTHER_MODELS = {
    **{name: name.lower() for name in ("BERT", "T5", "ICT", "RL", "RETRO", "vision")},
    "protein (ESM)": "esm1 esm2",
    _WITH_ENCODER: "vlm vl omni --language-model-type --vision-model-type --img-h "
    "--disable-vision-class-token --model-provider",
    "DeepSeek-V4": "deepseek4 --kv-compress",  # of MindSpeed-LLM
    "LongCat": "longcat --num-zero-experts",
}
"""Models that are not rehearsed: parts of the script's name, and flags."""


def read_command(words: Sequence[str]) -> Command:
    """Return the command in the words after `--`: as in a shell, or with a file that contains it.

    torchrun and python before the script are skipped. The first word can be a file: a YAML file of
    Megatron-LM's functional tests, a saved configuration of Megatron-Bridge (also in checkpoints of
    NeMo-RL), `transformer_config.json` of a checkpoint of verl, a shell script, or flags alone.
    Flags after the file are added; other words after a shell script are its parameters. bash
    expands a shell script, without running its commands.

    Raises:
        ScheduleError: There is no command, or the file has none.
    """
    words = _without_shell(words)
    if not words:
        raise ScheduleError(
            "the training command is missing: add it after --, as in -- pretrain_gpt.py FLAGS..."
        )
    if (framework_command := _framework_command(words)) is not None:
        return _with_launcher_of(Command("pretrain_gpt.py", ()), framework_command)
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    if not scripts and "-m" in words[:-1]:
        words = _words_of_module(words)
        scripts = [0]
    if scripts:
        index = scripts[0]
        environment = {name: value for name, value in map(_assignment, words[:index]) if name}
        command = Command(words[index], (), environment, _launch_options(words[:index]))
        words = words[index + 1 :]
    else:
        command = Command("pretrain_gpt.py", ())
    if words and not words[0].startswith("-"):
        file_command = _command_of_file(Path(words[0]), command, words[1:])
        command = replace(file_command, script=command.script) if scripts else file_command
    else:
        command = replace(command, flags=tuple(words))
    _reject_other_models(command)
    command = _without_unknown(with_zero_bubble_flags(with_deepspeed_flags(command)))
    command = with_pattern(_with_present_names(with_translated_flags(command)))
    command = with_slime_settings(command)
    if not scripts and command.pattern and command.script == "pretrain_gpt.py":
        return replace(command, script="pretrain_hybrid.py")
    return command


_VALUES = {
    "position_embedding_type": ("none", "learned_absolute", "rope", "yarn", "mrope", "relative"),
    "moe_token_dispatcher_type": ("alltoall", "allgather", "flex"),
    "moe_router_load_balancing_type": (
        *("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"),
    ),
}
"""Values of options to which forks and old releases add others, estimated as the first of these."""


_ATTENTION_VARIABLES = "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"
_BACKENDS = {
    (False, False): "auto",
    (True, False): "fused",
    (False, True): "flash",
    (True, True): "unfused",
}
"""--attention-backend by whether FlashAttention and whether fused attention is forbidden."""


def _with_present_names(command: Command) -> Command:
    """Replace settings of forks and of old releases of Megatron by those with the same memory."""
    notes = [*command.notes]
    for option, values in _VALUES.items():
        flag = "--" + option.replace("_", "-")
        if (value := command.value(flag, values[0])) not in values:
            notes.append(f"Megatron-Core has no {flag} {value}: estimated as {values[0]}.")
            command = command.having(**{option: values[0]})
    if (optimizer := command.value("--optimizer", "adam") or "") != "adam" and "adam" in optimizer:
        notes.append(f"--optimizer {optimizer} is estimated as adam.")
        command = command.having(optimizer="adam")
    if command.has("--use-legacy-models") and command.has("--use-flash-attn"):
        notes.append("Legacy models with FlashAttention are estimated with Transformer Engine.")
        command = command.having(transformer_impl=None)
    if command.has("--checkpoint-activations"):
        notes.append("--checkpoint-activations is estimated as full recomputation of every layer.")
        command = command.having(
            checkpoint_activations=None,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=command.number("--checkpoint-num-layers", 1),
            checkpoint_num_layers=None,
        )
    forbidden = [command.environment.get(name) == "0" for name in _ATTENTION_VARIABLES]
    if any(forbidden) and not command.has("--attention-backend"):
        no_flash, no_fused, _ = forbidden
        backend = _BACKENDS[no_flash, no_fused]
        notes.append(
            f"The NVTE_*_ATTN variables are estimated as --attention-backend {backend}, since "
            "Megatron-Core rejects them without this flag."
        )
        environment = {
            name: value
            for name, value in command.environment.items()
            if name not in _ATTENTION_VARIABLES
        }
        command = replace(command, environment=environment).having(attention_backend=backend)
    return replace(command, notes=tuple(notes))


_SHELLS = ("sbatch", "bash", "sh", "source", ".")


def _without_shell(words: Sequence[str]) -> list[str]:
    """Remove the shell or sbatch, and its options, before the name of a shell script."""
    if not words or words[0] not in _SHELLS:
        return [*words]
    scripts = (index for index, word in enumerate(words) if Path(word).is_file())
    return [*words[next(scripts, 1) :]]


_SIZE_OPTIONS = {
    NODES: NODES,
    PROCESSES: PROCESSES,
    "--num-nodes": NODES,
    "--num-gpus": PROCESSES,
    "--worker-num": PROCESSES,  # of all nodes, as of msrun and mpirun
    "-np": PROCESSES,
    "--actor-num-nodes": NODES,  # of slime and miles, started by ray
    "--actor-num-gpus-per-node": PROCESSES,
}


def _launch_options(words: Sequence[str]) -> dict[str, str]:
    """Return the numbers of nodes and of processes per node of torchrun, deepspeed or ray."""
    options: dict[str, str] = {}
    for word, next_word in pairwise((*words, "")):
        name, equals, value = word.partition("=")
        option = _SIZE_OPTIONS.get(name.replace("_", "-"))
        if option is not None and not value.startswith("--"):
            options[option] = value if equals else next_word
    return dict(sorted(options.items()))


_UNKNOWN = re.compile(r"\$\{?(\w+|[@*#?])[^\s}]*\}?|\$\([^)]*\)?|`[^`]*`?|@\{[^}]*\}?")
"""A variable or command substitution of a shell, or the output of a command that bash skipped."""


_UNIMPORTANT = {
    "--" + word.partition(">")[0].partition("<")[0].replace("_", "-"): topic.title
    for topic in TOPICS
    if not topic.changes_step
    for word in topic.names.split()
}
"""Flags that change neither memory nor time of a step, and their topic."""


MEGATRON_FLAGS = {
    *(f"--{word.replace('_', '-')}" for topic in TOPICS for word in topic.names.split()),
    *FILES,
    *("--fp8-format", "--fp4-format", "--norm-epsilon", "--output-logit-dtype"),
    *("--cuda-graph-scope", "--microbatch-group-size-per-virtual-pipeline-stage"),
}
"""Megatron's flags with values, by the names of their attributes; the last have other names."""


def _without_unknown(command: Command) -> Command:
    """Remove flags with unknown values that do not change a step, with all flags of their topic.

    They are flags of Megatron for data, logs and so on, and flags that it does not have.

    Raises:
        ScheduleError: Values of other flags are unknown.
    """
    checked = command.without(FILES.__contains__)
    flag, flags_of_unknown, names = "", dict[str, None](), dict[str, None]()
    values = variables_of_step(command.environment).values()
    has_layers = command.pattern or command.has("--num-layers")
    important = (MEGATRON_FLAGS | SLIME_SIZES) - _UNIMPORTANT.keys()
    for word in (*checked.flags, "--", *values):
        if word.startswith("--"):
            flag = "--" + word[2:].partition("=")[0].replace("_", "-")
        unknown = {_unknown_text(match): None for match in _UNKNOWN.finditer(word)}
        # Without layers, an unknown word may hold the flags of the model.
        is_ignored = has_layers and flag != "--" and flag not in important
        if unknown and is_ignored:
            flags_of_unknown[flag] = None
        else:
            names |= unknown
    if names:
        raise ScheduleError(_unknown_values(names))
    if not flags_of_unknown:
        return command
    topics = set(map(topic_of, flags_of_unknown))
    note = f"Ignored, with unknown values and no effect on a step: {', '.join(flags_of_unknown)}."
    remaining = command.without(lambda flag: topic_of(flag) in topics and flag not in FILES)
    return replace(remaining, notes=(*command.notes, note))


def _unknown_values(names: Collection[str]) -> str:
    """Return the error message for variables, parameters of a script, and output of programs."""
    parameters = [int(name[1:]) for name in names if name[1:].isdecimal()]
    variables = [name for name in names if re.fullmatch(r"\$[A-Za-z_]\w*", name)]
    fixes = []
    if parameters:
        last = max(parameters)
        words = "the word $1" if last == 1 else f"the words $1 to ${last}"
        consequence = ", which may set the others" if variables else ""
        fixes.append(f"add {words} after the script's name{consequence}")
    elif variables:
        fixes.append(f"set them, as in {variables[0][1:]}=... megatron-vshape ...")
    if len(parameters) + len(variables) < len(names):
        fixes.append("replace $(...) by its output")
    return (
        f"the command has variables without a value: {', '.join(names)}. Neither the script nor "
        f"the environment sets them: {'; '.join(fixes)}"
    )


def topic_of(flag: str) -> str:
    """Return the title of the topic of a flag without effect on a step, else its name."""
    name = flag.replace("_", "-")
    return _UNIMPORTANT.get(name, name)


def _unknown_text(match: re.Match[str]) -> str:
    if match[1]:
        return f"${match[1]}"
    return re.sub(r"^@\{(.*?) ?\}?$", r"$(\1)", re.sub("\u00a0+", " ", match[0]))


def _words_of_module(words: Sequence[str]) -> list[str]:
    """Return `python -m package.pretrain_gpt FLAGS` as a script with flags.

    Raises:
        ScheduleError: it is the module of another program.
    """
    index = words.index("-m") + 1
    name = words[index].rpartition(".")[2]
    if not name.startswith("pretrain_"):
        raise ScheduleError(f"-m {words[index]} is no training script of Megatron-LM. {_INSTEAD}")
    return [f"{name}.py", *words[index + 1 :]]


def _assignment(word: str) -> tuple[str, str]:
    match = re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", word)
    return (match[1], match[2]) if match else ("", "")


def _reject_other_models(command: Command, *permitted: str) -> None:
    parts = re.split("[-_]", Path(command.script).stem.lower())
    for model, marks in _OTHER_MODELS.items():
        is_model = any(mark in parts or command.has(mark) for mark in marks.split())
        if is_model and model not in permitted:
            raise ScheduleError(
                f"{command.script} trains a {model} model: rehearsed are GPT and hybrid models "
                "(pretrain_gpt.py, pretrain_hybrid.py, pretrain_mamba.py)"
            )
    backend = command.value("--train-backend", "megatron")  # of slime and miles
    if backend != "megatron":
        raise ScheduleError(
            f"the command trains with --train-backend {backend}, without Megatron: only the "
            "megatron backend is rehearsed"
        )


def _command_of_file(path: Path, command: Command, extra_words: Sequence[str]) -> Command:
    try:
        text = path.read_text()
    except OSError as error:
        raise ScheduleError(f"{path} cannot be read: {error.strerror or error}") from error
    if path.suffix in (".yaml", ".yml"):
        command = _command_of_yaml(path, text, command, extra_words)
    elif path.suffix == ".json":
        command = _command_of_json(path, text, command, extra_words)
    elif path.suffix in (".sh", ".bash", ".sbatch", ".slurm") or text.startswith("#!"):
        parameters = [*takewhile(lambda word: word[:1] != "-", extra_words)]  # $1, $2 and so on
        command = _command_of_shell(path, text, command, parameters)
        extra_words = extra_words[len(parameters) :]
    else:
        command = replace(command, flags=tuple(split_words(text, str(path))))
    overrides = [word for word in command.flags if _OVERRIDE.match(word)]
    if overrides:
        raise ScheduleError(
            f"{path} configures its run by {overrides[0]!r:.60} and similar overrides, which are "
            f"no flags of Megatron-LM. {_INSTEAD}"
        )
    return replace(command, flags=(*command.flags, *extra_words))


_INSTEAD = (
    "Pass run_config.yaml of a checkpoint that Megatron-Bridge or NeMo-RL saved, "
    "transformer_config.json of one that verl saved, or pretrain_gpt.py with the model's flags"
)


_OVERRIDE = re.compile(r"\+*\w+(\.\w+)+=")
"""An override of OmegaConf and Hydra, as in `train.global_batch_size=8`."""


def _command_of_yaml(
    path: Path, text: str, command: Command, extra_flags: Sequence[str]
) -> Command:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ScheduleError(f"to read {path}, pip install PyYAML") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScheduleError(f"{path} is not YAML: {fault_of(error)}") from None
    if is_saved_config(content):
        return _command_of_saved_config(content, command, extra_flags)
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        _reject_other_models(_model_of(content), _WITH_ENCODER)
    check_format(path, content)
    if (framework_command := command_of_framework(path, content, extra_flags)) is not None:
        return _with_launcher_of(command, framework_command)
    arguments = content.get("MODEL_ARGS", content) if isinstance(content, dict) else None
    if not isinstance(arguments, dict) or any(
        isinstance(arguments[name], dict) for name in arguments
    ):
        raise ScheduleError(
            f"{path} has no flags: MODEL_ARGS, as in Megatron-LM's functional tests, or flags "
            f"alone. {_INSTEAD}"
        )
    environment = {name: str(value) for name, value in section(content, "ENV_VARS").items()}
    return Command(
        command.script, tuple(flags_of(arguments)), {**command.environment, **environment}
    )


def _command_of_json(
    path: Path, text: str, command: Command, extra_flags: Sequence[str]
) -> Command:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ScheduleError(f"{path} is not valid JSON: {fault_of(error)}") from None
    config = config_of_verl(content)
    if config is None:
        check_format(path, content)
        raise ScheduleError(
            f"{path} has no model of Megatron-Bridge. Use transformer_config.json of a checkpoint "
            "that verl saved, or run_config.yaml of one that Megatron-Bridge or NeMo-RL saved"
        )
    return _command_of_saved_config(config, command, extra_flags)


def _framework_command(words: Sequence[str]) -> Command | None:
    readers = (command_of_swift, command_of_verl, command_of_recipe, command_of_performance)
    return next(filter(None, (reader(words) for reader in readers)), None)


def _with_launcher_of(outer: Command, command: Command) -> Command:
    """Return a framework's command with the script, variables and launcher of the given words."""
    return replace(
        command,
        script=outer.script,
        environment={**outer.environment, **variables_of_step(command.environment)},
        launched=command.launched if command.launched.get(PROCESSES) else outer.launched,
    )


def _command_of_saved_config(
    config: Mapping[str, Any], command: Command, extra_flags: Sequence[str]
) -> Command:
    _reject_other_models(_model_of(config), _WITH_ENCODER)
    flags = tuple(flags_of_config(config, extra_flags))
    return replace(command, flags=flags, lora=lora_of_config(config.get("peft")))


def _model_of(config: Mapping[str, Any]) -> Command:
    """Return the class name of the configuration's model as a script name."""
    target = str(section(config, "model").get("_target_", ""))
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", target).replace(
        ".", "_"
    )
    return Command(words, ())


def _command_of_shell(
    path: Path, text: str, command: Command, parameters: Sequence[str]
) -> Command:
    """Return the command of a shell script, without the flags of its launcher.

    Raises:
        ScheduleError: The script has no training command and no flags of Megatron-LM.
    """
    sbatch = sbatch_words(text)
    variables = {**SlurmSizes.of(sbatch).variables(), **command.environment}
    expansion = expand_script(text, path, parameters, variables)
    for record in expansion.records:
        assignments = [f"{name}={value}" for name, value in record.environment.items()]
        if (framework_command := _framework_command([*assignments, *record.words])) is not None:
            launched = _launched([*record.launcher, *record.words], sbatch)
            return _with_launcher_of(replace(command, launched=launched), framework_command)
    started = training_command(expansion, MEGATRON_FLAGS)
    if not any(word.startswith("--") for word in started.flags):
        empty = re.search(r"\.py[\"']?[ \t]+[\"']?\$\{?([A-Z]\w*)", "\n".join(expansion.texts))
        if empty is not None:
            raise ScheduleError(
                f"{path} takes the flags of the training from ${empty[1]}, which is empty. Set it: "
                f"{empty[1]}=... megatron-vshape ..."
            )
        raise ScheduleError(
            f"{path} has no flags of Megatron-LM, neither in an array nor after a script's name. "
            "Of other libraries, megatron sft, pt and rlhf, verl, and scripts/performance of "
            f"Megatron-Bridge are read. {_INSTEAD}"
        )
    notes = [f"{path} sources {name}, which cannot be read." for name in expansion.unreadable]
    if started.num_further:
        notes.append(
            f"{path} starts {started.num_further + 1} different trainings: estimated is the one "
            "with the most flags, or the first of them."
        )
    environment = variables_of_step(started.environment)
    launched = _launched([*started.flags, *started.launcher], [*sbatch, *started.launcher])
    script = started.script or command.script
    shell_command = Command(script, tuple(started.flags), environment, launched, notes=tuple(notes))
    return shell_command.without(lambda flag: flag.startswith(_LAUNCHER))


def _launched(words: Sequence[str], slurm_words: Sequence[str]) -> dict[str, str]:
    """Return the nodes and processes of a launcher, else of SLURM: srun starts one per GPU."""
    slurm = SlurmSizes.of(slurm_words)
    sizes = {NODES: slurm.nodes or "1", PROCESSES: slurm.processes} if slurm.processes else {}
    return _launch_options(words) or sizes


_LAUNCHER = ("--nproc", "--nnodes", "--node", "--master", "--rdzv")
"""Beginnings of torchrun's flags, which scripts keep in arrays too."""
