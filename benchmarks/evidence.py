"""Print benchmarks/evidence.md: published runs of other groups, compared with predictions.

    python benchmarks/evidence.py > benchmarks/evidence.md

The published figures and all inputs of the predictions are in evidence/published.yaml, and in
configs/sweeps for the grid search. The work of a microbatch is counted by `rehearse`
(counted_sets.json; missing counts are added) and converted to times as in `sweep`; then schedules
are simulated and planned. loss_parity.csv of scripts/loss_parity.py and speed.md of
scripts/bench_training.py are printed unchanged.
"""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import measured_table
import rehearsed_table
import steps_table
import yaml
from grid_search import GRID, Published, load_published

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import TIMES, ScheduleError
from megatron_vshape.core.model.placement import looping
from megatron_vshape.core.model.schedule import Objective, Schedule
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest, PlanResult
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.rehearsal.configuration_costs import Ranks
from megatron_vshape.rehearsal.rank_report import REPORT_PARTS, RankReport
from megatron_vshape.tuning.configurations import (
    FULL,
    NONE,
    Configuration,
    Layout,
    Subject,
    layers_of_stages,
)
from megatron_vshape.tuning.files import Cluster, load, load_model, load_sweep
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import Counts, Prediction, Predictor, key_of_count
from megatron_vshape.tuning.ranking import kendall_tau
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import GIB

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "benchmarks" / "evidence"
COUNTED = EVIDENCE / "counted_sets.json"
CONFIGS = ROOT / "configs"
MOST_GROUPS = 16  # largest number of microbatches per device that a fit tries
HOST_STEP_US, MOST_HOST_US = 10, 1000  # of a pass, tried by a fit

HEAD = """\
# Evidence

Published measurements of other groups, compared with the predictions of this package for the same
runs, and where these predictions are wrong. `python benchmarks/evidence.py >
benchmarks/evidence.md` writes this page; `python -m pytest benchmarks` checks it. The published
figures and all inputs are in [published.yaml](evidence/published.yaml). The package does not read
them.

Throughputs are relative to the first row of a table, so that the speed of the hardware cancels.
*ratio* is predicted / published. *plan in its memory* is the predicted throughput of a plan within
the memory of the row. If V-shaped schedules are predicted too fast, plans are too. Kendall's tau
is 1 if the predicted order of the rows is the published one, and -1 if it is reversed.
"""


SPEED = """\
Each variant trains on two ranks over gloo with one CPU core each, and the variants alternate
(`scripts/bench_training.py`). A round is *quiet* if other programs used less than 5% of the CPU.
No round was quiet in this measurement.
"""

PARITY = """\
`python scripts/loss_parity.py` trains a small GPT with Megatron's trainer on four pipeline ranks.
The text is the documentation of Python. Weights and data are the same for every schedule:
Megatron's 1F1B, V-Half, V-ZB, and `auto`, which measures its costs in steps 10 to 13 and then uses
its plan. Embeddings are untied: a V-shaped schedule sums both gradients of a tied embedding on one
rank, in another order than 1F1B.

Without clipping, every loss equals that of 1F1B bit for bit: passes compute the same values, and
gradients of microbatches are added in the same order. The gradient norm is summed over other
groups of layers on each rank, so its last bit can differ. If the norm clips gradients, the weights
differ as well, and the difference grows with the steps. In bfloat16, the last losses differ by
less than those of 1F1B in bfloat16 and float32.
"""
PARITY_FIGURES = "loss-parity-*.svg"


@dataclass(frozen=True, slots=True)
class Row:
    """A published run: throughput in the set's unit, memory in GiB or GB, or None."""

    schedule: str
    published: float
    memory: float | None = None
    chunks: int | None = None
    recompute: bool = False

    @property
    def name(self) -> str:
        """Return the name that the page shows."""
        name = display_name(self.schedule)
        if self.chunks:
            name += f", {self.chunks} chunks"
        return name + (", recomputed" if self.recompute else "")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions for a row."""

    time_us: float
    held_bytes: float  # largest activation memory of a device


@dataclass(frozen=True, slots=True)
class Set:
    """Published runs of one model on the same devices."""

    description: Mapping[str, Any]
    rows: tuple[Row, ...]
    costs_of: Callable[[int, bool], Costs]  # costs of a number of stages, recomputed or not
    subject: Subject | None

    @property
    def devices(self) -> int:
        """Return the pipeline's number of devices."""
        return int(self.description["devices"])

    @property
    def spans(self) -> bool:
        """Return whether a step whose backward is split has no barrier to wait for."""
        return bool(self.description.get("post_validation", False))

    def predict(self, row: Row, microbatches: int, host_us: float = 0.0) -> Predicted:
        """Return the predictions for a row if every pass needs `host_us` more."""
        schedule = make(row.schedule, self.devices, microbatches, row.chunks)
        costs = self.costs_of(schedule.num_stages, row.recompute)
        costs = longer(costs, host_us, schedule.splits_backward)
        timeline = simulate(schedule, costs)
        spans = self.spans and schedule.splits_backward
        time_us = timeline.span if spans else timeline.makespan
        return Predicted(time_us, max(peak_held(schedule, costs)))

    def microbatches(self) -> int:
        """Return the microbatches, fitted to a row's speed where they are not known."""
        microbatches = self.description["microbatches"]
        if isinstance(microbatches, int):
            return microbatches
        fitted = self._row(microbatches.removeprefix("fit "))
        counts = (self.devices * groups for groups in range(1, MOST_GROUPS + 1))
        return min(counts, key=lambda count: self._off(fitted, count))

    def host_us(self, microbatches: int) -> float | None:
        """Return the time per pass, fitted to the speed of the row named by `host_fit`."""
        if "host_fit" not in self.description:
            return None
        fitted = self._row(self.description["host_fit"])
        times = range(0, MOST_HOST_US + 1, HOST_STEP_US)
        return min(times, key=lambda host_us: self._off(fitted, microbatches, host_us))

    def _off(self, row: Row, microbatches: int, host_us: float = 0.0) -> float:
        """Return how far a row's predicted speed is from the published, against the first's."""
        first, this = (self.predict(row, microbatches, host_us) for row in (self.rows[0], row))
        return abs(first.time_us / this.time_us - row.published / self.rows[0].published)

    def memory(self, predicted: Sequence[Predicted]) -> list[float]:
        """Return the memory of every row by a line through two rows' published."""
        ends = self.description["memory_line"]
        (low, high), predicted_of_row = (
            map(self._row, ends),
            dict(zip(self.rows, predicted, strict=True)),
        )
        if low.memory is None or high.memory is None:
            raise SystemExit(
                f"evidence.py: {self.description['name']}: memory_line needs memory in {ends}"
            )
        from_bytes = predicted_of_row[low].held_bytes
        slope = (high.memory - low.memory) / (predicted_of_row[high].held_bytes - from_bytes)
        return [
            low.memory + slope * (prediction.held_bytes - from_bytes) for prediction in predicted
        ]

    def plan(self, microbatches: int, held_bytes: float) -> Predicted | None:
        """Return the adaptive scheduler's order within this memory; None where nothing fits."""
        finest = max(self.devices * (row.chunks or 2) for row in self.rows)
        costs = self.costs_of(finest, False)
        goal = Objective.SPAN if self.spans else Objective.MAKESPAN
        question = PlanRequest(
            AUTO, self.devices, microbatches, costs, limit=held_bytes, objective=goal
        )
        try:
            answer: PlanResult = plan_request(question)
        except ScheduleError:
            return None
        timeline = simulate(answer.schedule, answer.costs)
        return Predicted(goal.of(timeline), max(peak_held(answer.schedule, answer.costs)))

    def _row(self, schedule: str) -> Row:
        return next(row for row in self.rows if row.schedule == schedule)


@cache  # a fit requests the same schedules many times
def make(name: str, devices: int, microbatches: int, chunks: int | None) -> Schedule:
    """Return a schedule of the catalogue."""
    schedule_name = f"{name}:{chunks}" if chunks else name
    return plan_request(PlanRequest(schedule_name, devices, microbatches)).schedule


def longer(costs: Costs, pass_us: float, splits: bool) -> Costs:
    """Return costs with additional time for each pass: F and BW, or F, B and W."""
    increases = dict.fromkeys(TIMES[: 3 if splits else 2], pass_us)
    return replace(costs, stages=tuple(stage.increased(increases) for stage in costs.stages))


def read_sets() -> list[Set]:
    """Return the published sets with the inputs of their costs."""
    sets = []
    for description in yaml.safe_load((EVIDENCE / "published.yaml").read_text()):
        rows = tuple(Row(**row) for row in description["rows"])
        if "costs_ms" in description:
            sets.append(Set(description, rows, _measured(description), None))
            continue
        files = (folder / description["model"] for folder in (EVIDENCE, CONFIGS / "models"))
        subject = load_model(next(file for file in files if file.is_file()))
        sets.append(Set(description, rows, _counted(description, subject), subject))
    return sets


def _measured(description: Mapping[str, Any]) -> Callable[[int, bool], Costs]:
    """Return the costs that a set states, of one device, cut into stages."""
    costs = description["costs_ms"]

    def costs_of(num_stages: int, recompute: bool) -> Costs:
        passes = (1e3 * costs[name] / 2 for name in ("forward", "backward", "weight"))
        return Costs.uniform(description["devices"], num_stages, *passes, 1e3 * costs["send"])

    return costs_of


def _counted(description: Mapping[str, Any], subject: Subject) -> Callable[[int, bool], Costs]:
    """Return the costs of a model on a cluster, as the sweep has them."""
    machine = Machine.of(load(CONFIGS / "clusters" / description["cluster"], Cluster))
    counts = Kept(subject, machine)

    def costs_of(num_stages: int, recompute: bool) -> Costs:
        layout = Layout(description.get("layout", "even"))
        sizes = (description["sequence_length"], 1, 1, 1, description["devices"], 1, 1)
        config = Configuration("", *sizes, FULL if recompute else NONE, layout)
        placement = looping(description["devices"], num_stages // description["devices"])
        return counts.costs_of(config).pieces.costs(layers_of_stages(config, subject, placement))

    return costs_of


_NOT_KEPT: dict[str, Any] = {
    **{field.name: 0 for part in (RankReport, *REPORT_PARTS) for field in fields(part)},
    "when": {"pass": "", "place": ""},
    "graph_bytes": None,
    "chunk_dummy_bytes": (0, 0),
    **dict.fromkeys(("holders", "curve"), ()),
}
"""In place of values of a dry run that no cost needs, and that the file does not have."""


def _kept(ranks: Ranks | str) -> Any:
    """Return the values of a dry run that costs need."""
    if isinstance(ranks, str):
        return ranks
    every = (report.to_json() for report in ranks)
    return [{name: value for name, value in one.items() if name in _KEPT} for one in every]


_KEPT = """stage sizes kinds held_bytes held_parts chunk_parameters chunk_layers chunk_dummy_bytes
    message_bytes work scale shards_optimizer communicators replaced_bytes""".split()


class Kept(Counts):
    """Counts stored in docs/evidence, to which new counts are added."""

    def count(self, combinations: Any, tell: Any) -> tuple[int, int]:
        """Count combinations that are missing in memory and in the file."""
        saved = json.loads(COUNTED.read_text()) if COUNTED.is_file() else {}
        combinations = list(combinations)
        for config in combinations:
            if self._name(config) in saved:
                plain = saved[self._name(config)]
                self.ranks[key_of_count(config)] = [
                    RankReport.from_json(_NOT_KEPT | report) for report in plain
                ]
        counts = super().count(combinations, tell)
        if counts[0]:
            saved |= {
                self._name(config): _kept(self.ranks[key_of_count(config)])
                for config in combinations
            }
            lines = [f"{json.dumps(key)}: {json.dumps(saved[key])}" for key in sorted(saved)]
            COUNTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return counts

    def _name(self, config: Configuration) -> str:
        return f"{self.subject.name} {self.machine.gpu.name} {key_of_count(config)}"


# --- the page -----------------------------------------------------------------------------------


def section(which: Set) -> Iterator[str]:
    """Yield the lines of a set's section."""
    description, microbatches = which.description, which.microbatches()
    facts = {
        "microbatches": microbatches,
        "host_us": which.host_us(microbatches),
        "flops": _flops_per_token(which),
    }
    yield f"## {description['name']}\n"
    yield wrap(f"Source: {description['source']}.") + "\n"
    yield from (item(f"Stated: {text}.") for text in description["stated"])
    yield from (item(f"Assumed: {text.format(**facts)}.") for text in description["assumed"])
    columns = list(zip(*_columns(which, microbatches), strict=True))
    yield "\n" + table(columns)
    published = [row.published for row in which.rows]
    speeds = [-which.predict(row, microbatches).time_us for row in which.rows]
    tau = kendall_tau(speeds, published)
    yield "\n" + wrap(f"Kendall's tau {tau:.2f}. {description['why'].format(**facts)}")


def _columns(which: Set, microbatches: int) -> Iterator[list[str]]:
    """Yield the columns of a set's table, each with its head."""
    description, first = which.description, which.rows[0]
    predicted = [which.predict(row, microbatches) for row in which.rows]
    speeds = [predicted[0].time_us / prediction.time_us for prediction in predicted]
    published = [row.published / first.published for row in which.rows]
    yield ["schedule", *(row.name for row in which.rows)]
    yield ["published", *(f"{row.published:g}" for row in which.rows)]
    yield ["relative", *(f"{speed:.3f}" for speed in published)]
    yield ["predicted", *(f"{speed:.3f}" for speed in speeds)]
    yield ["ratio", *(f"{a / b:.3f}" for a, b in zip(speeds, published, strict=True))]
    yield ["published rank", *(str(rank(speed, published)) for speed in published)]
    yield ["predicted rank", *(str(rank(speed, speeds)) for speed in speeds)]
    host_us = which.host_us(microbatches)
    if host_us is not None:
        times = [which.predict(row, microbatches, host_us).time_us for row in which.rows]
        yield [
            f"with {host_us} us more per pass",
            *(f"{times[0] / step_time:.3f}" for step_time in times),
        ]
    if "memory_line" in description:
        yield ["published memory", *(f"{row.memory:g}" for row in which.rows)]
        marks = [" (fitted)" * (row.schedule in description["memory_line"]) for row in which.rows]
        memory = zip(which.memory(predicted), marks, strict=True)
        yield ["predicted memory", *(f"{figure:.1f}{mark}" for figure, mark in memory)]
    if description.get("plan"):
        plans = [which.plan(microbatches, prediction.held_bytes) for prediction in predicted]
        speeds = [predicted[0].time_us / planned.time_us if planned else 0.0 for planned in plans]
        yield ["plan in its memory", *(f"{speed:.3f}" if speed else "-" for speed in speeds)]


def _flops_per_token(which: Set) -> float:
    if which.subject is None:
        return 0.0
    length = which.description["sequence_length"]
    return which.subject.flops(length, 1) / length / 1e9


class BestPrediction(NamedTuple):
    """A published result of the grid search, and the prediction for its configuration."""

    published: Published
    prediction: Prediction
    mfu_percent: float  # also if the prediction does not fit


def grid_predictions() -> list[BestPrediction]:
    """Predict the configurations that the paper's grid search found best."""
    loaded = load_sweep(GRID)
    machine = Machine.of(loaded.cluster)
    counts = Kept(loaded.subject, machine)
    predictor = Predictor(loaded.subject, machine, counts, loaded.sweep.post_validation)
    roomy = replace(predictor, headroom_bytes=-machine.gpu.memory_bytes)
    batches = {
        workload.sequence_length: workload.global_batch_size for workload in loaded.sweep.workloads
    }
    rows = []
    for published in load_published():
        length = published.sequence_length
        # Where a method ran out of memory, the configuration of the one that did not.
        sizes = published.parallel if published.mfu_percent is not None else ONLY_FIT
        data, tensor, pipeline, size = map(int, sizes.split())
        prediction = predictor(
            Configuration(
                published.schedule, length, batches[length], data, tensor, pipeline, 1, size,
                NONE, Layout.BALANCED,
            )
        )  # fmt: skip
        mfu = prediction.mfu or roomy(prediction.configuration).mfu or 0.0
        rows.append(BestPrediction(published, prediction, 100 * mfu))
    return rows


ONLY_FIT = "1 8 5 1"
"""DP, TP, PP and microbatch size with which V-Half ran at 16384 tokens, and no other method."""


def grid_search() -> Iterator[str]:
    """Yield the lines of the paper's grid search, at the configurations that it found best."""
    rows = [row for row in grid_predictions() if row.published.mfu_percent is not None]
    cells = []
    for published, prediction, mfu in rows:
        assert published.mfu_percent is not None
        cells.append([str(published.sequence_length), display_name(published.schedule)])
        figures = f"{published.mfu_percent:.2f}", f"{mfu:.2f}" + " (OOM)" * (not prediction.fits)
        cells[-1] += [published.parallel, *figures, f"{mfu / published.mfu_percent:.3f}"]
    yield "## The paper's grid search, 98.5B on 40 A100\n"
    yield wrap(
        "Source: arXiv 2405.15362, best MFU of each method in percent. Each row is predicted at "
        "the configuration that was published as the best. `bash scripts/reproduce_grid_search.sh` "
        "compares the configurations that are *predicted* to be the best."
    )
    head = ["sequence", "schedule", "DP TP PP microbatch", "published", "predicted", "ratio"]
    yield "\n" + table([head, *cells], text_columns=3)
    published_mfu = [row.published.mfu_percent for row in rows]
    groups = [row.published.sequence_length for row in rows]
    tau = kendall_tau([row.mfu_percent for row in rows], published_mfu, groups)
    gpu, last = Machine.of(load_sweep(GRID).cluster).gpu, rows[-1].prediction
    yield "\n" + wrap(
        f"Kendall's tau within a sequence length: {tau:.2f}. At 16384, only V-Half ran; predicted "
        f"are {last.peak_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB. These include "
        f"{gpu.beside_gib:g} GiB for CUDA and libraries without Transformer Engine, which the "
        "published code does not use, from out-of-memory messages of A100 "
        "([outside_memory.csv](evidence/outside_memory.csv)). The efficiency of kernels on A100 "
        "was fitted to the rows at 3072; all rows at 1024 and 16384 are predicted too fast."
    )


def trained_here() -> Iterator[str]:
    """Yield the sections on training on this project's machines."""
    losses, speed = EVIDENCE / "loss_parity.csv", EVIDENCE / "speed.md"
    if losses.exists():
        with losses.open(newline="") as stream:
            rows = list(csv.reader(stream))
        yield "## Losses compared with Megatron's 1F1B\n"
        yield PARITY
        for path in sorted((ROOT / "benchmarks" / "figures").glob(PARITY_FIGURES)):
            about = "Losses, and their difference from those of Megatron's 1F1B"
            yield f"![{about}](figures/{path.name})\n"
        yield table(rows, text_columns=2)
    if speed.exists():
        yield "## Measured speed\n"
        yield SPEED
        yield speed.read_text().rstrip()


def rank(value: float, among: Sequence[float]) -> int:
    """Return how many are larger, and one."""
    return 1 + sum(competitor > value for competitor in among)


def table(rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Return rows as a Markdown table, the first of them its head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|---" * text_columns + "|---:" * (len(rows[0]) - text_columns) + "|"
    return "\n".join([head, rule, *body])


def wrap(text: str) -> str:
    """Return a paragraph in lines of 100."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def item(text: str) -> str:
    """Return an item of a list in lines of 100."""
    lines = textwrap.wrap(text, 98, break_long_words=False, break_on_hyphens=False)
    return "* " + "\n  ".join(lines)


def page() -> str:
    """Return the page."""
    lines = [HEAD, *grid_search()]
    for which in read_sets():
        lines += ["", *section(which)]
    tables = [*measured_table.table(), "", *rehearsed_table.table(), "", *steps_table.table()]
    return "\n".join([*lines, "", *tables, "", *trained_here()]).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
