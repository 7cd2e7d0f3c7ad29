"""Processor time to make, verify and lower the schedule of a new number of microbatches.

A step with a count that the run has not had before makes its plan on every rank, which includes
the proof that its messages cannot deadlock, and compares the hash of its program with the others.
`--counts N` plans N counts below `--microbatches`, each once, as a run with dynamic batches does.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from statistics import median

from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice

NAMES = ("1f1b", "zb-h1", "1f1b-v", "v-min", "v-half", "v-zb")
TRANSPORTS = ("gloo", "NCCL", "NCCL, variable lengths")


def times_ms(name: str, transport: str, devices: int, counts: range) -> dict[str, list[float]]:
    """Measure the plan, the hash and the evaluation program of every count, in ms of processor."""
    planner = Planner(ScheduleChoice(devices, name, kernels=transport != "gloo"))
    if "variable" in transport:
        planner.expect_length_on_arrival()
    planner.plan_step(2)  # one-time work of a process: imports and tables of kinds
    times: dict[str, list[float]] = {"plan": [], "hash": [], "again": [], "evaluation": []}
    for count in counts:
        clock = [time.process_time()]
        program = planner.plan_step(count).program
        clock.append(time.process_time())
        hashlib.sha256(program.text().encode()).hexdigest()
        clock.append(time.process_time())
        planner.plan_step(count)
        clock.append(time.process_time())
        planner.evaluation_program(count)
        clock.append(time.process_time())
        for key, begin, end in zip(times, clock, clock[1:], strict=False):
            times[key].append(1e3 * (end - begin))
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="Pipeline ranks (default: 8)")
    parser.add_argument("--microbatches", type=int, default=64, help="Largest count (default: 64)")
    parser.add_argument("--counts", type=int, default=8, help="Counts per row (default: 8)")
    options = parser.parse_args()
    last = options.microbatches
    counts = range(last, max(0, last - options.counts), -1)
    print(f"PP {options.devices}, {counts[0]} to {counts[-1]} microbatches, ms of processor time")
    print("| schedule | transport | new count | maximum | hash | known count | evaluation |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in NAMES:
        for transport in TRANSPORTS:
            times = times_ms(name, transport, options.devices, counts)
            cells = (
                median(times["plan"]),
                max(times["plan"]),
                *(median(times[key]) for key in ("hash", "again", "evaluation")),
            )
            print(f"| {name} | {transport} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
