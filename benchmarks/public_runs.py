"""Compare the estimated steps of public runs with the published ones, and print a table.

    python benchmarks/public_runs.py --te DIR [NAME ...]

Published: for Nemotron, the performance summary of NVIDIA-NeMo/Megatron-Bridge (067f987d) and its
archive, the slowest and the fastest of releases 26.04 to 26.08, with the flags of its recipes in
perf_recipes/nemotronh; for Moonlight and the 70B, its skill on activation recomputation and its
pull request 3107; for Mixtral, the projection page of AMD-AGI/Primus. No rate was fitted to them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30
COMMON = """--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --grad-reduce-in-bf16 --cross-entropy-loss-fusion --cross-entropy-fusion-impl native"""
NEMOTRON = """--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep
    --cuda-graph-impl transformer_engine --te-rng-tracker"""
MXFP8 = f"""{NEMOTRON} --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather
    --reuse-grad-buf-for-mxfp8-param-ag --cuda-graph-modules attn mamba moe_router moe_preprocess"""
FP8 = f"""{NEMOTRON} --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather
    --cuda-graph-modules attn mamba --recompute-granularity selective
    --recompute-modules layernorm"""
LLAMA_70B = """--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --sequence-parallel
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 5 --tp-comm-overlap --defer-embedding-wgrad-compute
    --wgrad-deferral-limit 22 --micro-batch-size 1"""
MIXTRAL = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 2 --expert-model-parallel-size 8 --micro-batch-size 2"""
EXPERTS = "--expert-model-parallel-size"
MOONLIGHT = """--num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16
    --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --rope-type rope --vocab-size 163840 --num-experts 64
    --moe-layer-freq ([0]+[1]*26) --moe-router-topk 6 --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816 --moe-shared-expert-overlap
    --moe-router-score-function sigmoid --moe-grouped-gemm --moe-permute-fusion
    --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3"""
MOONLIGHT_RUN = f"""{MOONLIGHT} --swiglu --normalization RMSNorm --disable-bias-linear
    --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16
    --exp-avg-sq-dtype bf16 --position-embedding-type rope --no-rope-fusion
    --untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel
    {EXPERTS} 8 --expert-tensor-parallel-size 1 --micro-batch-size 1"""


class Run(NamedTuple):
    """A published run: preset, GPUs, flags, batch, sequence length, measured values."""

    model: str  # "": the flags describe it
    gpus: str
    flags: str
    batch: int
    length: int
    tokens_per_s: tuple[float, ...] = ()  # per GPU: slowest and fastest
    step_s: float = 0.0  # instead of the tokens
    peak_gib: float | None = None

    def seconds(self) -> tuple[float, ...]:
        """Return the measured times of a step, fastest first."""
        tokens = self.batch * self.length / int(self.gpus.partition("x")[0])
        return tuple(tokens / rate for rate in reversed(self.tokens_per_s)) or (self.step_s,)


RUNS = {
    "nano b300": Run("nemotron-3-nano", "8xb300", f"{MXFP8} {EXPERTS} 8 --micro-batch-size 4", 512,
                     8192, (35282, 37316)),
    "nano h100": Run("nemotron-3-nano", "16xh100", f"{FP8} {EXPERTS} 8 --micro-batch-size 1", 1024,
                     8192, (14336, 14719)),
    "super b300": Run("nemotron-3-super", "64xb300", f"{MXFP8} {EXPERTS} 8 --micro-batch-size 1",
                      512, 8192, (7009, 7867)),
    "super gb300": Run("nemotron-3-super", "64xgb300", f"{MXFP8} {EXPERTS} 64 --micro-batch-size 1",
                       512, 8192, (9243, 9856)),
    "super gb200": Run("nemotron-3-super", "64xgb200", f"{MXFP8} --tensor-model-parallel-size 2 "
                       f"--sequence-parallel --micro-batch-size 1 {EXPERTS} 64 "
                       "--expert-tensor-parallel-size 1", 512, 8192, (6656, 7040)),
    "moonlight": Run("", "8xh100", MOONLIGHT_RUN, 4, 4096, step_s=0.457, peak_gib=36.618e9 / GIB),
    "moonlight mla_up_proj": Run("", "8xh100", f"{MOONLIGHT_RUN} --recompute-granularity selective "
                                 "--recompute-modules mla_up_proj", 4, 4096, step_s=0.481,
                                 peak_gib=35.902e9 / GIB),
    "70b fine-tuning": Run("llama-3-1-70b", "32xh100", LLAMA_70B, 32, 4096, step_s=2.52),
    "mixtral mi355x": Run("mixtral-8x22b", "64xmi355x", MIXTRAL, 256, 8192, (3534,)),
}  # fmt: skip
"""By name."""


def main() -> None:
    """Print a row per run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(RUNS))
    parser.add_argument("--te", required=True, help="As of rehearse")
    options = parser.parse_args()
    print("| run | estimated s | measured s | of the middle | GiB | measured |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in options.names:
        print(f"| {name} | {' | '.join(cells(RUNS[name], options.te))} |", flush=True)


def cells(run: Run, te: str) -> Iterator[str]:
    """Yield the figures of a row."""
    answer = estimate(run, te)
    estimated, measured = float(answer["step_s"]), run.seconds()
    yield f"{estimated:.2f}"
    yield " to ".join(f"{step_s:.2f}" for step_s in measured)
    yield f"{estimated / (sum(measured) / len(measured)) - 1:+.0%}"
    peak_gib = max(rank["peak_bytes"] for rank in answer["ranks"]) / GIB
    yield from ("", "") if run.peak_gib is None else (f"{peak_gib:.1f}", f"{run.peak_gib:.1f}")


def estimate(run: Run, te: str) -> dict[str, Any]:
    """Return the answer of `rehearse`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "estimate.json"
        command = [sys.executable, "-m", "megatron_vshape", "rehearse", "--alone", "--te", te]
        command += ["--gpus", run.gpus, "--json", str(file)]
        command += ["--model", run.model] if run.model else []
        command += ["--", *COMMON.split(), "--global-batch-size", str(run.batch)]
        command += ["--seq-length", str(run.length), "--max-position-embeddings", str(run.length)]
        subprocess.run([*command, *run.flags.split()], check=True, stdout=subprocess.DEVNULL)
        answer: dict[str, Any] = json.loads(file.read_text())
        return answer


if __name__ == "__main__":
    main()
