"""Compare the estimated steps of hybrid models with published ones, and print a table.

    python benchmarks/hybrid_rows.py --te DIR [NAME ...]

Published: the performance summary of NVIDIA-NeMo/Megatron-Bridge (067f987d) and its archive, in
tokens per second and GPU: the slowest and the fastest of releases 26.04 to 26.08. Flags: those of
its recipes in perf_recipes/nemotronh. No rate was fitted to these runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

COMMON = """--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --grad-reduce-in-bf16 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl native --seq-length 8192
    --cuda-graph-impl transformer_engine --te-rng-tracker"""
MXFP8 = """--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather
    --reuse-grad-buf-for-mxfp8-param-ag --cuda-graph-modules attn mamba moe_router moe_preprocess"""
FP8 = """--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather
    --cuda-graph-modules attn mamba --recompute-granularity selective
    --recompute-modules layernorm"""


class Run(NamedTuple):
    """A published run: the preset, the GPUs, flags, and tokens per second and GPU."""

    model: str
    gpus: str
    flags: str
    batch: int
    slowest: float
    fastest: float

    def step_s(self, tokens_per_s: float) -> float:
        """Return the time of a step at this rate."""
        return self.batch * 8192 / (int(self.gpus.partition("x")[0]) * tokens_per_s)


RUNS = {
    "nano b300": Run(
        "nemotron-3-nano",
        "8xb300",
        f"{MXFP8} --expert-model-parallel-size 8 --micro-batch-size 4",
        512,
        35282,
        37316,
    ),
    "nano h100": Run(
        "nemotron-3-nano",
        "16xh100",
        f"{FP8} --expert-model-parallel-size 8 --micro-batch-size 1",
        1024,
        14336,
        14719,
    ),
    "super b300": Run(
        "nemotron-3-super",
        "64xb300",
        f"{MXFP8} --expert-model-parallel-size 8 --micro-batch-size 1",
        512,
        7009,
        7867,
    ),
    "super gb300": Run(
        "nemotron-3-super",
        "64xgb300",
        f"{MXFP8} --expert-model-parallel-size 64 --micro-batch-size 1",
        512,
        9243,
        9856,
    ),
    "super gb200": Run(
        "nemotron-3-super",
        "64xgb200",
        f"{MXFP8} --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 "
        "--expert-model-parallel-size 64 --expert-tensor-parallel-size 1",
        512,
        6656,
        7040,
    ),
}


def main() -> None:
    """Print a row per run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(RUNS))
    parser.add_argument("--te", required=True, help="As of rehearse")
    options = parser.parse_args()
    print("| run | estimated s | measured s | of the middle |\n|---|---:|---:|---:|")
    for name in options.names:
        run = RUNS[name]
        estimated = estimate_s(run, options.te)
        measured = [run.step_s(rate) for rate in (run.fastest, run.slowest)]
        deviation = estimated / (sum(measured) / 2) - 1
        span = " to ".join(f"{step_s:.2f}" for step_s in measured)
        print(f"| {name} | {estimated:.2f} | {span} | {deviation:+.0%} |", flush=True)


def estimate_s(run: Run, te: str) -> float:
    """Return the step time that `rehearse` estimates."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "estimate.json"
        command = [sys.executable, "-m", "megatron_vshape", "rehearse", "--alone", "--te", te]
        command += ["--gpus", run.gpus, "--model", run.model, "--json", str(file), "--"]
        command += [*COMMON.split(), "--global-batch-size", str(run.batch), *run.flags.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(file.read_text())["step_s"])


if __name__ == "__main__":
    main()
