"""Largest differences between this package's schedules and Megatron's 1F1B in client libraries.

Runs `tests/clients` (`bash scripts/test.sh --nightly` makes the environments) on four CPU ranks, or
reads the output of earlier runs: `python -m pytest tests/clients -s > FILE`. Losses and gradient
norms are relative if above 1. A weight differs by up to a step of Adam (1e-3) where a gradient is
close to 0.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^\| (?P<library>\w+) \| (?P<case>[^|]+) \| (?P<found>[^|]+) \|$")
COLUMNS = {
    "losses, gradient norms": ("logged", "losses", "evaluated", "evaluations", "steps"),
    "log-probabilities": ("inferred",),
    "weights": ("weights", "exported"),
}
SCHEDULES = ("v-half", "v-zb", "auto", "v-half, shared", "zb-h1")


def rows(lines: Iterable[str]) -> dict[tuple[str, str], dict[str, float]]:
    """Find the largest difference of each column, and the cases, by library and schedule."""
    rows_by_case: dict[tuple[str, str], dict[str, float]] = {}
    for match in filter(None, map(LINE.match, lines)):
        schedule = match["case"].rpartition(": ")[2]
        if schedule not in SCHEDULES:  # a checkpoint that another schedule has saved
            continue
        row = rows_by_case.setdefault((match["library"], schedule), {"cases": 0})
        row["cases"] += 1
        for figure in match["found"].split(", "):
            key, _, value = figure.rpartition(" ")
            column = next(name for name, keys in COLUMNS.items() if key in keys)
            row[column] = max(row.get(column, 0.0), float(value))
    return rows_by_case


def table(rows_by_case: dict[tuple[str, str], dict[str, float]]) -> str:
    """Format the rows, one per library and schedule."""
    text = [
        f"| library | schedule | cases | {' | '.join(COLUMNS)} |",
        "|---|---|---:|" + "---:|" * len(COLUMNS),
    ]
    order = sorted(rows_by_case, key=lambda pair: (pair[0], SCHEDULES.index(pair[1])))
    for library, schedule in order:
        row = rows_by_case[library, schedule]
        cells = [f"{row[name]:.1e}" if name in row else "" for name in COLUMNS]
        text.append(f"| {library} | {schedule} | {row['cases']:.0f} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("outputs", nargs="*", type=Path, help="Output of earlier runs")
    options = parser.parse_args()
    lines = [line for file in options.outputs for line in file.read_text().splitlines()]
    if not options.outputs:
        command = [sys.executable, "-m", "pytest", "tests/clients", "-s", "-q"]
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        lines = ended.stdout.splitlines()
        print("\n".join(line for line in lines if "FAILED" in line or "SKIPPED" in line))
    print(table(rows(lines)))


if __name__ == "__main__":
    main()
