"""Estimate Kwai's LLaMA 65B with a share of offloaded activations, and write evidence/kwai.csv.

    python benchmarks/rehearse_kwai.py KWAI.json --megatron CHECKOUT --te DIRECTORY

KWAI.json contains {"memory": [{"alpha", "recompute", "max_memory_allocated"}]} of USENIX ATC '24
(Megatron-Kwai, examples/atc24). Kwai offloads a share of each chunk's activations. Megatron's flags
cannot offload an MLP, so this package offloads whole chunks here: a share of every rank's chunks in
an interleaved 1F1B. Kwai's recomputation of the MLP's activation function is not available in
Megatron, so only the runs without recomputation are compared.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_vshape import Schedule, make, verify
from megatron_vshape.core.model.kinds import OFFLOAD
from megatron_vshape.core.model.passes import Pass

OUT = Path(__file__).resolve().parents[1] / "benchmarks" / "evidence" / "kwai.csv"
RANKS, CHUNKS, MICROBATCHES = 8, 5, 16
SOON = 6  # passes from F to its backward in which no copy goes and comes back
FLAGS = f"""
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 22016 --num-attention-heads 64
    --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128
    --tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel --bf16 --swiglu
    --pipeline-model-parallel-size {RANKS} --num-layers-per-virtual-pipeline-stage 2
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --use-distributed-optimizer --transformer-impl transformer_engine --vocab-size 32004
    --attention-backend flash --no-create-attention-mask-in-dataloader
""".split()


def with_copies(share: float) -> Schedule:
    """Return an interleaved 1F1B that offloads this share of the activations of F."""
    base = make("interleaved-1f1b", RANKS, MICROBATCHES, num_chunks=CHUNKS)
    rows = tuple(tuple(_copied(row, share)) for row in base.order)
    schedule = replace(base, name=f"{share:.0%} of chunks copied", order=rows)
    verify(schedule)
    return schedule


def _copied(row: tuple[Pass, ...], share: float) -> Iterator[Pass]:
    backward = {work[1:]: index for index, work in enumerate(row) if work.kind == "BW"}
    passes_before: dict[int, list[Pass]] = {}
    passes_after: dict[int, list[Pass]] = {}
    due = 0.0
    for index, work in enumerate(row):
        if work.kind != "F":
            continue
        due += share
        back = backward[work[1:]]
        if due > 1 - 1e-9 and back - index >= SOON:
            due -= 1
            out, let_go, room, home = (Pass(kind, *work[1:]) for kind in OFFLOAD)
            passes_after.setdefault(index, []).append(out)
            passes_after.setdefault(index + 1, []).append(let_go)
            passes_before.setdefault(back - 1, []).extend((room, home))
    for index, work in enumerate(row):
        yield from (*passes_before.get(index, ()), work, *passes_after.get(index, ()))


def peak_bytes(share: float, megatron: Path, te: Path) -> int:
    """Return the peak of the first rank of the pipeline, whose is the largest."""
    with tempfile.TemporaryDirectory() as folder:
        plan, report = Path(folder, "plan.json"), Path(folder, "found.json")
        plan.write_text(with_copies(share).to_json())
        command = [sys.executable, "-m", "megatron_vshape", "rehearse", "--alone", "--gpu", "h800"]
        command += ["--gpus", "256", "--ranks", "first", "--json", str(report)]
        command += ["--megatron", str(megatron), "--te", str(te), "--", "pretrain_gpt.py", *FLAGS]
        subprocess.run([*command, "--pipeline-schedule", str(plan)], check=True)
        return int(json.loads(report.read_text())["ranks"][0]["peak_bytes"])


def main() -> None:
    """Rehearse every run without recompute whose peak is known, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--te", type=Path, required=True)
    options = parser.parse_args()
    runs = json.loads(options.rows.read_text())["memory"]
    with OUT.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("share", "measured_peak", "rehearsed_peak"))
        for run in runs:
            if run["recompute"] == "no" and run["max_memory_allocated"] is not None:
                peak = peak_bytes(run["alpha"], options.megatron, options.te)
                writer.writerow((run["alpha"], run["max_memory_allocated"], peak))
                stream.flush()


if __name__ == "__main__":
    main()
