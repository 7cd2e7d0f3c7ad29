"""Compare estimates with the memory and step time that ms-swift states for its Megatron examples.

    python benchmarks/swift_examples.py [--checkout DIR] [--list] [NAME ...]

The scripts of modelscope/ms-swift in examples/ are read as by `rehearse`. Their comments before the
command state the figures, as in "# 2 * 62GiB, 5.10s/it"; 80GiB may be the memory of the GPU instead
of the peak. Most do not name the GPU; ms-swift's documentation names the A800 for two of them.
Examples without packing train on the tokens of their samples only, so that their number is assumed
here (~). The attention of packed samples ends at their borders: a window of half their assumed
length, after the slash, has the same work. The last column names parts that are not estimated.
"""

from __future__ import annotations

import argparse
import io
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from script_coverage import clone

from megatron_vshape.cli.dry_run import command_with_model
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command, Sizes, launched_gpus, sizes_of
from megatron_vshape.rehearsal.gpus import GPUS, Gpu
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import FailedRank, RankReport
from megatron_vshape.rehearsal.ranks import DryRunConfig, rehearse_all
from megatron_vshape.rehearsal.simulated import estimate_step
from megatron_vshape.rehearsal.start_rules import check_model, violations_of
from megatron_vshape.tuning.configurations import SweepError
from megatron_vshape.tuning.model_names import find_model

SAMPLE_TOKENS = {
    "AI-ModelScope/alpaca-gpt4-data-zh": 170,
    "AI-ModelScope/LongAlpaca-12k": 8000,
    "ZhipuAI/LongWriter-6k": 8000,
    "liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT": 1000,
    "swift/Chinese-Qwen3-235B-2507-Distill-data-110k-SFT": 4000,
    "swift/Chinese-Qwen3-235B-Thinking-2507-Distill-data-110k-SFT": 4000,
    "swift/Qwen3-SFT-Mixin": 1000,
}
"""Assumed mean tokens of a sample, by the first data set of an example."""
OTHER_TOKENS = 500
SHORT_LENGTH, SHORT_TOKENS = 2048, 1000
"""Assumed mean of long samples if --max_length leaves the short ones of them."""

DOCUMENTED_GPUS = {"sft": "a100", "multimodal/dense/full": "a100", "multimodal/dense/lora": "a100"}
"""GPUs in ms-swift's documentation (Quick-start.md, Multimodal-Model.md), by example."""
DOCUMENTED_SECONDS = {"base_to_chat": 9.04}
"""Time of a step in Quick-start.md, if the script has none."""
DEFAULT_GPU, LARGE_GPU = "a800", "h20"
"""The second one for FP8, or for more memory than the first one has."""

CHANGES: dict[str, Callable[[Command], Command]] = {
    "full": lambda command: replace(command, lora=None),
    "BF16": lambda command: command.without(lambda flag: flag.startswith("--fp8")),
    "adam(w)": lambda command: command.without("--optimizer".__eq__),
}
"""Changes of a script for the figures of another run, by the word before them."""
OTHER_RUNS = ("ZeRO3", "fa2")
"""Words before the figures of runs without Megatron, or with other kernels."""

_COMMAND = re.compile(r"(?m)^[ \t]*megatron (?:sft|pt|rlhf)\b(?:.*\\\n)*.*")
_MEMORY = re.compile(r"^#(?: ([\w()-]+):)?(?: |.* )(?:(\d+) \* )?(\d+)(GiB|GB)\b(?! Ascend)")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?) ?s/it")
_GPU = re.compile(r"(?mi)^#.*\b(A100|A800|H20|H100|H200|H800)\b")
_ENCODER = re.compile(r"(?m)^(vision|text|thinker)_config:")


@dataclass(frozen=True)
class Figures:
    """Memory and time in a comment of a script."""

    label: str  # of the run; empty: the script's
    gpus: int | None
    gib: float
    seconds: float | None


@dataclass(frozen=True)
class Example:
    """A run of a script, and its stated figures."""

    name: str
    figures: Figures
    command: Command
    sizes: Sizes
    gpu: Gpu
    tokens: str
    omitted: str  # parts that are not estimated

    def jobs(self) -> list[RankJob]:
        """Return the jobs of all pipeline ranks."""
        config = self.config()
        stages = range(self.sizes.pipeline)
        return [config.job(self.command, self.sizes, stage, self.name) for stage in stages]

    def config(self) -> DryRunConfig:
        """Return the programs and the settings of the dry run."""
        return DryRunConfig.of(self.command, self.gpu, jobs=1, lora=self.command.lora)


def main() -> None:
    """Estimate the examples, all or these, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="Examples (default: all)")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="Of ms-swift, else cloned")
    parser.add_argument("--list", action="store_true", help="Print names and assumptions only")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # arguments without effect on memory and time
    with tempfile.TemporaryDirectory() as folder:
        checkout = options.checkout or clone("modelscope/ms-swift", Path(folder))
        examples = {example.name: example for example in read_examples(checkout, options.names)}
    print(
        f"{'example':36s} {'GPUs':7s} {'tokens':>11s}   GiB: stated, estimated   "
        "s/it: stated, estimated   not estimated"
    )
    if options.list:
        for example in examples.values():
            line = f"{_heading(example)}{example.figures.gib:14.0f}   {example.omitted}"
            print(line.rstrip())
    elif examples:
        estimate(examples)


def read_examples(checkout: Path, names: Sequence[str]) -> Iterator[Example]:
    """Read the scripts that state memory; print the reasons for those that cannot be estimated."""
    folder = checkout / "examples"
    for script in sorted(folder.rglob("*.sh")):
        text = script.read_text()
        match = _COMMAND.search(text)
        if match is None:
            continue
        for figures in figures_of(text[: match.start()]):
            name = str(script.relative_to(folder).with_suffix("")).removeprefix("megatron/")
            name += f" ({figures.label})" if figures.label in CHANGES else ""
            seconds = figures.seconds or DOCUMENTED_SECONDS.get(name)
            if figures.label in OTHER_RUNS or (names and name not in names):
                continue
            try:
                yield read_example(name, script, replace(figures, seconds=seconds))
            except (ScheduleError, SweepError) as error:
                print(f"{name}: {str(error).replace(str(script), 'the script'):.200}", flush=True)


def figures_of(comments: str) -> Iterator[Figures]:
    """Yield the figures in the comments before a command."""
    for line in comments.splitlines():
        if match := _MEMORY.match(line):
            label, gpus, memory, unit = match.groups()
            seconds = _SECONDS.search(line)
            yield Figures(
                label or "",
                int(gpus) if gpus else None,
                int(memory) / (1.0737 if unit == "GB" else 1),
                float(seconds[1]) if seconds else None,
            )


def read_example(name: str, script: Path, figures: Figures) -> Example:
    """Read a script, with the tokens of its microbatches and its GPU.

    Raises:
        ScheduleError: the model is unknown, or the script cannot be read.
        SweepError: the model's file cannot be read.
    """
    with redirect_stdout(io.StringIO()):  # flags of the model
        command = command_with_model(argparse.Namespace(model=None, command=[str(script)]))
    check_model(command)
    command = CHANGES.get(figures.label, lambda unchanged: unchanged)(command)
    text = script.read_text()
    command, tokens = with_sample_tokens(command, text)
    sizes = sizes_of(command, launched_gpus(command)[0] or figures.gpus)
    if violations := violations_of(command, sizes):
        raise ScheduleError(". ".join(map(str, violations)))
    has_encoder = _ENCODER.search(find_model(command.model_name).read_text())
    omitted = "image encoder" if has_encoder else ""
    named = _GPU.search(text)
    is_large = command.has("--fp8-format") or figures.gib * 2**30 > GPUS[DEFAULT_GPU].memory_bytes
    gpu = DOCUMENTED_GPUS.get(name, LARGE_GPU if is_large else DEFAULT_GPU)
    gpu = named[1].lower() if named else gpu
    return Example(name, figures, command, sizes, GPUS[gpu], tokens, omitted)


def with_sample_tokens(command: Command, text: str) -> tuple[Command, str]:
    """Set the assumed tokens of a microbatch; return them for the table as well."""
    length = command.number("--seq-length", 0)
    dataset = re.search(r"--dataset\s+'?([^\s'#:]+)", text)
    sample = SAMPLE_TOKENS.get(dataset[1] if dataset else "", OTHER_TOKENS)
    sample = min(sample, SHORT_TOKENS if length <= SHORT_LENGTH else length)
    if "--packing true" in text:
        # Attention within samples: a token sees half of its sample on average.
        return command.having(window_size=f"{sample // 2},0"), f"{length}/{sample}"
    samples = command.number("--micro-batch-size", 1)
    if "--padding_free false" in text:  # padded to the longest sample, assumed twice the mean
        padded = min(2 * sample, length)
        return command.having(seq_length=padded), f"~{samples}x{padded}"
    batch = command.number("--global-batch-size", samples) // samples
    command = command.having(micro_batch_size=1, global_batch_size=batch)
    return command.having(seq_length=samples * sample), f"~{samples * sample}"


def estimate(examples: dict[str, Example]) -> None:
    """Print the line of an example when all its ranks are estimated."""
    jobs = [job for example in examples.values() for job in example.jobs()]
    programs = next(iter(examples.values())).config().programs
    waiting = Counter(job.name for job in jobs)
    reports: dict[str, list[RankReport]] = {}
    for result in rehearse_all(programs, jobs):  # one process for all imports
        if isinstance(result, FailedRank):
            print(f"{result.name}: {result.error}", flush=True)
            continue
        ranks = reports.setdefault(result.name, [])
        ranks.append(result)
        if len(ranks) == waiting[result.name]:
            example = examples[result.name]
            line = _heading(example) + " ".join(_cells(example, ranks))
            print(line.rstrip(), flush=True)


def _heading(example: Example) -> str:
    gpus = f"{example.sizes.world}x{example.gpu.name}"
    return f"{example.name:36s} {gpus:7s} {example.tokens:>11s}"


def _cells(example: Example, reports: list[RankReport]) -> Iterator[str]:
    reports.sort(key=lambda report: report.stage)
    gib = max(report.memory.reserved_bytes for report in reports) / 2**30
    stride = example.sizes.stage_stride
    seconds = estimate_step(reports, example.command, example.gpu, stride).seconds
    stated = example.figures
    yield f"{stated.gib:14.0f} {gib:10.1f} {gib / stated.gib - 1:+5.0%}"
    if stated.seconds is None:
        yield f"{'-':>9} {seconds:10.2f}      "
    else:
        yield f"{stated.seconds:9.2f} {seconds:10.2f} {seconds / stated.seconds - 1:+5.0%}"
    yield f"  {example.omitted}"


if __name__ == "__main__":
    main()
