"""The part of docs/evidence.md on rehearsals: docs/evidence/rehearsed.csv, and how far off it is.

`scripts/rehearse_rows.py` writes the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

ROWS = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "rehearsed.csv"
GIB = 2**30
LARGE = GIB
"""Peaks from which on errors are counted: below it, a library's 32 MiB are per cents."""

Row = dict[str, str]

HEAD = """\
## Memory rehearsed, and measured by NVIDIA

[`megatron-vshape rehearse`](rehearse.md) on the functional tests of Megatron-LM, whose golden
values hold what torch.cuda.memory_stats called allocated on the last rank: the largest peak of the
run, and what is held between steps. Flags and environment are read from the tests' own files, main
of the day; golden values are older, some by half a year. Routing is taken as balanced, attention as
fused unless the flags forbid it; nothing is fitted. Where nothing says how many GPUs a run had
(\\*), it is the power of two at which what is held fits, so that of those rows only the peak is a
prediction; small cases that do not say it (+) are taken to run on one node.
`python scripts/rehearse_rows.py` makes the figures.
"""


def table() -> list[str]:
    """Return the lines of the section, or none where nothing was rehearsed."""
    if not ROWS.is_file():
        return []
    with ROWS.open() as stream:
        rows = list(csv.DictReader(stream))
    ran = [row for row in rows if row["rehearsed_peak"]]
    return [HEAD, *_summary(rows, ran), "", *_rows(ran), "", *_reasons(rows)]


def _off(row: Row, what: str) -> float:
    return int(row[f"rehearsed_{what}"]) / int(row[f"measured_{what}"]) - 1


def _tenth(values: Sequence[float]) -> float:
    """Return what nine in ten are below."""
    return sorted(values)[max(0, -(-9 * len(values) // 10) - 1)]


def _summary(rows: Sequence[Row], ran: Sequence[Row]) -> Iterator[str]:
    large = [row for row in ran if int(row["measured_peak"]) >= LARGE]
    peaks = [abs(_off(row, "peak")) for row in large]
    held = [abs(_off(row, "held")) for row in large if row["gpus_from"] != "fitted"]
    times = [float(row["process_s"]) for row in ran]
    yield (
        f"{len(ran)} of {len(rows)} rows run. Of the {len(large)} with a peak of 1 GiB or more the "
        f"median error of the peak is {median(peaks):.2%}, nine in ten are within "
        f"{_tenth(peaks):.1%}; of what is held between steps, GPUs not fitted, {median(held):.2%} "
        f"and {_tenth(held):.1%}. A rank took {median(times):.0f} s (median, on a crowded machine) "
        f"and at most {max(int(row['host_mib']) for row in ran) / 1024:.1f} GiB of host memory."
    )


def _rows(ran: Sequence[Row]) -> Iterator[str]:
    both = "measured | rehearsed | off"
    yield f"| case | GPU | GPUs | peak, {both} | held, {both} |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    marks = {"given": "", "fitted": " \\*", "assumed": " +"}
    for row in ran:
        cells = [row["case"], row["platform"], row["gpus"] + marks[row["gpus_from"]]]
        for what in ("peak", "held"):
            both = (int(row[f"{by}_{what}"]) / GIB for by in ("measured", "rehearsed"))
            cells += [*(f"{size:.3f}" for size in both), f"{_off(row, what):+.2%}"]
        yield f"| {' | '.join(cells)} |"


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row["rehearsed_peak"]:
            reasons.setdefault(row["error"], []).append(f"{row['case']} ({row['platform']})")
    if reasons:
        yield "Rows that did not run:"
        yield ""
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
        yield f"* {len(names)}: {reason.replace('|', ' ')}: {shown}"
