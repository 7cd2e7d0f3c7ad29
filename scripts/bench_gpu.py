"""Measure on one GPU the cost of splitting a backward, its numerics, and copies to host memory.

    python scripts/bench_gpu.py split                     (B + W) / full backward, by hidden size
    python scripts/bench_gpu.py numerics                  split and full backwards against fp32
    python scripts/bench_gpu.py copies                    copies to host memory while passes run

`scripts/measure_ranks.py` measures the memory and the passes of single ranks. All commands also run
with `--device cpu`, for which `--tiny` selects sizes; such figures do not apply to a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # works without installation
sys.path.insert(0, str(Path(__file__).parent))  # also if another file was started

import torch
from chunks import (
    WARM_UP,
    Model,
    build,
    choose_device,
    prepare,
    random_activation,
    run_layers,
    timed_pass,
    zero_gradients,
)
from torch import Tensor, nn

import megatron_vshape
from megatron_vshape.core.model.kinds import (
    COPY_BACK,
    COPY_OUT,
    KINDS,
    PARTS,
    Kind,
    ScheduleError,
)
from megatron_vshape.environment import ALLOCATOR, set_missing
from megatron_vshape.runtime.measure import PassTimer
from megatron_vshape.runtime.offload import measure_copies
from megatron_vshape.runtime.program_runner import on_stream_of

HIDDEN_SIZES = (2048, 3072, 4096, 5120, 6144, 8192)
SPLIT_LIMIT = 1.02  # of (B + W) / full backward, at hidden size 4096 and 4096 tokens
NUMERICS_LIMIT = 2e-2  # of a split bf16 gradient's relative error against fp32
# split may have this factor more error than full, because sums have another order
NUMERICS_SLACK, EPSILON = 1.05, 1e-6


TINY = Model(32, 4, 16, "cpu", "float32")


# --- the cost of splitting ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SplitCost:
    """Medians of the passes of some layers, in us."""

    hidden_size: int
    forward_us: float
    full_us: float
    backward_us: float
    weight_us: float
    host_us: float  # launch time of all passes in Python, with two F
    caught_up: int  # repeats in which the GPU waited for Python

    @property
    def ratio(self) -> float:
        """Return the time of B and W relative to the full backward."""
        return (self.backward_us + self.weight_us) / self.full_us


def split_cost(model: Model, num_layers: int, repeats: int) -> SplitCost:
    """Time full and split backwards of the same layers alternately, without a wait between.

    A filler first keeps the GPU busy for longer than Python needs to launch the passes; otherwise
    small layers would show Python's time. The time of W starts at the end of its B.
    """
    state = prepare(model.device)
    chunk = build(model, state, num_layers)
    zero_gradients([chunk])
    for _ in range(WARM_UP):
        launched_us = run_both(model, state, chunk, None)
    filler = (Filler if model.device == "cuda" else NoFiller)(2 * launched_us)
    timer = PassTimer(torch.device(model.device), aligned=False)
    host_us = []
    for _ in range(repeats):
        filler.start()
        host_us.append(run_both(model, state, chunk, timer))
        filler.check()
    times: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    last_end = 0.0
    for work, start, end in timer.slots():
        times[work.kind].append(end - (last_end if work.kind is Kind.W else start))
        last_end = end
    kinds = (Kind.F, Kind.BW, Kind.B, Kind.W)
    medians = (statistics.median(values) for values in (*(times[k] for k in kinds), host_us))
    return SplitCost(model.hidden_size, *medians, filler.caught_up)


class NoFiller:
    """A filler for the CPU, which needs none."""

    def __init__(self, min_us: float) -> None:
        self.caught_up = 0

    def start(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""


class Filler(NoFiller):
    """Keeps a GPU busy for at least `min_us`."""

    CYCLES_PER_US = 2000  # no GPU has a much faster clock

    def __init__(self, min_us: float) -> None:
        super().__init__(min_us)
        self._cycles = int(self.CYCLES_PER_US * min_us)
        self._ended = torch.cuda.Event()

    def start(self) -> None:
        """Start after all earlier work: a full queue would block Python."""
        torch.cuda.synchronize()
        torch.cuda._sleep(self._cycles)
        self._ended.record()

    def check(self) -> None:
        """Count a repeat in which the GPU finished the filler before all passes were launched."""
        self.caught_up += self._ended.query()


def run_both(model: Model, state: Any, chunk: nn.Module, timer: PassTimer | None) -> float:
    """Run one microbatch with a full and one with a split backward; return the host time in us."""
    start_s = time.perf_counter()
    for split in (False, True):
        received = random_activation(model).requires_grad_()
        gradient = random_activation(model)
        with timed_pass(timer, Kind.F):
            output = run_layers(chunk, received)
        if split:
            with timed_pass(timer, Kind.B), state.jobs.collect(0):
                output.backward(gradient)
            with timed_pass(timer, Kind.W):
                state.jobs.run(0)
        else:
            with timed_pass(timer, Kind.BW):
                output.backward(gradient)
    return 1e6 * (time.perf_counter() - start_s)


def split_table(costs: Sequence[SplitCost]) -> str:
    """Return the Markdown table of the costs of splitting."""
    columns = "hidden | F us | B us | W us | whole us | (B + W) / whole | host us | caught up"
    lines = [f"| {columns} |", "|---:" * 8 + "|"]
    for cost in costs:
        lines.append(
            f"| {cost.hidden_size} | {cost.forward_us:.0f} | {cost.backward_us:.0f} | "
            f"{cost.weight_us:.0f} | {cost.full_us:.0f} | {cost.ratio:.3f} | "
            f"{cost.host_us:.0f} | {cost.caught_up} |"
        )
    lines += ["", HOST]
    return "\n".join(lines)


HOST = (
    "host us: what Python takes to launch F, whole, F, B and W. Caught up: in so many repeats the "
    "GPU had to wait for it, which the times then show."
)


# --- numerics -----------------------------------------------------------------------------------


def gradient_errors(model: Model, num_layers: int) -> dict[str, tuple[float, float]]:
    """Return the relative errors of full and of split gradients, by parameter and input.

    Both use the model's dtype, compared with fp32 layers with the same weights and data.
    """
    state = prepare(model.device)
    exact = replace(model, dtype="float32")
    chunk = build(model, state, num_layers)
    reference = build(exact, state, num_layers)
    with torch.no_grad():
        for reference_parameter, parameter in zip(
            reference.parameters(), chunk.parameters(), strict=True
        ):
            reference_parameter.copy_(parameter)
    gradients = []
    for layers, split in ((reference, False), (chunk, False), (chunk, True)):
        zero_gradients([layers])
        dtype = torch.float32 if layers is reference else model.torch_dtype
        input_gradients = run_three(model, state, layers, dtype, split)
        gradients.append([*(p.main_grad.clone() for p in layers.parameters()), *input_gradients])
    names = [name for name, _ in chunk.named_parameters()]
    names += [f"input of microbatch {microbatch}" for microbatch in range(3)]
    return {
        name: (_error(full, reference), _error(split, reference))
        for name, reference, full, split in zip(names, *gradients, strict=True)
    }


def run_three(
    model: Model, state: Any, chunk: nn.Module, dtype: torch.dtype, split: bool
) -> list[Tensor]:
    """Run three microbatches, W passes out of order, and return the gradients of their inputs."""
    microbatch_runs = []
    for microbatch in range(3):
        generator = torch.Generator().manual_seed(microbatch)
        values = torch.randn((2, *model.shape), generator=generator).to(model.torch_dtype)
        received, gradient = values.to(model.device, dtype)
        received.requires_grad_()
        microbatch_runs.append((received, run_layers(chunk, received), gradient))
    for microbatch, (_, output, gradient) in enumerate(microbatch_runs):
        if split:
            with state.jobs.collect(microbatch):
                output.backward(gradient)
        else:
            output.backward(gradient)
    for microbatch in (2, 0, 1) if split else ():
        state.jobs.run(microbatch)
    return [received.grad for received, _, _ in microbatch_runs]


def _error(gradient: Tensor, reference: Tensor) -> float:
    """Return the relative error; inf if a value is not finite."""
    error = float(
        (gradient.float() - reference.float()).norm() / reference.float().norm().clamp_min(1e-30)
    )
    return error if math.isfinite(error) else math.inf


# --- the report ---------------------------------------------------------------------------------


def stop_process(process: subprocess.Popen[str]) -> None:
    """Stop a process and wait for it."""
    process.kill()
    process.wait()


def provenance(args: argparse.Namespace) -> dict[str, str]:
    """Return the device, the date, the versions, the allocator's settings, and the command."""
    on_gpu = args.device == "cuda"
    versions = {"megatron-vshape": megatron_vshape.__version__}
    for package in ("torch", "megatron-core", "transformer-engine"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    if on_gpu:
        versions |= {
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": driver_version(),
        }
    allocator = next(filter(None, map(os.environ.get, ALLOCATOR)), None)
    return {
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "allocator": allocator or "as torch has it",
        "command": shlex.join(["python", "/".join(Path(sys.argv[0]).parts[-2:]), *sys.argv[1:]]),
    }


def driver_version() -> str:
    """Return the version of the GPU's driver, if nvidia-smi is available."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return process.stdout.partition("\n")[0].strip()


def print_values(about: Mapping[str, str]) -> None:
    """Print a line for each value."""
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)


# --- copies to the host -------------------------------------------------------------------------

COPIES = (COPY_OUT, COPY_BACK)


class Copying:
    """Copies to and from the host in two threads while its context is active."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Set the bytes of one copy."""
        self._device, self._bytes = device, num_bytes
        self._ends = threading.Event()
        self.gb_per_s = [0.0, 0.0]  # out, back

    def __enter__(self) -> Copying:
        self._threads = [
            threading.Thread(target=self._run, args=(direction,)) for direction in range(2)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, direction: int) -> None:
        on_stream_of(COPIES[direction].resource)()
        pinned = self._device.type == "cuda"
        on_device = torch.zeros(self._bytes, dtype=torch.uint8, device=self._device)
        on_host = torch.zeros(self._bytes, dtype=torch.uint8, pin_memory=pinned)
        target, source = (on_device, on_host) if direction else (on_host, on_device)
        start, copied = time.perf_counter(), 0
        while not self._ends.is_set():
            target.copy_(source, non_blocking=True)
            if pinned:
                torch.cuda.current_stream().synchronize()
            copied += self._bytes
        self.gb_per_s[direction] = copied / (time.perf_counter() - start) / 1e9


def run_copies(args: argparse.Namespace) -> int:
    """Print the rates of copies alone, in both directions, and during passes, and the slowdown."""
    model = replace(TINY if args.tiny else full_size(args, args.hidden), device=args.device)
    state, device = prepare(model.device), torch.device(model.device)
    chunk = build(model, state, args.layers)
    zero_gradients([chunk])
    size = 256 << 20 if device.type == "cuda" else 1 << 20
    passes = median_passes(model, state, chunk, args.repeats)
    with Copying(device, size) as copying:
        with_copies = median_passes(model, state, chunk, args.repeats)
    plain = measure_copies(device, size)
    print_values(provenance(args))
    print("| copies | out GB/s | back GB/s |\n|---|---|---|")
    for label, times_us in (("alone", plain[1:3]), ("both ways at once", plain[3:5])):
        rates = (f"{plain.num_bytes / us / 1e3:.1f}" for us in times_us)
        print(f"| {label} | {' | '.join(rates)} |")
    out, back = copying.gb_per_s
    print(f"| both ways, beside passes | {out:.1f} | {back:.1f} |\n")
    print("| pass | us | us beside copies | ratio |\n|---|---|---|---|")
    for kind in PARTS:
        ratio = with_copies[kind] / passes[kind]
        print(f"| {kind} | {passes[kind]:.0f} | {with_copies[kind]:.0f} | {ratio:.3f} |")
    return 0


def median_passes(model: Model, state: Any, chunk: nn.Module, repeats: int) -> dict[Kind, float]:
    """Measure the median times of F, B and W in us."""
    for _ in range(WARM_UP):
        run_both(model, state, chunk, None)
    timer = PassTimer(torch.device(model.device))
    for _ in range(repeats):
        run_both(model, state, chunk, timer)
    times: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for work, start, end in timer.slots():
        times[work.kind].append(end - start)
    return {kind: statistics.median(times[kind]) for kind in PARTS}


# --- the command line ---------------------------------------------------------------------------


def run_split(args: argparse.Namespace) -> int:
    """Print the table of the costs of splitting; return 1 if hidden size 4096 exceeds the limit."""
    costs = []
    for hidden in args.hidden:
        sizes = replace(TINY, hidden_size=hidden) if args.tiny else full_size(args, hidden)
        costs.append(split_cost(replace(sizes, device=args.device), args.layers, args.repeats))
    print_values(provenance(args))
    print(split_table(costs))
    decisive = [cost for cost in costs if cost.hidden_size == 4096]
    return int(any(cost.ratio > SPLIT_LIMIT for cost in decisive))


def full_size(args: argparse.Namespace, hidden: int) -> Model:
    """Return a model of this hidden size with heads of 128."""
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    return Model(hidden, hidden // 128, args.tokens, args.device, dtype, args.te)


def run_numerics(args: argparse.Namespace) -> int:
    """Print the largest errors of full and split gradients; return 1 if split is worse."""
    model = TINY if args.tiny else full_size(args, 2048)
    errors = gradient_errors(replace(model, device=args.device, dtype=args.dtype), args.layers)
    full, split = (max(pair[i] for pair in errors.values()) for i in (0, 1))
    worst = max(errors, key=lambda name: errors[name][1])
    print_values(provenance(args))
    print(f"largest relative error against fp32: whole {full:.3e}, split {split:.3e} ({worst})")
    return int(not (split <= NUMERICS_LIMIT and split <= NUMERICS_SLACK * full + EPSILON))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    common.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    common.add_argument("--te", action="store_true", help="Transformer Engine's layers")
    common.add_argument("--tokens", type=int, default=4096, help="tokens of a microbatch")
    split = commands.add_parser("split", parents=[common])
    split.add_argument("--hidden", type=int, nargs="+", default=HIDDEN_SIZES)
    split.add_argument("--layers", type=int, default=2)
    split.add_argument("--repeats", type=int, default=20)
    split.set_defaults(run=run_split)
    numerics = commands.add_parser("numerics", parents=[common])
    numerics.add_argument("--layers", type=int, default=2)
    numerics.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    numerics.set_defaults(run=run_numerics)
    copies = commands.add_parser("copies", parents=[common])
    copies.add_argument("--hidden", type=int, default=4096)
    copies.add_argument("--layers", type=int, default=2)
    copies.add_argument("--repeats", type=int, default=10)
    copies.set_defaults(run=run_copies)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    args = parse(arguments)
    # the settings of a schedule's ranks, before CUDA starts
    set_missing(os.environ, kernels=args.device != "cpu", ordered=True)
    try:
        choose_device(args.device)
        status: int = args.run(args)
    except ScheduleError as error:
        raise SystemExit(f"bench_gpu: {error}") from None
    return status


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # with Transformer Engine 2.20, the interpreter did not exit on a GPU
