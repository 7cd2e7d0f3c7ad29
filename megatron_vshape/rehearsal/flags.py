"""Parse the flags of a training command, and remove those that need files."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from math import lcm
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.files import fault_of
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.setup.judged_arguments import TOPICS
from megatron_vshape.rehearsal.framework_files import (
    FrameworkConfig,
    check_format,
    config_of_file,
    config_of_swift,
)
from megatron_vshape.rehearsal.saved_config import (
    config_of_verl,
    flags_of_config,
    is_saved_config,
)
from megatron_vshape.rehearsal.shell_script import (
    SlurmSizes,
    expand_script,
    sbatch_words,
    training_command,
)
from megatron_vshape.rehearsal.slime_scripts import SLIME_MARK, SLIME_SIZES, slime_flags

FILES = """
    --data-path --train-data-path --valid-data-path --test-data-path --data-cache-path
    --data-args-path --per-split-data-args-path --per-dataset-sequences-path --vocab-file
    --merge-file --tokenizer-model --tokenizer-metadata --tiktoken-pattern --split --mock-data
    --tokenizer-type --vocab-size --trust-remote-code --tokenizer-prompt-format --num-workers
    --no-mmap-bin-files --finetune --load --save --save-interval --save-retain-interval
    --pretrained-checkpoint --exit-interval --exit-duration-in-mins --exit-signal-handler
    --use-checkpoint-args --use-checkpoint-opt_param-scheduler --override-opt_param-scheduler
    --override-opt-param-scheduler --use-persistent-ckpt-worker --async-save
    --async-strategy --async-ckpt-use-cpu-shm --auto-detect-ckpt-format --ckpt-step
    --ckpt-fully-parallel-load --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save
    --ckpt-fully-parallel-load-per-rank-objects --ckpt-drop-redundant-extra-state
    --ckpt-assume-constant-structure --dist-ckpt-strictness --dist-ckpt-save-pre-mcore-014
    --dist-ckpt-optim-fully-reshardable --non-persistent-save-interval --non-persistent-ckpt-type
    --no-ckpt-load-validate-sharding-integrity --no-load-optim --no-load-rng --no-save-optim
    --no-save-rng --no-use-tokenizer-model-from-checkpoint-args --dataloader-type
    --tensorboard-dir --tensorboard-log-interval --tensorboard-queue-size --wandb-project
    --wandb-entity --wandb-exp-name --wandb-save-dir --log-interval --log-progress --log-energy
    --log-memory-to-tensorboard --log-timers-to-tensorboard --log-memory-interval
    --log-validation-ppl-to-tensorboard --logging-level --log-straggler --straggler-minmax-count
    --disable-straggler-on-startup --enable-experimental-wandb --eval-iters --eval-interval
    --eval-global-batch-size --profile --profile-step-start --profile-step-end --profile-ranks
    --use-pytorch-profiler --record-memory-history --memory-snapshot-path
    --run-workload-inspector-server
    --enable-ft-package --calc-ft-timeouts --enable-one-logger --one-logger-project
    --one-logger-run-name --one-logger-async --distributed-backend --distributed-timeout-minutes
    --local-rank --high-priority-stream-groups --check-weight-hash-across-dp-replicas-interval
    --use-mcore-models --manual-gc --manual-gc-interval
    --lazy-mpu-init --data-parallel-random-init --pipeline-trace --pipeline-timeout
    --reset-attention-mask
    --fim-data --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix
    --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token
""".split()
"""Flags of data, tokenizers, checkpoints and logs, which do not change the memory of a step.
--eval-iters and similar flags are replaced."""

VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 256000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "TikTokenizer": 131072,
}
"""Usual vocabulary sizes of tokenizers; --vocabulary overrides them."""

SCHEDULE = "--pipeline-schedule"

STAGE_BEFORE_DATA = "--use-tp-pp-dp-mapping"

CHUNKS = ("--num-layers-per-virtual", "--num-virtual", "--pipeline-model-parallel-layout")

_OTHER_MODELS = {
    "bert": "BERT",
    "t5": "T5",
    "ict": "ICT",
    "vlm": "vision-language",
    "vl": "vision-language",
    "omni": "vision-language",
    "rl": "RL",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A training command."""

    script: str
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    launched: Mapping[str, str] = field(default_factory=dict)  # nodes and processes per node
    model_name: str = ""  # of a framework's configuration, which has no sizes of the model
    notes: tuple[str, ...] = ()  # for the user: omissions and assumptions

    def value(self, flag: str, default: str | None = None) -> str | None:
        """Return the value of the last occurrence of a flag.

        Raises:
            ScheduleError: The flag is given without a value.
        """
        values = self._values_of(flag)
        if not values:
            return default
        if not values[-1] or values[-1].startswith("--"):
            raise ScheduleError(f"{flag} has no value: add one after it, or remove {flag}")
        return values[-1]

    def _values_of(self, flag: str) -> list[str]:
        """List the word after each occurrence of a flag; empty at the end of the command."""
        return [
            word.partition("=")[2] if word != flag else next_word
            for word, next_word in pairwise((*self.flags, ""))
            if word.partition("=")[0] == flag
        ]

    def number(self, flag: str, default: int) -> int:
        """Return the integer value of a flag.

        Raises:
            ScheduleError: The value is missing or not an integer.
        """
        text = self.value(flag)
        if text is None:
            return default
        try:
            return int(text)
        except ValueError:
            raise ScheduleError(f"{flag} {text!r:.40} is no whole number") from None

    @property
    def pattern(self) -> str | None:
        """The pattern of layers of a hybrid model, by its flag or the flag's old name."""
        return self.value(hybrid.FLAG) or self.value("--hybrid-override-pattern")

    @property
    def layers(self) -> int:
        """The number of layers, without those of multi-token prediction."""
        return hybrid.num_layers(self.pattern) if self.pattern else self.number("--num-layers", 0)

    @property
    def mtp_layers(self) -> int:
        """The number of layers of multi-token prediction."""
        return hybrid.num_predicting(self.pattern or "") or self.number("--mtp-num-layers", 0)

    def option(self, name: str) -> int | str | None:
        """Return the value of an option, True for a switch, None if it is not given.

        `name` is the attribute of Megatron's arguments. Values that are no integers are strings.
        """
        if name == hybrid.OPTION:
            return self.pattern
        flag = "--" + name.replace("_", "-")
        values = self._values_of(flag)
        if not values:
            return None
        text = values[-1]
        if text.isdecimal():
            return int(text)
        return True if not text or text.startswith("--") else text

    def has(self, flag: str) -> bool:
        """Return whether a flag is given."""
        return bool(self._values_of(flag))

    def without(self, is_out: Callable[[str], bool]) -> Command:
        """Return the command without flags whose name fulfills `is_out`, and their values."""
        remaining: list[str] = []
        keep = True
        for word in self.flags:
            if word.startswith("--"):
                keep = not is_out(word.partition("=")[0])
            if keep:
                remaining.append(word)
        return replace(self, flags=tuple(remaining))

    def of_megatron(self) -> Command:
        """Return the command without the flags of this package."""
        return self.without(
            lambda flag: (
                flag.startswith(("--pipeline-", "--optimizer-post-validation"))
                and not flag.startswith("--pipeline-model")
            )
        )

    def without_chunks(self) -> Command:
        """Return the command without flags for several stages per rank."""
        plain = self.without(lambda flag: flag.startswith(CHUNKS))
        if self.pattern is None:
            return plain
        without = {hybrid.OPTION: hybrid.without_stages(self.pattern)}
        return plain.having(hybrid_override_pattern=None, **without)

    def without_predicting(self) -> Command:
        """Return the command without multi-token prediction."""
        if self.pattern is None:
            return self.having(mtp_num_layers=None)
        main = self.pattern.partition(hybrid.BEGINS_MTP)[0]
        old = {"hybrid_override_pattern": None, "mtp_hybrid_override_pattern": None}
        return self.having(mtp_num_layers=None, **old, **{hybrid.OPTION: main})

    def having(self, **values: object) -> Command:
        """Return the command with these flags, with underscores for dashes; True adds a switch.

        None removes a flag.
        """
        names = {"--" + name.replace("_", "-") for name in values}
        remaining = self.without(names.__contains__).flags
        return replace(self, flags=(*remaining, *flags_of(values)))


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
    if (config := config_of_swift(words)) is not None:
        return _command_of_framework(config, Command("pretrain_gpt.py", ()))
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
    command = _with_present_names(_without_unknown(command))
    command = _with_slime_settings(command)
    if not scripts and command.pattern and command.script == "pretrain_gpt.py":
        return replace(command, script="pretrain_hybrid.py")
    return command


_POSITIONS = ("learned_absolute", "rope", "yarn", "mrope", "relative", "none")
"""Position embeddings of Megatron-Core."""


def _with_present_names(command: Command) -> Command:
    """Replace settings of forks and of Megatron before 2022 by those with the same memory."""
    notes = [*command.notes]
    name = command.value("--position-embedding-type", "none")
    if name not in _POSITIONS:
        notes.append(f"Megatron-Core has no {name} position embedding: estimated without one.")
        command = command.having(position_embedding_type="none")
    if command.has("--checkpoint-activations"):
        notes.append("--checkpoint-activations is estimated as full recomputation of every layer.")
        command = command.having(
            checkpoint_activations=None,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=command.number("--checkpoint-num-layers", 1),
            checkpoint_num_layers=None,
        )
    return replace(command, notes=tuple(notes))


_SHELLS = ("sbatch", "bash", "sh", "source", ".")


def _without_shell(words: Sequence[str]) -> list[str]:
    """Remove the shell or sbatch, and its options, before the name of a shell script."""
    if not words or words[0] not in _SHELLS:
        return [*words]
    scripts = (index for index, word in enumerate(words) if Path(word).is_file())
    return [*words[next(scripts, 1) :]]


def _with_slime_settings(command: Command) -> Command:
    if not command.has(SLIME_MARK):
        return command
    flags, note = slime_flags(command.number, command.has, launched_gpus(command)[0])
    script = "pretrain_hybrid.py" if command.pattern else "pretrain_gpt.py"
    note = f"{command.script} is estimated as {script}: {note}"
    return replace(
        command,
        script=script,
        flags=(*command.flags, *flags),
        notes=(*command.notes, note),
    )


_NODES, _PROCESSES = "--nnodes", "--nproc-per-node"
_SIZE_OPTIONS = {
    _NODES: _NODES,
    _PROCESSES: _PROCESSES,
    "--num-nodes": _NODES,
    "--num-gpus": _PROCESSES,
    "--actor-num-nodes": _NODES,  # of slime and miles, started by ray
    "--actor-num-gpus-per-node": _PROCESSES,
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


def launched_gpus(command: Command) -> tuple[int | None, str]:
    """Compute the number of GPUs of torchrun or SLURM, or None and a message if it is not known.

    The message is empty if neither torchrun's nor SLURM's options are given.
    """
    options = command.launched
    nodes, processes = options.get(_NODES, "1"), options.get(_PROCESSES, "")
    if nodes.isdigit() and processes.isdigit() and int(nodes) * int(processes):
        return int(nodes) * int(processes), ""
    if not options:
        return None, ""
    shown = " ".join(f"{name} {value}" for name, value in options.items())
    return None, (
        f"The number of GPUs is not known from {shown}: the minimum for the parallel sizes is "
        "assumed. Set it with --gpus."
    )


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
    values = [value for name, value in command.environment.items() if name.startswith(VARIABLES)]
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
        example = next((name for name in names if re.fullmatch(r"\$[A-Z]\w*", name)), "$NAME")
        raise ScheduleError(
            f"the command has variables without a value: {', '.join(names)}. Neither the script "
            f"nor the environment sets them. Set them: {example[1:]}=... megatron-vshape ...; $1, "
            "$2 and so on are the words after the script's name; replace $(...) by its output"
        )
    if not flags_of_unknown:
        return command
    topics = set(map(topic_of, flags_of_unknown))
    note = f"Ignored, with unknown values and no effect on a step: {', '.join(flags_of_unknown)}."
    remaining = command.without(lambda flag: topic_of(flag) in topics and flag not in FILES)
    return replace(remaining, notes=(*command.notes, note))


def topic_of(flag: str) -> str:
    """Return the title of the topic of a flag without effect on a step, else its name."""
    name = flag.replace("_", "-")
    return _UNIMPORTANT.get(name, name)


def _unknown_text(match: re.Match[str]) -> str:
    if match[1]:
        return f"${match[1]}"
    return re.sub(r"^@\{(.*?)\}?$", r"$(\1)", match[0].replace("\u00a0", " "))


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


def _reject_other_models(command: Command) -> None:
    name = Path(command.script).stem.lower()
    for part, model in _OTHER_MODELS.items():
        if part in name.replace("-", "_").split("_"):
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
        parameters = [
            *takewhile(lambda word: not word.startswith("-"), extra_words)
        ]  # $1, $2 and so on
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


def split_words(text: str, label: str) -> list[str]:
    """Split a text into words as a shell does, without comments.

    Raises:
        ScheduleError: a quote is not closed.
    """
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ScheduleError(f"{label:.200} cannot be split into words: {error}") from None


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
        _reject_other_models(_model_of(content))
    check_format(path, content)
    if (config := config_of_file(path, content, extra_flags)) is not None:
        return _command_of_framework(config, command)
    arguments = content.get("MODEL_ARGS", content) if isinstance(content, dict) else None
    if not isinstance(arguments, dict) or any(
        isinstance(arguments[name], dict) for name in arguments
    ):
        raise ScheduleError(
            f"{path} has no flags: MODEL_ARGS, as in Megatron-LM's functional tests, or flags "
            f"alone. {_INSTEAD}"
        )
    environment = {name: str(value) for name, value in (content.get("ENV_VARS") or {}).items()}
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


def _command_of_framework(config: FrameworkConfig, command: Command) -> Command:
    _reject_other_models(Command(config.model_name.replace(".", "_"), ()))
    launched = {_NODES: config.nodes, _PROCESSES: config.processes}
    return replace(
        command,
        flags=tuple(config.flags),
        environment={
            **command.environment,
            **{
                name: value
                for name, value in config.environment.items()
                if name.startswith(VARIABLES)
            },
        },
        launched=launched if config.processes else command.launched,
        model_name=config.model_name,
    )


def _command_of_saved_config(
    config: Mapping[str, Any], command: Command, extra_flags: Sequence[str]
) -> Command:
    _reject_other_models(_model_of(config))
    return replace(command, flags=tuple(flags_of_config(config, extra_flags)))


def _model_of(config: Mapping[str, Any]) -> Command:
    """Return the class name of the configuration's model as a script name."""
    target = str((config.get("model") or {}).get("_target_", ""))
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", target).replace(
        ".", "_"
    )
    return Command(words, ())


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return a mapping of flags to values as words; true adds a switch, false nothing."""
    words: list[str] = []
    for name, value in values.items():
        flag = name if name.startswith("--") else "--" + name.replace("_", "-")
        if value is True or value == "true":
            words.append(flag)
        elif value is not False and value is not None:
            words += [flag, *_words_of(value)]
    return words


def flag_changes(old: Command, new: Command) -> list[str]:
    """Return the changes that make one command another: variables and flags, for a shell."""
    old_words, new_words = (words_by_flag(command.flags) for command in (old, new))
    removed = [flag for flag in old_words if flag not in new_words]
    if sum(flag.startswith("--recompute-") for flag in removed) > 1:
        removed = ["--recompute-*", *(flag for flag in removed if "recompute" not in flag)]
    return [
        *(f"unset {name}" for name in old.environment if name not in new.environment),
        *(f"remove {flag}" for flag in removed),
        *(
            shlex.join([flag, *words])
            for flag, words in new_words.items()
            if old_words.get(flag) != words
        ),
    ]


def words_by_flag(flags: Sequence[str]) -> dict[str, list[str]]:
    """Return the words after each flag; the last occurrence of a flag applies."""
    words: dict[str, list[str]] = {}
    flag = ""
    for word in flags:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            words[flag] = [value] if equals else []
        else:
            words.setdefault(flag, []).append(word)
    return words


def _words_of(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    text = str(value).strip()
    if text.startswith("[") and text.endswith("]"):
        return split_words(text[1:-1].replace(",", " "), text)
    if re.fullmatch(r"\d+(\s+\d+)+", text):  # several numbers, as of context-parallel groups
        return text.split()
    return [text]


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
        if (config := config_of_swift([*assignments, *record.words])) is not None:
            return _command_of_framework(config, command)
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
            f"Of other libraries, only megatron sft, pt and rlhf are read. {_INSTEAD}"
        )
    notes = [f"{path} sources {name}, which cannot be read." for name in expansion.unreadable]
    if started.others:
        notes.append(
            f"{path} starts {started.others + 1} different trainings: estimated is the one with "
            "the most flags, or the first of them."
        )
    environment = {
        name: value for name, value in started.environment.items() if name.startswith(VARIABLES)
    }
    launched = _launch_options([*started.flags, *started.launcher])
    slurm = SlurmSizes.of([*sbatch, *started.launcher])
    if not launched and slurm.processes:  # srun starts one process per GPU
        launched = {_NODES: slurm.nodes or "1", _PROCESSES: slurm.processes}
    script = started.script or command.script
    shell_command = Command(script, tuple(started.flags), environment, launched, notes=tuple(notes))
    return shell_command.without(lambda flag: flag.startswith(_LAUNCHER))


_LAUNCHER = ("--nproc", "--nnodes", "--node", "--master", "--rdzv")
"""Beginnings of torchrun's flags, which scripts keep in arrays too."""


def evaluation_of(command: Command) -> list[str]:
    """Return the flags of a command's evaluation, which `without_files` removes."""
    flags = ("--eval-iters", "--eval-global-batch-size")
    values = {flag: command.value(flag) for flag in flags}
    values["--eval-iters"] = values["--eval-iters"] or str(_EVAL_ITERS)
    return [word for flag, value in values.items() if value is not None for word in (flag, value)]


_EVAL_ITERS = 100
"""Default of Megatron's --eval-iters."""


def without_files(command: Command, vocabulary: int | None = None) -> list[str]:
    """Return the flags without those about files, plus the flags that a dry run needs.

    Raises:
        ScheduleError: The vocabulary size is unknown.
    """
    flags = [_absolute_path(word) for word in command.without(FILES.__contains__).flags]
    size = vocabulary or command.number("--vocab-size", 0) or count_tokens(command)
    flags += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]
    flags += ["--num-workers", "0", "--log-interval", "1", "--eval-iters", "0"]
    if not command.has("--lr"):
        flags += ["--lr", "1e-4", "--min-lr", "1e-5"]
    if not command.has("--train-iters") and not command.has("--train-samples"):
        flags += ["--train-iters", "100"]
    return flags


def _absolute_path(word: str) -> str:
    """Make the path of an existing file absolute: a dry run has a working directory of its own."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{flag}{equals}{Path(value).resolve()}" if os.path.isfile(value) else word


def count_tokens(command: Command) -> int:
    """Return the number of tokens of a command's tokenizer.

    The files of a Hugging Face tokenizer are read if they are in a local folder.

    Raises:
        ScheduleError: neither the command nor a file has the number.
    """
    kind = command.value("--tokenizer-type", "GPT2BPETokenizer") or ""
    size = command.number("--padded-vocab-size", 0) or VOCABULARIES.get(kind, 0)
    size = size or _tokens_in_folder(Path(command.value("--tokenizer-model") or ""))
    if not size:
        raise ScheduleError(
            f"--tokenizer-type {kind} has no known number of tokens, and there is no "
            "local folder with its files: add --vocabulary N before the --"
        )
    return size


def _tokens_in_folder(folder: Path) -> int:
    """Return the tokens in a Hugging Face tokenizer's folder; 0 if there is none."""
    try:
        content = json.loads((folder / "tokenizer.json").read_text())
        tokens = [*content["model"]["vocab"].values()]
        tokens += [token["id"] for token in content.get("added_tokens", [])]
        return 1 + max(map(int, tokens))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass  # some models have no such file, or a list of tokens in it
    try:
        return int(json.loads((folder / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The parallel sizes of a command."""

    world: int
    tensor: int
    context: int
    pipeline: int
    stage_before_data: bool  # rank order tp-cp-ep-pp-dp: neighboring ranks are stages

    @property
    def replicas(self) -> int:
        """Return the number of data-parallel pipelines."""
        return self.world // (self.tensor * self.context * self.pipeline)

    @property
    def stage_stride(self) -> int:
        """Distance between neighboring pipeline ranks in GPUs."""
        if self.stage_before_data:
            return self.tensor * self.context
        return self.world // self.pipeline

    def last_rank(self, stage: int) -> int:
        """Return the last rank of a pipeline stage."""
        return self.world - 1 - (self.pipeline - 1 - stage) * self.stage_stride


def sizes_of(command: Command, gpus: int | None) -> Sizes:
    """Return the sizes for this number of GPUs, or for the smallest possible number.

    Raises:
        ScheduleError: The sizes do not divide the GPUs.
    """
    tensor = command.number("--tensor-model-parallel-size", 1)
    context = command.number("--context-parallel-size", 1)
    pipeline = command.number("--pipeline-model-parallel-size", 1)
    experts = command.number("--expert-model-parallel-size", 1)
    expert_tensor = command.number("--expert-tensor-parallel-size", tensor)
    min_gpus = pipeline * lcm(tensor * context, experts * expert_tensor)
    world = gpus or min_gpus
    if world % min_gpus:
        raise ScheduleError(
            f"{world} GPUs do not divide among TP {tensor} x CP {context} x PP {pipeline} and "
            f"EP {experts} x ETP {expert_tensor}. Set the number in --gpus to a multiple "
            f"of {min_gpus}"
        )
    return Sizes(world, tensor, context, pipeline, command.has(STAGE_BEFORE_DATA))


def parse_ranks(text: str, pipeline: int) -> list[int]:
    """Return the pipeline ranks of `all`, `first,last` or comma-separated numbers.

    Raises:
        ScheduleError: A rank does not exist.
    """
    ranks_by_name = {"first": 0, "last": pipeline - 1}
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        if part == "all":
            ranks += range(pipeline)
        elif part in ranks_by_name:
            ranks.append(ranks_by_name[part])
        elif part.isdigit() and int(part) < pipeline:
            ranks.append(int(part))
        else:
            raise ScheduleError(
                f"--ranks {part}: all, first, last or numbers from 0 to {pipeline - 1}, the ranks "
                "of the pipeline"
            )
    return sorted(set(ranks))


_CHECKED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_GRAPH_REGISTER", "CUDA_GRAPHS_USE_NODE_PRIORITY")
VARIABLES = ("NVTE_", "CUBLAS_", "CUDA_DEVICE_", "PYTORCH_", *_CHECKED)
"""Prefixes of the environment variables that affect the allocations of a command, and those that
Megatron checks, such as NCCL_GRAPH_REGISTER with CUDA graphs and expandable segments."""


def environment_of(command: Command, variables: Iterable[str] = VARIABLES) -> dict[str, str]:
    """Return the environment variables that affect the command's allocations."""
    prefixes = tuple(variables)
    process_environment = {
        name: value for name, value in os.environ.items() if name.startswith(prefixes)
    }
    command_environment = {
        name: value for name, value in command.environment.items() if name.startswith(prefixes)
    }
    return {**process_environment, **command_environment}
