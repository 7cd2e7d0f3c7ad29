#!/usr/bin/env python3
"""Measure memory and time of single ranks of training commands on one GPU, or estimate them.

    python scripts/measure_ranks.py measure --output FILE.json [--only NAME ...]
    python scripts/measure_ranks.py rehearse FILE.json [--te DIRECTORY]

`measure` runs each rank as `megatron-vshape rehearse --measure` does (`rehearsal.measurement`):
Megatron's trainer without the other ranks. Memory is that of torch's allocator. NCCL's buffers,
waits and communication are not measured. Transformer Engine must be installed.

`rehearse` needs no GPU: it adds the estimate for the same flags. The figures of an H200
are in benchmarks/evidence/h200.json; `benchmarks/measured_table.py` prints them. They were measured
and estimated with torch 2.11; with torch 2.15 the 7B ranks are estimated 136 MiB lower.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # works without installation
sys.path.insert(0, str(Path(__file__).parent))

from megatron_vshape.rehearsal.gpus import GPUS, Gpu
from megatron_vshape.rehearsal.rank_job import RankJob

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
GIB = 2**30
STEPS = 3  # the first one compiles
TIMEOUT_S = 120.0
COMMON = (
    "--micro-batch-size 1 --bf16 --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --use-distributed-optimizer --mock-data "
    "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 128 --train-iters 100 "
    "--lr 1e-9 --min-lr 1e-9 --lr-decay-style constant --eval-iters 0 --eval-interval 1000 "
    "--log-interval 1 --num-workers 0 --no-check-for-nan-in-loss-and-grad"
)
GPT_7B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32 "
    "--seq-length 8192 --max-position-embeddings 8192 --vocab-size 131072 "
    "--pipeline-model-parallel-size 4 --global-batch-size 8"
)
LLAMA_70B = (
    "--sequence-parallel --seq-length 4096 --max-position-embeddings 4096 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--group-query-attention --pipeline-model-parallel-size 8 --num-layers 80 --hidden-size 8192 "
    "--ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8 --vocab-size 128256 "
    "--tensor-model-parallel-size 8 --global-batch-size 16"
)
EXPERTS = (
    "--seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --group-query-attention "
    "--num-query-groups 8 --num-layers 16 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --vocab-size 32000 --pipeline-model-parallel-size 4 "
    "--global-batch-size 8 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2"
)
MANY_EXPERTS = (
    EXPERTS.replace("--global-batch-size 8", "--global-batch-size 64").replace(
        "--num-experts 8 --moe-router-topk 2", "--num-experts 32 --moe-router-topk 4"
    )
    + " --moe-ffn-hidden-size 3584 --expert-model-parallel-size 8 --attention-backend unfused"
)
FUSED = "--moe-permute-fusion"
LIMITED = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
FP8 = (
    "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SHARED = "--pipeline-vocab-parallel"
V = "--pipeline-schedule"
CASES = (  # name, flags, GPUs, ranks
    ("7B 1f1b", GPT_7B, 4, (0,)),
    ("7B v-half", f"{GPT_7B} {V} v-half", 4, (0, 3)),
    ("7B v-min", f"{GPT_7B} {V} v-min", 4, (0,)),
    ("7B v-zb", f"{GPT_7B} {V} v-zb", 4, (0,)),
    ("70B 1f1b", LLAMA_70B, 64, (0,)),
    ("70B v-half", f"{LLAMA_70B} {V} v-half", 64, (0,)),
    ("7B FP8 1f1b", f"{GPT_7B} {FP8}", 4, (0,)),
    ("7B FP8 v-half", f"{GPT_7B} {FP8} {V} v-half", 4, (0,)),
    ("8 experts 1f1b", EXPERTS, 4, (0,)),
    ("8 experts v-half", f"{EXPERTS} {V} v-half", 4, (0,)),
    ("70B v-half, shared vocabulary", f"{LLAMA_70B} {V} v-half {SHARED}", 64, (0,)),
    ("7B v-half, full recompute", f"{GPT_7B} {FULL} {V} v-half", 4, (0,)),
    ("7B 1f1b, full recompute", f"{GPT_7B} {FULL}", 4, (0,)),
    ("32 experts, EP 8, 1f1b", MANY_EXPERTS, 32, (0,)),
    ("32 experts, EP 8, 1f1b, fused permutation", f"{MANY_EXPERTS} {FUSED}", 32, (0,)),
    ("32 experts, EP 8, 1f1b, limited capacity", f"{MANY_EXPERTS} {LIMITED}", 32, (0,)),
    ("32 experts, EP 8, v-half", f"{MANY_EXPERTS} {V} v-half", 32, (0,)),
)


# --- all cases ----------------------------------------------------------------------------------


def write(file: Path, measurements: Mapping[str, Any]) -> None:
    """Write the measurements, one rank per line."""
    ranks = ",\n".join(f"  {json.dumps(measurement)}" for measurement in measurements["ranks"])
    about = json.dumps(measurements["about"], indent=1).replace("\n", "\n ")
    file.write_text(f'{{\n "about": {about},\n "ranks": [\n{ranks}\n ]\n}}\n')


def cases(only: Sequence[str], excluded: Sequence[str], extra: str) -> Iterator[dict[str, Any]]:
    """Yield every rank of every case, in the form of the file."""
    for name, flags, world, ranks in CASES:
        if (only and not any(text in name for text in only)) or any(
            text in name for text in excluded
        ):
            continue
        for rank in ranks:
            all_flags = " ".join(f"{COMMON} {flags} {extra}".split())
            yield {"name": name, "flags": all_flags, "world": world, "rank": rank}


def job_of(case: Mapping[str, Any]) -> RankJob:
    """Return the job that measures a rank."""
    flags, gpu = case["flags"].split(), GPUS["h100"]
    has_schedule = V in flags
    return RankJob(str(SCRIPT), flags, gpu, case["world"], case["rank"], has_schedule=has_schedule)


def measure(args: argparse.Namespace) -> int:
    """Measure all cases and write the results after each; return 1 if one failed."""
    import torch
    from bench_gpu import provenance

    from megatron_vshape.rehearsal.measurement import format_passes, measure_ranks

    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    rank_cases = list(cases(args.only, args.skip, args.flags))
    measurements: list[dict[str, Any]] = []
    about = provenance(args)
    results = measure_ranks([job_of(case) for case in rank_cases], timeout_s=TIMEOUT_S, steps=STEPS)
    for case, result in zip(rank_cases, results, strict=True):
        measurements.append(case | result)
        row = result.get("error") or f"{sizes_of(result)}; {format_passes(result)}"
        print(f"{case['name']}, rank {case['rank']}: {row}", flush=True)
        write(args.output, {"about": about, "ranks": measurements})
    return int(any("error" in measurement for measurement in measurements))


def sizes_of(measurement: Mapping[str, Any]) -> str:
    """Format the memory and the steps of a rank."""
    peak, allocated, reserved = (
        measurement[f"{name}_bytes"] / GIB for name in ("peak", "held", "reserved")
    )
    steps = " ".join(f"{step:.3f}" for step in measurement["step_s"])
    return f"peak {peak:.3f} held {allocated:.3f} reserved {reserved:.2f} GiB, steps {steps} s"


def rehearse(args: argparse.Namespace) -> int:
    """Add the estimate to each rank of a file; return 1 if one failed."""
    from megatron_vshape.rehearsal import sources
    from megatron_vshape.rehearsal.rank_report import FailedRank
    from megatron_vshape.rehearsal.ranks import Programs, rehearse_all

    measurements = json.loads(args.file.read_text())
    local = all(
        "--transformer-impl local" in measurement["flags"] for measurement in measurements["ranks"]
    )
    programs = Programs(None, None if local else sources.find_te(args.te), os.cpu_count() or 1)
    gpu = measurements["about"]["device"].split()[-1].lower()
    jobs = [
        rehearsal(measurement, GPUS[gpu], str(index))
        for index, measurement in enumerate(measurements["ranks"])
    ]
    failed = False
    for report in rehearse_all(programs, jobs):
        measurement = measurements["ranks"][int(report.name)]
        if isinstance(report, FailedRank):
            failed = True
            print(
                f"{measurement['name']}, rank {measurement['rank']}: {report.error}",
                file=sys.stderr,
            )
            continue
        fields = report.to_json()
        names = "peak_bytes", "held_bytes", "reserved_bytes", "when"
        measurement["rehearsed"] = {name: fields[name] for name in names}
        measurement["rehearsed"]["kinds"] = [
            {name: getattr(kind, name) for name in ("kind", "chunk", "adds_bytes")}
            | {"ms": 1e3 * (kind.seconds - kind.waited_seconds)}
            for kind in report.step.kinds
        ]
    measurements["about"]["rehearsed with torch"] = importlib.metadata.version("torch")
    write(args.file, measurements)
    return int(failed)


def rehearsal(measurement: Mapping[str, Any], gpu: Gpu, name: str) -> RankJob:
    """Return the job that estimates a measured rank, with the measurement's allocator."""
    from megatron_vshape.environment import ALLOCATOR, SEGMENTS
    from megatron_vshape.rehearsal.command import SCHEDULE, Command
    from megatron_vshape.rehearsal.dry_run_flags import environment_of, without_files

    command = Command(str(SCRIPT), tuple(measurement["flags"].split()))
    return RankJob(
        script=command.script,
        flags=without_files(command, None),
        gpu=gpu,
        world=measurement["world"],
        rank=measurement["rank"],
        environment=environment_of(command) | {ALLOCATOR[0]: SEGMENTS},
        has_schedule=command.has(SCHEDULE),
        name=name,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    gpu = commands.add_parser("measure")
    gpu.add_argument("--output", type=Path, required=True)
    gpu.add_argument("--only", nargs="+", default=[], help="cases whose name holds one of these")
    gpu.add_argument("--skip", nargs="+", default=[], help="and those with one of these not")
    gpu.add_argument("--flags", default="", help="more flags, for every case")
    gpu.set_defaults(run=measure)
    anywhere = commands.add_parser("rehearse")
    anywhere.add_argument("file", type=Path)
    anywhere.add_argument("--te", type=Path, help="Transformer Engine's Python")
    anywhere.set_defaults(run=rehearse)
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    raise SystemExit(main())
