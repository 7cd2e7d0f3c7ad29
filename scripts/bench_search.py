#!/usr/bin/env python3
"""Compare the adaptive scheduler with published schedules, cell by cell.

    python3 scripts/bench_search.py [--judge PATH] [--peers PATH] [--chunks C] [--steps N]
                                    [--longer S]
    python3 scripts/bench_search.py --random 40 [--against CHECKOUT]

A cell is a number of devices and microbatches and one F, B, W, communication. Per cell and memory
limit: the best published overhead that fits, ours as `replay.py` computes it from the exported
file, their ratio, the lower bound of the overhead, the proven gap of the step time for the plan's
placement, with `=` if it is proven optimal, and the seconds of processor time, which all
cores share. With --longer a plan whose proven gap is above 1% is searched again for S seconds of
all cores (processor time), and the end of the row has the gain in step time.
Then geometric means, medians of the proven gap, and the overhead when every pass is up to 10%
slower or faster than planned. Exit status 1 if any plan is worse than a published schedule.

With --random N the cells are N random ones with a fixed seed: 3 to 9 devices, 2 to 40 microbatches,
limits from 0.4 to 1.0 of 1F1B. Each is planned by `megatron-vshape plan` in its own process, as a
user gets it, also with the package of another checkout, and the last lines compare step times,
overheads and processor seconds (start of the process included).
"""

import argparse
import importlib.util
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.compiling import processors
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper import catalogue
from megatron_vshape.core.planner import search
from megatron_vshape.core.schedule_names import baselines_of

ROOT = Path(__file__).resolve().parents[1]
JUDGE = Path(__file__).resolve().parents[2] / "shared" / "judge"
TRIALS = 20
SLACK = 1e-6
"""The replay rounds to this."""
NEAR = 0.01
"""A plan with a proven gap of at most this value is not searched again."""


class Cell(NamedTuple):
    """One comparison: counts, costs, and a memory limit in chunks."""

    devices: int
    microbatches: int
    cost: tuple[float, float, float, float]
    limit: float

    @property
    def group(self) -> str:
        """Return the group of the cell for geometric means."""
        memory = "below 1F1B's" if self.limit < 2 * self.devices else "1F1B's or more"
        equal = self.cost[0] == self.cost[1] == self.cost[2] and not self.cost[3]
        return f"{'unit' if equal else 'unequal'} costs, memory {memory}"


class Result(NamedTuple):
    """Overheads of one cell."""

    cell: Cell
    published: float
    planned: float
    bound: float
    seconds: float
    plan: search.EvaluatedSchedule
    longer: search.EvaluatedSchedule | None = None

    @property
    def gain(self) -> float:
        """Return the share of the step time that a longer search saves."""
        return 1 - self.longer.value / self.plan.value if self.longer else 0.0

    @property
    def ratio(self) -> float:
        """Return our overhead over the published one."""
        return self.planned / self.published if self.published else 1.0


def read_cells(path: Path) -> list[tuple[Cell, float]]:
    """Return every cell with the minimum published overhead that fits its limit."""
    rows: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in json.loads(path.read_text())["rows"]:
        key = (row["num_devices"], row["num_microbatches"], tuple(row["cost"]))
        rows[key].append((row["peak"], row["overhead"]))
    cells = []
    for key, points in rows.items():
        for limit in sorted({peak for peak, _ in points}):
            best = min(overhead for peak, overhead in points if peak <= limit)
            cells.append((Cell(*key, limit), best))
    return cells


def load_judge(path: Path) -> ModuleType:
    """Return the module of the replay, which is not part of the package."""
    spec = importlib.util.spec_from_file_location("replay", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} cannot be loaded; give --judge PATH/replay.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replay_file(judge: ModuleType, text: str, cell: Cell) -> dict[str, Any]:
    """Return the figures of the replay for the text of a schedule file."""
    data = json.loads(text)
    stages = len(data["placement"])
    scale = 2 * cell.devices / stages
    costs = {kind: [x * scale] * stages for kind, x in zip("FBW", cell.cost, strict=False)}
    return judge.replay(data, costs, cell.cost[3], [scale] * stages)


def measure(judge: ModuleType, cell: Cell, published: float, options: argparse.Namespace) -> Result:
    """Return the replayed plan for a cell; a device may have up to `options.chunks` stages."""
    started = time.process_time()
    costs = Costs.uniform(cell.devices, options.chunks * cell.devices, *cell.cost)
    plan = search.plan(costs, cell.devices, cell.microbatches, cell.limit, steps=options.steps)
    seconds = time.process_time() - started
    verdict = replay_file(judge, plan.schedule.to_json(), cell)
    if verdict["peak"] > cell.limit + SLACK:
        raise SystemExit(f"{cell}: the plan holds {verdict['peak']}, more than the limit")
    bound = plan.lower_bound - plan.busy
    longer = search_longer(costs, cell, options.longer) if plan.gap > NEAR else None
    return Result(cell, published, verdict["overhead"], bound, seconds, plan, longer)


def search_longer(costs: Costs, cell: Cell, seconds: float) -> search.EvaluatedSchedule | None:
    """Return the plan after `seconds` of processor time, independent of other programs."""
    if not seconds:
        return None
    cores = processors()
    clock = SimpleNamespace(monotonic=lambda: time.process_time() / cores)
    with mock.patch.object(search, "time", clock):
        return search.plan(costs, cell.devices, cell.microbatches, cell.limit, seconds=seconds)


def bubble_with_jitter(judge: ModuleType, schedule: Schedule, cell: Cell, seed: int) -> float:
    """Return the bubble when every pass is up to 10% slower or faster than planned."""
    rng = random.Random(seed)
    stages = len(schedule.placement)
    scale = 2 * cell.devices / stages
    times = {
        (kind, stage, microbatch): base * scale * rng.uniform(0.9, 1.1)
        for kind, base in zip("FBW", cell.cost, strict=False)
        for stage in range(stages)
        for microbatch in range(cell.microbatches)
    }
    return _bubble(schedule, times, cell.cost[3])


def _bubble(schedule: Schedule, times: dict[tuple[str, int, int], float], send: float) -> float:
    """Return the bubble of an order for times that differ from pass to pass."""
    rows, stages = schedule.order, schedule.num_stages
    finished: dict[tuple[str, int, int], float] = {}
    clock, positions, work = [0.0] * len(rows), [0] * len(rows), [0.0] * len(rows)
    remaining = sum(map(len, rows))
    while remaining:
        for device, row in enumerate(rows):
            while positions[device] < len(row):
                device_pass = row[positions[device]]
                simple = Pass(device_pass.parts()[0], device_pass.stage, device_pass.microbatch)
                dependencies = [
                    (str(dependency.kind), *dependency[1:]) for dependency in simple.needs(stages)
                ]
                if any(dependency not in finished for dependency in dependencies):
                    break
                start = clock[device]
                for dependency in dependencies:
                    is_remote = schedule.placement[dependency[1]] != device
                    start = max(start, finished[dependency] + (send if is_remote else 0.0))
                keys = [
                    (str(kind), device_pass.stage, device_pass.microbatch)
                    for kind in device_pass.parts()
                ]
                clock[device] = start + sum(times[key] for key in keys)
                work[device] += sum(times[key] for key in keys)
                finished.update(dict.fromkeys(keys, clock[device]))
                positions[device] += 1
                remaining -= 1
    return 1 - max(work) / max(clock)


def published_orders(cell: Cell) -> list[Schedule]:
    """Return the published schedules that fit the cell's limit."""
    fitting = []
    for name in catalogue.NAMES:
        schedule = catalogue.make(name, cell.devices, cell.microbatches)
        if max(peak_held(schedule)) <= cell.limit + SLACK:
            fitting.append(schedule)
    return fitting


RANDOM_COSTS = ((1, 1, 1, 0), (1, 1.15, 0.85, 0.05), (1, 2, 1, 0.05))
"""Costs of the random cells: those of the published figures."""

RANDOM_SEED = 77
MOST_CHUNKS = 12
"""Maximum chunks per rank of published schedules, as in `megatron-vshape plan`."""


def random_cells(count: int) -> list[Cell]:
    """Return the first `count` random cells; the limit is in tenths of a chunk."""
    rng = random.Random(RANDOM_SEED)
    cells = []
    for _ in range(count):
        devices, microbatches = rng.randint(3, 9), rng.randint(2, 40)
        limit = round(2 * devices * rng.uniform(0.4, 1.0), 1)
        cells.append(Cell(devices, microbatches, rng.choice(RANDOM_COSTS), limit))
    return cells


class PlannedStep(NamedTuple):
    """Times of one plan, in --cost units, and the processor seconds of its process."""

    makespan: float
    overhead: float
    seconds: float


class Comparison(NamedTuple):
    """The plans of a random cell: of this checkout, and of another one."""

    cell: Cell
    published: float  # overhead of the best published schedule that fits; infinity if none does
    planned: PlannedStep
    other: PlannedStep | None = None


def plan_with(checkout: Path, judge: ModuleType, cell: Cell, flags: Sequence[str]) -> PlannedStep:
    """Plan a cell with the command of a checkout.

    Raises:
        SystemExit: the command fails, or its plan exceeds the limit.
    """
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    environment["XDG_CACHE_HOME"] = str(checkout / ".cache")
    start = "import sys; from megatron_vshape.cli.main import main; sys.exit(main())"
    cost = ",".join(map(str, cell.cost))
    sizes = ["--devices", str(cell.devices), "--microbatches", str(cell.microbatches)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        options = [*sizes, "--cost", cost, "--memory-limit", str(cell.limit), *flags]
        command = [sys.executable, "-c", start, "plan", *options, "--export", str(path)]
        # python -c imports from the current directory first.
        completed = subprocess.run(
            command, env=environment, cwd=checkout, capture_output=True, text=True
        )
        if completed.returncode:
            raise SystemExit(f"{checkout}: {cell}: {completed.stderr}")
        figures = replay_file(judge, path.read_text(), cell)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if figures["peak"] > cell.limit + SLACK:
        raise SystemExit(f"{checkout}: {cell}: the plan's peak {figures['peak']} exceeds the limit")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return PlannedStep(figures["makespan"], figures["overhead"], seconds)


def published_overhead(judge: ModuleType, cell: Cell) -> float:
    """Return the minimum overhead of the published schedules that fit; infinity if none does."""
    overheads = [math.inf]
    sizes = cell.devices, cell.microbatches
    for baseline, _ in baselines_of(*sizes, range(1, MOST_CHUNKS + 1)):
        schedule = baseline.make(*sizes).split_overlapped()
        figures = replay_file(judge, schedule.to_json(), cell)
        if figures["peak"] <= cell.limit + SLACK:
            overheads.append(figures["overhead"])
    return min(overheads)


def compare_random_cells(judge: ModuleType, options: argparse.Namespace) -> int:
    """Print a row per random cell; return 1 if any plan is worse than a published schedule."""
    print("  d     m  F/B/W/comm          limit published      ours  ratio seconds", end="")
    print("     other of other seconds" if options.against else "")
    comparisons = []
    for cell in random_cells(options.random):
        if options.devices not in (None, cell.devices):
            continue
        planned = plan_with(ROOT, judge, cell, options.flags)
        other = options.against and plan_with(options.against.resolve(), judge, cell, [])
        comparisons.append(Comparison(cell, published_overhead(judge, cell), planned, other))
        print_comparison(comparisons[-1])
    print_comparison_means(comparisons)
    worse = [row for row in comparisons if row.planned.overhead > row.published + SLACK]
    print(f"{len(worse)} of {len(comparisons)} worse than published")
    return 1 if worse else 0


def print_comparison(row: Comparison) -> None:
    """Print one line of the table of random cells."""
    cell, planned, other = row.cell, row.planned, row.other
    cost = "/".join(f"{x:g}" for x in cell.cost)
    text = (
        f"{cell.devices:3} {cell.microbatches:5}  {cost:17} {cell.limit:7.5g} "
        f"{row.published:9.2f} {planned.overhead:9.2f} "
        f"{_ratio(planned.overhead, row.published):6.3f} {planned.seconds:7.2f}"
    )
    if other is not None:
        text += f" {other.overhead:9.2f} {_ratio(planned.overhead, other.overhead):8.3f}"
        text += f" {other.seconds:7.2f}"
    print(text, flush=True)


def _ratio(overhead: float, other: float) -> float:
    """Return the ratio of two overheads; 1 if both are 0."""
    return 1.0 if overhead <= SLACK and other <= SLACK else max(overhead, SLACK) / max(other, SLACK)


def print_comparison_means(comparisons: Sequence[Comparison]) -> None:
    """Print geometric means over the random cells, and the ratio of all processor seconds."""

    def mean(label: str, ratios: Sequence[float]) -> None:
        if ratios:
            middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"geometric mean of {len(ratios)} cells, {label}: {middle:.4f}")

    mean(
        "overhead over the best published",
        [_ratio(row.planned.overhead, row.published) for row in comparisons if row.published < 1e9],
    )
    pairs = [(row.planned, row.other) for row in comparisons if row.other is not None]
    mean("step time over the other's", [ours.makespan / other.makespan for ours, other in pairs])
    mean("overhead over the other's", [_ratio(x.overhead, y.overhead) for x, y in pairs])
    ours = sum(row.planned.seconds for row in comparisons)
    print(f"processor seconds: {ours:.1f}", end="")
    if pairs:
        seconds = sum(other.seconds for _, other in pairs)
        print(f", other {seconds:.1f}, ratio {ours / seconds:.3f}", end="")
    print()


def geometric_means(results: Sequence[Result]) -> dict[str, float]:
    """Return the mean ratio of every group of cells."""
    groups: dict[str, list[float]] = defaultdict(list)
    for result in results:
        groups[result.cell.group].append(math.log(max(result.ratio, 1e-9)))
    return {name: math.exp(sum(logs) / len(logs)) for name, logs in sorted(groups.items())}


def print_gaps(results: Sequence[Result]) -> None:
    """Print the median of the proven gap for up to 8 devices, in percent."""
    few = [result for result in results if result.cell.devices <= 8]
    tight = [result for result in few if result.cell.limit < 2 * result.cell.devices]
    for name, group in (("up to 8 devices", few), ("of them, memory below 1F1B's", tight)):
        if group:
            middle = median(100 * result.plan.gap for result in group)
            print(f"median proven gap, {name}: {middle:.2f} %")


def print_row(result: Result) -> None:
    """Print one line of the table."""
    cell = result.cell
    cost = "/".join(f"{x:g}" for x in cell.cost)
    worse = "  WORSE" if result.planned > result.published + SLACK else ""
    print(
        f"{cell.devices:3} {cell.microbatches:5}  {cost:17} {cell.limit:7.5g} "
        f"{result.published:9.2f} {result.planned:9.2f} {result.ratio:6.3f} {result.bound:8.2f}"
        f"{'=' if result.plan.gap <= SLACK else ' '}{100 * result.plan.gap:5.2f}% "
        f"{result.seconds:6.2f} {result.plan.source}{worse}"
        + (f"  longer: {100 * result.gain:.2f} %" if result.longer else ""),
        flush=True,
    )


def print_robustness(judge: ModuleType, results: Sequence[Result]) -> None:
    """Print the mean bubble under random pass times, of the plan and the best schedule."""
    print("\nbubble in % when every pass takes up to 10 % more or less (mean of trials)")
    for result in results:
        cell = result.cell
        orders = published_orders(cell)
        if cell.limit > 2 * cell.devices or cell.devices > 8 or not orders:
            continue
        planned, best = (
            min(
                sum(bubble_with_jitter(judge, order, cell, seed) for seed in range(TRIALS)) / TRIALS
                for order in group
            )
            for group in ([result.plan.schedule], orders)
        )
        cost = "/".join(f"{x:g}" for x in cell.cost)
        print(
            f"{cell.devices:3} {cell.microbatches:5}  {cost:17} {cell.limit:5g}  "
            f"plan {100 * planned:6.2f}  published {100 * best:6.2f}  "
            f"{'ok' if planned <= best else ''}"
        )


def main() -> int:
    """Print the table; return 1 if any plan is worse than a published schedule."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--judge", type=Path, default=JUDGE / "replay.py")
    parser.add_argument("--peers", type=Path, default=JUDGE / "peers.json")
    parser.add_argument("--steps", type=int, help="budget of every plan (default: its own)")
    parser.add_argument("--devices", type=int, help="only cells of so many devices")
    parser.add_argument("--chunks", type=int, default=4, help="most stages a device may hold")
    parser.add_argument("--longer", type=float, default=0.0, metavar="S", help="per cell")
    parser.add_argument("--no-robustness", action="store_true")
    parser.add_argument("--random", type=int, metavar="N", help="N random cells instead")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="plan there as well")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of plan, at the end")
    arguments = parser.parse_args()
    judge = load_judge(arguments.judge)
    if arguments.random:
        return compare_random_cells(judge, arguments)
    print(
        "  d     m  F/B/W/comm          limit published      ours  ratio    bound    gap ", end=""
    )
    print("seconds  from")
    results = []
    for cell, published in read_cells(arguments.peers):
        if arguments.devices in (None, cell.devices):
            results.append(measure(judge, cell, published, arguments))
            print_row(results[-1])
    for name, mean in geometric_means(results).items():
        print(f"geometric mean, {name}: {mean:.3f}")
    print_gaps(results)
    if arguments.longer:
        print(f"a longer search gains at most {100 * max(result.gain for result in results):.2f} %")
    if not arguments.no_robustness:
        print_robustness(judge, results)
    worse = [result for result in results if result.planned > result.published + SLACK]
    print(f"{len(worse)} of {len(results)} worse than published")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
