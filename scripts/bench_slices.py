#!/usr/bin/env python3
"""Measure steps of a sliced V beside Megatron's 1F1B and interleaved, and the same V unsliced.

    python scripts/bench_slices.py [--ranks 4] [--microbatches 4] [--slices 4] [--seq-length 512]

Trains a small GPT over gloo with long sequences and no more microbatches than ranks. Printed are
the medians of Megatron's own times of an iteration, their ratios to that of the sliced V, and the
ratios that the simulator predicts from what F, B and W of the unsliced V have taken, with the price
of a pass from the sliced one.

Every pass computes and then sleeps until `DILATION` times its processor time has gone, the median
of the first `CALIBRATION` of its kind, chunk and slice: so the ranks' passes fit on few processors
beside each other. What else a rank does is as it is.
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
from pathlib import Path
from typing import Any, NamedTuple

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs, regroup
from megatron_vshape.core.paper.catalogue import make

ROOT = Path(__file__).parents[1]
AS_RANK = "--as-rank"  # first argument of this script where it is one rank of a run
DILATION, CALIBRATION, STEPS, COUNTED = 6, 6, 8, 4
MODEL = (
    "--transformer-impl local --mock-data --tokenizer-type NullTokenizer --hidden-size 128 "
    "--num-attention-heads 4 --num-workers 0 --vocab-size 255 --position-embedding-type rope "
    "--no-rope-fusion --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --lr 1e-3 "
    "--untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --eval-iters 0 "
    "--no-masked-softmax-fusion --no-persist-layer-norm --micro-batch-size 1 --eval-interval 1000 "
    f"--lr-decay-style constant --distributed-backend gloo --train-iters {STEPS}"
).split()
METHODS = ("forward", "backward_inputs", "backward_weights", "backward")


class Run(NamedTuple):
    """The median time of a step, and what passes have taken: by rank, then by key."""

    step_ms: float
    passes: dict[int, dict[str, float]]


def measure(flags: tuple[str, ...], options: argparse.Namespace) -> Run:
    """Train so and return what it tells; raises SystemExit if it fails."""
    ours = {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | ours)
    steps = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", run.stdout)
    told = re.findall(r"rank (\d+) passes (\{.*?\})", run.stdout)
    if run.returncode or len(steps) < STEPS or len(told) < options.ranks:
        raise SystemExit(f"a run failed:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    median = statistics.median(map(float, steps[-COUNTED:]))
    return Run(median, {int(rank): json.loads(text) for rank, text in told})


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

    def longer(original: Callable[..., Any], key_of: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **options: Any) -> Any:
            cpu, at, known = time.thread_time(), time.perf_counter(), spent[key_of(*args)]
            result = original(*args, **options)
            if len(known) < CALIBRATION:
                known.append(time.thread_time() - cpu)
            until = at + DILATION * statistics.median_low(known)
            time.sleep(max(0.0, until - time.perf_counter()))
            return result

        return run

    def key_of(name: str) -> Callable[..., str]:
        def key(stage: Any, microbatch: int, *_: Any) -> str:
            return f"{name} {stage.chunk} {microbatch % stage.step.slices}"

        return key

    if {"1f1b", "interleaved-1f1b"}.isdisjoint(arguments):
        for name in METHODS:
            setattr(MegatronStage, name, longer(getattr(MegatronStage, name), key_of(name)))
    else:
        for name in ("forward_step", "backward_step"):
            setattr(schedules, name, longer(getattr(schedules, name), lambda *_, of=name: of))
    train = training.train

    def tell(*args: Any, **options: Any) -> Any:
        result = train(*args, **options)
        took = {key: 1e3 * DILATION * statistics.median_low(each) for key, each in spent.items()}
        print(f"rank {dist.get_rank()} passes {json.dumps(took)}", flush=True)
        return result

    training.train = tell
    exec(source, {"__name__": "__main__", "__file__": script})


def times(run: Run, ranks: int, slices: int) -> list[list[float]]:
    """Return what F, B and W of all slices of a microbatch take in every stage of the V, in ms."""
    stages = [(rank, 0) for rank in range(ranks)]
    stages += [(rank, 1) for rank in reversed(range(ranks))]
    return [
        [
            sum(run.passes[rank][f"{name} {chunk} {at}"] for at in range(slices))
            for rank, chunk in stages
        ]
        for name in METHODS[:3]
    ]


def predicted(whole: Run, cut: Run, options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Return what the simulator says of every run, and the price of a pass, in ms."""
    ranks, slices = options.ranks, options.slices
    alone, parts = times(whole, ranks, 1), times(cut, ranks, slices)
    more = [b - a for x, y in zip(alone, parts, strict=True) for a, b in zip(x, y, strict=True)]
    price = max(0.0, statistics.fmean(more) / (slices - 1))
    stages, one = 2 * ranks, (1.0,) * (2 * ranks)
    f, b, w = (tuple(max(each - price, each / 10) for each in row) for row in alone)
    costs = Costs(f, b, w, 0.0, one, one, host_us=price)
    names = {"1f1b": 1, "interleaved-1f1b": 1, "v-zb": 1, f"v-zb, {slices} slices": slices}
    found = {}
    for name, count in names.items():
        schedule = make(name.partition(",")[0], ranks, options.microbatches, slices=count)
        cut_costs = costs if schedule.num_stages == stages else regroup(costs, ranks, name)
        found[name] = simulate(schedule, cut_costs).makespan
    return found, price


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=512)
    options = parser.parse_args()
    sliced = f"v-zb, {options.slices} slices"
    runs = {}
    for name in ("1f1b", "interleaved-1f1b", "v-zb", sliced):
        flags: tuple[str, ...] = ("--pipeline-schedule", name.partition(",")[0])
        if name == sliced:
            flags += ("--pipeline-slices", str(options.slices))
        runs[name] = measure(flags, options)
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        print(f"{name}: {runs[name].step_ms:.0f} ms a step (load {load})", flush=True)
    expected, price = predicted(runs["v-zb"], runs[sliced], options)
    share = price / statistics.fmean(times(runs["v-zb"], options.ranks, 1)[0])
    print(
        f"{options.ranks} ranks, {options.microbatches} microbatches of {options.seq_length} "
        f"tokens; a pass of a slice takes {price:.1f} ms beside its share, {share:.1%} of an F"
    )
    print(
        f"{'run':20} {'measured ms':>12} {'predicted ms':>13} {'over sliced':>12} {'predicted':>10}"
    )
    for name, run in runs.items():
        ratio = run.step_ms / runs[sliced].step_ms
        foretold = expected[name] / expected[sliced]
        print(
            f"{name:20} {run.step_ms:12.0f} {expected[name]:13.0f} {ratio:12.2f} {foretold:10.2f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        run_rank(sys.argv[2:])
    else:
        main()
