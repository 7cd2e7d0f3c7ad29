"""Plans split everywhere, joined, nowhere and where it pays, by what a whole backward saves."""

from dataclasses import replace

from megatron_vshape.core.ask import AUTO, Question, best_order
from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.planner.search import plan
from megatron_vshape.core.program.lowering import whole_backwards
from megatron_vshape.core.splitting import joined, where_split
from megatron_vshape.view.numbers import percent, table

REAL = (1.0, 1.15, 0.85, 0.05)

CELLS = (
    (4, 8, 8, 0.1, 0.0),
    (8, 24, 10, 0.05, 0.0),
    (8, 24, 10, 0.15, 0.0),
    (8, 24, 16, 0.3, 0.0),
    (8, 24, 10, 0.0, 0.1),
)
"""Devices, microbatches, limit in chunks, the share of B + W that is saved, host time of a pass."""


def main() -> None:
    """Print a row per cell: the step's time in passes, and where the plan splits."""
    rows = [["devices, microbatches, limit", "saved", "host", "everywhere", "joined", "nowhere"]]
    rows[0] += ["chosen", "B and W apart"]
    for devices, microbatches, limit, saved, host in CELLS:
        costs = Costs.uniform(devices, 2 * devices, *REAL, host)
        if saved:
            whole = ((1 - saved) * (REAL[1] + REAL[2]),) * (2 * devices)
            costs = replace(costs, whole_backward_us=whole)
        sizes = devices, microbatches, limit
        split = plan(costs, *sizes).schedule
        whole_plan = whole_backwards(plan(costs, *sizes, whole=True).schedule)
        chosen = best_order(Question(AUTO, devices, microbatches, costs, limit=limit))
        fused = joined(split, costs, Objective.MAKESPAN)
        values = [simulate(each, costs).makespan for each in (split, fused, whole_plan)]
        cells = [f"{value:.2f}" for value in (*values, chosen.plan.value)]
        name = f"{devices}, {microbatches}, {limit} chunks"
        rows.append([name, percent(saved), f"{host:g}", *cells, where_split(chosen.schedule)])
    print(table(rows))


if __name__ == "__main__":
    main()
