"""Draw step time over memory limit: schedule only, with slices, with offloading, with both.

    python benchmarks/long_frontier.py [--devices 8] [--microbatches 8 24] [--steps N] [FOLDER]

F, B, W = 1, 1.15, 0.85 for one of two stages per rank, P2P messages of 0.05, copies as long as F in
one direction, and an overhead of 0.01 per pass, which is the cost of slices. Writes
FOLDER/long-frontier-M.svg (default: benchmarks/figures) and prints the table: idle time in percent
of the work, with the number of slices. Needs about five minutes of CPU time for 8 microbatches with
--steps 60000, and for 24 with 10000; without --steps, each plan needs as long as `plan`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_vshape.core.model.costs import Costs, with_copies
from megatron_vshape.core.model.placement import looping
from megatron_vshape.core.plan import Point, frontier, published_schedules
from megatron_vshape.core.request import SLICES, PlanRequest
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.view.figure import save
from megatron_vshape.view.frontier import frontier_figure
from megatron_vshape.view.numbers import table

FIGURES = Path(__file__).resolve().parent / "figures"
SHARES = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)


def families(devices: int, microbatches: int, steps: int | None) -> dict[str, PlanRequest]:
    """Return the plan requests by the memory techniques that their plans may use."""
    costs = Costs.uniform(devices, 4 * devices, 1, 1.15, 0.85, 0.05, host=0.01)
    alone = PlanRequest(AUTO, devices, microbatches, costs, steps=steps)
    return {
        "order alone": alone,
        "slices": replace(alone, slices=SLICES),
        "copies": replace(alone, costs=with_copies(costs, 1.0)),
        "all": replace(alone, costs=with_copies(costs, 1.0), slices=SLICES),
    }


def drawn(devices: int, microbatches: int, steps: int | None, folder: Path) -> list[list[str]]:
    """Draw one picture; return its rows."""
    requests = families(devices, microbatches, steps)
    limits = [2 * devices * share for share in SHARES]
    points_by_family = {name: frontier(request, limits) for name, request in requests.items()}
    points_by_limit = {
        limit: [
            point
            for family_points in points_by_family.values()
            for point in family_points
            if point.limit == limit
        ]
        for limit in limits
    }
    best = [
        min(limit_points, key=_value) for limit_points in points_by_limit.values() if limit_points
    ]
    label, scale = "memory limit, share of what 1F1B holds", 1 / (2 * devices)
    published = list(published_schedules(requests["order alone"]))
    figure = frontier_figure(best, published, label, scale)
    fastest = min(plan.value for plan in (*(point.plan for point in best), *published))
    for name, points in points_by_family.items():
        memory = [point.limit * scale for point in points]
        slower = [100 * (point.plan.value / fastest - 1) for point in points]
        figure.axes[0].plot(memory, slower, drawstyle="steps-post", label=name)
    figure.legends.clear()
    figure.legend(frameon=False, fontsize=7, loc="outside right upper")
    save(figure, folder / f"long-frontier-{microbatches}.svg")
    costs = replace(requests["order alone"].full_costs(), host_us=0.0)
    work_us = costs.busy_us(looping(devices, costs.num_stages // devices), devices, microbatches)
    return [
        [
            str(microbatches),
            f"{limit * scale:.3f}",
            *(_cell(family_points, limit, work_us) for family_points in rows),
        ]
        for limit in limits
        for rows in [[*list(points_by_family.values())[:-1], best]]
    ]


def _cell(points: Sequence[Point], limit: float, work: float) -> str:
    """Return by how many percent the plan at a limit exceeds the work, and its slices."""
    point_at_limit = next((point for point in points if point.limit == limit), None)
    if point_at_limit is None:
        return "-"
    over, slices = 100 * (point_at_limit.plan.value / work - 1), point_at_limit.plan.schedule.slices
    return f"{over:.1f}" + (f" ({slices})" if slices > 1 else "")


def _value(point: Point) -> float:
    return point.plan.value


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
