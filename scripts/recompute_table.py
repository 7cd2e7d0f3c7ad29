"""Print what is saved where stages need not compute again what they have room to keep, simulated.

    python scripts/recompute_table.py [--devices 4 8] [--layers 8] [--head 2]

Named orders under full recompute, whole backwards, four microbatches a device: the step where every
stage computes all again, and where those that have room keep all of their layers or the last one
(`core.planner.choosing.computing_less`), within the memory of the device that holds most before.
Layers take 1 in F, 2 in B and W, and as much as F again where they are recomputed; what is left of
one after F is a 17th of what it holds else (2 of 34 bytes a number of the hidden state), and a
backward that makes one again works with it. The model's end takes as long as --head layers, and 0.

Then plans: F, B, W and a message take 1, 1.15, 0.85 and 0.05 of a chunk and `full` 1 F more, of
which a sixteenth is held; the best with settings by chunk alone, and that whose last stage, where B
may follow F at once, may keep all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import FULL, NO_RECOMPUTE
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.choosing import computing_less
from megatron_vshape.core.planner.search import plan
from megatron_vshape.core.program.lowering import whole_backwards
from megatron_vshape.view.numbers import table

NAMES = ("1f1b", "interleaved-1f1b", "1f1b-v")
LEFT = 1 / 17
LIMITS = (0.25, 0.375, 0.5)
"""Chunks of a plan's device, in those of 1F1B's."""


def of_layers(stages: int, layers: int, head: float) -> Costs:
    """Return costs of equal stages, but for the model's end; memory is in layers."""
    forward = [float(layers)] * stages
    forward[-1] += head
    whole = [2 * each for each in forward]
    each = (float(layers),) * stages
    own = Costs(tuple(forward), tuple(forward), tuple(forward), 0.1, each, each, (layers,) * stages)
    own = own.having(whole_backward_us=tuple(whole), whole_work_bytes=(0.0,) * stages)
    again = tuple(each + layers for each in whole)
    prices = {
        "whole_work_bytes": (1.0,) * stages,
        "whole_backward_us": again,
        "backward_us": tuple(each + layers for each in forward),
        "held_after_forward_bytes": (LEFT * layers,) * stages,
    }
    return replace(own, recompute=((FULL, own.with_prices(FULL, prices)),))


def named(devices: int, layers: int, head: float) -> Iterator[list[str]]:
    """Yield a row for each order."""
    for name in NAMES:
        schedule = whole_backwards(make(name, devices, 4 * devices))
        stages = schedule.num_stages
        costs = of_layers(stages, layers * devices // stages, head)
        alike = replace(schedule, recompute=(FULL,) * stages)
        most = max(peak_held(alike, costs))
        kept = computing_less(alike, costs, (most,) * devices)
        steps = [simulate(each, costs).makespan for each in (alike, kept)]
        settings = kept.recompute
        alone = sum(each not in (FULL, NO_RECOMPUTE) for each in settings)
        counts = f"{settings.count(NO_RECOMPUTE)}, {alone} of {stages}"
        peak = max(peak_held(kept, costs))
        gain = f"{steps[0] / steps[1] - 1:.1%}"
        row = [name, f"{head:g}", f"{steps[0]:.1f}", f"{steps[1]:.1f}", gain]
        yield [str(devices), *row, f"{most:.2f}", f"{peak:.2f}", counts]


def planned(devices: int) -> Iterator[list[str]]:
    """Yield a row for each limit."""
    stages = 2 * devices
    own = Costs.uniform(devices, stages, 1.0, 1.15, 0.85, 0.05)
    prices = {"backward_us": (2.15,) * stages, "held_after_forward_bytes": (1 / 16,) * stages}
    costs = replace(own, recompute=((FULL, own.with_prices(FULL, prices)),))
    for share in LIMITS:
        limit = share * 2 * devices
        made = plan(costs, devices, 4 * devices, limit, trades=True)
        last = (*(FULL,) * (stages - 1), NO_RECOMPUTE)
        known = [each for each in made.tried if each.way.settings != last]
        by_chunk = [each.value for each in known if each.value is not None]
        least = min(by_chunk, default=float("nan"))
        gain = f"{least / made.value - 1:.1%}"
        yield [str(devices), f"{limit:g}", f"{least:.1f}", f"{made.value:.1f}", gain]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--layers", type=int, default=8, help="of a device")
    parser.add_argument("--head", type=float, default=2.0)
    args = parser.parse_args(arguments)
    heads = dict.fromkeys((0.0, args.head))
    rows = [row for d in args.devices for h in heads for row in named(d, args.layers, h)]
    names = ["d", "order", "head", "all again", "kept", "gain", "peak", "peak", "none, but last"]
    print(table([names, *rows]), end="\n\n")
    rows = [row for d in args.devices for row in planned(d)]
    print(table([["d", "chunks", "by chunk", "plan", "gain"], *rows]))


if __name__ == "__main__":
    main()
