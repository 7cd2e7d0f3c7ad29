"""Report of a sweep: tables and CSV."""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megatron_vshape.tuning.configurations import GIVEN, NONE, Configuration
from megatron_vshape.tuning.predictor import Prediction, Predictor, Verdict
from megatron_vshape.tuning.ranking import kendall_tau
from megatron_vshape.tuning.results import Outcome, Result, Status
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import GIB


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration with its prediction and, after a run, its measurements."""

    configuration: Configuration
    verdict: str
    predicted_step_s: float | None
    predicted_mfu: float | None
    predicted_bubble: float | None
    predicted_peak_gib: float | None  # None if not planned
    step_s: float | None = None
    mfu: float | None = None
    bubble: float | None = None
    peak_gib: float | None = None
    note: str = ""
    # By pipeline rank, in GiB separated by spaces: the total and its parts.
    predicted_ranks: str = ""
    predicted_states: str = ""
    predicted_activations: str = ""
    predicted_rest: str = ""

    @property
    def ran(self) -> bool:
        """Whether the configuration has run, with any outcome."""
        return not self.verdict.startswith("predicted")

    @property
    def best_mfu(self) -> float:
        """Measured MFU; predicted MFU if it has not run; otherwise 0."""
        return (self.mfu if self.ran else self.predicted_mfu) or 0.0


def rows_of(predictions: Iterable[Prediction], results: Iterable[Result] = ()) -> list[Row]:
    """Return one row per prediction, with measurements where there are any."""
    measured = {each.configuration: each for each in results}
    return [_row(each, measured.get(each.configuration)) for each in predictions]


def prediction_of(result: Result, predictor: Predictor) -> Prediction:
    """Return the prediction that was recorded before a run."""
    it, step_s = result.configuration, result.predicted_step_s
    return Prediction(
        it,
        Verdict.RUNS,
        result.predicted_peak_bytes,
        step_s,
        None if step_s is None else predictor.mfu(it, step_s),
        result.predicted_bubble,
    )


def _row(prediction: Prediction, result: Result | None) -> Row:
    outcome = result.outcome if result else Outcome(Status.OK)
    verdict = f"predicted {prediction.verdict}" if result is None else outcome.status.value
    lines = outcome.log_tail.splitlines()
    ranks = prediction.ranks
    by_rank = [
        [sum(each), each.states, each.activations, each.buffers + each.context] for each in ranks
    ]
    return Row(
        prediction.configuration,
        verdict,
        prediction.step_s,
        prediction.mfu,
        prediction.bubble,
        prediction.peak_bytes / GIB if prediction.peak_bytes else None,
        outcome.step_s,
        result.mfu if result else None,
        outcome.bubble,
        outcome.peak_bytes / GIB if outcome.peak_bytes else None,
        lines[-1] if lines else prediction.reason,
        *(" ".join(f"{value / GIB:.2f}" for value in each) for each in zip(*by_rank, strict=True)),
    )


def memory_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the predicted memory of every rank for the best row of each workload, by part."""
    best: dict[tuple[int, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.best_mfu):
        if row.predicted_ranks:
            best[row.configuration.workload] = row
    for row in best.values():
        yield f"predicted memory of {row.configuration}, GiB by pipeline rank:"
        yield f"    all                  {row.predicted_ranks}"
        yield f"    parameters, states   {row.predicted_states}"
        yield f"    activations          {row.predicted_activations}"
        yield f"    context, buffers     {row.predicted_rest}"


def best_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the best row of every workload and schedule; an OOM row if all are.

    Rows with and without vocabulary parallelism are separate.
    """
    best: dict[tuple[tuple[int, int], str, bool], Row] = {}
    for row in rows:
        it = row.configuration
        key = (it.workload, it.schedule, it.vocab_parallel)
        if key not in best or _rank(row) > _rank(best[key]):
            best[key] = row
    return sorted(best.values(), key=lambda row: row.configuration.workload)


def _rank(row: Row) -> tuple[float, float]:
    return row.best_mfu, -(row.predicted_peak_gib or math.inf)


def result_tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table per workload, with the best row in bold.

    Values common to all rows are in the title. On a narrow terminal, the columns of figures keep
    their width, and later columns are wrapped.
    """
    workloads = dict.fromkeys(row.configuration.workload for row in rows)
    groups = [[row for row in rows if row.configuration.workload == each] for each in workloads]
    return [_result_table(group) for group in groups]


def _result_table(rows: Sequence[Row]) -> Table:
    sequence, batch = rows[0].configuration.workload
    said = [f"sequence {sequence}, batch {batch}"]
    table = Table(title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("schedule", no_wrap=True)
    for name in ("MFU %", "step s", "bubble %", "peak GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("DP TP PP CP mbs", overflow="fold")
    cells = [_cells(row) for row in rows]
    told = {"layout": list(map(_layout, rows)), "status": [row.verdict for row in rows]}
    for name, texts in told.items():
        if len(set(texts)) == 1:
            said.append(f"{name}: {texts[0]}")
        else:
            table.add_column(name, overflow="fold")
            cells = [[*row, text] for row, text in zip(cells, texts, strict=True)]
    best = max(rows, key=lambda row: row.best_mfu)
    for row, texts in zip(rows, cells, strict=True):
        table.add_row(*texts, style="bold" if row is best and row.best_mfu else None)
    table.title = ", ".join(said)
    return table


def _layout(row: Row) -> str:
    it = row.configuration
    told = str(it.layout)
    if it.recompute not in (NONE, GIVEN):
        told += f", {it.recompute} recompute"
    if it.expert_parallel > 1:
        told += f", EP {it.expert_parallel}"
    if it.format != GIVEN:
        told += f", {it.format}"
    return told + (", vocabulary shared" if it.vocab_parallel else "")


def _cells(row: Row) -> list[str]:
    it = row.configuration
    return [
        display_name(it.schedule),
        _both(row, row.mfu, row.predicted_mfu, 100, 2),
        _both(row, row.step_s, row.predicted_step_s, 1, 3),
        _both(row, row.bubble, row.predicted_bubble, 100, 1),
        _both(row, row.peak_gib, row.predicted_peak_gib, 1, 1),
        parallel(it),
    ]


def parallel(it: Configuration) -> str:
    """Format DP, TP, PP, CP and the microbatch size."""
    sizes = (
        it.data_parallel,
        it.tensor_parallel,
        it.pipeline_parallel,
        it.context_parallel,
        it.microbatch_size,
    )
    return " ".join(map(str, sizes))


def _both(
    row: Row, measured: float | None, predicted: float | None, scale: float, digits: int
) -> str:
    """Format a measured value with the predicted one in brackets, or the predicted value only."""
    texts = [
        "-" if each is None else f"{each * scale:.{digits}f}" for each in (measured, predicted)
    ]
    return f"{texts[0]} ({texts[1]})" if row.ran else texts[1]


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write every row with every value."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            fields = asdict(row)
            fields = {**fields.pop("configuration"), **fields}
            fields["arguments"] = " ".join(fields["arguments"])
            if writer is None:
                writer = csv.DictWriter(file, list(fields), lineterminator="\n")
                writer.writeheader()
            writer.writerow(fields)


def ranking_line(rows: Iterable[Row]) -> str:
    """Format the agreement of predicted and measured rankings of step times.

    Runs are compared within a workload, because longer sequences or larger batches are always
    slower.
    """
    found = [
        (row.predicted_step_s, row.step_s, row.configuration.workload)
        for row in rows
        if row.predicted_step_s is not None and row.step_s is not None
    ]
    tau = kendall_tau(*zip(*found, strict=True)) if found else None
    if tau is None:
        return "Kendall's tau of predicted and measured step times: too few runs to say"
    return (
        f"Kendall's tau of predicted and measured step times over {len(found)} runs: {tau:+.2f} "
        "(1: the same order)"
    )
