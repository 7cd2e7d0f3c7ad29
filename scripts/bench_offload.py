"""Print what a plan gains where activations may wait in host memory or be computed again.

    python scripts/bench_offload.py [--devices 8] [--only 32,4] [--in-host 16]
    python scripts/bench_offload.py --together [--devices 8] [--steps 100000]

Overhead in F beyond the work of order alone, 6 F a microbatch: planned with the order alone, with
what is computed again, with copies to the host, and with both; beside it the seconds that planning
takes of the clock and of all cores. F, B, W and a message take 1, 1.15, 0.85 and 0.05, a chunk is
held as a whole from F to W, and t is how many F a copy of it takes one way. Cheap recompute (norms
and activation functions) keeps 0.625 after F, which B makes 1 again in 0.04 F more.

With --together the model has a vocabulary that all devices share, of 2.46 layers' output layer
where a chunk has two layers, 0.3 of F and of B is exchange, which a joint pass hides, and BW takes
0.1 less than B and W: the step by the best plan that uses none of joint passes, recompute and
copies, each of them alone, and all.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from megatron_vshape.core.ask import Question, best_order
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.planner.search import plan
from megatron_vshape.core.planner.vocabulary import shared_pieces
from megatron_vshape.view.numbers import table

CELLS = (
    (32, 10, 1.0, False, False),
    (32, 8, 1.0, False, False),
    (32, 4, 1.0, False, False),
    (32, 4, 2.0, True, True),
    (64, 8, 1.0, False, False),
    (64, 4, 1.0, False, False),
)
"""Microbatches, chunks, t, half duplex, cheap recompute."""

WITH_RECOMPUTE = (1, 3)
"""The columns that need a cell with recompute."""


def costs_of(devices: int, t: float, half_duplex: bool, cheap: bool) -> Costs:
    """Return the costs of two stages a device."""
    own = Costs.uniform(devices, 2 * devices, 1.0, 1.15, 0.85, 0.05).with_copies(t, half_duplex)
    if not cheap:
        return own
    each = 2 * devices
    prices = {"backward_us": (1.19,) * each, "held_after_forward_bytes": (0.625,) * each}
    return replace(own, recompute=(("cheap", own.with_prices("cheap", prices)),))


def rows(devices: int, only: str | None, in_host: float) -> Iterator[list[str]]:
    """Yield a row per cell."""
    for microbatches, chunks, t, half_duplex, cheap in CELLS:
        if only not in (None, f"{microbatches},{chunks}"):
            continue
        costs = costs_of(devices, t, half_duplex, cheap)
        ways = [costs.in_order_alone(), costs.without_copies(), replace(costs, recompute=()), costs]
        link = f"{t:g}{', half duplex' if half_duplex else ''}{', cheap' if cheap else ''}"
        row = [str(microbatches), str(chunks), link]
        gap = ""
        for at, each in enumerate(ways):
            if at in WITH_RECOMPUTE and not cheap:
                row.append("")
                continue
            begin, worked = time.monotonic(), time.process_time()
            made = plan(each, devices, microbatches, chunks, trades=True, in_host=in_host)
            seconds, worked = time.monotonic() - begin, time.process_time() - worked
            row.append(f"{made.value - 6 * microbatches:.1f} ({seconds:.1f} s, {worked:.1f} s)")
            gap = f"{made.gap:.1%}"
        yield [*row, gap]


TOGETHER = ((16, 14), (16, 10), (16, 7), (16, 5))
"""Microbatches, chunks."""


def shared(devices: int) -> Costs:
    """Return costs that tell of a shared vocabulary, joint passes, recompute and copies."""
    stages = 2 * devices
    pieces = Pieces.estimated(2.46, 2.0, (0.7, 0.85, 0.85, 0.05))
    own = shared_pieces(pieces, devices, 0.1, 0.25).costs((2,) * stages)
    waits = dict.fromkeys(("forward_exchange_us", "backward_exchange_us"), (0.3,) * stages)
    own = own.having(**waits, whole_backward_us=(1.6,) * stages).with_copies(1.0)
    prices = {name: tuple(share * each for each in own.lists()[name]) for name, share in CHEAP}
    cheap = replace(own, hidden_share=1.0).with_prices("cheap", prices)
    return replace(own, hidden_share=1.0, recompute=(("cheap", cheap),))


CHEAP = (("backward_us", 1.05), ("whole_backward_us", 1.03), ("held_after_forward_bytes", 0.625))


def together(devices: int, steps: int) -> Iterator[list[str]]:
    """Yield a row per cell."""
    every = shared(devices)
    alone = every.in_order_alone()
    ways = [
        alone.never_joined(),
        alone,
        every.without_copies().never_joined(),
        replace(every, recompute=()).never_joined(),
        every,
    ]
    for microbatches, chunks in TOGETHER:
        row, values = [str(microbatches), str(chunks)], []
        for each in ways:
            asked = Question("auto", devices, microbatches, each, limit=chunks, steps=steps)
            begin = time.process_time()
            try:
                made = best_order(replace(asked, holds_less=False)).plan
            except ScheduleError:
                row.append("nothing fits")
                continue
            values.append(made.value)
            row.append(f"{made.value:.1f} ({time.process_time() - begin:.0f} s)")
        yield [*row, f"{min(values[:-1]) / values[-1] - 1:.1%}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, metavar="D")
    parser.add_argument("--only", metavar="M,CHUNKS", help="these cells alone")
    in_host = "the most of a device that waits in host memory (default: any)"
    parser.add_argument("--in-host", type=float, metavar="CHUNKS", default=math.inf, help=in_host)
    parser.add_argument("--together", action="store_true", help="all in one plan")
    parser.add_argument("--steps", type=int, default=100_000, help="of each search of --together")
    options = parser.parse_args()
    if options.together:
        heading = ["microbatches", "chunks", "vocabulary alone", "joint", "recompute", "copies"]
        print(table([[*heading, "all", "faster"], *together(options.devices, options.steps)]))
        return
    warm = costs_of(2, 1.0, half_duplex=False, cheap=False)
    plan(warm, 2, 4, 4, trades=True, steps=1000)  # compiles
    heading = ["microbatches", "chunks", "t", "order alone", "recompute", "copies", "both", "gap"]
    print(table([heading, *rows(options.devices, options.only, options.in_host)]))


if __name__ == "__main__":
    main()
