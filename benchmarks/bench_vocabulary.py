#!/usr/bin/env python3
"""Measure step time and memory of vocabulary parallelism in training; compare with predictions.

    python benchmarks/bench_vocabulary.py [--ranks 4] [--schedule v-half] [--vocabulary 16384]

Trains a small GPT with a large vocabulary three times over gloo: with equal layers per stage, with
`--pipeline-layer-split auto`, and with `--pipeline-vocab-parallel`. Each run measures its costs
and predicts its later steps from them. Prints the medians of both, the ratios of the runs, and the
MiB of the rank with the highest peak: activations, counted per pass, and memory of the parameters.

Every pass computes and then sleeps until DILATION times the CPU time of its kind has passed
(median of the later half of the first CALIBRATION passes). The passes of all ranks then fit on few
CPU cores and have constant lengths. Messages, collectives and other work are not changed.

Exits with 1 if a measured ratio differs by more than 5% from its prediction.
"""

from __future__ import annotations

import argparse
import functools
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

ROOT = Path(__file__).parents[1]
AS_RANK = "--as-rank"  # first argument of this script where it is one rank of a run
DILATION = 10
CALIBRATION = 31  # within the first two steps, before costs are measured
TOLERANCE = 0.05
MODEL = (
    "--transformer-impl local --mock-data --tokenizer-type NullTokenizer --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --num-workers 0 "
    "--position-embedding-type rope --no-rope-fusion --attention-dropout 0 --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --micro-batch-size 1 --train-iters 14 "
    "--lr 1e-3 --lr-decay-style constant --eval-iters 0 --eval-interval 1000 "
    "--distributed-backend gloo --pipeline-profile-iterations 3:7"
).split()
RUNS = {
    "even": (),
    "balanced": ("--pipeline-layer-split", "auto"),
    "shared": ("--pipeline-vocab-parallel",),
}


class Run(NamedTuple):
    """Times of the passes of a run, and its memory."""

    predicted_ms: float
    measured_ms: float
    activations: list[float]  # of every rank at its peak, in MiB
    state_mib: list[float]  # parameters, their gradients and the optimizer's state

    @property
    def worst(self) -> float:
        """Return the largest memory of a rank, in MiB."""
        return max(map(sum, zip(self.activations, self.state_mib, strict=True)))


def measure(flags: tuple[str, ...], options: argparse.Namespace) -> Run:
    """Train with these flags and return the measurements; raises SystemExit if the run fails."""
    variables = {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = os.environ | variables
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={options.ranks}", __file__, AS_RANK),
        f"--pipeline-model-parallel-size={options.ranks}",
        f"--pipeline-schedule={options.schedule}",
        f"--num-layers={2 * options.ranks}",
        f"--global-batch-size={options.microbatches}",
        f"--vocab-size={options.vocabulary - 1}",
        *MODEL,
        *flags,
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    passes = re.search(r"passes, ms +([\d.]+) +([\d.]+)", run.stdout)
    peaks = re.search(r"per rank in MiB: measured \[(.*?)\]", run.stdout)
    if run.returncode or passes is None or peaks is None:
        raise SystemExit(f"a run failed:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    state_bytes = sorted(re.findall(r"rank (\d+) holds (\d+) bytes besides", run.stdout))
    return Run(
        float(passes[1]),
        float(passes[2]),
        [float(peak) for peak in peaks[1].split(", ")],
        [int(size) / 2**20 for _, size in state_bytes],
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

    from megatron_vshape.core.model.kinds import KINDS, PROCESSOR, VOCABULARY
    from megatron_vshape.mcore.features.vocabulary.step import SharedVocabulary
    from megatron_vshape.mcore.observe.report import static_memory
    from megatron_vshape.mcore.step.stage import MegatronStage
    from megatron_vshape.runtime.device_collectives import DeviceCollectives

    spent: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
    began, key = (0.0, 0.0), tuple[Any, ...]()

    def sleep_on(part: str) -> None:
        nonlocal began
        cpu, start = began
        cpu_times = spent[*key, part]
        if len(cpu_times) < CALIBRATION:
            cpu_times.append(time.thread_time() - cpu)
        until = start + DILATION * statistics.median_low(cpu_times[len(cpu_times) // 2 :])
        time.sleep(max(0.0, until - time.perf_counter()))
        began = time.thread_time(), time.perf_counter()

    def longer(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(stage: Any, *args: Any) -> Any:
            nonlocal began, key
            began = time.thread_time(), time.perf_counter()
            key = original.__name__, getattr(stage, "chunk", 0)
            result = original(stage, *args)
            sleep_on("the rest")
            return result

        return run

    for kind in KINDS:
        owner = SharedVocabulary if kind in VOCABULARY else MegatronStage
        if kind.resource == PROCESSOR and hasattr(owner, kind.method):
            setattr(owner, kind.method, longer(getattr(owner, kind.method)))
    begin, train = DeviceCollectives.begin, training.train

    def begin_late(together: Any, job: Any, inputs: Any) -> Any:
        if inputs:  # within a pass: its results so far are summed
            sleep_on("summed")
        return begin(together, job, inputs)

    def tell(forward_step: Any, model: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        result = train(forward_step, model, optimizer, *args, **options)
        size = static_memory(model, optimizer).total
        print(f"rank {dist.get_rank()} holds {size} bytes besides", flush=True)
        return result

    DeviceCollectives.begin, training.train = begin_late, tell  # type: ignore[method-assign]
    exec(source, {"__name__": "__main__", "__file__": script})


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--schedule", default="v-half")
    options = parser.parse_args()
    runs = {name: measure(flags, options) for name, flags in RUNS.items()}
    print(
        f"{options.schedule}, {options.ranks} ranks, {options.microbatches} microbatches, "
        f"vocabulary {options.vocabulary}"
    )
    print("run        predicted ms  measured ms  ratio   MiB of a rank: peak, activations, rest")
    for name, run in runs.items():
        print(
            f"{name:10} {run.predicted_ms:12.1f} {run.measured_ms:12.1f} "
            f"{run.measured_ms / run.predicted_ms:6.3f}   {run.worst:.2f}, "
            f"{max(run.activations):.2f}, {max(run.state_mib):.2f}"
        )
    shared, missed = runs["shared"], False
    for name in ("even", "balanced"):
        expected = runs[name].predicted_ms / shared.predicted_ms
        measured = runs[name].measured_ms / shared.measured_ms
        missed |= abs(measured / expected - 1) > TOLERANCE
        print(
            f"{name} / parallel: predicted {expected:.3f}, measured {measured:.3f}, "
            f"error {measured / expected - 1:+.1%}"
        )
    if missed:
        raise SystemExit(f"a ratio differs by more than {TOLERANCE:.0%} from its prediction")


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        run_rank(sys.argv[2:])
    else:
        main()
