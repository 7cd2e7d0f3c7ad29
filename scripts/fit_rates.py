"""Fit what kernels and links reach of the stated rates to published runs; prints them and errors.

    python scripts/fit_rates.py

One set for each generation of GPU, and never one for a run: the squares of the logarithms of
predicted over measured are made small, one number after the other, each kept near where it starts.
Beside each system's errors stand those with that system left out of the fit.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import combinations
from statistics import mean, median

from published_runs import EVIDENCE, Row, is_counted, key_of, predicted, published

from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.step_time import Rates

LEFT_OUT = EVIDENCE / "left_out.json"
START = Rates()
LEAST = {"kernel_us": 0.5, "launch_us": 0.5, "exchange_us": 2.0, "replicas_exposed": 0.02}
MOST = {"wide": 0.95, "eight": 0.9, "four": 0.9, "memory": 0.95, "wire": 0.95, "attention": 0.9}
PULL = 0.01
"""Of a number away from where it starts, against the runs: what they do not tell stays."""

STEPS = (1.25, 0.8, 1.1, 0.91, 1.03, 0.97)


def main() -> None:
    """Fit each generation."""
    runs = [row for row in published() if is_counted(row)]
    by_generation = defaultdict(list)
    for row in runs:
        by_generation[GPUS[row["gpu"]].capability].append(row)
    left = {}
    for generation, rows in sorted(by_generation.items()):
        found = fitted(rows)
        values = ", ".join(f"{each.name}={getattr(found, each.name):.3g}" for each in fields(found))
        print(f"{generation}: Rates({values})")
        print(f"  {len(rows)} runs: {told(errors(rows, found))}")
        for system in sorted({row["gpu"] for row in rows}):
            own = [row for row in rows if row["gpu"] == system]
            others = [row for row in rows if row["gpu"] != system]
            left_out = told(errors(own, fitted(others))) if others else "no other system"
            left[system.upper()] = [len(own), told(errors(own, found)), left_out]
            print(f"  {system}, {len(own)}: {left[system.upper()][1]}; left out: {left_out}")
    LEFT_OUT.write_text(json.dumps(left, indent=1) + "\n")
    print(f"in use: {told(errors(runs, None))}; {told_pairs(runs)}")


def errors(rows: Iterable[Row], rates: Rates | None) -> list[float]:
    """Return predicted over measured, less one, of each."""
    return [predicted(row, rates)["step_s"] / row["step_s"] - 1 for row in rows]


def told(found: Sequence[float]) -> str:
    """Return the median and the ninth tenth of the sizes."""
    sizes = sorted(map(abs, found))
    ninth = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
    return f"median {100 * median(sizes):.1f} %, nine in ten within {100 * ninth:.1f} %"


def told_pairs(rows: Sequence[Row]) -> str:
    """Return how well two configurations of one model on one system are told apart, in words.

    What several releases measured counts once, by its median, and once for every release.
    """
    releases: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        releases[key_of(row), row["gpu"], row.get("vpp"), row.get("global_batch")].append(row)
    once = [{**own[0], "step_s": median(row["step_s"] for row in own)} for own in releases.values()]
    off, right = _pairs(once)
    _, every = _pairs(rows)
    return (
        f"{len(off)} pairs: ratios off by {100 * median(off):.1f} %, order right in "
        f"{100 * mean(right):.0f} % ({len(every)} and {100 * mean(every):.0f} % with every release "
        "that measured them by itself)"
    )


def _pairs(rows: Sequence[Row]) -> tuple[list[float], list[bool]]:
    """Return by how much the ratios of pairs are off, and whether the order is right."""
    off, right = [], []
    for one, other in combinations(rows, 2):
        same = (one["model"], one["gpu"]) == (other["model"], other["gpu"])
        if same and (key_of(one), one.get("vpp")) != (key_of(other), other.get("vpp")):
            measured = math.log(one["step_s"] / other["step_s"])
            guess = math.log(predicted(one)["step_s"] / predicted(other)["step_s"])
            off.append(abs(guess - measured))
            right.append((guess > 0) == (measured > 0))
    return off, right


def fitted(rows: Sequence[Row]) -> Rates:
    """Return the rates whose predictions are nearest."""
    weights = _weights(rows)
    rates, least = START, _badness(rows, weights, START)
    for _ in range(12):
        before = least
        for each in fields(Rates):
            for factor in STEPS:
                value = getattr(rates, each.name) * factor
                value = max(LEAST.get(each.name, 0.0), min(MOST.get(each.name, math.inf), value))
                tried = replace(rates, **{each.name: value})
                bad = _badness(rows, weights, tried)
                if bad < least:
                    rates, least = tried, bad
        if least > 0.999 * before:
            break
    return rates


def _weights(rows: Sequence[Row]) -> list[float]:
    """Return what each row counts: those of one model and system count as four at most."""
    number: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        number[row["model"], row["gpu"]] += 1
    return [min(1.0, 4 / number[row["model"], row["gpu"]]) for row in rows]


def _badness(rows: Sequence[Row], weights: Sequence[float], rates: Rates) -> float:
    total = sum(
        weight * min(abs(math.log(predicted(row, rates)["step_s"] / row["step_s"])), 0.4) ** 2
        for row, weight in zip(rows, weights, strict=True)
    )
    for each in fields(Rates):
        total += PULL * math.log(getattr(rates, each.name) / getattr(START, each.name)) ** 2
    return total


if __name__ == "__main__":
    main()
