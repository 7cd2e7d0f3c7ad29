#!/usr/bin/env python3
"""Measure on one GPU what single ranks of training commands need; elsewhere, rehearse the same.

    python scripts/measure_ranks.py measure --output FILE.json [--only NAME ...]
    python scripts/measure_ranks.py rehearse FILE.json [--te DIRECTORY]

`measure` runs Megatron's trainer, with this package's schedules where a case has one, as one rank
of a job whose other ranks are not there: exchanges have ended as they begin, and what would have
come is random. Memory is what torch's allocator says. A pass takes from the start of its first
kernel to the end of its last; where Python starts them later than the GPU could run them, that is
Python's time. Not seen are NCCL's buffers, waits for other ranks, and what exchanges take. Every
rank runs in a process of its own, while the next two import. Transformer Engine must be installed.

`rehearse` needs no GPU: it adds what a rehearsal of the same flags counts. The figures of an H200
stand in benchmarks/evidence/h200.json; `benchmarks/measured_table.py` prints them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import os
import runpy
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed
sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
GIB = 2**30
STEPS = 3  # the first one compiles
AHEAD = 2
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
)


# --- one rank, on the GPU -----------------------------------------------------------------------


class _Enough(BaseException):
    """Ends the program after its last step; no handler of Megatron's catches it."""


class Watched:
    """Counts and times the steps and the passes of one rank's program."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda
        self.held: list[int] = []
        self.peaks: list[int] = []
        self.step_s: list[float] = []
        self.passes: list[tuple[str, int, Any, Any, int, int]] = []
        self.chunks: dict[int, int] = {}
        self.parameters = 0
        self._begun: Any = None

    def setup(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Set the model up."""
        made = call(*args, **kwargs)
        self.chunks = {id(chunk): at for at, chunk in enumerate(made[0])}
        self.parameters = sum(p.numel() for chunk in made[0] for p in chunk.parameters())
        return made

    def train_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take stock, and run a step."""
        gc.collect()
        self.cuda.synchronize()
        self.held.append(self.cuda.memory_allocated())
        if len(self.step_s) == STEPS:
            raise _Enough
        self.passes.clear()
        self.cuda.reset_peak_memory_stats()
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            return call(*args, **kwargs)
        finally:
            end.record()
            self.cuda.synchronize()
            self.step_s.append(start.elapsed_time(end) / 1e3)
            self.peaks.append(self.cuda.max_memory_allocated())

    def watch(self, name: str, chunk: int, call: Callable[[], Any]) -> Any:
        """Run a pass and note when it runs and what it leaves."""
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        before = self.cuda.memory_allocated()
        start.record()
        try:
            return call()
        finally:
            end.record()
            after = self.cuda.memory_allocated()
            self.passes.append((name, chunk, start, end, before, after))

    def of_megatron(self, name: str) -> Callable[..., Any]:
        """Return what runs Megatron's own passes, watched."""

        def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            model = kwargs.get("model", args[2] if len(args) > 2 else None)
            return self.watch(name, self.chunks.get(id(model), 0), lambda: call(*args, **kwargs))

        return run

    def of_ours(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of a stage, watched."""

        @functools.wraps(call)
        def run(stage: Any, *args: Any, **kwargs: Any) -> Any:
            return self.watch(name, stage.chunk, lambda: call(stage, *args, **kwargs))

        return run

    def report(self) -> dict[str, Any]:
        """Return the figures, of the last step where they differ from step to step."""
        kinds: dict[tuple[str, int], list[tuple[float, int]]] = {}
        for name, chunk, start, end, before, after in self.passes:
            kinds.setdefault((name, chunk), []).append((start.elapsed_time(end), after - before))
        return {
            "peak_bytes": max(self.peaks),
            "held_bytes": self.held[-1],
            "step_s": self.step_s,
            "reserved_bytes": self.cuda.max_memory_reserved(),
            "parameters": self.parameters,
            "kinds": [
                {
                    "kind": name,
                    "chunk": chunk,
                    "number": len(found),
                    "ms": statistics.median(ms for ms, _ in found),
                    "adds_bytes": statistics.median(size for _, size in found),
                }
                for (name, chunk), found in sorted(kinds.items())
            ],
        }


def import_all() -> None:
    """Import what a rank needs, with exchanges that end as they begin."""
    from megatron_vshape.environment import complete

    complete(os.environ, kernels=True, ordered=True)
    import torch

    from megatron_vshape.mcore import cpu

    cpu.install()  # nothing where there is a GPU
    from megatron_vshape.rehearsal import exchanges

    exchanges.install()
    _let_exchanges_write()
    import megatron_vshape

    megatron_vshape.register()
    import megatron.training.training  # noqa: F401

    from megatron_vshape.mcore.hooks import registry  # noqa: F401

    torch.manual_seed(1)


def _let_exchanges_write() -> None:
    """Have what comes from other ranks be random: what nobody wrote may be anything."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    def writing(call: Callable[..., Any], write: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            write(*args, **kwargs)
            return call(*args, **kwargs)

        return run

    for names, write in (
        (("recv", "irecv"), _receive),
        (("all_gather_into_tensor", "_all_gather_base"), _gather),
        (("reduce_scatter_tensor", "_reduce_scatter_base"), _scatter),
    ):
        for name in names:
            made = writing(getattr(dist, name), write)
            for module in (dist, c10d):
                setattr(module, name, made)


def _receive(tensor: Any, *unused: Any, **options: Any) -> None:
    if tensor.is_floating_point():
        tensor.detach().normal_(std=1e-2)


def _gather(*args: Any, **options: Any) -> None:
    output, given = _both(("output_tensor", "input_tensor"), args, options)
    if not _is_part(output, given):
        output.view(-1, *given.shape).copy_(given)


def _scatter(*args: Any, **options: Any) -> None:
    output, given = _both(("output", "input"), args, options)
    if not _is_part(output, given):
        output.copy_(given[: output.shape[0]])


def _both(names: Sequence[str], args: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    return [options[name] if name in options else args[at] for at, name in enumerate(names)]


def _is_part(output: Any, given: Any) -> bool:
    """Return whether the one lies in the other, which then has its values."""
    return bool(output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr())


def run_rank(job: dict[str, Any]) -> dict[str, Any]:
    """Run a rank's program for some steps and return what was seen."""
    os.environ |= {
        "RANK": str(job["rank"]),
        "WORLD_SIZE": str(job["world"]),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    from megatron.training import training

    from megatron_vshape.rehearsal import exchanges
    from megatron_vshape.rehearsal.adjustments import wrap

    exchanges.start(job["rank"], job["world"])
    watched = Watched()
    wrap(training, "setup_model_and_optimizer", watched.setup)
    wrap(training, "train_step", watched.train_step)
    data: Any = training
    data.build_train_valid_test_data_iterators = _iterators
    _stand_in()
    if "--pipeline-schedule" in job["flags"]:
        _watch_ours(watched)
    else:
        from megatron.core.pipeline_parallel import schedules

        wrap(schedules, "forward_step", watched.of_megatron("F"))
        wrap(schedules, "backward_step", watched.of_megatron("BW"))
    sys.argv = [str(SCRIPT), *job["flags"].split()]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except _Enough:
        return watched.report()
    raise RuntimeError("the program ended before its last step")


def _stand_in() -> None:
    """Leave out what asks other ranks for values, or for a driver's library."""
    from megatron.core.pipeline_parallel import utils
    from megatron.training import initialize

    asks: Any = utils
    asks.set_ideal_affinity_for_current_gpu = lambda: None
    compiles: Any = initialize
    compiles._compile_dependencies = lambda: None


def _watch_ours(watched: Watched) -> None:
    from megatron_vshape.core.model.kinds import PARTS, Kind
    from megatron_vshape.mcore.step.stage import MegatronStage
    from megatron_vshape.rehearsal import ours

    ours.run_alone()
    stage: Any = MegatronStage
    for kind in (*PARTS, Kind.BW):
        setattr(stage, kind.method, watched.of_ours(str(kind), getattr(stage, kind.method)))


def _iterators(*unused: Any, **options: Any) -> Any:
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args

    args = get_args()
    args.do_train, args.do_valid, args.do_test = True, False, False
    return RerunDataIterator(_batches(args)), None, None


def _batches(args: Any) -> Iterator[dict[str, Any]]:
    import torch

    shape = (args.micro_batch_size, args.seq_length)
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(args.padded_vocab_size, shape, generator=generator)
        yield {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
        }


def serve() -> int:
    """Import, wait for a job on stdin, run it, and print what was seen as the last line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_all()
    line = sys.stdin.readline()
    if line:
        print(json.dumps(run_rank(json.loads(line))), file=out, flush=True)
        os._exit(0)  # some threads wait for other ranks
    return 0


# --- all cases ----------------------------------------------------------------------------------


def write(file: Path, found: Mapping[str, Any]) -> None:
    """Write what was found: a rank a line."""
    ranks = ",\n".join(f"  {json.dumps(each)}" for each in found["ranks"])
    about = json.dumps(found["about"], indent=1).replace("\n", "\n ")
    file.write_text(f'{{\n "about": {about},\n "ranks": [\n{ranks}\n ]\n}}\n')


def jobs(only: Sequence[str], but: Sequence[str], extra: str) -> Iterator[dict[str, Any]]:
    """Yield a job for every rank of every case."""
    for name, flags, world, ranks in CASES:
        if (only and not any(text in name for text in only)) or any(text in name for text in but):
            continue
        for rank in ranks:
            told = " ".join(f"{COMMON} {flags} {extra}".split())
            yield {"name": name, "flags": told, "world": world, "rank": rank}


def measure(args: argparse.Namespace) -> int:
    """Measure all cases and write what was found after each; 1 where one failed."""
    import torch
    from bench_gpu import provenance

    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    todo = list(jobs(args.only, args.skip, args.flags))
    command = [sys.executable, __file__, "one-rank"]

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
        )

    waiting = deque(start() for _ in todo[:AHEAD])
    found: list[dict[str, Any]] = []
    about = provenance(args)
    for at, job in enumerate(todo):
        process = waiting.popleft()
        if at + AHEAD < len(todo):
            waiting.append(start())
        try:
            text, said = process.communicate(json.dumps(job) + "\n", TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            text, said = "", process.communicate()[1] + "\nnot in time"
        lines = text.strip().splitlines()
        told = json.loads(lines[-1]) if lines else {"error": "\n".join(said.splitlines()[-8:])}
        found.append(job | told)
        print(row_of(found[-1]), flush=True)
        write(args.output, {"about": about, "ranks": found})
    return int(any("error" in each for each in found))


def row_of(each: dict[str, Any]) -> str:
    """Return a line on what one rank showed."""
    head = f"{each['name']}, rank {each['rank']}"
    if "error" in each:
        return f"{head}: {each['error']}"
    kinds = "; ".join(
        f"{one['kind']}{one['chunk']} x{one['number']} {one['ms']:.2f} ms "
        f"{one['adds_bytes'] / 2**20:.0f} MiB"
        for one in each["kinds"]
    )
    peak, held, reserved = (each[f"{name}_bytes"] / GIB for name in ("peak", "held", "reserved"))
    steps = " ".join(f"{step:.3f}" for step in each["step_s"])
    sizes = f"peak {peak:.3f} held {held:.3f} reserved {reserved:.2f} GiB"
    return f"{head}: {sizes}, steps {steps} s; {kinds}"


def rehearse(args: argparse.Namespace) -> int:
    """Add to each rank of a file what a rehearsal counts; 1 where one failed."""
    from megatron_vshape.rehearsal import sources
    from megatron_vshape.rehearsal.ranks import Programs, rehearse_all

    found = json.loads(args.file.read_text())
    local = all("--transformer-impl local" in each["flags"] for each in found["ranks"])
    programs = Programs(None, None if local else sources.find_te(args.te), os.cpu_count() or 1)
    gpu = found["about"]["device"].split()[-1].lower()
    jobs = [rehearsal(each, gpu, str(at)) for at, each in enumerate(found["ranks"])]
    failed = False
    for told in rehearse_all(programs, jobs):
        each = found["ranks"][int(told["name"])]
        if "error" in told:
            failed = True
            print(f"{each['name']}, rank {each['rank']}: {told['error']}", file=sys.stderr)
            continue
        each["rehearsed"] = {name: told[name] for name in ("peak_bytes", "held_bytes", "when")}
        each["rehearsed"]["kinds"] = [
            {name: kind[name] for name in ("kind", "chunk", "adds_bytes")}
            | {"ms": 1e3 * (kind["seconds"] - kind["waited_seconds"])}
            for kind in told["kinds"]
        ]
    found["about"]["rehearsed with torch"] = importlib.metadata.version("torch")
    write(args.file, found)
    return int(failed)


def rehearsal(each: Mapping[str, Any], gpu: str, name: str) -> dict[str, Any]:
    """Return the job that rehearses what was measured."""
    from megatron_vshape.rehearsal.flags import Command, environment_of, without_files
    from megatron_vshape.rehearsal.ranks import SCHEDULE

    command = Command(str(SCRIPT), tuple(each["flags"].split()))
    return {
        "script": command.script,
        "flags": without_files(command, None),
        "gpu": gpu,
        "world": each["world"],
        "rank": each["rank"],
        "environment": environment_of(command),
        "schedule": command.has(SCHEDULE),
        "name": name,
    }


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
    commands.add_parser("one-rank").set_defaults(run=lambda args: serve())
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    raise SystemExit(main())
