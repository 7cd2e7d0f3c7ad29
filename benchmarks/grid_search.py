"""Predict the paper's grid search and compare the best of each schedule with the published.

    python benchmarks/grid_search.py [OPTIONS of megatron-vshape sweep]

98.5B model, 40 A100-80GB, three sequence lengths. No GPU; a minute or two. The exit status is 1 if
a predicted winner is not the published one. Nothing reads the published figures to predict.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_vshape.cli.main import main as run
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import table

GRID = Path(__file__).resolve().parents[1] / "configs" / "sweeps" / "grid_98b_a100.yaml"
SIZES = ("data_parallel", "tensor_parallel", "pipeline_parallel", "microbatch_size")


@dataclass(frozen=True, slots=True)
class Published:
    """The best configuration of a schedule; no MFU if it ran out of memory."""

    sequence_length: int
    schedule: str
    mfu_percent: float | None
    parallel: str


def load_published() -> list[Published]:
    """Load the paper's results."""
    text = GRID.with_name(f"{GRID.stem}_published.csv").read_text()
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return [
        Published(
            int(row["sequence_length"]),
            row["schedule"],
            None if row["mfu_percent"] == "OOM" else float(row["mfu_percent"]),
            row["parallel"],
        )
        for row in csv.DictReader(lines)
    ]


def compared(
    published: Sequence[Published], predicted: Sequence[Mapping[str, str]]
) -> tuple[list[list[str]], bool]:
    """Return a heading with a row per published result, and whether all winners are the same.

    `predicted` are rows of `sweep --csv`. Published results have no batch size, so they are
    compared with the best of all batch sizes.
    """
    best: dict[tuple[int, str], Mapping[str, str]] = {}
    for row in sorted(predicted, key=_mfu):
        best[int(row["sequence_length"]), row["schedule"]] = row
    heading = ["sequence", "schedule", "predicted", "published", "difference"]
    rows, winners_agree = [[*heading, "predicted sizes", "published sizes"]], True
    for length in dict.fromkeys(published_row.sequence_length for published_row in published):
        group = [
            published_row for published_row in published if published_row.sequence_length == length
        ]
        published_winner = max(
            group, key=lambda published_row: published_row.mfu_percent or 0.0
        ).schedule
        winners_agree &= published_winner == max(
            (published_row.schedule for published_row in group),
            key=lambda name: _mfu(best[length, name]),
        )
        for published_row in group:
            mfu = _mfu(best[length, published_row.schedule])
            difference = (
                f"{mfu - published_row.mfu_percent:+.2f}"
                if mfu and published_row.mfu_percent
                else ""
            )
            sizes = (
                " ".join(best[length, published_row.schedule][name] for name in SIZES)
                if mfu
                else "-"
            )
            figures = [
                f"{value:.2f}" if value else "OOM" for value in (mfu, published_row.mfu_percent)
            ]
            name = display_name(published_row.schedule)
            rows.append([str(length), name, *figures, difference, sizes, published_row.parallel])
    return rows, winners_agree


def _mfu(row: Mapping[str, str]) -> float:
    """Return the predicted MFU in percent; 0 if the configuration does not fit."""
    return 100 * float(row["predicted_mfu"] or 0)


def main(options: Sequence[str]) -> int:
    """Print the predictions and the comparison."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        command = ["sweep", str(GRID), "--predict-only", "--csv", str(file), "--headroom", "0"]
        if run([*command, *options]):
            return 2
        with file.open(newline="") as stream:
            rows, winners_agree = compared(load_published(), list(csv.DictReader(stream)))
    print("best MFU in % and its DP TP PP microbatch size\n" + table(rows))
    print(f"every winner is the published one: {'yes' if winners_agree else 'no'}")
    return 0 if winners_agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
