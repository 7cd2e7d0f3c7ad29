"""A training command: its flags, their values, and the parallel sizes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import lcm
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.rehearsal.rank_job import LoraConfig, Reference

SCHEDULE = "--pipeline-schedule"
STAGE_BEFORE_DATA = "--use-tp-pp-dp-mapping"
ENDS_ARE_LAYERS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Options with which Megatron counts the embedding and the loss as a layer each."""

SHARDED_STATE = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "ckpt_format": "fsdp_dtensor",
}
"""Options with which Megatron-FSDP shards weights, gradients and optimizer."""

NODES, PROCESSES = "--nnodes", "--nproc-per-node"
CHUNKS = ("--num-layers-per-virtual", "--num-virtual", "--pipeline-model-parallel-layout")
_POSITIVE = frozenset(
    """
    --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
    --expert-model-parallel-size --expert-tensor-parallel-size --micro-batch-size
    --global-batch-size --seq-length --num-layers --hidden-size --num-attention-heads
    --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
    --microbatch-group-size-per-virtual-pipeline-stage
    """.split()
)
"""Flags whose value must not be zero; a script without its variables may compute it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A training command."""

    script: str
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    launched: Mapping[str, str] = field(default_factory=dict)  # nodes and processes per node
    model_name: str = ""  # of a framework's configuration, which has no sizes of the model
    notes: tuple[str, ...] = ()  # for the user: omissions and assumptions
    lora: LoraConfig | None = None  # adapters that a framework's command trains
    reference: Reference | None = None  # of preference training

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
            ScheduleError: The value is missing or not an integer, or a size is not positive.
        """
        text = self.value(flag)
        if text is None:
            return default
        try:
            number = int(text)
        except ValueError:
            raise ScheduleError(f"{flag} {text!r:.40} is no whole number") from None
        if number < 1 and flag in _POSITIVE:
            raise ScheduleError(f"{flag} {number} is not a positive number")
        return number

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


def launched_gpus(command: Command) -> tuple[int | None, str]:
    """Compute the number of GPUs of torchrun or SLURM, or None and a message if it is not known.

    The message is empty if neither torchrun's nor SLURM's options are given.
    """
    options = command.launched
    nodes, processes = options.get(NODES, "1"), options.get(PROCESSES, "")
    if nodes.isdigit() and processes.isdigit() and int(nodes) * int(processes):
        return int(nodes) * int(processes), ""
    if not options:
        return None, ""
    shown = " ".join(f"{name} {value}" for name, value in options.items())
    return None, (
        f"The number of GPUs is not known from {shown}: the minimum for the parallel sizes is "
        "assumed. Set it with --gpus."
    )


def split_words(text: str, label: str) -> list[str]:
    """Split a text into words as a shell does, without comments.

    Raises:
        ScheduleError: a quote is not closed.
    """
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ScheduleError(f"{label:.200} cannot be split into words: {error}") from None


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
