#!/usr/bin/env python3
"""Train on four ranks that share one GPU, over NCCL, with and without CUDA graphs of F, B and W.

    python benchmarks/check_graph_ranks.py [--device cpu] [--only RUN ...]

TP 2 with sequence parallelism and PP 2 under v-half: the weight gradients of column-parallel layers
gather their inputs over NCCL, within the graphs of W. Gradients of all parameters and steps are
compared bit by bit with those of the run without graphs, in Megatron's deterministic mode. The same
run without that mode, twice, shows the effect of the GPU's order of additions. With `--device
cpu`, there are no graphs; it shows that the script runs. Exits with 1 if a run failed or differs.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import torch
from bench_gpu import stop_process
from bench_nccl import ROOT, fill, rank_environment, wait_for

RANKS = 4
LIMIT_S = 150.0  # of a run
TRAINED = (
    "--bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 64 --num-layers 8 --hidden-size 256 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --min-lr 1e-3 "
    "--lr-decay-style constant --eval-iters 0 --eval-interval 1000 --log-interval 1 "
    "--num-workers 0 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --pipeline-schedule v-half --pipeline-timeout 60"
)
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1"
ON_GPU = "--sequence-parallel --attention-backend unfused --distributed-backend nccl"
ON_CPU = (
    "--transformer-impl local --distributed-backend gloo --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion"
)
FIXED = "--deterministic-mode"
RUNS = {  # a run is compared with the last one before it that has no graphs
    "without graphs": FIXED,
    "graphs, W in B": f"{FIXED} {GRAPHS} --pipeline-split-graphs off",
    "graphs of F, B and W": f"{FIXED} {GRAPHS}",
    "without graphs, not deterministic": "",
    "the same again": "",
    "graphs of F, B and W, not deterministic": GRAPHS,
}
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
MAY_DIFFER = ("the same again", "graphs of F, B and W, not deterministic")


def train_rank(flags: list[str]) -> None:
    """Train as scripts/pretrain_gpt.py does, and print a checksum of the parameters."""
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    sys.argv = [script, *flags]
    pretrain = runpy.run_path(script, run_name="imported")["main"]
    from megatron.training import training

    build, step = training.setup_model_and_optimizer, training.train_step
    chunks: list[torch.nn.Module] = []
    sums: list[dict[str, int]] = []

    def setup(*args: Any, **options: Any) -> Any:
        setup_result = build(*args, **options)
        chunks.extend(setup_result[0])
        for index, chunk in enumerate(chunks):
            for name, parameter in chunk.named_parameters():
                if parameter.dim() > 1:
                    fill(parameter.data, f"{index} {name}")
        return setup_result

    def train_step(*args: Any, **options: Any) -> Any:
        step_result = step(*args, **options)
        sums.append(
            {
                f"{index} {name}": checksum(parameter.main_grad)
                for index, chunk in enumerate(chunks)
                for name, parameter in chunk.named_parameters()
            }
        )
        return step_result

    training.setup_model_and_optimizer, training.train_step = setup, train_step
    pretrain()
    print(f"gradients: {json.dumps(sums)}", flush=True)


def checksum(tensor: torch.Tensor) -> int:
    """Return a sum over the bits of a tensor, weighted by place."""
    bits = tensor.detach().float().reshape(-1).view(torch.int32).to(torch.int64)
    return int((bits * (torch.arange(len(bits), device=bits.device) % 65537 + 1)).sum())


def start(run: str, device: str, folder: Path) -> list[subprocess.Popen[str]]:
    """Start the ranks of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = f"{TRAINED} {RUNS[run]} {ON_GPU}" if device == "cuda" else f"{TRAINED} {ON_CPU}"
    command = [sys.executable, __file__, "train-rank", *flags.split()]
    processes = []
    for rank in range(RANKS):
        with (folder / f"{run}.{rank}").open("w") as stream:
            out = {"stdout": stream, "stderr": subprocess.STDOUT, "text": True}
            environment = rank_environment(rank, RANKS, port, device)
            environment |= ENVIRONMENT
            processes.append(subprocess.Popen(command, env=environment, **out))
    return processes


def said_by(run: str, folder: Path) -> tuple[list[str], list[list[dict[str, int]]]]:
    """Return the losses and the checksums by rank, step and parameter of a run."""
    texts = [(folder / f"{run}.{rank}").read_text(errors="replace") for rank in range(RANKS)]
    losses = re.findall(r"lm loss: (\S+).*?grad norm: (\S+)", "".join(texts))
    sums = [json.loads(line) for text in texts for line in re.findall(r"gradients: (.*)", text)]
    return [" ".join(line) for line in losses], sums


def differences(checksums: list[list[dict[str, int]]], expected: list[list[dict[str, int]]]) -> str:
    """Format which gradients of which step are the first to differ, empty if none are."""
    for step in range(len(expected[0])):
        names = [
            f"rank {rank} {name}"
            for rank, (mine, expected_sums) in enumerate(zip(checksums, expected, strict=True))
            for name in expected_sums[step]
            if mine[step][name] != expected_sums[step][name]
        ]
        if names:
            total = sum(len(expected_sums[step]) for expected_sums in expected)
            return f"step {step + 1}: {len(names)} of {total} differ, as {', '.join(names[:4])}"
    return ""


def main() -> int:
    """Run all, or one rank, and return the exit status."""
    if sys.argv[1:2] == ["train-rank"]:
        train_rank(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="RUN")
    args = parser.parse_args()
    runs = args.only or (list(RUNS) if args.device == "cuda" else list(RUNS)[3:5])
    with TemporaryDirectory() as name:
        return judge(runs, args.device, Path(name))


def judge(runs: list[str], device: str, folder: Path) -> int:
    """Run one after the other and print how their gradients compare; 1 if wrong."""
    good, expected_sums = True, []
    for run in runs:
        processes = start(run, device, folder)
        try:
            ended = wait_for(processes, time.monotonic() + LIMIT_S)
        finally:
            for process in processes:
                stop_process(process)
        losses, sums = said_by(run, folder)
        if any(ended) or len(sums) != RANKS:
            good = False
            first = next((rank for rank, why in enumerate(ended) if why.startswith("status")), 0)
            lines = (folder / f"{run}.{first}").read_text(errors="replace").splitlines()[-60:]
            text = "\n".join(line[:300] for line in lines)
            print(f"{run}: failed, {ended}\nrank {first}: {text}", flush=True)
            continue
        if run.startswith("without graphs"):
            expected_sums = sums
        difference = (
            differences(sums, expected_sums) if expected_sums else "nothing to compare with"
        )
        good &= not difference or run in MAY_DIFFER
        print(f"{run}: {difference or 'equal'}; losses and norms {', '.join(losses)}", flush=True)
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
