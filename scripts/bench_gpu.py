"""Measure on one GPU what splitting the backward costs and what one rank of a schedule needs.

    python scripts/bench_gpu.py split                      (B + W) / whole backward, by hidden size
    python scripts/bench_gpu.py numerics                   split and whole against fp32
    python scripts/bench_gpu.py emulate --model configs/models/gpt_9_6b.yaml --devices 8 \\
        --microbatches 24 [--schedules 1f1b v-half v-half@host v-half+ FILE.json] [--write DIR]
    python scripts/bench_gpu.py copies                     to host memory and back, beside passes

`emulate` runs the real instructions of a pipeline rank with its real layers, each rank in a fresh
process, and makes up what its neighbours would send. It prints the measured peak beside the
predicted one, and with --write keeps the pass times as a costs file, with a second file that says
where, when and how they were measured. A name with a plus is the adaptive plan at the costs that
the rows before it have measured; one with `@host` has every microbatch wait in host memory between
its F and its B, with a pass for each copy.

Everything runs with `--device cpu` as well, for which `--tiny` chooses sizes; such figures say
nothing about a GPU and are not written without --write.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed
sys.path.insert(0, str(Path(__file__).parent))  # nor this be the file that Python starts with

import torch
from in_use import Allocator, PassNeeds, StepPeaks
from live_bytes import LivePeak
from offloaded import offloaded
from torch import Tensor, nn

import megatron_vshape
from megatron_vshape.core.ask import Question, ask
from megatron_vshape.core.check.simulate import held_curve
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import (
    COPY_BACK,
    COPY_OUT,
    KINDS,
    PARTS,
    RELEASE,
    Kind,
    ScheduleError,
)
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.program.instructions import Message, Program
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.environment import ALLOCATOR, complete
from megatron_vshape.mcore.one_device import (
    WARM_UP,
    Model,
    alone,
    batches,
    build,
    choose,
    counted,
    made_up,
    observed,
    prepare,
    profile_copies,
    run_microbatch,
    start_step,
    unwrap,
    zero_gradients,
)
from megatron_vshape.mcore.options import PLUS_NAMES
from megatron_vshape.runtime.copies import measure_copies
from megatron_vshape.runtime.measure import PassTimer
from megatron_vshape.runtime.offload import Offload
from megatron_vshape.runtime.program_runner import Observer, on_stream_of, run_program

ROOT = Path(__file__).parents[1]
SCHEDULES = ("1f1b", "v-min", "v-half", "v-zb", "v-half+")
IN_HOST_MEMORY = "@host"
HIDDEN_SIZES = (2048, 3072, 4096, 5120, 6144, 8192)
SPLIT_LIMIT = 1.02  # of (B + W) / whole, at hidden 4096 and 4096 tokens
MEMORY_LIMIT = 0.05  # how far a measured peak may lie from the predicted one
NUMERICS_LIMIT = 2e-2  # of a split bf16 gradient's relative error against fp32
NUMERICS_SLACK, EPSILON = 1.05, 1e-6  # split may be so much worse than whole: sums in other order
AHEAD = 2  # processes that import while one measures
RANK_TIMEOUT_S = 180.0
GIB = 2**30


TINY = Model(14, 32, 4, 512, 16, 1, "cpu", "float32")


def load_model(file: Path, tokens: int, device: str, use_te: bool) -> Model:
    """Return the model that a file of configs/models describes, with `tokens` per microbatch.

    Of hidden states alone is anything dropped: the kernels of attention here have no dropout.
    """
    data = yaml.safe_load(file.read_text())
    return Model(
        layers=data["layers"],
        hidden_size=data["hidden_size"],
        attention_heads=data["attention_heads"],
        vocabulary_size=data["vocabulary_size"],
        sequence_length=tokens,
        microbatch_size=1,
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        use_te=use_te,
        ffn_hidden_size=data.get("ffn_hidden_size"),
        query_groups=data.get("query_groups"),
        gated=data.get("gated", False),
        dropout=0.1 if data.get("dropout") else 0.0,
        flash_attention=data.get("flash_attention", True),
    )


# --- the cost of splitting ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SplitCost:
    """Medians of the passes of some layers, in us."""

    hidden_size: int
    forward_us: float
    whole_us: float
    backward_us: float
    weight_us: float
    host_us: float  # what Python takes to launch them all, F twice
    caught_up: int  # repeats in which the GPU had to wait for Python

    @property
    def ratio(self) -> float:
        """Return what B and W take together, by the whole backward."""
        return (self.backward_us + self.weight_us) / self.whole_us


def split_cost(model: Model, num_layers: int, repeats: int) -> SplitCost:
    """Time whole and split backwards of the same layers, in turns and without a wait between.

    A GPU is kept busy before, for longer than Python takes to launch them, or small layers would
    show Python's time. A W is timed from the end of its B: what lies between counts.
    """
    state = prepare(model.device)
    chunk = build(model, state, num_layers, False, False)
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
    """What a CPU needs of a Filler: nothing."""

    def __init__(self, least_us: float) -> None:
        self.caught_up = 0

    def start(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""


class Filler(NoFiller):
    """Keeps a GPU busy meanwhile, for `least_us` or longer."""

    CYCLES_PER_US = 2000  # no GPU's clock is faster by much

    def __init__(self, least_us: float) -> None:
        super().__init__(least_us)
        self._cycles = int(self.CYCLES_PER_US * least_us)
        self._ended = torch.cuda.Event()

    def start(self) -> None:
        """Begin, when all that ran before has ended: a full queue would hold Python up."""
        torch.cuda.synchronize()
        torch.cuda._sleep(self._cycles)
        self._ended.record()

    def check(self) -> None:
        """Count it if the GPU has got to what was launched before all of it was."""
        self.caught_up += self._ended.query()


def run_both(model: Model, state: Any, chunk: nn.Module, timer: PassTimer | None) -> float:
    """Run a microbatch with a whole and one with a split backward; return the host's time in us."""
    begun_s = time.perf_counter()
    for split in (False, True):
        received = made_up(model).requires_grad_()
        gradient = made_up(model)
        with observed(timer, Kind.F):
            output = run_layers(chunk, received)
        if split:
            with observed(timer, Kind.B), state.jobs.collect(0):
                output.backward(gradient)
            with observed(timer, Kind.W):
                state.jobs.run(0)
        else:
            with observed(timer, Kind.BW):
                output.backward(gradient)
    return 1e6 * (time.perf_counter() - begun_s)


def run_layers(chunk: nn.Module, received: Tensor) -> Tensor:
    """Return the output of a chunk without embedding and loss."""
    unwrap(chunk).set_input_tensor(received)
    output: Tensor = chunk(None, None, None)
    return output


def split_table(costs: Sequence[SplitCost]) -> str:
    """Return the Markdown table of the costs of splitting."""
    columns = "hidden | F us | B us | W us | whole us | (B + W) / whole | host us | caught up"
    lines = [f"| {columns} |", "|---:" * 8 + "|"]
    for each in costs:
        lines.append(
            f"| {each.hidden_size} | {each.forward_us:.0f} | {each.backward_us:.0f} | "
            f"{each.weight_us:.0f} | {each.whole_us:.0f} | {each.ratio:.3f} | "
            f"{each.host_us:.0f} | {each.caught_up} |"
        )
    lines += ["", HOST]
    return "\n".join(lines)


HOST = (
    "host us: what Python takes to launch F, whole, F, B and W. Caught up: in so many repeats the "
    "GPU had to wait for it, which the times then show."
)


# --- numerics -----------------------------------------------------------------------------------


def gradient_errors(model: Model, num_layers: int) -> dict[str, tuple[float, float]]:
    """Return, by parameter and input, the relative error of whole and of split gradients.

    Both in the model's dtype, against fp32 layers with the same weights and data.
    """
    state = prepare(model.device)
    exact = replace(model, dtype="float32")
    chunk = build(model, state, num_layers, False, False)
    reference = build(exact, state, num_layers, False, False)
    with torch.no_grad():
        for mine, theirs in zip(reference.parameters(), chunk.parameters(), strict=True):
            mine.copy_(theirs)
    found = []
    for each, split in ((reference, False), (chunk, False), (chunk, True)):
        zero_gradients([each])
        dtype = torch.float32 if each is reference else model.torch_dtype
        of_inputs = run_three(model, state, each, dtype, split)
        found.append([*(p.main_grad.clone() for p in each.parameters()), *of_inputs])
    names = [name for name, _ in chunk.named_parameters()]
    names += [f"input of microbatch {microbatch}" for microbatch in range(3)]
    return {
        name: (_error(whole, right), _error(split, right))
        for name, right, whole, split in zip(names, *found, strict=True)
    }


def run_three(
    model: Model, state: Any, chunk: nn.Module, dtype: torch.dtype, split: bool
) -> list[Tensor]:
    """Run three microbatches and return their inputs' gradients; split, W comes out of order."""
    ran = []
    for microbatch in range(3):
        generator = torch.Generator().manual_seed(microbatch)
        values = torch.randn((2, *model.shape), generator=generator).to(model.torch_dtype)
        received, gradient = values.to(model.device, dtype)
        received.requires_grad_()
        ran.append((received, run_layers(chunk, received), gradient))
    for microbatch, (_, output, gradient) in enumerate(ran):
        if split:
            with state.jobs.collect(microbatch):
                output.backward(gradient)
        else:
            output.backward(gradient)
    for microbatch in (2, 0, 1) if split else ():
        state.jobs.run(microbatch)
    return [received.grad for received, _, _ in ran]


def _error(found: Tensor, right: Tensor) -> float:
    """Return the relative error, which is inf where a value is not finite."""
    error = float((found.float() - right.float()).norm() / right.float().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf


# --- rank emulation -----------------------------------------------------------------------------


NOT_EMULATED = (
    "receives that are posted and wait, messages kept until they have left, NCCL's buffers, the "
    "thread blocks that waiting kernels hold: a pipeline's rank needs more memory and more time"
)


class MadeUpPeers:
    """Carries nothing: what a neighbour would send is random, what goes to it is dropped."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def post(self, message: Message) -> None:
        """Do nothing."""

    def wait(self, message: Message) -> Tensor:
        """Return a tensor as the neighbour would send it; zeros would run faster."""
        return made_up(self._model)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Drop the tensor."""

    def poll(self) -> None:
        """Do nothing."""

    def drain(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one microbatch of a stage needs, in bytes."""

    held: tuple[float, float]  # between passes: after F, after B
    in_use: Mapping[Kind, int]  # while a pass runs, at most, above what is there before it


def stage_memory(model: Model, state: Any, chunk: nn.Module, allocator: Allocator) -> StageMemory:
    """Measure single microbatches, split and whole; one of each before sets the caches up."""
    zero_gradients([chunk])
    stage = alone(model, state, chunk, 4)
    run_microbatch(model, stage, 0)
    run_microbatch(model, stage, 1, splits=False)
    needs = PassNeeds(allocator)
    with counted(state, chunk) as census:
        run_microbatch(model, stage, 2, needs)
    run_microbatch(model, stage, 3, needs, splits=False)
    return StageMemory(census.held_bytes(0), needs.in_use_bytes)


@dataclass(frozen=True, slots=True)
class Emulated:
    """What one emulated rank showed; bytes are above what lives between steps."""

    schedule: str
    rank: int
    num_stages: int  # of the model
    peak_bytes: int  # at any moment
    predicted_bytes: float
    after_pass_bytes: int  # the most when a pass had ended
    held_bytes: float  # the same predicted, as plans have it: activations between passes
    state_bytes: int  # what lives between steps; 0 on a CPU
    reserved_bytes: int  # in all, by the allocator; 0 on a CPU
    times_us: dict[str, list[float]]  # by stage: median F, B, W
    microbatch_bytes: dict[str, list[float]]  # by stage: held after F, after B
    in_use_bytes: dict[str, dict[str, int]]  # by stage and pass: at most, alone
    copies: dict[str, list[float]]  # by stage that has them: bytes, and median us out and back


def emulate(model: Model, name: str, devices: int, rank: int, microbatches: int) -> Emulated:
    """Run two steps of a rank's instructions: one's memory is counted, the other is timed.

    The prediction knows what single microbatches have shown before, and the order.
    """
    state = prepare(model.device)
    from megatron_vshape.mcore.setup.choice import choice_of
    from megatron_vshape.mcore.setup.plans import Planner

    plan = Planner(choice_of(name.removesuffix(IN_HOST_MEMORY), devices)).training(microbatches)
    program, offload = plan.program, None
    if name.endswith(IN_HOST_MEMORY):
        program = lower(offloaded(program.schedule))
        offload = Offload(torch.device(model.device))
    placement = plan.schedule.placement
    last = len(placement) - 1
    chunks = {
        stage: build(model, state, layers_of(model, stage, last), stage == 0, stage == last)
        for stage, holder in enumerate(placement)
        if holder == rank
    }
    if offload is not None:  # one step learns what may wait, the next makes host memory for all
        for _ in range(2):
            run_step(model, state, program, rank, chunks, offload=offload)
    with allocator_of(model.device) as allocator:
        memory = {
            stage: stage_memory(model, state, chunk, allocator) for stage, chunk in chunks.items()
        }
        if model.device == "cuda":
            torch.cuda.empty_cache()  # so that what is reserved is what the step needs
        state_bytes = torch.cuda.memory_allocated()
        peaks = StepPeaks(allocator)
        run_step(model, state, program, rank, chunks, peaks, offload)
        peak_bytes, reserved_bytes = peaks.peak_bytes, torch.cuda.memory_reserved()
    timer = PassTimer(torch.device(model.device))
    run_step(model, state, program, rank, chunks, timer, offload)
    moved = {} if offload is None else offload.bytes_by_stage
    predicted, held = predicted_bytes(program.schedule, rank, memory, moved)
    return Emulated(
        name,
        rank,
        last + 1,
        peak_bytes,
        predicted,
        peaks.after_pass_bytes,
        held,
        state_bytes,
        reserved_bytes,
        {str(stage): pass_times(timer, stage) for stage in chunks},
        {str(stage): list(each.held) for stage, each in memory.items()},
        {
            str(stage): {str(kind): size for kind, size in each.in_use.items()}
            for stage, each in memory.items()
        },
        {
            str(stage): [moved[stage], *(copy_us(timer, kind, stage) for kind in COPIES)]
            for stage in moved
        },
    )


def allocator_of(device: str) -> AbstractContextManager[Allocator]:
    """Return what counts the device's memory, which it does while it is entered."""
    return nullcontext(torch.cuda) if device == "cuda" else LivePeak()


def predicted_bytes(
    schedule: Schedule, rank: int, memory: Mapping[int, StageMemory], moved: Mapping[int, int]
) -> tuple[float, float]:
    """Return the most that a rank has in use at any moment, and the most it holds between passes.

    A pass has in use what microbatches in flight hold, and on top what it was seen to need alone.
    """
    held = [memory[s].held if s in memory else (0.0, 0.0) for s in range(schedule.num_stages)]
    ones = (1.0,) * len(held)
    waits = tuple(float(moved.get(s, 0)) for s in range(schedule.num_stages))
    costs = Costs(ones, ones, ones, 0.0, *zip(*held, strict=True), **{RELEASE.frees: waits})
    curve = held_curve(schedule, costs, rank)
    in_use = []
    for work, now in zip(schedule.order[rank], curve, strict=True):
        own = memory[work.stage].held[0] if work.kind is Kind.F else 0.0  # which `now` has already
        in_use.append(now - own + memory[work.stage].in_use.get(work.kind, 0))
    return max(in_use), max(curve)


def layers_of(model: Model, stage: int, last: int) -> int:
    """Return how many layers a stage has: one less where the embedding or the loss is."""
    each, rest = divmod(model.layers + 2, last + 1)
    if rest or each < 2:
        raise SystemExit(
            f"bench_gpu: {model.layers} layers and the two ends do not divide among {last + 1} "
            "stages"
        )
    return each - (stage in (0, last))


def run_step(
    model: Model,
    state: Any,
    program: Program,
    rank: int,
    chunks: Mapping[int, nn.Module],
    observer: Observer | None = None,
    offload: Offload | None = None,
) -> None:
    """Run one step of the rank, whose chunks are given by stage."""
    from megatron_vshape.mcore.observe.report import persistent
    from megatron_vshape.mcore.step.stage import MegatronStage
    from megatron_vshape.mcore.step.waiting import Waiting

    zero_gradients(list(chunks.values()))
    step = start_step(next(iter(chunks.values())), program.schedule.num_microbatches)
    if offload is not None:
        step.parts.append(Waiting(state, offload))
        offload.keep(persistent(list(chunks.values())))
    last = len(program.schedule.placement) - 1
    running = {
        stage: MegatronStage(
            state, step, chunk, batches(model), i, stage, stage == last, len(chunks) > 1
        )
        for i, (stage, chunk) in enumerate(chunks.items())
    }
    peers, handlers = MadeUpPeers(model), step.handlers()
    run_program(program, rank, running, peers, observer, handlers=handlers)


def pass_times(timer: Any, stage: int) -> list[float]:
    """Return a stage's median F, B and W in us; a whole backward counts for no part."""
    found: dict[Kind, list[float]] = {Kind.F: [], Kind.B: [], Kind.W: [], Kind.BW: []}
    for work, start, end in timer.slots():
        if work.stage == stage and work.kind in found:
            found[work.kind].append(end - start)
    medians = {kind: statistics.median(values) for kind, values in found.items() if values}
    half = medians.get(Kind.BW, 0.0) / 2
    return [medians[Kind.F], medians.get(Kind.B, half), medians.get(Kind.W, half)]


COPIES = (COPY_OUT, COPY_BACK)


def copy_us(timer: PassTimer, kind: Kind, stage: int) -> float:
    """Return the median us of a stage's copies one way."""
    return statistics.median(
        end - start
        for (found, own, _), start, end in timer.slots()
        if found is kind and own == stage
    )


class RankError(RuntimeError):
    """An emulated rank failed; the text is the end of what it said."""


class Fresh:
    """Fresh processes, one for each rank: while one measures, the next ones import."""

    def __init__(self, device: str) -> None:
        self._command = [sys.executable, __file__, "one-rank", "--device", device]
        self._waiting = deque(self._start() for _ in range(AHEAD))

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
        )

    def emulate(self, order: str) -> Emulated:
        """Return what the rank that `order` asks for showed.

        Raises:
            RankError: it failed, or took longer than a rank may.
        """
        process = self._waiting.popleft()
        self._waiting.append(self._start())
        try:
            text, said = process.communicate(order, RANK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RankError(f"not done after {RANK_TIMEOUT_S:g} s") from None
        finally:
            end(process)
        if process.returncode:
            raise RankError(f"ended with {process.returncode}\n{said[-2000:]}")
        return Emulated(**json.loads(text.splitlines()[-1]))

    def close(self) -> None:
        """End the processes that nobody has asked."""
        for process in self._waiting:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Make sure that a process has ended."""
    process.kill()
    process.wait()


def emulate_all(args: argparse.Namespace, model: Model, output: Output) -> list[Emulated]:
    """Emulate ranks 0, p/2 and p-1 of every schedule, each in a process of its own.

    Where the very first fails, so would the others; a later one is left out.
    """
    found: list[Emulated] = []
    costs = None
    with closing(Fresh(args.device)) as fresh:
        for name in args.schedules:
            if name in PLUS_NAMES:
                name = output.plan(name, args, costs)
            for rank in ranks_of(args.devices):
                order = [asdict(model), name, args.devices, rank, args.microbatches]
                try:
                    found.append(fresh.emulate(json.dumps(order)))
                except RankError as error:
                    print(f"{name}, rank {rank}: {error}", file=sys.stderr, flush=True)
                    if not found:
                        return found
                    continue
                print(emulated_row(found[-1]), flush=True)
                costs = costs_of(found, model, args.devices)
                output.write(costs, found)
    return found


def ranks_of(devices: int) -> list[int]:
    """Return the ranks that are emulated: the ends and one in the middle."""
    return sorted({0, devices // 2, devices - 1})


EMULATED_HEAD = (
    "| schedule | rank | peak GiB | predicted GiB | off by | after passes GiB | held GiB | "
    "state GiB | reserved GiB | F / B / W us by stage |\n" + "|---" * 10 + "|"
)


def emulated_row(each: Emulated) -> str:
    """Return a row of the table of emulated ranks."""
    off = each.peak_bytes / each.predicted_bytes - 1
    times = "; ".join(
        f"{stage}: {' / '.join(f'{value:.0f}' for value in values)}"
        for stage, values in each.times_us.items()
    )
    times += "".join(
        f"; copies of {stage} at {size / out_us / 1e3:.1f} and {size / back_us / 1e3:.1f} GB/s"
        for stage, (size, out_us, back_us) in each.copies.items()
    )
    peak, predicted, after_pass, held, state, reserved = (
        f"{size / GIB:.4g}"
        for size in (
            each.peak_bytes,
            each.predicted_bytes,
            each.after_pass_bytes,
            each.held_bytes,
            each.state_bytes,
            each.reserved_bytes,
        )
    )
    return (
        f"| {Path(each.schedule).name} | {each.rank} | {peak} | {predicted} | {off:+.1%} | "
        f"{after_pass} | {held} | {state} | {reserved} | {times} |"
    )


def costs_of(found: Sequence[Emulated], model: Model, devices: int) -> Costs | None:
    """Return costs of a V's stages, where its first, a middle and its last chunk were measured.

    A pass's time depends only on which of the three its chunk is.
    """
    last = 2 * devices - 1
    times: dict[str, list[list[float]]] = {}
    held: dict[str, list[list[float]]] = {}
    for each in found:
        if each.num_stages != last + 1:
            continue
        for stage, values in each.times_us.items():
            place = {"0": "first", str(last): "last"}.get(stage, "middle")
            times.setdefault(place, []).append(values)
            held.setdefault(place, []).append(each.microbatch_bytes[stage])
    if times.keys() != {"first", "middle", "last"}:
        return None
    order = ["first", *["middle"] * (last - 1), "last"]
    columns = [
        tuple(statistics.median(values[i] for values in table[place]) for place in order)
        for table, width in ((times, 3), (held, 2))
        for i in range(width)
    ]
    layers = tuple(layers_of(model, stage, last) for stage in range(last + 1))
    return Costs(columns[0], columns[1], columns[2], 0.0, columns[3], columns[4], layers)


@dataclass(frozen=True, slots=True)
class Output:
    """Where figures go: a costs file, and beside it where, when and how they were measured."""

    file: Path
    about: Mapping[str, str]

    def write(self, costs: Costs | None, found: Sequence[Emulated]) -> None:
        """Write what is known so far."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if costs is not None:
            self.file.write_text(costs.to_json() + "\n")
        about = {**self.about, "ranks": [asdict(each) for each in found]}
        self.file.with_suffix(".about.json").write_text(json.dumps(about, indent=1) + "\n")

    def plan(self, name: str, args: argparse.Namespace, costs: Costs | None) -> str:
        """Write the plan that `name` stands for at measured costs, and return its file."""
        if costs is None:
            raise SystemExit(f"bench_gpu: {name} is planned with measured costs: put a V before it")
        schedule = ask(Question(name, args.devices, args.microbatches, costs)).schedule
        file = self.file.with_suffix(f".{name.replace('+', '-plus')}.csv")
        file.write_text(schedule.to_csv())
        return str(file)


def provenance(args: argparse.Namespace) -> dict[str, str]:
    """Return the device, the date, the versions, how memory is allocated, and the command."""
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
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def driver_version() -> str:
    """Return the version of the GPU's driver, as far as nvidia-smi is there to say it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return told.stdout.partition("\n")[0].strip()


def show(about: Mapping[str, str]) -> None:
    """Print a line for each value."""
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)


# --- copies to the host -------------------------------------------------------------------------


class Copying:
    """Copies to and from the host in two threads for as long as it is entered."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Make the memory of which so much is copied at a time."""
        self._device, self._bytes = device, num_bytes
        self._ends = threading.Event()
        self.gb_per_s = [0.0, 0.0]  # out, back

    def __enter__(self) -> Copying:
        self._threads = [threading.Thread(target=self._run, args=(at,)) for at in range(2)]
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for each in self._threads:
            each.join()

    def _run(self, at: int) -> None:
        on_stream_of(COPIES[at].resource)()
        pinned = self._device.type == "cuda"
        here = torch.zeros(self._bytes, dtype=torch.uint8, device=self._device)
        there = torch.zeros(self._bytes, dtype=torch.uint8, pin_memory=pinned)
        target, source = (here, there) if at else (there, here)
        start, copied = time.perf_counter(), 0
        while not self._ends.is_set():
            target.copy_(source, non_blocking=True)
            if pinned:
                torch.cuda.current_stream().synchronize()
            copied += self._bytes
        self.gb_per_s[at] = copied / (time.perf_counter() - start) / 1e9


def run_copies(args: argparse.Namespace) -> int:
    """Print rates alone, both ways and beside passes, and what passes take beside copies."""
    model = replace(TINY if args.tiny else full_size(args, args.hidden), device=args.device)
    state, device = prepare(model.device), torch.device(model.device)
    (own,) = profile_copies(model, [args.layers], args.repeats).values()
    chunk = build(model, state, args.layers, is_first=False, is_last=False)
    zero_gradients([chunk])
    stage = alone(model, state, chunk, 2 * (WARM_UP + args.repeats))
    microbatches = iter(range(2 * (WARM_UP + args.repeats)))
    passes = median_passes(model, stage, microbatches, args.repeats)
    with Copying(device, min(int(own.num_bytes), 256 << 20)) as copying:
        beside = median_passes(model, stage, microbatches, args.repeats)
    plain = measure_copies(device, 256 << 20 if device.type == "cuda" else 1 << 20)
    show(provenance(args))
    print("| copies | out GB/s | back GB/s |\n|---|---|---|")
    for what, each in (("in one piece", plain), (f"of {args.layers} layers", own)):
        rows = (("alone", each[1:3]), ("both ways at once", each[3:5]))
        for how, (out_us, back_us) in rows:
            rates = (f"{each.num_bytes / us / 1e3:.1f}" for us in (out_us, back_us))
            print(f"| {what}, {how} | {' | '.join(rates)} |")
    out, back = copying.gb_per_s
    print(f"| both ways, beside passes | {out:.1f} | {back:.1f} |\n")
    print("| pass | us | us beside copies | ratio |\n|---|---|---|---|")
    for kind in PARTS:
        ratio = beside[kind] / passes[kind]
        print(f"| {kind} | {passes[kind]:.0f} | {beside[kind]:.0f} | {ratio:.3f} |")
    return 0


def median_passes(
    model: Model, stage: Any, microbatches: Iterator[int], repeats: int
) -> dict[Kind, float]:
    """Return the median us of a stage's passes, of so many microbatches once it is warm."""
    for microbatch in itertools.islice(microbatches, WARM_UP):
        run_microbatch(model, stage, microbatch)
    timer = PassTimer(torch.device(model.device))
    for microbatch in itertools.islice(microbatches, repeats):
        run_microbatch(model, stage, microbatch, timer)
    times: dict[Kind, list[float]] = {kind: [] for kind in PARTS}
    for work, start, end in timer.slots():
        times[work.kind].append(end - start)
    return {kind: statistics.median(each) for kind, each in times.items()}


# --- the command line ---------------------------------------------------------------------------


def run_split(args: argparse.Namespace) -> int:
    """Print the table of the costs of splitting; 1 where hidden 4096 misses the limit."""
    costs = []
    for hidden in args.hidden:
        sizes = replace(TINY, hidden_size=hidden) if args.tiny else full_size(args, hidden)
        costs.append(split_cost(replace(sizes, device=args.device), args.layers, args.repeats))
    show(provenance(args))
    print(split_table(costs))
    decisive = [each for each in costs if each.hidden_size == 4096]
    return int(any(each.ratio > SPLIT_LIMIT for each in decisive))


def full_size(args: argparse.Namespace, hidden: int) -> Model:
    """Return a model of this hidden size with heads of 128."""
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    return Model(0, hidden, hidden // 128, 50304, args.tokens, 1, args.device, dtype, args.te)


def run_numerics(args: argparse.Namespace) -> int:
    """Print the largest errors of whole and of split gradients; 1 where split is worse."""
    model = TINY if args.tiny else full_size(args, 2048)
    errors = gradient_errors(replace(model, device=args.device, dtype=args.dtype), args.layers)
    whole, split = (max(pair[i] for pair in errors.values()) for i in (0, 1))
    worst = max(errors, key=lambda name: errors[name][1])
    show(provenance(args))
    print(f"largest relative error against fp32: whole {whole:.3e}, split {split:.3e} ({worst})")
    return int(not (split <= NUMERICS_LIMIT and split <= NUMERICS_SLACK * whole + EPSILON))


def run_emulate(args: argparse.Namespace) -> int:
    """Print the table of emulated ranks; 1 where one fails or misses the prediction."""
    model = TINY if args.tiny else load_model(args.model, args.tokens, args.device, args.te)
    name = f"{'tiny' if args.tiny else args.model.stem}-p{args.devices}.json"
    about = provenance(args) | {
        "model": f"{model.layers} layers, hidden {model.hidden_size}, {model.dtype}, "
        f"{model.sequence_length} tokens a microbatch, {args.microbatches} microbatches, "
        f"dropout {model.dropout:g} of hidden states and none in attention",
        "not seen": NOT_EMULATED,
    }
    show(about)
    print(EMULATED_HEAD, flush=True)
    with nullcontext(args.write) if args.write else TemporaryDirectory() as directory:
        found = emulate_all(args, model, Output(Path(directory) / name, about))
    close = [
        each for each in found if abs(each.peak_bytes / each.predicted_bytes - 1) <= MEMORY_LIMIT
    ]
    return int(len(close) < len(args.schedules) * len(ranks_of(args.devices)))


def run_one_rank(args: argparse.Namespace) -> int:
    """Emulate the rank that standard input asks for and print what it showed, as JSON.

    The imports, which take long and leave the GPU alone, come before the question.
    """
    for name in ("megatron.core.distributed", "megatron.core.models.gpt.gpt_layer_specs"):
        importlib.import_module(name)
    order = sys.stdin.readline()
    if order:
        sizes, *rest = json.loads(order)
        print(json.dumps(asdict(emulate(Model(**sizes), *rest))))
    return 0


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
    ranks = commands.add_parser("emulate", parents=[common])
    ranks.add_argument("--model", type=Path, default=ROOT / "configs/models/gpt_9_6b.yaml")
    ranks.add_argument("--devices", type=int, default=8)
    ranks.add_argument("--microbatches", type=int, default=24)
    ranks.add_argument(
        "--schedules",
        nargs="+",
        default=SCHEDULES,
        help="names or files; with a plus, as v-half+, planned for the costs measured until then",
    )
    ranks.add_argument("--write", type=Path, help="directory for the costs files and the plans")
    ranks.set_defaults(run=run_emulate)
    copies = commands.add_parser("copies", parents=[common])
    copies.add_argument("--hidden", type=int, default=4096)
    copies.add_argument("--layers", type=int, default=2)
    copies.add_argument("--repeats", type=int, default=10)
    copies.set_defaults(run=run_copies)
    one = commands.add_parser("one-rank", parents=[common])
    one.set_defaults(run=run_one_rank)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    args = parse(arguments)
    # What a schedule's ranks have, before CUDA starts.
    complete(os.environ, kernels=args.device != "cpu", ordered=True)
    try:
        choose(args.device)
        status: int = args.run(args)
    except ScheduleError as error:
        raise SystemExit(f"bench_gpu: {error}") from None
    return status


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    os._exit(ended)  # with Transformer Engine 2.20 an interpreter on a GPU did not end by itself
