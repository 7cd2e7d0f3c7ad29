"""Fit the shares of the stated rates to published runs; write them and the left-out errors.

    python benchmarks/fit_rates.py

Writes megatron_vshape/rehearsal/fitted.py: six shares for each generation of GPU and constants
shared by all generations, none for a release, a model or a run. Every constant is pulled towards
its start (the defaults of `Rates`), so that the runs change only constants that they determine. The
errors are those of runs that were left out of the fit: all runs of one model on one system at a
time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
from published_runs import (
    Row,
    case_of,
    is_counted,
    key_of,
    predicted,
    published,
)

from megatron_vshape.rehearsal import step_time
from megatron_vshape.rehearsal.accuracy import size_of
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.step_time import Rates

FITTED = Path(step_time.__file__).with_name("fitted.py")
OWN = "wide eight four attention attention_in_8_bits memory".split()
SHARED = """
    wire dispatch network kernel_us launch_us module_us exchange_us
    shards_exposed shards_left experts_left context_exposed replicas_exposed
""".split()
START = Rates()
ATTENTION = {(9, 0): 0.5, (10, 0): 0.45, (10, 3): 0.6}
"""Start of the share of attention: B300 has twice the exponentials per second of B200."""

MOST = dict.fromkeys(OWN, 0.9) | {"memory": 0.95, "shards_exposed": 1.0}
PULL = 0.3
PULLS = {"memory": 1.0, "wire": 1.0, "network": 2.0, "exchange_us": 0.3}
"""Strength of the pull to the start: cost of a factor of e, in runs that are 100% off."""

CLIPPED = 0.2
"""Errors beyond count less than their square: some published runs have other settings."""

Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants by name: `wide 9.0`, `wire`."""

    values: Values

    def rates(self, gpu: str) -> Rates:
        """Return the rates of the GPU's generation."""
        of_own = {name: self.values[f"{name} {_generation(gpu)}"] for name in OWN}
        return Rates(**of_own, **{name: self.values[name] for name in SHARED})

    def logs(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the logarithms of predicted over measured."""
        by_gpu = {gpu: self.rates(gpu) for gpu in {row["gpu"] for row in rows}}
        steps = [predicted(row, by_gpu[row["gpu"]])["step_s"] for row in rows]
        return np.array(
            [math.log(step / row["step_s"]) for step, row in zip(steps, rows, strict=True)]
        )


def main() -> None:
    """Fit, leave out, and write."""
    rows = [row for row in published() if is_counted(row)]
    fit = fitted(rows, started(rows), rounds=25)
    ratios = left_out(rows, fit)
    FITTED.write_text(written(fit, rows, ratios))
    for name, errors in table_of(rows, ratios).items():
        print(f"{name}: {told(errors)}")
    print(pairs_of(rows, ratios))


def left_out(rows: Sequence[Row], fit: Fit) -> list[float]:
    """Return predicted over measured of every row, its model on its system left out of the fit."""
    ratios: dict[int, float] = {}
    for model, gpu in sorted({(row["model"], row["gpu"]) for row in rows}):
        other_rows = [row for row in rows if (row["model"], row["gpu"]) != (model, gpu)]
        row_indices = [
            i for i, row in enumerate(rows) if (row["model"], row["gpu"]) == (model, gpu)
        ]
        logs = fitted(other_rows, fit, rounds=4).logs([rows[i] for i in row_indices])
        ratios |= zip(row_indices, map(math.exp, logs), strict=True)
    return [ratios[i] for i in range(len(rows))]


def started(rows: Sequence[Row]) -> Fit:
    """Return the constants at their starts."""
    values = {name: getattr(START, name) for name in SHARED}
    for generation in sorted({GPUS[row["gpu"]].capability for row in rows}):
        for name in OWN:
            key = f"{name} {generation[0]}.{generation[1]}"
            values[key] = ATTENTION[generation] if name == "attention" else getattr(START, name)
    return Fit(values)


def fitted(rows: Sequence[Row], first: Fit, rounds: int) -> Fit:
    """Fit by damped Gauss-Newton steps on the logarithms of the constants."""
    names, start = list(first.values), started(rows).values
    start = {name: start.get(name, first.values[name]) for name in names}
    pulls = np.array([PULLS.get(name.split()[0], PULL) for name in names])
    weights, damping = _weights(rows), 0.01

    def badness(fit: Fit) -> tuple[float, np.ndarray, np.ndarray]:
        logs = fit.logs(rows)
        away = pulls * np.array([math.log(fit.values[name] / start[name]) for name in names])
        lost = weights * CLIPPED**2 * np.log1p((logs / CLIPPED) ** 2)
        return float(lost.sum() + (away**2).sum()), logs, away

    fit = first
    least_badness, logs, away = badness(fit)
    for _ in range(rounds):
        slopes = np.stack([(_moved(fit, {n: 1e-3}).logs(rows) - logs) / 1e-3 for n in names], 1)
        counts = weights / (1 + (logs / CLIPPED) ** 2)
        square = slopes.T @ (counts[:, None] * slopes) + np.diag(pulls**2)
        uphill = slopes.T @ (counts * logs) + pulls * away
        previous_badness = least_badness
        for _ in range(5):
            step = -np.linalg.solve(square + damping * np.diag(np.diag(square)), uphill)
            moved_fit = _moved(fit, dict(zip(names, np.clip(step, -0.5, 0.5), strict=True)))
            bad = badness(moved_fit)
            if bad[0] < least_badness:
                fit, (least_badness, logs, away) = moved_fit, bad
                damping = max(damping / 3, 1e-4)
                break
            damping *= 4
        if previous_badness - least_badness < 1e-4 * previous_badness:
            break
    return fit


def _moved(fit: Fit, by: Mapping[str, float]) -> Fit:
    values = {
        name: min(value * math.exp(by.get(name, 0.0)), MOST.get(name.split()[0], math.inf))
        for name, value in fit.values.items()
    }
    return Fit(values)


def _generation(gpu: str) -> str:
    return "{}.{}".format(*GPUS[gpu].capability)


def _weights(rows: Sequence[Row]) -> np.ndarray:
    """Return the weights of the rows: those of one model and system count as four at most."""
    number: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        number[row["model"], row["gpu"]] += 1
    return np.array([min(1.0, 4 / number[row["model"], row["gpu"]]) for row in rows])


def summary(ratios: Sequence[float]) -> tuple[int, float, float, float]:
    """Return the number, median and ninth tenth (percent) and worst factor of the errors."""
    sizes = sorted(abs(ratio - 1) for ratio in ratios)
    ninth = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    return len(sizes), round(100 * median(sizes), 1), round(100 * ninth, 1), round(worst, 2)


def told(errors: tuple[int, float, float, float]) -> str:
    """Format the errors."""
    runs, middle, ninth, worst = errors
    return f"{runs} runs, median {middle:g}%, 90% within {ninth:g}%, worst {worst:g}x"


def table_of(
    rows: Sequence[Row], ratios: Sequence[float]
) -> dict[str, tuple[int, float, float, float]]:
    """Return the errors by case, and by system."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row, ratio in zip(rows, ratios, strict=True):
        piped = "with a pipeline" if row["pp"] > 1 else "no pipeline"
        for name in ("all", piped, case_of(row), size_of(row["gpus"]), row["gpu"].upper()):
            groups[name].append(ratio)
    return {name: summary(errors) for name, errors in groups.items()}


def pairs_of(rows: Sequence[Row], ratios: Sequence[float]) -> tuple[int, float, float]:
    """Compare two configurations of one model on one system in one release, as `Pairs`.

    A pair that several releases measured counts once, by its medians.
    """
    deviations: dict[frozenset[tuple[object, ...]], list[tuple[float, float]]] = defaultdict(list)
    for (one, guess), (other_row, second) in combinations(zip(rows, ratios, strict=True), 2):
        kinds = sorted([_configuration(one), _configuration(other_row)], key=str)
        if _same(one, other_row) and kinds[0] != kinds[1]:
            sign = 1 if kinds[0] == _configuration(one) else -1
            measured = sign * math.log(one["step_s"] / other_row["step_s"])
            away = sign * math.log(guess / second)
            deviations[frozenset(kinds)].append((measured, measured + away))
    pairs = [
        tuple(map(median, zip(*measurements, strict=True))) for measurements in deviations.values()
    ]
    off = [abs(predicted - measured) for measured, predicted in pairs]
    right = sum(measured * predicted > 0 for measured, predicted in pairs) / len(pairs)
    return len(off), round(100 * median(off), 1), round(100 * right)


def _same(one: Row, other_row: Row) -> bool:
    return all(one[name] == other_row[name] for name in ("model", "gpu", "release", "set"))


def _configuration(row: Row) -> tuple[object, ...]:
    return key_of(row), row["gpu"], row["vpp"], row["global_batch"]


def written(fit: Fit, rows: Sequence[Row], ratios: Sequence[float]) -> str:
    """Return the text of fitted.py."""
    generations = dict.fromkeys(sorted({GPUS[row["gpu"]].capability for row in rows}))
    generation_rates = {
        generation: {
            name: _short(fit.values[f"{name} {generation[0]}.{generation[1]}"]) for name in OWN
        }
        for generation in generations
    }
    shared = {name: _short(fit.values[name]) for name in SHARED}
    name = "BY_GENERATION: dict[tuple[int, int], dict[str, float]]"
    head, _, _ = FITTED.read_text().partition(name)  # the types of the errors stay
    lines = [head + _dict(name, generation_rates)]
    lines.append('"""By compute capability."""\n')
    lines.append(_dict("SHARED: dict[str, float]", shared))
    table = table_of(rows, ratios)
    text = "".join(f"    {name!r}: Errors{table[name]},\n" for name in sorted(table))
    lines.append("LEFT_OUT: dict[str, Errors] = {\n" + text.replace("'", '"') + "}")
    lines.append('"""By case, and by system."""\n')
    lines.append(f"PAIRS = Pairs{pairs_of(rows, ratios)}")
    return "\n".join(lines) + "\n"


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _dict(name: str, values: Mapping[object, object]) -> str:
    text = "".join(f"    {_quoted(key)}: {_value(number)},\n" for key, number in values.items())
    return f"{name} = {{\n{text}}}"


def _value(value: object) -> str:
    if isinstance(value, dict):
        inner = "".join(f"        {_quoted(key)}: {number},\n" for key, number in value.items())
        return f"{{\n{inner}    }}"
    return str(value)


def _quoted(key: object) -> str:
    return f'"{key}"' if isinstance(key, str) else str(key)


def ratios_of(rows: Iterable[Row]) -> list[float]:
    """Return predicted over measured, with the rates in use."""
    return [predicted(row)["step_s"] / row["step_s"] for row in rows]


if __name__ == "__main__":
    main()
