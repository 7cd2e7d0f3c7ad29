"""`megatron-vshape sweep FILE.yaml`: search for the fastest way to train a model on a cluster."""

import argparse
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_vshape.cli.files import (
    check_installed,
    check_targets,
)
from megatron_vshape.cli.hardware import add_headroom_argument, headroom_bytes_of
from megatron_vshape.cli.help import MODEL, OUTPUT, PROGRAM, REQUIRED, SEARCH, group
from megatron_vshape.cli.progress import told
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.fits import HEADROOM

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_vshape.tuning.configurations import Configuration
    from megatron_vshape.tuning.files import Loaded
    from megatron_vshape.tuning.grid import Dropped, Expanded
    from megatron_vshape.tuning.predictor import Prediction, Predictor
    from megatron_vshape.tuning.ranking import Pruned
    from megatron_vshape.tuning.report import Row

NEEDED = ("pydantic", "yaml", "rich")
_TARGETS = {"csv": (".csv",)}
NARROWEST = 132
"""Minimum table width without a terminal."""

NONE_ENDED_WELL = 1
"""Exit status if runs were launched but none succeeded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-vshape sweep FILE.yaml [OPTIONS] [-- pretrain_gpt.py FLAGS...]"
    group(parser, MODEL).add_argument(
        "file", type=Path, metavar="FILE.yaml", help="Sweep file" + REQUIRED
    )
    parser.set_defaults(command=[])  # the words after --
    add_headroom_argument(parser)
    search = group(parser, SEARCH)
    mode = search.add_mutually_exclusive_group()
    mode.add_argument(
        "--predict-only", action="store_true", help="Predict and rank only; needs no cluster"
    )
    mode.add_argument(
        "--dry-run",
        action="store_true",
        help="Print the commands of the runs and write their plans; start none",
    )
    mode.add_argument(
        "--report",
        action="store_true",
        help="Print the results so far, also during the sweep; start none",
    )
    search.add_argument(
        "--retry-failed", action="store_true", help="Repeat runs that failed in an earlier sweep"
    )
    output = group(parser, OUTPUT)
    output.add_argument(
        "--results",
        type=Path,
        metavar="FILE.db",
        help="Results database (default: runs/sweep-NAME/results.db)",
    )
    output.add_argument(
        "--csv", type=Path, metavar="FILE.csv", help="Table of all combinations to write"
    )
    output.add_argument("--verbose", action="store_true", help="Print every dropped combination")
    for flag, words in (
        ("--megatron", "Megatron-LM checkout (default: the installed megatron-core)"),
        ("--te", "Transformer Engine checkout or wheel (default: installed or downloaded)"),
    ):
        group(parser, PROGRAM).add_argument(flag, type=Path, metavar="DIR", help=words)


def run(options: argparse.Namespace) -> int:
    """Predict, launch the promising runs, and print the results."""
    quiet = options.predict_only or options.report
    check_installed("a sweep", "sweep", *NEEDED, *([] if quiet else ["submitit"]))
    _check_targets(options)
    from rich.console import Console

    from megatron_vshape.tuning.files import load_sweep
    from megatron_vshape.tuning.ranking import prune

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    loaded = load_sweep(options.file, options.command)
    if options.report:
        return _report(loaded, console, options)
    if not options.predict_only:
        _check_can_launch(loaded, options.dry_run)
    predictor, predictions = _predict(loaded, console, options)

    chosen = prune(predictions, loaded.sweep.pruning)
    _print_dropped(console, chosen.dropped, "not worth a run", options.verbose)
    if not chosen.run:
        raise ScheduleError(f"{options.file}: {_why_nothing_fits(predictions)}")
    if options.dry_run:
        from megatron_vshape.tuning.launcher import dry_run

        dry_run(loaded, predictor, chosen.run, _results_path(loaded, options).parent, print)
        return 0
    if options.predict_only:
        return _report_predictions(console, loaded, predictions, options)
    return _launch(console, loaded, predictor, predictions, chosen, options)


def _check_can_launch(loaded: "Loaded", dry_run: bool) -> None:
    """Raise ScheduleError if the training script or SLURM is missing, before predicting."""
    script = Path(loaded.sweep.run.script)
    if not script.is_file():
        raise ScheduleError(
            f"{loaded.path}: run.script {script} is no file in {Path.cwd()}: start the sweep from "
            "the checkout, or give the script's whole path"
        )
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing and loaded.sweep.run.executor == "slurm" and not dry_run:
        raise ScheduleError(
            f"{loaded.path}: run.executor is slurm, but {' and '.join(missing)} cannot be found "
            "here: start the sweep where jobs are submitted; --predict-only and --dry-run need none"
        )


def _say(console: "Console", text: str) -> None:
    """Print text verbatim, without markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _check_targets(options: argparse.Namespace) -> None:
    """Raise ScheduleError for files that cannot be written or read, before predicting."""
    check_targets(options, _TARGETS)


def _expand(loaded: "Loaded", options: argparse.Namespace) -> "tuple[Predictor, Expanded]":
    from megatron_vshape.rehearsal.ranks import DryRunConfig
    from megatron_vshape.tuning.counts import Counts
    from megatron_vshape.tuning.grid import expand
    from megatron_vshape.tuning.machine import Machine
    from megatron_vshape.tuning.measured_costs import load_measured
    from megatron_vshape.tuning.predictor import Predictor

    machine, measured = Machine.of(loaded.cluster), load_measured(loaded)
    if not machine.known:
        print(
            f"{loaded.cluster.device.name} is not a known GPU: kernel efficiencies of known GPUs "
            "are assumed; set others with assumptions: in the cluster file"
        )
    kept = headroom_bytes_of(options.headroom, machine.gpu.memory_bytes)
    subject, post_validation = loaded.subject, loaded.sweep.post_validation
    programs = partial(DryRunConfig.of, subject.command, machine.gpu, options.megatron, options.te)
    counts = Counts(subject, machine, programs)
    predictor = Predictor(subject, machine, counts, post_validation, measured, kept)
    expanded = expand(loaded)
    if expanded.note:
        print(expanded.note)
    return predictor, expanded


def _predict(
    loaded: "Loaded", console: "Console", options: argparse.Namespace
) -> "tuple[Predictor, list[Prediction]]":
    predictor, expanded = _expand(loaded, options)
    if options.headroom is None:
        _say(console, f"{HEADROOM:.0%} of every GPU's memory is kept free (set by --headroom)")
    _print_dropped(console, expanded.dropped, "impossible", options.verbose)
    predictions: list[Prediction] = []
    _count(predictor, expanded.possible)
    with _quiet(), told(str) as progress:
        for each in predictor.survey(expanded.possible, loaded.sweep.pruning.margin):
            predictions.append(each)
            progress.say(f"{len(predictions)} of {len(expanded.possible)} combinations predicted")
    return predictor, predictions


def _count(predictor: "Predictor", combinations: "Sequence[Configuration]") -> None:
    """Estimate each distinct configuration of a stage that is not cached, and print the number."""
    from megatron_vshape.tuning.counts import Counts, key_of_count

    if not isinstance(predictor.counts, Counts):
        return
    number = len(set(map(key_of_count, combinations)))
    print(f"{len(combinations)} combinations have stages of {number} shapes, each counted once")
    with told(str) as progress:

        def tell(done: int, total: int) -> None:
            progress.say(f"{done} of {total} ranks rehearsed")

        predictor.counts.count(combinations, tell)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the planner's log line per schedule, for the progress line."""
    logger = logging.getLogger("megatron_vshape")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _print_dropped(
    console: "Console", dropped: "Sequence[Dropped]", what: str, verbose: bool
) -> None:
    kinds: dict[str, list[Dropped]] = {}
    for each in dropped:
        kinds.setdefault(each.kind, []).append(each)
    for kind, members in kinds.items():
        _say(console, f"{len(members)} combinations are {what}: {kind}")
        for each in members if verbose else members[:1]:
            mark = "" if verbose else "such as "
            _say(console, f"    {mark}{each.configuration}: {each.reason}")


def _why_nothing_fits(predictions: "Sequence[Prediction]") -> str:
    closest = min(predictions, key=lambda each: each.peak_bytes or float("inf"))
    return (
        f"none of the {len(predictions)} combinations fits; the closest is "
        f"{closest.configuration}, which {closest.reason}"
    )


def _report_predictions(
    console: "Console",
    loaded: "Loaded",
    predictions: "Sequence[Prediction]",
    options: argparse.Namespace,
) -> int:
    from megatron_vshape.tuning.report import best_rows, memory_lines, rows_of

    rows = rows_of(predictions)
    title = f"{loaded.subject.name} on {loaded.cluster.name}: the best predicted of each schedule"
    _print_tables(console, title, best_rows(rows))
    for line in memory_lines(rows):
        _say(console, line)
    _write_csv(rows, options.csv)
    return 0


def _write_csv(rows: "Sequence[Row]", csv: Path | None) -> None:
    from megatron_vshape.tuning.report import write_csv

    if csv is not None:
        write_csv(rows, csv)


def _launch(
    console: "Console",
    loaded: "Loaded",
    predictor: "Predictor",
    predictions: "Sequence[Prediction]",
    chosen: "Pruned",
    options: argparse.Namespace,
) -> int:
    from megatron_vshape.tuning.launcher import Launcher
    from megatron_vshape.tuning.progress import RunLog
    from megatron_vshape.tuning.report import rows_of
    from megatron_vshape.tuning.results import key_of, open_results

    path = _results_path(loaded, options)
    keys = {each: key_of(each.configuration, loaded, predictor.measured) for each in predictions}
    with open_results(path) as results:
        done = results.ended(options.retry_failed)
        before = sum(keys[each] in done for each in chosen.run)
        progress = RunLog(partial(_say, console), len(chosen.run), before)
        launcher = Launcher(loaded, predictor, results, path.parent, progress)
        launcher.run(chosen.run, options.retry_failed)
        found = results.read(set(keys.values()))
    logs = {each.configuration: path.parent / key for each, key in keys.items()}
    # Results of earlier sweeps are shown even if this one would not launch these runs.
    shown = {each.configuration for each in chosen.run} | {each.configuration for each in found}
    rows = rows_of([each for each in predictions if each.configuration in shown], found)
    _show(console, loaded, rows, logs)
    csv = options.csv or path.parent / "results.csv"
    _write_csv(rows, csv)
    _say(console, f"results: {path}, {csv}")
    if found and not any(row.best_mfu for row in rows):
        _say(console, "no run has ended well")
        return NONE_ENDED_WELL
    return 0


def _report(loaded: "Loaded", console: "Console", options: argparse.Namespace) -> int:
    """Print the stored results of this sweep, without predicting."""
    from megatron_vshape.tuning.report import prediction_of, rows_of
    from megatron_vshape.tuning.results import key_of, read_results

    path = _results_path(loaded, options)
    predictor, expanded = _expand(loaded, options)
    keys = {each: key_of(each, loaded, predictor.measured) for each in expanded.possible}
    with read_results(path) as results:
        wanted = set(keys.values())
        found, in_flight = results.read(wanted), results.num_in_flight(wanted)
    logs = {each: path.parent / key for each, key in keys.items()}
    rows = rows_of([prediction_of(each, predictor) for each in found], found)
    _show(console, loaded, rows, logs)
    _write_csv(rows, options.csv)
    _say(console, f"{len(found)} runs have ended, {in_flight} are in flight: {path}")
    return 0


def _results_path(loaded: "Loaded", options: argparse.Namespace) -> Path:
    path: Path | None = options.results
    return path or Path("runs") / f"sweep-{loaded.sweep.name}" / "results.db"


def _show(
    console: "Console",
    loaded: "Loaded",
    rows: "list[Row]",
    folders: "Mapping[Configuration, Path]",
) -> None:
    """Print the table, the failures with their logs, and the quality of the predictions."""
    from megatron_vshape.tuning.report import ranking_line

    rows.sort(key=lambda row: (row.configuration.workload, -(row.mfu or 0.0)))
    title = f"{loaded.subject.name} on {loaded.cluster.name}: measured (predicted)"
    _print_tables(console, title, rows)
    for row in rows:
        if row.note and row.verdict != "ok":
            _say(console, f"{row.verdict}: {row.configuration}: {row.note}")
            for log in sorted(folders[row.configuration].glob("node*.log")):
                _say(console, f"    {log}")
    console.print(ranking_line(rows))


def _print_tables(console: "Console", title: str, rows: "Sequence[Row]") -> None:
    from megatron_vshape.tuning.report import result_tables

    _say(console, title)
    for table in result_tables(rows):
        console.print(table)
