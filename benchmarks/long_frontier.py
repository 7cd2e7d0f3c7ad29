"""Draw step time over memory: the order alone, with slices, with copies to the host, with all.

    python benchmarks/long_frontier.py [--devices 8] [--microbatches 8 24] [--steps N] [FOLDER]

At 1, 1.15, .85 for F, B and W of one of two stages a device, messages of .05, copies as long as an
F one way, and .01 for every pass whatever its size, which is what slices cost. It writes
FOLDER/long-frontier-M.svg (docs/figures) and prints the table, in per cent over the work; what has
slices, with how many. It takes some five minutes of processor time at 8 microbatches with --steps
60000, and at 24 with 10000; without --steps every plan takes as long as `plan` does.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_vshape.core.ask import AUTO, SLICES, Question
from megatron_vshape.core.frontier import Point, frontier, published
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.placement import looping
from megatron_vshape.view.figure import save
from megatron_vshape.view.frontier import frontier_figure
from megatron_vshape.view.numbers import table

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
SHARES = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)


def families(devices: int, microbatches: int, steps: int | None) -> dict[str, Question]:
    """Return the questions by what their plans may do to hold less."""
    costs = Costs.uniform(devices, 4 * devices, 1, 1.15, 0.85, 0.05, host=0.01)
    alone = Question(AUTO, devices, microbatches, costs, steps=steps)
    return {
        "order alone": alone,
        "slices": replace(alone, slices=SLICES),
        "copies": replace(alone, costs=costs.with_copies(1.0)),
        "all": replace(alone, costs=costs.with_copies(1.0), slices=SLICES),
    }


def drawn(devices: int, microbatches: int, steps: int | None, folder: Path) -> list[list[str]]:
    """Draw one picture; return its rows."""
    asked = families(devices, microbatches, steps)
    limits = [2 * devices * share for share in SHARES]
    found = {name: frontier(each, limits) for name, each in asked.items()}
    at = {
        limit: [each for own in found.values() for each in own if each.limit == limit]
        for limit in limits
    }
    best = [min(each, key=_value) for each in at.values() if each]
    label, scale = "memory limit, share of what 1F1B holds", 1 / (2 * devices)
    others = list(published(asked["order alone"]))
    save(
        frontier_figure(best, others, label, scale, found),
        folder / f"long-frontier-{microbatches}.svg",
    )
    costs = replace(asked["order alone"].whole(), host_us=0.0)
    own = costs.busy_us(looping(devices, costs.num_stages // devices), devices, microbatches)
    return [
        [str(microbatches), f"{limit * scale:.3f}", *(_cell(each, limit, own) for each in rows)]
        for limit in limits
        for rows in [[*list(found.values())[:-1], best]]
    ]


def _cell(points: Sequence[Point], limit: float, work: float) -> str:
    """Return how much longer than the work the plan at a limit takes, and its slices."""
    at = next((point for point in points if point.limit == limit), None)
    if at is None:
        return "-"
    over, slices = 100 * (at.value / work - 1), at.schedule.slices
    return f"{over:.1f}" + (f" ({slices})" if slices > 1 else "")


def _value(point: Point) -> float:
    return point.value


def main() -> None:
    """Draw the pictures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FIGURES)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--steps", type=int, help="of every search; default: as plan has it")
    options = parser.parse_args()
    heading = ["microbatches", "limit", "order alone", "slices", "copies", "all"]
    rows = [
        row
        for count in options.microbatches
        for row in drawn(options.devices, count, options.steps, options.folder)
    ]
    print(table([heading, *rows]))


if __name__ == "__main__":
    main()
