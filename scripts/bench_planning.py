#!/usr/bin/env python3
"""Print how long planning takes: making, verifying, simulating and lowering schedules by name.

    python scripts/bench_planning.py [--sizes D,M ...] [NAME ...]

Seconds are of processor time, on one core. Every schedule has a process, whose peak memory is its;
making ends with a verification, and `verify` is the time of a second one.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower

SIZES = ((4, 16), (16, 128), (64, 1024))
COLUMNS = ("schedule", "devices", "microbatches", "passes", "make", "verify", "simulate", "lower",
           "total s", "peak MiB")  # fmt: skip

Result = TypeVar("Result")


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    """Return what `function` returns and the seconds of processor time it took."""
    begin = time.process_time()
    result = function()
    return result, time.process_time() - begin


def measure(case: tuple[str, int, int]) -> tuple[str, ...]:
    """Return the row of one schedule; call it in a fresh process."""
    name, devices, microbatches = case
    schedule, making = timed(lambda: make(name, devices, microbatches))
    _, verifying = timed(lambda: verify(schedule))
    timeline, simulating = timed(lambda: simulate(schedule))
    _, lowering = timed(lambda: lower(schedule, timeline))
    seconds = (making, verifying, simulating, lowering)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    counts = (devices, microbatches, sum(map(len, schedule.order)))
    times = (f"{each:.2f}" for each in (*seconds, sum(seconds)))
    return (name, *map(str, counts), *times, f"{peak_mib:.0f}")


def size(text: str) -> tuple[int, int]:
    """Return devices and microbatches from `D,M`."""
    devices, microbatches = map(int, text.split(","))
    return devices, microbatches


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=["v-half"])
    parser.add_argument("--sizes", nargs="+", type=size, metavar="D,M", default=SIZES)
    arguments = parser.parse_args()
    cases = [(name, *each) for name in arguments.names for each in arguments.sizes]
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure, cases):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
