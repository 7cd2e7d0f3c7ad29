#!/usr/bin/env python3
"""Change one part or constant of the planner at a time, and compare step times.

    python3 benchmarks/ablate_planner.py [--steps N] [--only TEXT]

Each variant plans ten cells (8 plain ones, one with slices, one with offloading) with two seeds in
a process of its own, because numba compiles constants into the code. A row has the mean and the
worst change of the step time, in percent (+ is slower), the mean of each seed, and the ratio of
processor seconds. Seeds differ by about as much as most variants: see benchmarks/planner.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_vshape.core.model.costs import Costs, with_copies
from megatron_vshape.core.planner import improve, job_shop, modulo, orders, search

SEEDS = (1, 2)


class Cell(NamedTuple):
    """A planning problem: sizes, costs of a chunk, memory limit in chunks, and features."""

    devices: int
    microbatches: int
    cost: tuple[float, float, float, float]
    limit: float
    slices: int = 1
    copy_time: float = 0.0  # 0: no offloading


CELLS = (
    Cell(4, 8, (1, 1.15, 0.85, 0.05), 5),
    Cell(4, 8, (1, 2, 1, 0.1), 8),
    Cell(4, 17, (1, 1, 1, 0), 4.2),
    Cell(7, 18, (1, 2, 1, 0.05), 11.8),
    Cell(7, 15, (1, 2, 1, 0.05), 7.1),
    Cell(8, 16, (10, 11, 7, 2), 12),
    Cell(8, 32, (1, 1.15, 0.85, 0.05), 10),
    Cell(8, 32, (1, 2, 1, 0.1), 6.5),
    Cell(4, 6, (1, 1.15, 0.85, 0.05), 5, slices=4),
    Cell(4, 8, (1, 1.15, 0.85, 0.05), 3, copy_time=1.0),
)

_START = "orders.PlacementSearch._make_candidate"
"""Variants of this name reject starting points whose name ends with the value."""

VARIANTS: dict[str, tuple[str, Any]] = {
    "starts: without filled": (_START, ", filled"),
    "starts: without filled, W reinserted": (_START, ", filled, W reinserted"),
    "starts: without any W reinserted": (_START, ", W reinserted"),
    "starts: without filled throughout": ("orders._FILL_THROUGHOUT_BELOW", 0),
    "starts: without filled at once": (_START, ", filled at once"),
    "orders.STARTS halved": ("orders.STARTS", 4),
    "orders.STARTS doubled": ("orders.STARTS", 16),
    "orders.EFFORT halved": ("orders.EFFORT", 2),
    "orders.EFFORT doubled": ("orders.EFFORT", 8),
    "orders._MAX_ANNEALED_STAGES 0": ("orders._MAX_ANNEALED_STAGES", 0),
    "orders.RESTART_STEPS 0": ("orders.RESTART_STEPS", 0),
    "orders.RESTART_SHARE halved": ("orders.RESTART_SHARE", 0.1),
    "search.ROUNDS 2": ("search.ROUNDS", 2),
    "search.MIN_STEPS 1": ("search.MIN_STEPS", 1),
    "search.FEW 0": ("search.FEW", 0),
    "search.ORDERS doubled": ("search.ORDERS", 4),
    "modulo.STARTS halved": ("modulo.STARTS", 3),
    "modulo._INITIAL_TEMPERATURES equal": ("modulo._INITIAL_TEMPERATURES", ((12, 12), (18, 18))),
    "job_shop._MAX_DELAY 0": ("job_shop._MAX_DELAY", 0),
    "improve._MAX_DISTANCE halved": ("improve._MAX_DISTANCE", 6),
    "improve._MAX_MOVES 2": ("improve._MAX_MOVES", 2),
    "improve._NONCRITICAL_PERIOD 1": ("improve._NONCRITICAL_PERIOD", 1),
    "improve._EXCHANGE_SIXTEENTHS 0": ("improve._EXCHANGE_SIXTEENTHS", 0),
}
MODULES = {"improve": improve, "job_shop": job_shop, "modulo": modulo, "orders": orders}
MODULES["search"] = search


def apply_variant(name: str) -> None:
    """Change the planner in this process."""
    target, value = VARIANTS[name]
    if target == _START:
        reject_starts(value)
        return
    module, _, attribute = target.partition(".")
    assert hasattr(MODULES[module], attribute), target
    setattr(MODULES[module], attribute, value)
    if target == "orders.STARTS":  # imported by name
        search.STARTS = value


def reject_starts(suffix: str) -> None:
    """Reject the starting points with this end of their name."""
    original = orders.PlacementSearch._make_candidate

    def make_candidate(self: Any, name: str, *arguments: Any) -> Any:
        return None if name.endswith(suffix) else original(self, name, *arguments)

    orders.PlacementSearch._make_candidate = make_candidate  # type: ignore[method-assign]


def plan_cells(steps: int) -> dict[str, Any]:
    """Return the step times of all cells and seeds, and the processor seconds of the planning."""
    values = []
    search.plan(Costs.uniform(3, 12), 3, 6, 4, steps=2000)  # compiles
    started = time.process_time()
    for seed in SEEDS:
        for cell in CELLS:
            costs = Costs.uniform(cell.devices, 4 * cell.devices, *cell.cost)
            if cell.copy_time:
                costs = with_copies(costs, cell.copy_time)
            searched = search.plan(
                costs,
                cell.devices,
                cell.microbatches,
                cell.limit,
                slices=cell.slices,
                trades=cell.copy_time > 0,
                steps=steps,
                seed=seed,
            )
            values.append(searched.value)
    return {"values": values, "seconds": time.process_time() - started}


def run_variant(name: str | None, steps: int) -> dict[str, Any]:
    """Plan in a new process, with its own compiled code if a constant of it changes."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        if name is not None and VARIANTS[name][0].startswith(("improve", "job_shop")):
            environment["NUMBA_CACHE_DIR"] = folder
        command = [sys.executable, __file__, "--steps", str(steps), "--variant", name or ""]
        output = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def print_variant(name: str, result: dict[str, Any], baseline: dict[str, Any]) -> None:
    """Print one row."""
    pairs = zip(result["values"], baseline["values"], strict=True)
    changes = [100 * (value / reference - 1) for value, reference in pairs]
    by_seed = [mean(changes[: len(CELLS)]), mean(changes[len(CELLS) :])]
    print(
        f"{name:42} {mean(changes):+6.2f} {max(changes):+6.2f}  {by_seed[0]:+6.2f} "
        f"{by_seed[1]:+6.2f}  {result['seconds'] / baseline['seconds']:5.2f}",
        flush=True,
    )


def main() -> None:
    """Print a row per variant."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400_000, help="per cell")
    parser.add_argument("--only", default="", metavar="TEXT", help="variants with this text")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        if options.variant:
            apply_variant(options.variant)
        print(json.dumps(plan_cells(options.steps)))
        return
    baseline = run_variant(None, options.steps)
    print(f"baseline: {baseline['seconds']:.1f} processor seconds")
    print(f"{'variant':42} {'mean':>6} {'worst':>6}  seed 1 seed 2   time")
    for name in VARIANTS:
        if options.only in name:
            print_variant(name, run_variant(name, options.steps), baseline)


if __name__ == "__main__":
    main()
