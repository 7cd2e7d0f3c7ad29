"""Predict, launch and report a sweep; imports the extra [sweep]."""

import argparse
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron_vshape.cli.dry_run import fetch_missing, headroom_bytes_of
from megatron_vshape.cli.progress import report_progress
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.gpus import HEADROOM
from megatron_vshape.rehearsal.ranks import DryRunConfig
from megatron_vshape.tuning import predictor as predicting
from megatron_vshape.tuning.configurations import Configuration
from megatron_vshape.tuning.files import Loaded, load_sweep
from megatron_vshape.tuning.grid import Dropped, Expanded, expand_grid, group_by_kind
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import Prediction, Predictor, key_of_count
from megatron_vshape.tuning.ranking import Pruned, prune_predictions
from megatron_vshape.tuning.report import (
    Row,
    best_rows,
    memory_lines,
    prediction_of,
    ranking_line,
    result_tables,
    rows_of,
    write_csv,
)
from megatron_vshape.tuning.results import key_of, open_results, read_results

_ALL_RUNS_FAILED = 1
"""Exit status if runs were launched but none succeeded."""


def run(options: argparse.Namespace) -> int:
    """Predict, launch the promising runs, and print the results."""
    loaded = load_sweep(options.file, options.command)
    if options.report:
        return _report(loaded, options)
    if not options.predict_only:
        _check_can_launch(loaded, options.dry_run)
    predictor, predictions = _predict(loaded, options)

    chosen = prune_predictions(predictions, loaded.sweep.pruning)
    _print_dropped(chosen.dropped, "not worth a run", options.verbose)
    if not chosen.run:
        closest = min(predictions, key=lambda prediction: prediction.peak_bytes or float("inf"))
        raise ScheduleError(
            f"{options.file}: none of the {len(predictions)} combinations fits; the closest is "
            f"{closest.configuration}, which {closest.reason}"
        )
    if options.dry_run:
        from megatron_vshape.tuning.launcher import dry_run  # imports submitit

        dry_run(loaded, chosen.run, _results_path(loaded, options).parent, print)
        return 0
    if not options.predict_only:
        return _launch(loaded, predictor, predictions, chosen, options)
    rows = rows_of(predictions)
    _print_tables(loaded, "the best predicted of each schedule", best_rows(rows))
    for line in memory_lines(rows):
        print(line)
    if options.csv is not None:
        write_csv(rows, options.csv)
    return 0


def _check_can_launch(loaded: Loaded, dry_run: bool) -> None:
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


def _expand(loaded: Loaded, options: argparse.Namespace) -> tuple[Predictor, Expanded]:
    machine = Machine.of(loaded.cluster)
    if not machine.has_measured_rates:
        print(
            f"{loaded.cluster.device.name} is not a known GPU: kernel efficiencies of known GPUs "
            "are assumed; set others with assumptions: in the cluster file"
        )
    command = loaded.subject.command
    predictor = Predictor(
        loaded.subject,
        machine,
        predicting.Counts(
            loaded.subject,
            machine,
            partial(DryRunConfig.of, command, machine.gpu, options.megatron, options.te),
        ),
        loaded.sweep.post_validation,
        headroom_bytes_of(options.headroom, machine.gpu.memory_bytes),
    )
    return predictor, expand_grid(loaded, machine)


def _predict(loaded: Loaded, options: argparse.Namespace) -> tuple[Predictor, list[Prediction]]:
    fetch_missing(options, loaded.subject.command)
    predictor, expanded = _expand(loaded, options)
    if options.headroom is None:
        print(f"{HEADROOM:.0%} of every GPU's memory is kept free (set by --headroom)")
    _print_dropped(expanded.dropped, "impossible", options.verbose)
    _count(predictor, expanded.possible)
    predictions: list[Prediction] = []
    with _quiet(), report_progress(str) as progress:
        for prediction in predictor.survey(expanded.possible, loaded.sweep.pruning.margin):
            predictions.append(prediction)
            progress.update(
                f"{len(predictions)} of {len(expanded.possible)} combinations predicted"
            )
    return predictor, predictions


def _count(predictor: Predictor, combinations: Sequence[Configuration]) -> None:
    """Estimate each distinct configuration of a stage that is not cached, and print the number."""
    assert isinstance(predictor.counts, predicting.Counts)
    number = len(set(map(key_of_count, combinations)))
    print(f"{len(combinations)} combinations have stages of {number} shapes, each counted once")
    with report_progress(str) as progress:
        predictor.counts.count(
            combinations,
            lambda num_done, total: progress.update(f"{num_done} of {total} ranks rehearsed"),
        )


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


def _print_dropped(dropped: Sequence[Dropped], label: str, verbose: bool) -> None:
    for kind, members in group_by_kind(dropped).items():
        print(f"{len(members)} combinations are {label}: {kind}")
        for rejection in members if verbose else members[:1]:
            print(
                f"    {'' if verbose else 'such as '}{rejection.configuration}: {rejection.reason}"
            )


def _launch(
    loaded: Loaded,
    predictor: Predictor,
    predictions: Sequence[Prediction],
    chosen: Pruned,
    options: argparse.Namespace,
) -> int:
    from megatron_vshape.tuning.launcher import Launcher  # imports submitit

    path = _results_path(loaded, options)
    keys = {
        prediction.configuration: key_of(prediction.configuration, loaded)
        for prediction in predictions
    }
    with open_results(path) as results:
        say = partial(print, flush=True)
        launcher = Launcher(loaded, predictor, results, path.parent, say)
        launcher.run(chosen.run, options.retry_failed)
        run_results = results.read(set(keys.values()))
    # Results of earlier sweeps are shown even if this one would not launch these runs.
    shown = {run.configuration for run in chosen.run} | {run.configuration for run in run_results}
    rows = rows_of(
        [prediction for prediction in predictions if prediction.configuration in shown], run_results
    )
    _show(loaded, rows, {config: path.parent / key for config, key in keys.items()})
    table = options.csv or path.parent / "results.csv"
    write_csv(rows, table)
    print(f"results: {path}, {table}")
    if run_results and not any(row.best_mfu for row in rows):
        print("no run has ended well")
        return _ALL_RUNS_FAILED
    return 0


def _report(loaded: Loaded, options: argparse.Namespace) -> int:
    """Print the stored results of this sweep, without predicting."""
    path = _results_path(loaded, options)
    predictor, expanded = _expand(loaded, options)
    keys = {config: key_of(config, loaded) for config in expanded.possible}
    with read_results(path) as results:
        run_keys = set(keys.values())
        run_results, in_flight = results.read(run_keys), results.num_in_flight(run_keys)
    rows = rows_of([prediction_of(result, predictor) for result in run_results], run_results)
    _show(loaded, rows, {config: path.parent / key for config, key in keys.items()})
    if options.csv is not None:
        write_csv(rows, options.csv)
    print(f"{len(run_results)} runs have ended, {in_flight} are in flight: {path}")
    return 0


def _results_path(loaded: Loaded, options: argparse.Namespace) -> Path:
    path: Path | None = options.results
    return path or Path("runs") / f"sweep-{loaded.sweep.name}" / "results.db"


def _show(loaded: Loaded, rows: list[Row], folders: Mapping[Configuration, Path]) -> None:
    """Print the table, the failures with their logs, and the quality of the predictions."""
    rows.sort(key=lambda row: (row.configuration.workload, -row.best_mfu, str(row.configuration)))
    _print_tables(loaded, "measured (predicted)", rows)
    for row in rows:
        if row.note and row.verdict != "ok":
            print(f"{row.verdict}: {row.configuration}: {row.note}")
            for log in sorted(folders[row.configuration].glob("node*.log")):
                print(f"    {log}")
    print(ranking_line(rows))


def _print_tables(loaded: Loaded, title: str, rows: Sequence[Row]) -> None:
    print(f"{loaded.subject.name} on {loaded.cluster.name}: {title}")
    for text in result_tables(rows):
        print(text + "\n")
