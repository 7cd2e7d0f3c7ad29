"""Print the gain of plans that offload activations to host memory.

    python benchmarks/bench_offload.py [--devices 8] [--only 32,4] [--in-host 16]

Overhead in F beyond the work, 6 F per microbatch, of plans without and with offload, and the
planning time: wall clock and processor time of all cores. F, B, W and a message need 1, 1.15, 0.85
and 0.05, a chunk stays allocated from F to W, and t is the time of a copy in one direction, in F.
"""

import argparse
import math
import time
from collections.abc import Iterator

from megatron_vshape.core.model.costs import Costs, with_copies, without_copies
from megatron_vshape.core.planner.search import plan
from megatron_vshape.view.numbers import table

CELLS = ((32, 10, 1.0), (32, 8, 1.0), (32, 4, 1.0), (32, 4, 2.0), (64, 8, 1.0), (64, 4, 1.0))
"""Microbatches, chunks, t."""


def costs_of(devices: int, t: float) -> Costs:
    """Build the costs of two stages per device with offload."""
    return with_copies(Costs.uniform(devices, 2 * devices, 1.0, 1.15, 0.85, 0.05), t)


def rows(devices: int, only: str | None, in_host: float) -> Iterator[list[str]]:
    """Yield a row per cell."""
    for microbatches, chunks, t in CELLS:
        if only not in (None, f"{microbatches},{chunks}"):
            continue
        costs = costs_of(devices, t)
        row = [str(microbatches), str(chunks), f"{t:g}"]
        gap = ""
        for plan_costs in (without_copies(costs), costs):
            begin, worked = time.monotonic(), time.process_time()
            result = plan(plan_costs, devices, microbatches, chunks, trades=True, in_host=in_host)
            seconds, worked = time.monotonic() - begin, time.process_time() - worked
            row.append(f"{result.value - 6 * microbatches:.1f} ({seconds:.1f} s, {worked:.1f} s)")
            gap = f"{result.gap:.1%}"
        yield [*row, gap]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, metavar="D")
    parser.add_argument("--only", metavar="M,CHUNKS", help="these cells alone")
    in_host = "maximum host memory of a device (default: unlimited)"
    parser.add_argument("--in-host", type=float, metavar="CHUNKS", default=math.inf, help=in_host)
    options = parser.parse_args()
    plan(costs_of(2, 1.0), 2, 4, 4, trades=True, steps=1000)  # compiles
    heading = ["microbatches", "chunks", "t", "without offload", "with offload", "gap"]
    print(table([heading, *rows(options.devices, options.only, options.in_host)]))


if __name__ == "__main__":
    main()
