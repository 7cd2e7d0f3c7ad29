"""Options of dry runs, for rehearse, advise and sweep: GPUs, free memory, Python sources."""

import argparse
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_vshape.cli.files import check_installed
from megatron_vshape.cli.help import MEMORY, MODEL, OUTPUT, PROGRAM, group
from megatron_vshape.cli.options import headroom_of
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.layout.sizes import parameters_of
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.gpus import GPUS, HEADROOM, Gpu
from megatron_vshape.rehearsal.rank_job import DEFAULT_TARGETS, LoraConfig
from megatron_vshape.rehearsal.ranks import DryRunConfig, missing_sources
from megatron_vshape.rehearsal.report import WIDTH
from megatron_vshape.rehearsal.sources import (
    MissingSourceError,
    PythonSource,
    cache,
    fetch,
    missing_text,
)
from megatron_vshape.tuning.configurations import SweepError
from megatron_vshape.tuning.machine import Machine


@dataclass(frozen=True, slots=True)
class GpuCount:
    """GPUs of an option: a number, a type, or both."""

    number: int | None
    name: str | None = None

    @classmethod
    def of(cls, text: str) -> "GpuCount":
        """Parse 128xH100 or 128; names in any case."""
        number, times, name = text.lower().partition("x")
        if times and not number.isdigit() and name.isdigit():
            number, name = name, number  # H100x128
        if not number.isdigit() or not int(number):
            raise argparse.ArgumentTypeError(
                f"{text!r:.40} is not a number, an x and a GPU, as in 128xH100"
            )
        return cls(int(number), gpu_name(name) if times else None)


def gpu_name(text: str) -> str:
    """Parse the name of a GPU, in any case and with underscores."""
    name = text.lower().replace("_", "-")
    if name not in GPUS:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no supported GPU: {', '.join(sorted(GPUS))}"
        )
    return name


def add_gpus_argument(parser: argparse.ArgumentParser, explanation: str) -> None:
    """Add --gpus."""
    group(parser, MODEL).add_argument(
        "--gpus", type=GpuCount.of, metavar="NxGPU", help=f"GPUs, as in 128xH100 {explanation}"
    )


def add_cluster_argument(parser: argparse.ArgumentParser) -> None:
    """Add --cluster."""
    group(parser, MODEL).add_argument(
        "--cluster",
        type=Path,
        metavar="FILE.yaml",
        help="Cluster file of the GPUs, as for sweep (instead of a GPU type)",
    )


def add_headroom_argument(parser: argparse.ArgumentParser) -> None:
    """Add --headroom."""
    group(parser, MEMORY).add_argument(
        "--headroom",
        metavar="SHARE|XGiB",
        help=f"GPU memory to keep free: 5%%, 0.05 or 4GiB (default: {HEADROOM:.0%}%)",
    )


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the training command and the libraries that run it."""
    group(parser, MODEL).add_argument(
        "--model",
        metavar="NAME|FILE",
        help="Model instead of its flags: preset (qwen3-8b), name on Hugging Face, or config.json",
    )
    group(parser, MODEL).add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="Expert load relative to balanced routing (default: 1.0)",
    )
    group(parser, MODEL).add_argument(
        "--vocabulary",
        type=positive,
        metavar="N",
        help="Tokens of the tokenizer, if not in the command",
    )
    group(parser, MODEL).add_argument(
        "--lora-rank",
        type=positive,
        metavar="R",
        help="Rank of LoRA adapters (default: none)",
    )
    group(parser, MODEL).add_argument(
        "--lora-targets",
        metavar="NAMES",
        help=f"Linear layers with adapters, or all-linear (default: {','.join(DEFAULT_TARGETS)})",
    )
    group(parser, MODEL).add_argument(
        "--lora-per-expert",
        action="store_true",
        help="One adapter per expert (default: one for a rank's experts)",
    )
    group(parser, MODEL).add_argument(
        "--strict",
        action="store_true",
        help="Reject flags unknown to Megatron's parser",
    )
    group(parser, PROGRAM).add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="Ranks to estimate in parallel (default: CPU cores)",
    )
    add_source_arguments(parser)
    group(parser, OUTPUT).add_argument(
        "--json", type=Path, metavar="FILE.json", help="All results to write"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def command_with_model(options: argparse.Namespace) -> Command:
    """Read the command (words, script or file: `read_command`), preceded by its model's flags.

    The flags of the model are printed. The model is that of --model, or the one that a framework's
    command names.

    Raises:
        ScheduleError: the model or the command cannot be read, or both have a model.
    """
    has_command = options.model is None or bool(options.command)
    try:
        command = read_command(options.command) if has_command else Command("", ())
    except MissingSourceError as error:  # Megatron's parser, for a framework's settings
        _fetch_all(options, [error.source])
        command = read_command(options.command)
    if command.layers and options.model is not None:
        raise ScheduleError(
            f"--model {options.model} and the command both have a model: remove one of them"
        )
    name = options.model or ("" if command.layers else command.model_name)
    if not name:
        return command
    check_installed("--model", "estimate", "pydantic", "yaml")
    from megatron_vshape.tuning.files import load_model
    from megatron_vshape.tuning.model_names import find_model

    subject = load_model(find_model(name))
    notes = command.notes
    if not command.has("--seq-length"):
        notes += (f"Sequences of {_LENGTH:,} tokens are assumed: set --seq-length.",)
    length = command.number("--seq-length", _LENGTH)
    positions = max(length, subject.command.number("--max-position-embeddings", 0))
    model = subject.command.having(seq_length=length, max_position_embeddings=positions)
    model = model.having(bf16=None) if command.has("--fp16") else model
    if options.model is None:  # not in the defaults of frameworks
        model = model.without_predicting().having(moe_permute_fusion=None)
    total, active, _ = parameters_of(model.option, subject.vocabulary)
    lines = textwrap.wrap(shlex.join(model.flags), WIDTH - 4, break_on_hyphens=False)
    print(
        f"{subject.name}: {total * 1e-9:.1f}B parameters, {active * 1e-9:.1f}B active. Flags, to "
        "edit and give after -- instead of --model:\n  " + " \\\n  ".join(lines) + "\n"
    )
    has_script = any(word.endswith(".py") for word in options.command)
    script = command.script if has_script else subject.command.script
    flags = (*model.flags, *command.flags)
    return replace(command, script=script, flags=flags, model_name=name, notes=notes)


_LENGTH = 4096
"""Sequence length of a model without a command that sets it."""


def with_batch(command: Command, gpus: int) -> Command:
    """Set the batch of --model unless given: four sequences per GPU, or one above 8192 tokens."""
    microbatch = command.number("--micro-batch-size", 1)
    command = command.having(micro_batch_size=microbatch)
    if command.has("--global-batch-size"):
        return command
    per_gpu = 4 if command.number("--seq-length", 0) <= 8192 else 1
    return command.having(global_batch_size=per_gpu * gpus * microbatch)


def dry_run_config(options: argparse.Namespace, command: Command, gpu: Gpu) -> DryRunConfig:
    """Find the programs of a command's dry run, by the options of `add_program_arguments`."""
    return DryRunConfig.of(
        command,
        gpu,
        options.megatron,
        options.te,
        options.jobs,
        options.vocabulary,
        options.imbalance,
        options.strict,
        _lora_of(options) or command.lora,
    )


def _lora_of(options: argparse.Namespace) -> LoraConfig | None:
    targets = tuple((options.lora_targets or "").replace(",", " ").split())
    if options.lora_rank is not None:
        return LoraConfig(options.lora_rank, targets, options.lora_per_expert)
    if targets or options.lora_per_expert:
        raise ScheduleError("--lora-targets and --lora-per-expert need a rank: add --lora-rank 8")
    return None


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number above 0")
    return number


def headroom_bytes_of(text: str | None, memory_bytes: float) -> float:
    """Return the memory of a GPU that --headroom keeps free, in bytes.

    Raises:
        ScheduleError: the text is neither a share nor GiB, or nothing would be left.
    """
    return headroom_of(text or f"{HEADROOM:.0%}", memory_bytes, in_bytes=True)


def machine_of(options: argparse.Namespace) -> Machine:
    """Return the GPUs of --gpus or --cluster.

    Raises:
        ScheduleError: neither or both are given, the GPU is unknown, or the file cannot be read.
    """
    if (options.gpus is None) == (options.cluster is None):
        raise ScheduleError("--gpus NxGPU, as in 128xH100, or --cluster FILE is required, not both")
    if options.cluster is not None:
        return of_cluster(options.cluster)
    number, name = options.gpus.number, options.gpus.name
    if name is None:
        raise ScheduleError(
            f"--gpus {number} has no type of GPU, as in {number}xH100; supported GPUs: "
            f"{', '.join(sorted(GPUS))}"
        )
    return Machine(GPUS[name], number)


def of_cluster(path: Path) -> Machine:
    """Read the GPUs with their links from a cluster file.

    Raises:
        ScheduleError: the file cannot be read, or sets an unknown value.
    """
    try:
        from megatron_vshape.tuning.files import Cluster, load
    except ImportError as error:
        raise ScheduleError(
            f"--cluster needs {error.name}: pip install 'megatron-vshape[sweep]'"
        ) from None
    try:
        return Machine.of(load(path, Cluster))
    except SweepError as error:
        raise ScheduleError(f"--cluster {error}") from None


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the Python sources of a dry run."""
    program = group(parser, PROGRAM)
    program.add_argument(
        "--megatron",
        type=Path,
        metavar="DIR",
        help="Megatron-LM checkout (default: installed or downloaded megatron-core)",
    )
    program.add_argument(
        "--te",
        type=Path,
        metavar="DIR",
        help="Transformer Engine checkout or wheel (default: installed or downloaded)",
    )
    program.add_argument(
        "--fetch",
        action="store_true",
        help="Download Megatron's and Transformer Engine's Python if missing (3.6 MB)",
    )
    program.add_argument(  # the name in 0.2
        "--fetch-te", dest="fetch", action="store_true", help=argparse.SUPPRESS
    )


def fetch_missing(options: argparse.Namespace, command: Command) -> None:
    """Download missing sources of a dry run, if --fetch is set or the user agrees.

    Raises:
        ScheduleError: Sources are missing and not to be downloaded, or a download failed.
    """
    _fetch_all(options, missing_sources(command, options.megatron, options.te))


def _fetch_all(options: argparse.Namespace, missing: Sequence[PythonSource]) -> None:
    if missing and not options.fetch and not _is_agreed(missing):
        raise ScheduleError(missing_text([*missing]))
    for source in missing:
        print(f"{source}: {fetch(source)}", file=sys.stderr, flush=True)


def _is_agreed(missing: Sequence[PythonSource]) -> bool:
    """Ask on a terminal; otherwise nobody can answer."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    names = " and ".join(map(str, missing))
    question = f"Download the Python of {names} to {cache()}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
