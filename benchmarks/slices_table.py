"""Print memory and idle time of schedules with sequence slices (simulated).

    python benchmarks/slices_table.py [--devices D] [--microbatches M ...] [--slices K ...] [NAME]
    python benchmarks/slices_table.py --planned

Memory is relative to 1F1B without slices. The idle time is the makespan minus the work of the
busiest rank, in percent of that work without the overhead of slices. Costs: F = B = W, and 1,
1.15, 0.85 (attention is 15% of a forward) with messages of 0.05 by size and 0.005 fixed, and an
overhead of 0.005 per pass of a slice. With --planned, schedules for 8 ranks are planned within a
share of that memory, for a V and for two and four chunks per rank, and compared with the best
known: local searches from many starts, and list scheduling with 768 settings.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.search import plan
from megatron_vshape.view.names import display_name, shape_text
from megatron_vshape.view.numbers import table

MESSAGE, LATENCY, ADDED = 0.05, 0.005, 0.005
NAMES = ("1f1b", "interleaved-1f1b", "v-zb", "v-half", "v-min")
EVEN, REAL, HEAVY = (1.0, 1.0, 1.0), (1.0, 1.15, 0.85), (1.0, 1.7, 0.3)
COUNTS = (4, 8, 24)
PLANNED = (
    (8, 0.125, EVEN, (15, 15, 15)),
    (8, 0.1875, EVEN, (2.3, 1.2, 0.4)),
    (8, 0.25, EVEN, (1.8, 0.9, 0.3)),
    (4, 0.259, REAL, (22.8, 12.2, 5.2)),
    (4, 0.352, REAL, (12.7, 7.3, 3.7)),
    (8, 0.1875, REAL, (8.5, 8.7, 5.3)),
    (8, 0.234375, REAL, (5.8, 5.4, 4.4)),
    (4, 0.259, HEAVY, (38, 25, 19.4)),
    (4, 0.352, HEAVY, (23.4, 13.2, 6.0)),
    (8, 0.1875, HEAVY, (13.5, 10.9, 11.4)),
    (8, 0.234375, HEAVY, (9.5, 7.4, 5.1)),
)
"""Slices, the limit as a share of 1F1B's memory, F, B and W, and the best known, by `COUNTS`."""


def costs_of(
    num_devices: int, num_stages: int, slices: int, parts: tuple[float, float, float] = REAL
) -> Costs:
    """Return the costs of an unsliced microbatch; slices add the host time."""
    if parts == EVEN:
        return Costs.uniform(num_devices, num_stages)
    scale = 2 * num_devices / num_stages
    host = ADDED * scale * (1 - 1 / slices)
    send = MESSAGE + LATENCY * slices  # of which a slice needs its share
    return Costs.uniform(num_devices, num_stages, *parts, send=send, host=host)


def planned(slices: int, share: float, parts: tuple[float, float, float], count: int) -> list[str]:
    """Return the overhead of the best plan in per cent, and the placement it has."""
    devices, candidates = 8, []
    for placement in (v_shape(devices), looping(devices, 2), looping(devices, 4)):
        costs = costs_of(devices, len(placement), slices, parts)
        limit = 2 * devices * share
        result = plan(costs, devices, count, limit, placements=[placement], slices=slices)
        verify(result.schedule, [limit] * devices, costs)
        busy = replace(costs, host_us=0.0).busy_us(placement, devices, count)
        candidates.append(
            (100 * (result.value / busy - 1), shape_text(result.schedule), result.schedule)
        )
    value, shape, schedule = min(candidates, key=lambda candidate: candidate[0])
    return [f"{value:.1f}", f"{shape} of {schedule.num_chunks}"]


def planned_rows() -> Iterator[list[str]]:
    """Yield the cells of every planned order with its previous result."""
    for slices, share, parts, results in PLANNED:
        for count, previous in zip(COUNTS, results, strict=True):
            text = ", ".join(f"{part:g}" for part in parts)
            cells = planned(slices, share, parts, count)
            yield [text, str(slices), f"{share:.3f}", str(count), f"{previous:.1f}", *cells]


def row(name: str, num_devices: int, microbatches: list[int], slices: int) -> list[str]:
    """Return the cells of one schedule."""
    even, real = [], []
    for count in microbatches:
        schedule = make(name, num_devices, count, slices=slices)
        plain = simulate(schedule)
        even.append(f"{100 * plain.overhead / plain.busy:.1f}")
        costs = costs_of(num_devices, schedule.num_stages, slices)
        work = replace(costs, host_us=0.0)
        busy = work.busy_us(schedule.placement, num_devices, count)
        real.append(f"{100 * (simulate(schedule, costs).makespan / busy - 1):.1f}")
    peak = max(peak_held(schedule)) / (2 * num_devices)
    return [display_name(name), str(slices), f"{peak:.3f}", " / ".join(even), " / ".join(real)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", default=NAMES)
    parser.add_argument("--devices", type=int, default=8, metavar="D")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 24], metavar="M")
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4, 8], metavar="K")
    parser.add_argument("--planned", action="store_true", help="plan the schedules")
    options = parser.parse_args()
    if options.planned:
        print("F, B, W          slices  limit  microbatches  known  planned")
        for cells in planned_rows():  # one by one, because they are slow
            print("{:16} {:>6}  {}  {:>12}  {:>5}  {:>7}  {}".format(*cells), flush=True)
        return
    heading = ["schedule", "slices", "peak", "F = B = W", "1, 1.15, .85"]
    rows = [
        row(name, options.devices, options.microbatches, slices)
        for name in options.names
        for slices in options.slices
    ]
    counts = " / ".join(map(str, options.microbatches))
    print(f"{options.devices} ranks, idle time in percent of the work for {counts} microbatches:")
    print(table([heading, *rows]))


if __name__ == "__main__":
    try:
        main()
    except ScheduleError as error:
        sys.exit(str(error))
