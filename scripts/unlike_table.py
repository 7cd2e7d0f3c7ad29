"""Print what the places of unlike microbatches are worth: steps over the ideal one, simulated.

    python scripts/unlike_table.py [--devices 4 8] [--sigma 0.5 1.0] [--draws 5]

A microbatch is one sequence, its length log-normal: its logarithm is normal with this sigma (which
ours are: of the papers on sequence lengths none was at hand to take one from). F and B take a time
in proportion to tokens + KAPPA x tokens^2 / mean, W to tokens, memory to tokens; the means are 1.
Rows: Megatron's 1F1B and interleaved 1F1B (two chunks a rank) and a plan for equal microbatches,
each in the order as given; the same plan with the places chosen (`core.unlike`), within the limit
of what it holds as given. Figures are the step over the ideal one, in which the busiest rank works
all the time: the median of the draws; with the longest processor time, in ms, of choosing the
places.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from megatron_vshape.core.ask import AUTO, Question, ask
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs, regroup
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.unlike import even_out

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--draws", type=int, default=5)
    args = parser.parse_args(arguments)
    names = ("1f1b", "interleaved", "equal's plan", "real's places")
    print(f"{'d':>3}{'m':>5}{'sigma':>7}{''.join(f'{n:>13}' for n in names)}{'gain':>9}{'ms':>9}")
    for devices in args.devices:
        for count in (4 * devices, 8 * devices):
            for sigma in args.sigma:
                print(row(devices, count, sigma, args.draws), flush=True)


if __name__ == "__main__":
    main()
