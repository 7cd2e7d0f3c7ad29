"""Print what the places of unlike microbatches are worth: steps over the ideal one, simulated.

    python scripts/unlike_table.py [--devices 4 8] [--sigma 0.5 1.0] [--draws 5]
    python scripts/unlike_table.py --gloo [--devices 4] [--sigma 1.0] [--draws 3] [--rounds 3]

A microbatch is one sequence, its length log-normal: its logarithm is normal with this sigma (which
ours are: of the papers on sequence lengths none was at hand to take one from). F and B take a time
in proportion to tokens + KAPPA x tokens^2 / mean, W to tokens, memory to tokens; the means are 1.
Rows: Megatron's 1F1B and interleaved 1F1B (two chunks a rank) and a plan for equal microbatches,
each in the order as given; the same plan with the places chosen (`core.unlike`), within the limit
of what it holds as given. Figures are the step over the ideal one, in which the busiest rank works
all the time: the median of the draws; with the longest processor time, in ms, of choosing the
places.

With --gloo the runtime runs these orders over gloo, a process for each device, four microbatches a
device; a pass sleeps for as long as it is predicted to take, of which one of mean length and of F
takes --unit-ms. Beside the measured step, the median of the rounds, stands the simulated one, both
of all draws together, and the gain of each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from bench_runtime import SHAPE, on_ranks, take

from megatron_vshape.core.ask import AUTO, Question, ask
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs, regroup
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.core.unlike import even_out
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program

NAMES = ("1f1b", "interleaved", "equal's plan", "real's places")

KAPPA = 0.5
"""Of attention's part where a sequence is of mean length: as of 8k tokens in a layer of 4096."""


def unlike(costs: Costs, count: int, sigma: float, seed: int) -> Costs:
    """Return the costs of so many microbatches of log-normal length."""
    rng = random.Random(seed)
    lengths = [rng.lognormvariate(0, sigma) for _ in range(count)]
    mean = sum(lengths) / count
    tokens = [each / mean for each in lengths]
    whole = [each + KAPPA * each**2 for each in tokens]
    by_name = {
        **dict.fromkeys(("forward_us", "backward_us"), whole),
        "weight_us": tokens,
        **dict.fromkeys(("held_after_forward_bytes", "held_after_backward_bytes"), tokens),
    }
    shares = ((name, tuple(x * count / sum(own) for x in own)) for name, own in by_name.items())
    return replace(costs, by_microbatch=tuple(shares))


def ideal(costs: Costs, schedule: Schedule) -> float:
    """Return how long the busiest device works."""
    return max(simulate(schedule, costs).work)


def row(devices: int, count: int, sigma: float, draws: int) -> str:
    """Return a line of the table."""
    alike = Costs.uniform(devices, 2 * devices, 1, 1.15, 0.85, 0.05)
    plan = ask(Question(AUTO, devices, count, alike)).schedule
    known = [make(name, devices, count) for name in ("1f1b", "interleaved-1f1b")]
    found: list[list[float]] = []
    slowest_s = 0.0
    for seed in range(draws):
        costs = unlike(alike, count, sigma, seed)
        own = regroup(costs, plan.num_stages, "plan")
        least = ideal(own, plan)
        steps = [simulate(s, regroup(costs, s.num_stages, s.name)).makespan for s in known]
        even_out(plan, own, tries=1)
        began_s = time.process_time()
        evened = even_out(plan, own, peak_held(plan, own))
        slowest_s = max(slowest_s, time.process_time() - began_s)
        steps += [evened.given_us, evened.found_us]
        found.append([step / least for step in steps])
    middle = [median(each) for each in zip(*found, strict=True)]
    gain = f"{100 * (middle[2] / middle[3] - 1):6.1f} %"
    figures = "".join(f"{each:13.3f}" for each in middle)
    return f"{devices:3}{count:5}{sigma:7.2f}{figures}{gain:>9}{1e3 * slowest_s:9.0f}"


class UnlikeStage:
    """A stage whose passes sleep as long as each microbatch's are to take."""

    def __init__(self, costs: Costs, stage: int) -> None:
        self._costs, self._stage = costs, stage

    def _take(self, microbatch: int, *kinds: Kind) -> torch.Tensor:
        own = self._costs
        took_us = sum(
            own.time_us(kind, self._stage) + own.more_us(kind, self._stage, microbatch)
            for kind in kinds
        )
        take(took_us / 1e6)
        return torch.zeros(SHAPE)

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleep as long as F takes."""
        return self._take(microbatch, Kind.F)

    def backward_inputs(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleep as long as B takes."""
        return self._take(microbatch, Kind.B)

    def backward_weights(self, microbatch: int) -> None:
        """Sleep as long as W takes."""
        self._take(microbatch, Kind.W)

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleep as long as B and W take."""
        return self._take(microbatch, Kind.B, Kind.W)


def measure(
    transport: Transport, runs: Sequence[tuple[Schedule, Costs]], rounds: int
) -> list[float]:
    """Return the median step of the slowest rank, in us, of every run; in turns."""
    taken: list[list[float]] = [[] for _ in runs]
    rank = transport.device
    for _ in range(rounds):
        for own, (schedule, costs) in zip(taken, runs, strict=True):
            program = lower(schedule, simulate(schedule, costs))
            transport.prepare(program)
            stages = {
                stage: UnlikeStage(costs, stage)
                for stage in stages_of(schedule.placement, schedule.num_devices)[rank]
            }
            dist.barrier()
            start = time.perf_counter()
            run_program(program, rank, stages, transport)
            end = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(end, op=dist.ReduceOp.MAX)
            own.append(1e6 * float(end))
    return [statistics.median(own) for own in taken]


def on_gloo(devices: int, sigma: float, draws: int, rounds: int, unit_us: float) -> None:
    """Print steps of the orders over gloo beside their predictions."""
    count = 4 * devices
    alike = Costs.uniform(devices, 2 * devices, unit_us, 1.15 * unit_us, 0.85 * unit_us)
    plan = ask(Question(AUTO, devices, count, alike)).schedule
    known = [make(name, devices, count) for name in ("1f1b", "interleaved-1f1b")]
    runs: list[tuple[Schedule, Costs]] = []
    for seed in range(draws):
        costs = unlike(alike, count, sigma, seed)
        runs += [(each, regroup(costs, each.num_stages, each.name)) for each in known]
        own = regroup(costs, plan.num_stages, "plan")
        evened = even_out(plan, own, peak_held(plan, own))
        runs += [(plan, own), (plan, own.placed(evened.order))]
    measured = on_ranks(devices, measure, runs, rounds)
    predicted = [simulate(*each).makespan for each in runs]
    print(f"{devices} ranks, {count} microbatches, sigma {sigma}, {draws} draws, {rounds} rounds")
    print(f"{'':14}{'simulated s':>12}{'measured s':>12}{'ratio':>8}{'gain, both':>18}")
    sums = [[sum(each[at::4]) / 1e6 for at in range(4)] for each in (predicted, measured)]
    for at, name in enumerate(NAMES):
        a, b = (each[at] for each in sums)
        gains = "".join(f"{100 * (each[at] / each[3] - 1):8.1f}%" for each in sums)
        print(f"{name:14}{a:12.3f}{b:12.3f}{b / a:8.3f}{gains:>18}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--gloo", action="store_true", help="run the orders over gloo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit-ms", type=float, default=10.0)
    args = parser.parse_args(arguments)
    if args.gloo:
        for devices in args.devices:
            for sigma in args.sigma:
                on_gloo(devices, sigma, args.draws, args.rounds, 1e3 * args.unit_ms)
        return
    print(f"{'d':>3}{'m':>5}{'sigma':>7}{''.join(f'{n:>13}' for n in NAMES)}{'gain':>9}{'ms':>9}")
    for devices in args.devices:
        for count in (4 * devices, 8 * devices):
            for sigma in args.sigma:
                print(row(devices, count, sigma, args.draws), flush=True)


if __name__ == "__main__":
    main()
