#!/usr/bin/env python3
"""Measure V-ZB with sequence slices, compared with 1F1B, interleaved 1F1B and V-ZB without slices.

    python benchmarks/bench_slices.py [--ranks 4] [--microbatches 4] [--slices 4] [--seq-length 768]

Trains a small GPT over gloo with long sequences and at most PP microbatches: four minutes on two
idle cores. Every pass computes and then sleeps until `DILATION` times its CPU time has passed
(median of the first `CALIBRATION` passes of its kind, chunk and slice), so that the passes of all
ranks fit on few CPU cores.

Prints for every run the median of Megatron's iteration times; the time from the first to the last
pass of all ranks, measured and simulated with the pass times of the same run; and the ratio of the
iteration time to that of the sliced V, measured and predicted. A run needs more time than its
simulation if it waits for messages: Megatron's schedules wait until a message has been received.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make

ROOT = Path(__file__).parents[1]
AS_RANK = "--as-rank"  # first argument of this script where it is one rank of a run
DILATION, CALIBRATION, STEPS, COUNTED = 3, 6, 6, 3
MODEL = (
    "--transformer-impl local --mock-data --tokenizer-type NullTokenizer --hidden-size 256 "
    "--num-attention-heads 4 --num-workers 0 --vocab-size 255 --position-embedding-type rope "
    "--no-rope-fusion --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --lr 1e-3 "
    "--untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --eval-iters 0 "
    "--no-masked-softmax-fusion --no-persist-layer-norm --micro-batch-size 1 --eval-interval 1000 "
    f"--lr-decay-style constant --distributed-backend gloo --train-iters {STEPS}"
).split()
KINDS = {Kind.F: "forward", Kind.B: "backward_inputs", Kind.W: "backward_weights"}
KINDS[Kind.BW] = "backward"
MEGATRONS = {"forward_step": KINDS[Kind.F], "backward_step": KINDS[Kind.BW]}


class Run(NamedTuple):
    """Measurements of a run, in ms."""

    step: float
    passes: float  # from the first to the last of a step
    pause_ms: float  # from there to the next step's first
    lasted: dict[int, dict[str, float]]  # by rank: a pass of a kind, chunk and slice


def measure(flags: tuple[str, ...], options: argparse.Namespace) -> Run:
    """Train with these flags and return the measurements; raises SystemExit if the run fails."""
    variables = {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={options.ranks}", __file__, AS_RANK),
        f"--pipeline-model-parallel-size={options.ranks}",
        f"--num-layers={2 * options.ranks}",
        f"--global-batch-size={options.microbatches}",
        f"--seq-length={options.seq_length}",
        f"--max-position-embeddings={options.seq_length}",
        *MODEL,
        *flags,
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    steps = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", run.stdout)
    rank_lines = re.findall(r"rank (\d+) passes (\{.*\}) steps (\[.*\])", run.stdout)
    if run.returncode or len(steps) < STEPS or len(rank_lines) < options.ranks:
        raise SystemExit(f"a run failed:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    first, last = zip(
        *(zip(*json.loads(text), strict=True) for *_, text in rank_lines), strict=True
    )
    starts, ended = map(min, zip(*first, strict=True)), map(max, zip(*last, strict=True))
    spans = list(zip(starts, ended, strict=True))
    return Run(
        statistics.median(map(float, steps[-COUNTED:])),
        statistics.median(end - begin for begin, end in spans),
        statistics.median(then - end for (_, end), (then, _) in pairwise(spans)),
        {int(rank): json.loads(text) for rank, text, _ in rank_lines},
    )


def run_rank(arguments: list[str]) -> None:
    """Train as one rank, as the training script does, with passes that last longer."""
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    sys.argv = [script, *arguments]
    source = compile(Path(script).read_text(), script, "exec")
    # Under another name the script imports and defines, and does not start.
    exec(source, {"__name__": "imports", "__file__": script})
    import megatron.training.training as training
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import schedules

    from megatron_vshape.mcore.step.stage import MegatronStage

    spent: defaultdict[str, list[float]] = defaultdict(list)
    ran: list[tuple[str, float, float]] = []

    def longer(original: Callable[..., Any], key_of: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **options: Any) -> Any:
            key = key_of(*args)
            cpu, start, cpu_times = time.thread_time(), time.perf_counter(), spent[key]
            result = original(*args, **options)
            if len(cpu_times) < CALIBRATION:
                cpu_times.append(time.thread_time() - cpu)
            until = start + DILATION * statistics.median_low(cpu_times)
            time.sleep(max(0.0, until - time.perf_counter()))
            ran.append((key, 1e3 * start, 1e3 * time.perf_counter()))
            return result

        return run

    def key_of(name: str) -> Callable[..., str]:
        def key(stage: Any, microbatch: int, *_: Any) -> str:
            return f"{name} {stage.chunk} {microbatch % stage.step.passes_per_microbatch}"

        return key

    if {"1f1b", "interleaved-1f1b"}.isdisjoint(arguments):
        for name in KINDS.values():
            setattr(MegatronStage, name, longer(getattr(MegatronStage, name), key_of(name)))
    else:  # these have no chunk for a backward
        for name, key in MEGATRONS.items():
            setattr(schedules, name, longer(getattr(schedules, name), lambda *_, key=key: key))
    train = training.train

    def tell(*args: Any, **options: Any) -> Any:
        result = train(*args, **options)
        print(f"rank {dist.get_rank()} {_told(ran)}", flush=True)
        return result

    training.train = tell
    exec(source, {"__name__": "__main__", "__file__": script})


def _told(ran: list[tuple[str, float, float]]) -> str:
    """Return a rank's report: durations of its passes, and start and end of its steps."""
    of_step = len(ran) // STEPS
    steps = [
        ran[step_index * of_step : (step_index + 1) * of_step]
        for step_index in range(STEPS - COUNTED, STEPS)
    ]
    lasted: defaultdict[str, list[float]] = defaultdict(list)
    for key, begin, end in (pass_record for step in steps for pass_record in step):
        lasted[key].append(end - begin)
    means = {key: statistics.fmean(durations) for key, durations in lasted.items()}
    ends = [(step[0][1], step[-1][2]) for step in steps]
    return f"passes {json.dumps(means)} steps {json.dumps(ends)}"


def times(run: Run, schedule: Schedule) -> dict[Kind, list[list[float]]]:
    """Return the durations of F, B, W and BW of every stage, for every slice of a microbatch.

    A stage that ran every W with its B gets half of these durations, which are then not used.
    """
    times_by_kind: dict[Kind, list[list[float]]] = {kind: [] for kind in KINDS}
    chunks = [0] * schedule.num_devices
    for rank in schedule.placement:
        durations = run.lasted[rank]
        for kind, name in KINDS.items():
            keys = (
                f"{name} {chunks[rank]} {slice_index}" for slice_index in range(schedule.slices)
            )
            known_times = [durations.get(key, durations.get(name)) for key in keys]
            there = [duration for duration in known_times if duration is not None]
            mean = statistics.fmean(there) if there else 0.0
            times_by_kind[kind].append(
                [mean if duration is None else duration for duration in known_times]
            )
        chunks[rank] += 1
    for part, weight, full in zip(
        times_by_kind[Kind.B], times_by_kind[Kind.W], times_by_kind[Kind.BW], strict=True
    ):
        if not any(part):
            part[:] = weight[:] = [duration / 2 for duration in full]
        if not any(full):
            full[:] = [b + w for b, w in zip(part, weight, strict=True)]
    return times_by_kind


def simulated(run: Run, schedule: Schedule) -> float:
    """Return the simulated time of the passes of a step, in ms, from the measured durations."""
    unsliced = replace(schedule, slices=1)  # so that every slice has a separate cost
    times_by_kind = times(run, schedule)
    means = {
        kind: [statistics.fmean(durations) for durations in times_by_kind[kind]] for kind in KINDS
    }
    shares = tuple(
        (
            str(kind.time),
            tuple(
                sum(stage[number % schedule.slices] for stage in times_by_kind[kind])
                / sum(means[kind])
                for number in range(unsliced.num_microbatches)
            ),
        )
        for kind in KINDS
    )
    f, b, w, full = (tuple(means[kind]) for kind in KINDS)
    ones = (1.0,) * schedule.num_stages
    costs = Costs.of(f, b, w, 0.0, ones, ones, whole_backward_us=full, by_microbatch=shares)
    return simulate(unsliced, costs).makespan


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=768)
    options = parser.parse_args()
    sliced = f"v-zb, {options.slices} slices"
    runs, expected, schedules = dict[str, Run](), dict[str, float](), dict[str, Schedule]()
    for name in ("1f1b", "interleaved-1f1b", "v-zb", sliced):
        schedule_name, slices = name.partition(",")[0], options.slices if name == sliced else 1
        schedules[name] = make(schedule_name, options.ranks, options.microbatches, slices=slices)
        flags = ("--pipeline-schedule", schedule_name, "--pipeline-slices", str(slices))
        runs[name] = measure(flags if slices > 1 else flags[:2], options)
        expected[name] = simulated(runs[name], schedules[name])
        load = ", ".join(f"{load_average:.1f}" for load_average in os.getloadavg())
        print(f"{name}: {runs[name].step:.0f} ms per step (load {load})", flush=True)
    (unsliced, *_), (sliced_times, *_) = (
        times(runs[name], schedules[name]).values() for name in ("v-zb", sliced)
    )
    differences = [sum(b) - sum(a) for a, b in zip(unsliced, sliced_times, strict=True)]
    price, share = (
        statistics.fmean(differences) / (options.slices - 1),
        statistics.fmean(map(sum, unsliced)),
    )
    print(
        f"{options.ranks} ranks, {options.microbatches} microbatches of {options.seq_length} "
        f"tokens; overhead of F per slice {price:.1f} ms, {price / share:.1%} of an unsliced F"
    )
    print(
        f"{'run':18} {'step ms':>8} {'passes':>7} {'simulated':>9} "
        f"{'/ sliced':>12} {'predicted':>9}"
    )
    for name, run in runs.items():
        ratio = run.step / runs[sliced].step
        foretold = (expected[name] + run.pause_ms) / (expected[sliced] + runs[sliced].pause_ms)
        print(
            f"{name:18} {run.step:8.0f} {run.passes:7.0f} {expected[name]:9.0f} {ratio:12.2f} "
            f"{foretold:9.2f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        run_rank(sys.argv[2:])
    else:
        main()
