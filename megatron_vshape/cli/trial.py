"""megatron-vshape trial: run a command as it is and with other schedules, and compare the runs."""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean

from megatron_vshape import __version__
from megatron_vshape.cli.advice_options import compare, prepare_advice
from megatron_vshape.cli.advise import add_keep_argument
from megatron_vshape.cli.dry_run import GpuCount, add_cluster_argument, add_gpus_argument
from megatron_vshape.cli.files import Output, check_target, report_written, write_all
from megatron_vshape.cli.help import OUTPUT, SEARCH, group
from megatron_vshape.cli.options import count
from megatron_vshape.cli.progress import report_progress
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.paper.catalogue import canonical_name
from megatron_vshape.mcore.options import VARIABLE
from megatron_vshape.rehearsal import report
from megatron_vshape.rehearsal.command import launched_gpus
from megatron_vshape.rehearsal.shell_script import SlurmSizes
from megatron_vshape.tuning.advice import check_schedule_flags
from megatron_vshape.tuning.comparison import sizes_text
from megatron_vshape.tuning.configurations import KEEP
from megatron_vshape.tuning.machine import gpu_of_device
from megatron_vshape.tuning.row_command import needs_file, row_command
from megatron_vshape.tuning.training_run import Status
from megatron_vshape.tuning.trial import (
    WARM_UP,
    CommandTrial,
    Launch,
    TrialRow,
    Variant,
    with_schedule,
    without_names,
)
from megatron_vshape.view.numbers import table

_NO_RUN_ENDED, _INTERRUPTED = 1, 130

_OTHER_WEIGHTS = (
    "Without --load, the runs start from other weights: Megatron seeds random numbers by pipeline "
    "rank."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; the other options of advise have their defaults."""
    parser.usage = "megatron-vshape trial [OPTIONS] -- torchrun ... pretrain_gpt.py FLAGS..."
    add_gpus_argument(parser, "(for predictions; default: those of this machine)")
    add_cluster_argument(parser)
    search, output = group(parser, SEARCH), group(parser, OUTPUT)
    names_help = "Schedules to run, as in v-half,auto (default: best stock, best of this package)"
    search.add_argument("--schedules", default="", metavar="NAMES", help=names_help)
    add_keep_argument(parser)
    steps_help = f"Steps of a run; the first {WARM_UP} are not measured (default: 20)"
    search.add_argument("--steps", type=count, default=20, metavar="N", help=steps_help)
    timeout_help = "Time without a step after which a run has hung (default: 10)"
    search.add_argument("--timeout", type=float, default=10, metavar="MINUTES", help=timeout_help)
    into_help = "Directory of trial.json, trial.md and the logs (default: trial)"
    output.add_argument("--into", type=Path, default="trial", metavar="DIR", help=into_help)
    job_help = "SLURM job to write, which runs all of it"
    output.add_argument("--sbatch", type=Path, metavar="FILE.sh", help=job_help)
    values = dict.fromkeys(("model", "grid", "headroom", "vocabulary", "jobs", "megatron", "te"))
    values |= dict.fromkeys(("lora_rank", "lora_targets", "lora_per_expert", "strict", "fetch"))
    parser.set_defaults(command=[], seconds=6.0, imbalance=1.0, **values)


def run(options: argparse.Namespace) -> int:
    """Run the variants, print and write their comparison.

    Returns:
        0, 1 if no run has ended well, or 130 after Ctrl-C.
    """
    if options.steps <= WARM_UP:
        raise ScheduleError(f"--steps {options.steps} are all warm-up: set {WARM_UP + 1} or more")
    if os.environ.get(VARIABLE):
        raise ScheduleError(
            f"{VARIABLE} sets a schedule for all runs: unset it, and add its options as flags"
        )
    launch = Launch.of(options.command)
    if options.sbatch is not None:
        return _write_job(options, launch)
    versions, status = _versions(), 0
    options.into.mkdir(parents=True, exist_ok=True)
    variants = _variants(options, launch, versions)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of a SLURM job that is cancelled
    with report_progress(str) as progress:
        steps, patience_s = options.steps - WARM_UP, 60 * options.timeout
        trial = CommandTrial(launch, variants, steps, patience_s, options.into, progress.update)
        try:
            trial.run()
        except KeyboardInterrupt:
            status = _INTERRUPTED
    rows = list(trial.rows())
    if rows:
        print(_text_of(trial, rows))
        _write(trial, rows, versions)
    if not status and all(row.status != Status.OK for row in rows):
        return _NO_RUN_ENDED
    return status


def _versions() -> dict[str, str]:
    """Return the versions of libraries, the GPUs and their links.

    Another process queries them, because this one would allocate memory of a GPU.
    """
    code = "import json, megatron_vshape.cli.doctor as d; print(json.dumps(dict(d.versions())))"
    versions = json.loads(_output_of(sys.executable, "-c", code) or "{}").items()
    links = re.findall(
        r"^GPU0\b.*?\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", _output_of("nvidia-smi", "topo", "-m"), re.M
    )
    ports = Path("/sys/class/infiniband").glob("*/ports/*/rate")
    rates = Counter(port.read_text().strip() for port in ports)
    network = ", ".join(f"{number} x {rate}" for rate, number in rates.items())
    option_names = [
        ("megatron-vshape", __version__),
        *versions,
        ("GPU link", "".join(links)),
        ("network", network),
    ]
    return {name: text.partition(": ")[0] for name, text in option_names if text}


def _output_of(*command: str) -> str:
    """Return the output of a program, "" if it is missing."""
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout
    return ""


def _variants(
    options: argparse.Namespace, launch: Launch, versions: Mapping[str, str]
) -> list[Variant]:
    """Choose the commands to run, the first of which is today's."""
    if options.gpus is None and options.cluster is None:
        slurm, (number, _) = SlurmSizes.of(launch.launcher), launched_gpus(launch.command)
        if number is None and slurm.processes.isdigit():
            number = int(slurm.processes) * int(slurm.nodes or 1)
        gpu = gpu_of_device(versions.get("CUDA", "").replace(" ", "-"))
        options.gpus = GpuCount(number, gpu) if number and gpu else None
    can_predict = options.gpus is not None or options.cluster is not None
    variants = [Variant("today", launch.command)]
    if options.schedules:
        for name in map(canonical_name, filter(None, options.schedules.split(","))):
            variants.append(Variant(Path(name).stem, with_schedule(launch.command, name)))
        return [*_predicted(options, variants)] if can_predict else variants
    if not can_predict:
        raise ScheduleError(
            "trial chooses schedules by predictions, and the GPUs are not known: add --gpus "
            "NxGPU, as in 128xH100, or --schedules v-half,v-zb"
        )
    search, comparison = compare(options)
    best, file = comparison.best, options.into.resolve() / "plan.json"
    best = comparison.same_sizes if best is not None and best.is_stock else best
    variants = [replace(variants[0], prediction=comparison.today)]
    for name, row in {"best stock": comparison.stock, "best of this package": best}.items():
        if row is not None and row.is_stock == (name == "best stock"):
            if needs_file(row) and row.schedule is not None:
                file.write_text(replace(row.schedule, name="advised").to_json())
            command = row_command(row, search.predictor.subject, str(file))
            if command.flags != launch.command.flags:
                variants.append(Variant(name, command, row))
    return variants


def _predicted(options: argparse.Namespace, variants: Sequence[Variant]) -> Iterator[Variant]:
    """Yield the variants with predictions, except those that are planned during the run."""
    try:
        search = prepare_advice(options, variants[0].subject, KEEP, [])
    except ScheduleError as error:
        print(report.wrap_text(f"No predictions: {error}."))
        yield from variants
        return
    for variant in variants:
        predictor, prediction = replace(search.predictor, subject=variant.subject), None
        with suppress(ScheduleError):
            check_schedule_flags(variant.command)
            prediction = replace(search, predictor=predictor).today()
        yield replace(variant, prediction=prediction)


def _cells(trial: CommandTrial, rows: Sequence[TrialRow]) -> list[list[str]]:
    """Format a row per variant, and a column per figure that is known."""
    heading = ["", "schedule", "step s (quartiles)", "tokens/s/GPU", "x today (rounds)", "loss"]
    cells = [[*heading, "predicted s", "peak GiB by pipeline rank", "predicted GiB"]]
    for row, variant in zip(rows, trial.variants, strict=False):
        config = variant.configuration(1).with_schedule_of(variant.command, row.schedule)
        sizes = sizes_text(config, variant.subject)
        quartiles = [f"{seconds:.3f}" for seconds in row.step_s]
        speedups = ", ".join(f"{speedup:.2f}" for speedup in row.speedups)
        loss = "" if row.loss_difference is None else f"{100 * row.loss_difference:.2g}% apart"
        cells.append(
            [
                row.name,
                ", ".join((row.schedule, *config.features, sizes)),
                f"{quartiles[1]} ({quartiles[0]}-{quartiles[2]})" if quartiles[2:] else row.status,
                f"{row.tokens_per_s_per_gpu:,.0f}" if row.tokens_per_s_per_gpu else "",
                f"{mean(row.speedups):.2f} ({speedups})" if speedups else "",
                "equal" if row.loss_difference == 0 else loss,
                f"{row.predicted_step_s:.3f}" if row.predicted_step_s else "",
                " ".join(map(report.gib, row.peak_bytes)),
                " ".join(map(report.gib, row.predicted_peak_bytes)),
            ]
        )
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    return [list(line) for line in zip(*columns, strict=True)]


def _text_of(trial: CommandTrial, rows: Sequence[TrialRow]) -> str:
    """Format the comparison, and the reasons of failed runs."""
    lines = [table(_cells(trial, rows))]
    lines += [f"{row.name}: {row.status}: {row.reason}" for row in rows if row.reason]
    if any(row.loss_difference for row in rows) and not trial.launch.command.has("--load"):
        lines.append(_OTHER_WEIGHTS)
    return "\n".join(lines)


def _write(trial: CommandTrial, rows: Sequence[TrialRow], versions: Mapping[str, str]) -> None:
    """Write trial.json and trial.md, without paths and without names of data and hosts."""
    command = trial.launch.command
    rows = [replace(row, reason=without_names(row.reason, command)) for row in rows]
    sizes = "--hidden-size --num-experts --seq-length --global-batch-size".split()
    model = {flag[2:].replace("-", "_"): command.number(flag, 0) for flag in sizes}
    content = {
        "versions": versions,
        "gpus": max(run.log.num_ranks for run in trial.runs),
        "model": {"num_layers": command.layers} | model,
        "measured_steps": trial.steps,
        "rows": [asdict(row) for row in rows],
    }
    text = json.dumps(content, indent=1)
    details = f"<details><summary>trial.json</summary>\n\n```json\n{text}\n```\n</details>"
    markdown = f"```text\n{_text_of(trial, rows)}\n```\n\n{details}"
    _write_texts("--into", {trial.folder / "trial.json": text, trial.folder / "trial.md": markdown})


def _write_texts(option: str, texts: Mapping[Path, str]) -> None:
    """Write a text to each file."""
    outputs = [
        Output(option, path, partial(Path.write_text, data=text + "\n"))
        for path, text in texts.items()
    ]
    write_all(outputs)
    report_written(outputs)


def _write_job(options: argparse.Namespace, launch: Launch) -> int:
    """Write the SLURM job that runs this trial, and return 0."""
    check_target("--sbatch", options.sbatch, (".sh", ".sbatch"))
    slurm, launched = SlurmSizes.of(launch.launcher), launch.command.launched
    sizes = {
        "nodes": slurm.nodes or launched.get("--nnodes", "1"),
        "gpus-per-node": slurm.gpus or launched.get("--nproc-per-node"),
        "ntasks-per-node": slurm.tasks,
    }
    words = re.sub(r" --sbatch[ =]('[^']*'|\S+)", "", shlex.join(options.words))
    lines = [
        "#!/usr/bin/env bash",
        "# Add the partition, the account and the time limit of your cluster.",
        *(f"#SBATCH --{name}={size}" for name, size in sizes.items() if size),
        "#SBATCH --exclusive",
        f"exec megatron-vshape {words} -- {shlex.join(options.command)}",
    ]
    _write_texts("--sbatch", {options.sbatch: "\n".join(lines)})
    return 0
