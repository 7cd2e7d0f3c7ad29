"""Print the table of users' results from files of `megatron-vshape trial`.

    python benchmarks/trials_table.py [FOLDER]

The default folder is benchmarks/results. scripts/docs.py writes the table to
docs/choosing-a-schedule.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

FOLDER = Path(__file__).parent / "results"
HEADING = "model | GPUs | today | schedule | x today | largest peak, GiB (today)"


def table(folder: Path = FOLDER) -> str:
    """Return the Markdown table, or a sentence if there are no results."""
    rows = [row for path in sorted(folder.glob("*.json")) for row in rows_of(path)]
    if not rows:
        return "No results yet.\n"
    heading = [cell.strip() for cell in HEADING.split("|")]
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def rows_of(path: Path) -> Iterator[list[str]]:
    """Yield the cells of each schedule that was faster or slower than today's command."""
    content = json.loads(path.read_text())
    model, (today, *rows) = content["model"], content["rows"]
    name = f"{model['num_layers']} layers of {model['hidden_size']}, {model['seq_length']} tokens"
    cuda = content["versions"].get("CUDA", "")
    gpu = cuda.rpartition(" x ")[2] if " x " in cuda else "CPU"
    for row in rows:
        speedup = f"{mean(row['speedups']):.2f}" if row["speedups"] else row["status"]
        peaks = f"{_peak(row)} ({_peak(today)})" if row["peak_bytes"] else ""
        schedules = [f"{side['schedule']}, {_sizes(side)}" for side in (today, row)]
        yield [name, f"{content['gpus']} x {gpu}", *schedules, speedup, peaks]


def _peak(row: dict[str, Any]) -> str:
    return f"{max(row['peak_bytes'], default=0) / 2**30:.1f}"


def _sizes(row: dict[str, Any]) -> str:
    sizes = row["sizes"]
    recompute = "" if sizes["recompute"] == "none" else f", {sizes['recompute']} recompute"
    return f"TP {sizes['tensor_parallel']} PP {sizes['pipeline_parallel']}{recompute}"


if __name__ == "__main__":
    print(table(*map(Path, sys.argv[1:])), end="")
