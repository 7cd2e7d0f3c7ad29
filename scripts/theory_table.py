"""Print the paper's table of memory and bubble, measured on generated schedules.

    python scripts/theory_table.py [--devices D ...] [NAME ...]

A NAME is a published schedule or an earlier method that the paper compares: gems, chimera
or bpipe.

Memory is in units of M, the memory of 1F1B: d microbatches of one device's layers, 2 d chunks. The
bubble is makespan minus work in passes of one chunk, all of one unit; without a barrier between
steps it is the span minus work. The growth with d is the difference between two device counts.
"""

import argparse
import sys
from collections.abc import Sequence
from fractions import Fraction

from theory import ATTEMPTS, THEORY, Analysis, analyse

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.view.names import display_name

DEVICES = (4, 8, 16, 32)
GROWTH = (24, 48)
"""Multiples of 6, so that the blocks of V-Min and V-Half belong to the same case."""


def measure(name: str, num_devices: int) -> Analysis:
    """Return the figures at enough microbatches for a stable phase."""
    return analyse(name, num_devices, 4 * num_devices)


def exact(analysis: Analysis) -> tuple[Fraction, Fraction, Fraction]:
    """Return peak and bubbles without the rounding of sums of times."""
    values = analysis.peak, analysis.overhead, analysis.span_overhead
    peak, bubble, span = (Fraction(value).limit_denominator(60) for value in values)
    return peak, bubble, span


def row(name: str, devices: Sequence[int]) -> list[str]:
    """Return the cells of one schedule."""
    first, second = GROWTH
    small, large = measure(name, first), measure(name, second)
    peak, bubble, span = (
        (large_value - small_value) / (second - first)
        for small_value, large_value in zip(exact(small), exact(large), strict=True)
    )
    bubbles = ["grows with m"] * 2 if small.repeats else [times(bubble, "d"), times(span, "d")]
    points = [exact(measure(name, count)) for count in devices]
    return [
        display_name(name),
        times(peak / 2, "M"),
        *bubbles,
        *(f"{amount(peak)} / {amount(idle)}" for peak, idle, _ in points),
    ]


def times(factor: Fraction, unit: str) -> str:
    """Format a multiple of a unit, such as 0, M, M/3, 3 d."""
    if factor == 0:
        return "0"
    number = "" if factor.numerator == 1 else f"{factor.numerator} "
    return f"{number}{unit}" + ("" if factor.denominator == 1 else f"/{factor.denominator}")


def amount(value: Fraction) -> str:
    """Format a number without unnecessary decimals."""
    return f"{float(value):.4g}"


def table(names: Sequence[str], devices: Sequence[int]) -> str:
    """Return the table as Markdown, followed by notes on the earlier methods."""
    heading = ["schedule", "memory", "bubble", "without a barrier"]
    heading += [f"d = {count}: chunks / bubble" for count in devices]
    attempts = [name for name in names if name in ATTEMPTS]
    notes = [f"{name}: {measure(name, GROWTH[0]).note}" for name in attempts]
    text = markdown([heading, *(row(name, devices) for name in names)])
    return "\n".join([text, "", *notes] if notes else [text])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format a table whose first row is its heading; all but the first column are numbers."""
    heading, *body = rows
    rule = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heading, rule, *body))


def main() -> int:
    """Print the requested table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(THEORY))
    parser.add_argument("--devices", nargs="+", type=int, metavar="D", default=list(DEVICES))
    options = parser.parse_args()
    try:
        print(table(options.names, options.devices))
    except ScheduleError as error:
        print(f"theory_table.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
