"""Print the gain over Megatron's 1F1B with few microbatches, as in reinforcement learning.

    python benchmarks/rl_table.py [--devices 4 8] [--microbatches 2 3 4 8] [--draws 9]
    python benchmarks/rl_table.py --gloo [--devices 4] [--rounds 5] [--unit-ms 20]

Figures are the time of 1F1B divided by that of the schedule, minus 1. Costs are those of
`unlike_table.py`: F, B and W of 1, 1.15 and 0.85, 0.05 per message. Lengths are equal, or drawn
from ShareGPT (see there; median of the draws). `auto` has the activation memory of 1F1B with as
many microbatches as ranks; its plan is for equal lengths, and it reorders drawn ones. "interleaved"
is Megatron's interleaved 1F1B with two chunks per rank; a dash marks numbers of microbatches that
Megatron rejects.

With --gloo the runtime runs the schedules over gloo on CPU ranks. A pass sleeps for its time, of
which F needs --unit-ms; the figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from unlike_table import measure, unlike

from bench_runtime import on_ranks  # isort: skip  found by unlike_table's path

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs, reordered
from megatron_vshape.core.model.kinds import TIMES
from megatron_vshape.core.model.pieces import regroup
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.core.variable_length import reorder_microbatches
from megatron_vshape.mcore.setup.megatron_schedules import runs_interleaved

EQUAL, SHAREGPT = "equal", "sharegpt"
NAMES = ("1f1b", "interleaved-1f1b", "v-min", "v-half", "v-zb")
Run = tuple[Schedule, Costs]


def costs_of(devices: int, count: int, lengths: str, seed: int, unit_us: float = 1.0) -> Costs:
    """Return the costs of microbatches of these lengths."""
    times = [unit_us * factor for factor in (1.0, 1.15, 0.85, 0.05)]
    uniform = Costs.uniform(devices, 2 * devices, *times)
    return uniform if lengths == EQUAL else unlike(uniform, count, lengths, seed)


def runs_of(devices: int, count: int, costs: Costs, plan: Schedule) -> dict[str, Run]:
    """Return the schedules that can run, with the costs of their stages."""
    runs: dict[str, Run] = {}
    for name in NAMES:
        if name != "interleaved-1f1b" or runs_interleaved(count, devices, devices):
            schedule = make(name, devices, count)
            runs[name] = schedule, regroup(costs, schedule.num_stages, name)
    auto_costs = regroup(costs, plan.num_stages, AUTO)
    if costs.by_microbatch:
        auto_costs = reordered(
            auto_costs, reorder_microbatches(plan, auto_costs, peak_held(plan, auto_costs)).order
        )
    runs[AUTO] = plan, auto_costs
    return runs


def plan_of(devices: int, count: int) -> Schedule:
    """Plan for equal lengths in the memory of 1F1B with one microbatch per rank."""
    limit = max(peak_held(make("1f1b", devices, max(count, devices))))
    question = PlanRequest(AUTO, devices, count, costs_of(devices, count, EQUAL, 0), limit=limit)
    return plan_request(replace(question, seconds=5.0)).schedule


def rows(
    devices: int, count: int, lengths: str, draws: int, times: Callable[..., list[float]]
) -> str:
    """Format the gains of one row; `times` gives the step times of some runs."""
    plan, gains = plan_of(devices, count), dict[str, list[float]]()
    for seed in range(1 if lengths == EQUAL else draws):
        runs = runs_of(devices, count, costs_of(devices, count, lengths, seed), plan)
        step_times = dict(zip(runs, times(list(runs.values())), strict=True))
        for name, step in step_times.items():
            gains.setdefault(name, []).append(100 * (step_times["1f1b"] / step - 1))
    cells = [
        f"{median(gains[name]):+.0f}%" if name in gains else "-" for name in (*NAMES[1:], AUTO)
    ]
    return f"| {devices} | {count} | {lengths} | {' | '.join(cells)} |"


def on_gloo(devices: int, rounds: int, unit_us: float) -> Callable[[list[Run]], list[float]]:
    """Return a function that runs schedules over gloo and measures their steps."""

    def times(runs: list[Run]) -> list[float]:
        scaled = [(schedule, scaled_by(costs, unit_us)) for schedule, costs in runs]
        return on_ranks(devices, measure, scaled, rounds)

    return times


def scaled_by(costs: Costs, unit_us: float) -> Costs:
    """Return the costs with all times multiplied."""
    times = {amount: [unit_us * us for us in costs.required(amount)] for amount in TIMES}
    return replace(costs.having(times), send_us=0.0)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--lengths", nargs="+", default=[EQUAL, SHAREGPT])
    parser.add_argument("--draws", type=int, default=9)
    parser.add_argument("--gloo", action="store_true", help="Run the schedules on CPU ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--unit-ms", type=float, default=20.0)
    options = parser.parse_args()
    print("| PP | microbatches | lengths | interleaved | v-min | v-half | v-zb | auto |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|")
    for devices in options.devices:
        for lengths in options.lengths:
            for count in options.microbatches:
                times: Callable[[list[Run]], list[float]] = simulated
                if options.gloo:
                    times = on_gloo(devices, options.rounds, 1e3 * options.unit_ms)
                print(rows(devices, count, lengths, options.draws, times), flush=True)


def simulated(runs: list[Run]) -> list[float]:
    """Return the simulated step times of some runs."""
    return [simulate(*run).makespan for run in runs]


if __name__ == "__main__":
    main()
