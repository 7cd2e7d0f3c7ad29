"""Arithmetic of a command: rules that Megatron checks at start or in the first step.

No model is built and no heavy package imported, so a command is checked in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.schedule_names import is_megatrons_own
from megatron_vshape.mcore.layout.given_layout import nearest
from megatron_vshape.rehearsal.command import CHUNKS, SCHEDULE, Command, Sizes
from megatron_vshape.rehearsal.megatron_layers import flags_text, layers_of_command

BATCH = "--global-batch-size"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a command violates, and the nearest values that fulfill it."""

    problem: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}" if self.fix else self.problem


_HOW_TO_NAME = (
    "give the model with --model NAME or FILE, set the variables of the script that name it "
    "(NAME=VALUE megatron-vshape ...), or add its flags after the command or file"
)


def check_model(command: Command) -> None:
    """Raise ScheduleError if the command has no layers, no size of them, or no place for experts.

    Its model is in another file, or a file was not understood.
    """
    unknown = [] if command.layers else ["--num-layers"]
    unknown += [] if command.has("--hidden-size") else ["--hidden-size"]
    if unknown:
        name = f" of {command.model_name}" if command.model_name else ""
        missing = [] if name else _missing_flags(command)
        if len(unknown) == 2 and missing == _REQUIRED and not any(map(command.has, _SIZES)):
            raise ScheduleError(
                f"{command.script} has none of Megatron's flags for a model, such as --num-layers: "
                "a program that trains without Megatron is not supported. If it uses Megatron, "
                f"{_HOW_TO_NAME}"
            )
        raise ScheduleError(
            f"the command has no {', '.join([*unknown, *missing])}, so the model{name} is unknown: "
            f"{_HOW_TO_NAME}"
        )
    if command.pattern and "E" not in command.pattern and command.number("--num-experts", 0):
        raise ScheduleError(
            f"the command has --num-experts, and its pattern {command.pattern:.20} no layer of "
            f"experts (E): {command.script} builds other layers than Megatron-LM. Remove "
            "--num-experts, or give the model with --model NAME"
        )


def check_required_flags(command: Command) -> None:
    """Raise ScheduleError if the command lacks flags without which Megatron does not start."""
    if missing := _missing_flags(command):
        raise ScheduleError(f"the command has no {', '.join(missing)}, which Megatron requires")


_REQUIRED = (
    "--num-attention-heads --seq-length --max-position-embeddings --micro-batch-size".split()
)
_SIZES = (BATCH, "--tensor-model-parallel-size", "--pipeline-model-parallel-size")


def _missing_flags(command: Command) -> list[str]:
    return [flag for flag in _REQUIRED if not command.has(flag)]


def violations_of(command: Command, sizes: Sizes) -> list[Violation]:
    """Return all violated rules of a command with these sizes, each with flags that fulfill it."""
    name = command.value(SCHEDULE)
    is_megatron = name is None or is_megatrons_own(name)
    violations: list[Violation] = []
    chunks = 1
    if is_megatron and command.layers:
        schedule, layers, reason = layers_of_command(command, command.layers, sizes.pipeline)
        chunks = int(schedule.partition(":")[2] or 1)
        if chunks > 1 and sizes.pipeline == 1:
            flags = ", ".join(word for word in command.flags if word.startswith(CHUNKS))
            fix = f"Remove {flags}" if flags else ""
            violations.append(Violation("virtual stages require more than 1 pipeline rank", fix))
            chunks = 1
        elif layers is None:
            # A smaller number of virtual stages that divides the layers is nearer than uneven ones.
            per_rank, remainder = divmod(command.layers, sizes.pipeline)
            divisors = (size for size in range(chunks, 1, -1) if not (remainder or per_rank % size))
            num_stages = sizes.pipeline * next(divisors, chunks)
            fix = ""
            if command.layers >= num_stages - 2:
                ends = 1.0 if command.layers % num_stages else 0.0
                split = nearest(command.layers, num_stages, ends, ends)
                fix = f"The nearest layer split is {flags_text(split, sizes.pipeline, command)}"
            violations.append(Violation(reason, fix))
    violations += _size_violations(command)
    return [*violations, *_batch_violations(command, sizes, chunks)]


TENSOR, CONTEXT = "--tensor-model-parallel-size", "--context-parallel-size"
EXPERT = "--expert-model-parallel-size"


class DivisibilityRule(NamedTuple):
    """A number of the model that must be a multiple of a parallel size, times a factor."""

    number_flag: str
    size_flag: str
    factor: int = 1
    is_checked_at_start: bool = True  # otherwise only for configurations that `advise` chooses

    def is_violated(self, number: int, size: int) -> bool:
        """Return whether the size does not divide the number."""
        return number % (self.factor * size) != 0


DIVISIBILITY_RULES = (
    DivisibilityRule("--num-attention-heads", TENSOR),
    DivisibilityRule("--num-query-groups", TENSOR, is_checked_at_start=False),
    DivisibilityRule("--ffn-hidden-size", TENSOR, is_checked_at_start=False),
    DivisibilityRule("--vocab-size", TENSOR, is_checked_at_start=False),
    DivisibilityRule("--num-experts", EXPERT),
    DivisibilityRule("--seq-length", CONTEXT, factor=2),
)


def violated_rules(
    numbers: Mapping[str, int], sizes: Mapping[str, int]
) -> Iterator[DivisibilityRule]:
    """Yield the rules that these numbers violate with these parallel sizes, both by flag."""
    for rule in DIVISIBILITY_RULES:
        if rule.number_flag in numbers and rule.size_flag in sizes:
            if rule.is_violated(numbers[rule.number_flag], sizes[rule.size_flag]):
                yield rule


def _size_violations(command: Command) -> Iterator[Violation]:
    """Yield the violated rules of heads, experts and tokens."""
    rules = [rule for rule in DIVISIBILITY_RULES if rule.is_checked_at_start]
    numbers = {rule.number_flag: command.number(rule.number_flag, 0) for rule in rules}
    sizes = {rule.size_flag: command.number(rule.size_flag, 1) for rule in rules}
    sizes = {flag: size for flag, size in sizes.items() if size > 1}
    for rule in violated_rules(numbers, sizes):
        number, size = numbers[rule.number_flag], sizes[rule.size_flag]
        smaller_sizes = range(size, 0, -1)
        valid_sizes = (valid for valid in smaller_sizes if not rule.is_violated(number, valid))
        times = f"{rule.factor} x " if rule.factor > 1 else ""
        multiple = f"{times}{rule.size_flag} {size}"
        problem = f"{rule.number_flag} {number} is not a multiple of {multiple}"
        yield Violation(problem, f"Set {rule.size_flag} {next(valid_sizes, 1)}")
    has_experts = command.number("--num-experts", 0) > 0
    if has_experts and command.number(TENSOR, 1) > 1 and not command.has("--sequence-parallel"):
        problem = "experts with tensor parallelism require sequence parallelism in training"
        yield Violation(problem, "Add --sequence-parallel")


def check_batch(command: Command, sizes: Sizes) -> None:
    """Raise ScheduleError if the global batch does not divide into microbatches."""
    for violation in _batch_violations(command, sizes, chunks=1):
        raise ScheduleError(str(violation))


def _batch_violations(command: Command, sizes: Sizes, chunks: int) -> Iterator[Violation]:
    """Yield a violated rule of the global batch, with the nearest batch that fulfills all rules."""
    micro, replicas = command.number("--micro-batch-size", 1), sizes.replicas
    step = micro * replicas
    batch = command.number(BATCH, step)
    ranks = sizes.pipeline if chunks > 1 else 1
    group = command.number(_GROUP, ranks) if chunks > 1 else 1
    if group < ranks:
        problem = f"{_GROUP} {group} is below the {ranks} pipeline ranks"
        yield Violation(problem, f"Set {_GROUP} {ranks}")
        group = ranks
    num_microbatches, remainder = divmod(batch, step)
    if remainder:
        problem = (
            f"a global batch of {batch} does not divide into microbatches of {micro} on {replicas} "
            "data-parallel ranks"
        )
    elif _fills_groups(num_microbatches, group, ranks):
        return
    else:
        problem = (
            f"{num_microbatches} microbatches are not a multiple of {group}, which virtual stages "
            f"on {ranks} pipeline ranks require"
        )
    last_group = num_microbatches - num_microbatches % group
    counts = (num_microbatches, num_microbatches + 1, last_group, last_group + group)
    sizes_of_batch = [step * count for count in counts if _fills_groups(count, group, ranks)]
    nearest_batch = min(sizes_of_batch, key=lambda size: (abs(size - batch), -size))
    yield Violation(problem, f"The nearest batch is {BATCH} {nearest_batch}")


def _fills_groups(num_microbatches: int, group: int, ranks: int) -> bool:
    """Return whether the last group of microbatches is complete, or fills the pipeline.

    Stock Megatron's interleaved 1F1B requires this; without virtual stages, group and ranks are 1.
    """
    remainder = num_microbatches % group
    return num_microbatches >= group and (remainder == 0 or remainder >= ranks)
