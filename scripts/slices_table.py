"""Print what slices along the sequence hold and idle, on the schedules that the code makes.

    python scripts/slices_table.py [--devices D] [--microbatches M ...] [--slices K ...] [NAME ...]

Memory is a share of what 1F1B holds unsliced. The overhead is what the makespan is over the busiest
device's work, in per cent, without what slicing adds: at F = B = W, and at 1, 1.15, .85 (attention
takes 15 % of a forward), where a message takes .05 of a pass by its size and .005 whatever that is,
and a slice's pass .005 of a whole one beside its share.
"""

import argparse
import sys
from dataclasses import replace

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import table

MESSAGE, LATENCY, ADDED = 0.05, 0.005, 0.005
NAMES = ("1f1b", "interleaved-1f1b", "v-zb", "v-half", "v-min")


def costs_of(num_devices: int, num_stages: int, slices: int) -> Costs:
    """Return the costs of a whole microbatch; what slicing adds is what the host takes."""
    scale = 2 * num_devices / num_stages
    host = ADDED * scale * (1 - 1 / slices)
    send = MESSAGE + LATENCY * slices  # of which a slice's takes its share
    return Costs.uniform(num_devices, num_stages, 1.0, 1.15, 0.85, send=send, host=host)


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
    options = parser.parse_args()
    heading = ["schedule", "slices", "peak", "F = B = W", "1, 1.15, .85"]
    rows = [
        row(name, options.devices, options.microbatches, slices)
        for name in options.names
        for slices in options.slices
    ]
    counts = " / ".join(map(str, options.microbatches))
    print(f"{options.devices} devices, per cent over the work at {counts} microbatches:")
    print(table([heading, *rows]))


if __name__ == "__main__":
    try:
        main()
    except ScheduleError as error:
        sys.exit(str(error))
