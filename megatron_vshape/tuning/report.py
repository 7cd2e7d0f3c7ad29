"""Report of a sweep: tables and CSV."""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vshape.tuning.configurations import Configuration
from megatron_vshape.tuning.predictor import Prediction, Predictor, RankPeak, Verdict
from megatron_vshape.tuning.ranking import kendall_tau
from megatron_vshape.tuning.results import Outcome, Result
from megatron_vshape.tuning.training_run import Status
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import GIB, table

HEADING = ["schedule", "MFU %", "step s", "bubble %", "peak GiB", "DP TP PP CP mbs"]


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration with its prediction and, after a run, its result."""

    prediction: Prediction
    result: Result | None = None

    @property
    def configuration(self) -> Configuration:
        """The configuration."""
        return self.prediction.configuration

    @property
    def outcome(self) -> Outcome:
        """Measurements; empty before a run."""
        return Outcome(Status.OK) if self.result is None else self.result.outcome

    @property
    def verdict(self) -> str:
        """Status of the run, or the prediction."""
        if self.result is None:
            return f"predicted {self.prediction.verdict}"
        return self.outcome.status.value

    @property
    def best_mfu(self) -> float:
        """Measured MFU; predicted MFU if it has not run; otherwise 0."""
        return (self.prediction if self.result is None else self.result).mfu or 0.0

    @property
    def note(self) -> str:
        """Last line of the log of a failed run, or the reason of the prediction."""
        return (self.outcome.log_tail.splitlines() or [self.prediction.reason])[-1]


def rows_of(predictions: Iterable[Prediction], results: Iterable[Result] = ()) -> list[Row]:
    """Return one row per prediction, with measurements where there are any."""
    measured = {result.configuration: result for result in results}
    return [Row(prediction, measured.get(prediction.configuration)) for prediction in predictions]


def prediction_of(result: Result, predictor: Predictor) -> Prediction:
    """Return the prediction that was recorded before a run."""
    config, step_s = result.configuration, result.predicted_step_s
    mfu = None if step_s is None else predictor.mfu(config, step_s)
    peak_bytes, bubble = result.predicted_peak_bytes, result.predicted_bubble
    return Prediction(config, Verdict.RUNS, peak_bytes, step_s, mfu, bubble)


def _by_rank(ranks: Sequence[RankPeak]) -> dict[str, str]:
    """Format the predicted memory of every rank in GiB: the sum, and its parts."""
    parts = {
        "all": [sum(peak) for peak in ranks],
        "parameters, states": [peak.states for peak in ranks],
        "activations": [peak.activations for peak in ranks],
        "context, buffers": [peak.buffers + peak.context for peak in ranks],
    }
    return {
        name: " ".join(f"{value / GIB:.2f}" for value in values) for name, values in parts.items()
    }


def memory_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the predicted memory of every rank for the best row of each workload, by part."""
    best: dict[tuple[int, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.best_mfu):
        if row.prediction.ranks:
            best[row.configuration.workload] = row
    for row in best.values():
        yield f"predicted memory of {row.configuration}, GiB by pipeline rank:"
        for name, text in _by_rank(row.prediction.ranks).items():
            yield f"    {name:20} {text}"


def best_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the best row of every workload and schedule; an OOM row if all are.

    Rows with different features are separate.
    """
    best: dict[tuple[tuple[int, int], str, tuple[str, ...]], Row] = {}
    for row in rows:
        config = row.configuration
        key = (config.workload, config.schedule, config.features)
        if key not in best or _rank(row) > _rank(best[key]):
            best[key] = row
    return sorted(best.values(), key=lambda row: row.configuration.workload)


def _rank(row: Row) -> tuple[float, float]:
    return row.best_mfu, -(row.prediction.peak_bytes or math.inf)


def result_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table per workload, with values common to all rows in its title."""
    for workload in dict.fromkeys(row.configuration.workload for row in rows):
        yield _result_table([row for row in rows if row.configuration.workload == workload])


def _result_table(rows: Sequence[Row]) -> str:
    sequence, batch = rows[0].configuration.workload
    title = f"sequence {sequence}, batch {batch}"
    best = max(rows, key=lambda row: row.best_mfu)
    cells = [HEADING, *map(_cells, rows)]
    for name, texts in (
        ("layout", [row.configuration.layout_text for row in rows]),
        ("status", [row.verdict for row in rows]),
        ("", ["best" if row is best and row.best_mfu else "" for row in rows]),
    ):
        if name and len(set(texts)) == 1:
            title += f", {name}: {texts[0]}"
        else:
            cells = [[*row, text] for row, text in zip(cells, [name, *texts], strict=True)]
    return f"{title}\n{table(cells)}"


def _cells(row: Row) -> list[str]:
    config, predicted, outcome = row.configuration, row.prediction, row.outcome
    sizes = (
        config.data_parallel,
        config.tensor_parallel,
        config.pipeline_parallel,
        config.context_parallel,
    )
    mfu = None if row.result is None else row.result.mfu
    return [
        display_name(config.schedule),
        _measured_and_predicted(row, mfu, predicted.mfu, 100, 2),
        _measured_and_predicted(row, outcome.step_s, predicted.step_s, 1, 3),
        _measured_and_predicted(row, outcome.bubble, predicted.bubble, 100, 1),
        _measured_and_predicted(row, outcome.peak_bytes, predicted.peak_bytes or None, 1 / GIB, 1),
        " ".join(map(str, (*sizes, config.microbatch_size))),
    ]


def _measured_and_predicted(
    row: Row, measured: float | None, predicted: float | None, scale: float, digits: int
) -> str:
    """Format a measured value with the predicted one in brackets, or the predicted value only."""
    texts = [
        "-" if value is None else f"{value * scale:.{digits}f}" for value in (measured, predicted)
    ]
    return texts[1] if row.result is None else f"{texts[0]} ({texts[1]})"


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write every row with every value."""
    with path.open("w", encoding="utf-8", newline="") as file:
        values = list(map(_values, rows))
        writer = csv.DictWriter(file, list(values[0]) if values else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(values)


def _values(row: Row) -> dict[str, Any]:
    predicted, outcome = row.prediction, row.outcome
    values = row.configuration.swept | {
        "arguments": " ".join(row.configuration.arguments),
        "verdict": row.verdict,
        "predicted_step_s": predicted.step_s,
        "predicted_mfu": predicted.mfu,
        "predicted_bubble": predicted.bubble,
        "predicted_peak_gib": predicted.peak_bytes / GIB if predicted.peak_bytes else None,
        "step_s": outcome.step_s,
        "mfu": None if row.result is None else row.result.mfu,
        "bubble": outcome.bubble,
        "peak_gib": outcome.peak_bytes / GIB if outcome.peak_bytes else None,
        "note": row.note,
    }
    names = ("ranks", "states", "activations", "rest")
    by_rank = zip(names, _by_rank(predicted.ranks).values(), strict=True)
    return values | {f"predicted_{name}": text for name, text in by_rank}


def ranking_line(rows: Iterable[Row]) -> str:
    """Format the agreement of predicted and measured rankings of step times.

    Runs are compared within a workload, because longer sequences or larger batches are always
    slower.
    """
    step_times = [
        (row.prediction.step_s, row.outcome.step_s, row.configuration.workload)
        for row in rows
        if row.prediction.step_s is not None and row.outcome.step_s is not None
    ]
    tau = kendall_tau(*zip(*step_times, strict=True)) if step_times else None
    if tau is None:
        return "Kendall's tau of predicted and measured step times: too few runs to say"
    return (
        f"Kendall's tau of predicted and measured step times over {len(step_times)} runs: "
        f"{tau:+.2f} (1: the same order)"
    )
