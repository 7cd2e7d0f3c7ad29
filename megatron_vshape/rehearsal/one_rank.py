"""Run the training program of one rank for two steps in fake tensors, and report its memory.

The program is the user's script: its arguments, model, DDP, optimizer, schedule and train_step are
Megatron's. The data is replaced, and the program ends after the second step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import logging
import os
import re
import resource
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_vshape.mcore.refusals import captures_graphs
from megatron_vshape.rehearsal import adjustments, exchanges, lora, repeats, routing
from megatron_vshape.rehearsal.adjustments import wrap
from megatron_vshape.rehearsal.allocator import AllocatorSettings, Lifetime, Replayed, replay
from megatron_vshape.rehearsal.device import Current, on_host
from megatron_vshape.rehearsal.graph_pools import GraphPool
from megatron_vshape.rehearsal.ledger import (
    NEVER,
    WORKSPACES,
    Ledger,
    PassRecord,
    Record,
    tensors_in,
)
from megatron_vshape.rehearsal.phases import JOIN, MODEL, OPTIMIZER, STEP, Phase
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import (
    PARTS,
    Bytes,
    CheckedRank,
    Holder,
    ParallelSizes,
    PassReport,
    PeakMoment,
    RankReport,
)
from megatron_vshape.rehearsal.step_time import Scale, step_time
from megatron_vshape.rehearsal.work import ExchangeKey, Work, repeated
from megatron_vshape.runtime.weight_jobs import plain_tensors

STEPS = 2
"""The second step is the first with allocated optimizer moments."""

_CURVE_POINTS = 4000
_MAX_HOLDERS = 12


class _StepsDone(BaseException):
    """Ends the program after its last measured step; no handler of Megatron catches it."""


def rehearse(job: RankJob) -> RankReport | CheckedRank:
    """Run the program of a rank and report its memory and passes, or the start-up checks only.

    Run this in a separate process, after `worker.prepare`.
    """
    start = time.monotonic()
    gpu = job.gpu
    _set_environment(job)
    Current.gpu = gpu
    workspace_bytes = gpu.workspace_bytes(os.environ)
    Current.ledger = ledger = Ledger(workspace_bytes, gpu.multiprocessors)
    exchanges.start_process_group(job.rank, job.world)
    run = _Run(job, ledger)
    sys.argv = [job.script, *job.flags]
    # As `python SCRIPT` does, for imports of modules next to the script.
    sys.path.insert(0, str(Path(job.script).parent))
    with ExitStack() as stack:
        # The last mode sees an operation first: the ledger, around the inference of fake tensors.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(ledger)
        run.install()
        try:
            runpy.run_path(job.script, run_name="__main__")
        except _StepsDone:
            pass
        else:
            raise RuntimeError(
                f"{job.script} ended after {len(run.peaks)} training steps, and a rehearsal lasts "
                f"until the start of step {STEPS + 1}: have the script train for more"
            )
        finally:
            Current.ledger = None
    seconds = round(time.monotonic() - start, 2)
    if job.checks_only:
        return CheckedRank(job.name, job.rank, job.stage, run.notices, seconds, run.ignored_flags)
    return run.report(seconds)


def _set_environment(job: RankJob) -> None:
    per_host = min(job.gpu.per_host, job.world)
    rank_variables = {
        "RANK": job.rank,
        "WORLD_SIZE": job.world,
        "LOCAL_RANK": job.rank % per_host,
        "LOCAL_WORLD_SIZE": per_host,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # may be set by this package
    os.environ.update(job.environment)
    os.environ.update({name: str(value) for name, value in rank_variables.items()})
    if not any("fsdp" in flag for flag in job.flags):  # FSDP requires another value or none
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _stop(phase: Phase) -> AbstractContextManager[None]:
    """End the program before its first pass."""
    raise _StepsDone


def _register_schedules(watch: Callable[[Phase], AbstractContextManager[None]]) -> None:
    """Register this package's schedules, whose passes run in the context of `watch`."""
    from megatron_vshape.mcore.hooks import registry
    from megatron_vshape.rehearsal.single_rank import watched_execution

    registry.install({}, watched_execution(watch))


class _Run:
    """Observes the program: provides its data, and records memory between its steps."""

    def __init__(self, job: RankJob, ledger: Ledger) -> None:
        self.job, self.ledger = job, ledger
        self.held: list[int] = []
        self.held_parts: Bytes = {}
        self.peaks: list[int] = []  # before each step
        self.few = self.many = self.traced = 0
        self.args: Any = None
        self.chunks: list[Any] = []
        self.pool: GraphPool | None = None
        self.passes = _Passes(ledger, self._before_forward)
        self.repeated_work = Work()
        self.ignored_flags: list[str] = []  # that Megatron's parser does not have
        self.notices: list[str] = []  # log lines about translated or ignored options
        ledger.seconds = lambda work: self.estimated_times(work)["step_s"]

    def estimated_times(self, work: Work) -> dict[str, float]:
        """Return the estimated seconds of a part of the step, by category."""
        return step_time(work, self.job.gpu, self.scale(1, 1, 1, 1))

    def scale(self, microbatches: int, traced: int, ranks: int, chunks: int) -> Scale:
        """Return the factors from counted work to a full step, and how kernels are launched."""
        # Before Megatron has parsed its arguments, the defaults below apply.
        args: Any = self.args or object()
        graphs = getattr(args, "cuda_graph_impl", "none") == "full_iteration"
        overlaps_experts = bool(getattr(args, "overlap_moe_expert_parallel_comm", False))
        overlaps_shards = bool(getattr(args, "tp_comm_overlap", False))
        return Scale(microbatches, traced, ranks, chunks, graphs, overlaps_experts, overlaps_shards)

    def install(self) -> None:
        """Install the replacements and observers."""
        from megatron.core.pipeline_parallel import schedules
        from megatron.training import training

        adjustments.install()
        if not self.job.strict:
            wrap(argparse.ArgumentParser, "parse_args", self._parse)
        if self.job.lora is not None:
            lora.install(self.job.lora)
        wrap(training, "setup_model_and_optimizer", self._setup)
        wrap(training, "train_step", self._train_step)
        wrap(training, "get_num_microbatches", self._num_microbatches)
        if hasattr(training, "get_megatron_optimizer"):
            wrap(training, "get_megatron_optimizer", self._in_optimizer)
        wrap(training, "build_train_valid_test_data_iterators", self._iterators)
        if self.job.checks_only:
            self._log_notices()
        if self.job.max_microbatches:
            self.few = min(self.many, self.job.max_microbatches)
        elif self.job.has_schedule:
            _register_schedules(_stop if self.job.checks_only else self.ledger.during)
        else:
            self.passes.watch_megatrons(schedules)

    def _parse(self, call: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
        """Ignore flags that the parser does not have, as those of forks of Megatron."""
        known, words = parser.parse_known_args(*args, **kwargs)
        self.ignored_flags += [word.partition("=")[0] for word in words if word.startswith("--")]
        return known

    def _log_notices(self) -> None:
        """Collect the log lines about options that are translated, ignored or unused."""
        from megatron_vshape.mcore.setup import configure, translate

        handler = logging.Handler()
        emit: Any = handler
        emit.emit = lambda record: self.notices.append(record.getMessage())
        translate.logger.setLevel(logging.INFO)
        for module in (configure, translate):
            module.logger.addHandler(handler)

    def _in_optimizer(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.ledger.during(OPTIMIZER):
            return call(*args, **kwargs)

    def _setup(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        self.args = get_args()
        self.args.cuda_graph_warmup_steps = sys.maxsize  # nothing can be captured here
        if self.args.num_experts:
            routing.install(self.args, self.job.imbalance)
        with self.ledger.during(MODEL):
            model, optimizer, scheduler = call(*args, **kwargs)
        self.chunks = list(model)
        # A shorter run would end before the memory between two steps is recorded.
        self.args.train_iters = max(self.args.train_iters or 0, STEPS + 1)
        self._set_purposes(optimizer)
        self.passes.register_modules(self.chunks)
        if captures_graphs(self.args):
            self.pool = GraphPool(self.ledger, self.chunks)
        return model, optimizer, scheduler

    def _set_purposes(self, optimizer: Any) -> None:
        """Set the purpose of existing storages: weights, gradients or optimizer."""
        # By phase first, because some storages have no tensor in the lists below.
        for record in self.ledger.held_at(self.ledger.clock):
            record.what = {MODEL: "weights", OPTIMIZER: "optimizer"}.get(record.phase, "")
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        weights = set(map(id, parameters))
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # The last name counts: an optimizer may step views of the weights.
        tensors_by_purpose = {
            "gradients": [*_main_grads(parameters), *_grad_buffers(self.chunks)],
            "optimizer": _parts_of(
                parameter for parameter in stepped if id(parameter) not in weights
            ),
            "weights": _parts_of(parameter.detach() for parameter in parameters),
        }
        for what, tensors in tensors_by_purpose.items():
            for tensor in tensors:
                self.ledger.name(tensor, what)

    def _num_microbatches(self, call: Callable[..., Any]) -> int:
        """Return fewer microbatches than the batch has: the first few determine the peak."""
        self.many = int(call())
        if self.job.has_schedule:
            self.few = self.many  # a schedule is made for one number
        else:
            ranks = self.args.pipeline_model_parallel_size
            # 1F1B has at most `ranks` microbatches in flight, so twice that number includes the
            # peak.
            self.few = min(self.many, 2 * ranks if ranks > 1 else 2)
        self.traced = min(self.few, self._needed_microbatches() or self.few)
        return self.traced

    def _needed_microbatches(self) -> int | None:
        from megatron.core import parallel_state

        job = self.job
        if job.max_microbatches or job.has_schedule or job.traces_all or len(self.chunks) > 1:
            return None
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return repeats.needed_microbatches(self.args, stage)

    def _before_forward(self, microbatch: int) -> None:
        """When the last forward starts, add the memory and work of the microbatches left out."""
        if microbatch == self.traced - 1 and self.traced < self.few:
            repeated = repeats.repeated_microbatch(self.ledger)
            self.repeated_work = repeated.work
            for record in repeated.retained:
                self.ledger.repeat(record, self.few - self.traced)

    def _train_step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Cycles that Python has not collected yet would count as memory between two steps.
        gc.collect()
        # Only after the first step: this function runs at the start of each.
        if self.ledger.phase is STEP:
            self.held.append(self.ledger.now)
            self.held_parts = _parts(self.ledger.held_at(self.ledger.clock), self.ledger.now)
        # Our schedules check the model in the first step, so `check` stops at the first pass.
        if self.job.checks_only and not self.job.has_schedule:
            from megatron_vshape.mcore.setup.megatron_schedules import check_first_step

            check_first_step(self.args)
            raise _StepsDone
        if len(self.held) == STEPS:
            raise _StepsDone
        self.ledger.phase = STEP
        self.peaks.append(self.ledger.peak)
        self.ledger.begin_step()
        self.passes.begin_step()
        # train_step(forward_step_func, data_iterator, model, optimizer, ...).
        optimizer: Any = kwargs["optimizer"] if "optimizer" in kwargs else args[3]
        step = optimizer.step

        optimizer.step = functools.partial(self._in_optimizer, step)
        try:
            return call(*args, **kwargs)
        finally:
            optimizer.step = step

    def _iterators(self, call: Callable[..., Any], *unused: Any, **options: Any) -> Any:
        args = self.args
        # An evaluation would run between the traced steps.
        args.do_train, args.do_valid, args.do_test = True, False, False
        from megatron.core.rerun_state_machine import RerunDataIterator

        return RerunDataIterator(_batches(args)), None, None  # called once per chunk

    def report(self, seconds: float) -> RankReport:
        """Compute the result; `seconds` is the duration of the dry run."""
        from megatron.core.package_info import __version__

        ledger, args = self.ledger, self.args
        ranks = args.pipeline_model_parallel_size
        many = self.job.batch_microbatches or self.many
        scale = self.scale(many, self.few, ranks, max(len(self.chunks), 1))
        ran = [record for record in ledger.passes if record.phase.is_pass]
        keys = repeated((record.phase.microbatch, record.did) for record in ran)
        # The last microbatch of each chunk, because the first one also casts weights.
        last = [record.did for record in ran if record.phase.microbatch == self.traced - 1]
        work = ledger.work.plus(self.repeated_work, self.few - self.traced)
        work = work.repeating(keys, last, self.few)
        at_peak = ledger.held_at(ledger.peak_at)
        parameters = [sum(weight.numel() for weight in chunk.parameters()) for chunk in self.chunks]
        graphs = None if self.pool is None else self.pool.peaks()
        replayed = self._replayed()
        peak = max(ledger.peak, replayed.allocated)
        return RankReport(
            name=self.job.name,
            rank=self.job.rank,
            stage=self.job.stage,
            peak_bytes=peak,
            graph_bytes=graphs,
            communicators=len({key[1:] for key in work.exchanges if key[2] > 1}),
            reserved_bytes=replayed.reserved + (graphs.pool + graphs.inputs if graphs else 0),
            held_bytes=self.held[-1] + replayed.unsplit,
            held_parts=self.held_parts,
            replaced_bytes=_replaced_bytes(ledger),
            parts=_parts(at_peak, peak),
            when=PeakMoment(ledger.peak_phase, ledger.peak_place),
            holders=_holders(at_peak),
            time=step_time(work, self.job.gpu, scale),
            microbatches=many,
            traced_microbatches=self.traced,
            parameters=sum(parameters),
            chunk_parameters=parameters,
            chunk_layers=[_layers(chunk) for chunk in self.chunks],
            chunk_dummy_bytes=[_dummy_bytes(chunk) for chunk in self.chunks],
            message_bytes=_message_bytes(args),
            shards_optimizer=bool(args.use_distributed_optimizer),
            scale=self.scale(1, 1, 1, 1),
            sizes=self._sizes(),
            first_peak_bytes=self.peaks[-1],
            curve=_over_time(ledger.records, ledger.curve[:_CURVE_POINTS]),
            kinds=self._by_kind(ran, keys),
            held_between_passes_bytes=_peak_between_passes(ledger.passes),
            megatron=str(__version__),
            transformer_engine=getattr(sys.modules.get("transformer_engine"), "__version__", ""),
            work=work,
            seconds=seconds,
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            ignored_flags=self.ignored_flags,
        )

    def _replayed(self) -> Replayed:
        """Replay the allocations outside of CUDA graphs with the allocator settings of the run."""
        lives = [
            Lifetime(record.size, record.born, None if record.died == NEVER else record.died)
            for record in self.ledger.records
            # Neither is in the general pool: fused storages never exist, graphs have a private
            # pool.
            if record.size and not (record.fused or record.graphed)
        ]
        registers = bool(getattr(self.args, "nccl_ub", False))
        settings = AllocatorSettings.of_run(os.environ, self.job.has_schedule, registers)
        ledger = self.ledger
        return replay(lives, ledger.emptied, ledger.step_start, settings)

    def _sizes(self) -> ParallelSizes:
        args = self.args
        return ParallelSizes(
            world=self.job.world,
            dp=args.data_parallel_size,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            vp=len(self.chunks),
        )

    def _by_kind(self, passes: list[PassRecord], keys: set[ExchangeKey]) -> list[PassReport]:
        """Summarize the passes per kind and chunk.

        The work is that of the last pass, because the first one also casts weights.
        """
        records: dict[tuple[str, int], list[PassRecord]] = {}
        for record in passes:
            records.setdefault((record.phase.kind, record.phase.chunk), []).append(record)
        reports = []
        for (kind, chunk), ran in sorted(records.items()):
            work = ran[-1].did.repeating(keys, [ran[-1].did])
            parts = self.estimated_times(work)
            pool = self.pool if kind == "F" else None
            reports.append(
                PassReport(
                    kind=kind,
                    chunk=chunk,
                    number=len(ran),
                    adds_bytes=median(record.after_bytes - record.before_bytes for record in ran),
                    meanwhile_bytes=median(
                        record.most_bytes - record.before_bytes for record in ran
                    ),
                    seconds=parts["step_s"],
                    waited_seconds=parts["exchanges"],
                    work=work,
                    static_bytes=None if pool is None else pool.inputs_of(chunk),
                )
            )
        return reports


def _layers(chunk: Any) -> int:
    """Return the number of layers of a chunk without multi-token prediction."""
    names = (name for name, _ in chunk.named_modules())
    return sum(re.search(r"decoder\.layers\.\d+$", name) is not None for name in names)


def _dummy_bytes(chunk: Any) -> int:
    """Return the bytes of dummy gradients of Megatron's linear layers with Megatron's schedules.

    There is one per weight shape, as Transformer Engine caches them. Passes of this package have
    none.
    """
    from megatron.core.tensor_parallel import layers

    if not getattr(layers, "HAVE_TE", False):
        return 0
    kinds = layers.ColumnParallelLinear, layers.RowParallelLinear
    linear_modules = [module for module in chunk.modules() if isinstance(module, kinds)]
    shapes = {
        (module.weight.shape, module.weight.dtype.itemsize)
        for module in linear_modules
        if module.gradient_accumulation_fusion and getattr(module.weight, "requires_grad", False)
    }
    return sum(shape.numel() * size for shape, size in shapes)


def _message_bytes(args: Any) -> int:
    """Return the bytes of a microbatch's P2P message."""
    shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
    # With sequence parallelism each tensor-parallel rank sends its shard, otherwise all of it.
    tokens = args.seq_length * args.micro_batch_size // (shards * args.context_parallel_size)
    return int(tokens * args.hidden_size * args.params_dtype.itemsize)


def _peak_between_passes(passes: list[PassRecord]) -> int:
    """Return the peak at the end of a pass, relative to the start of the first."""
    ran = [record for record in passes if record.phase.is_pass]
    return max(record.after_bytes for record in ran) - ran[0].before_bytes if ran else 0


def _replaced_bytes(ledger: Ledger) -> int:
    """Return the bytes that stay allocated between steps until the next step allocates them again.

    Workspaces and dummy gradients stay for all steps.
    """
    return sum(
        record.size
        for record in ledger.records
        if record.born < ledger.step_start <= record.died < NEVER
        and _part_of(record) in ("activations", "rest")
    )


def _part_of(record: Record) -> str:
    if record.what in PARTS:
        return record.what
    if record.what == WORKSPACES:
        return "rest"
    if record.phase == OPTIMIZER:
        return "optimizer"
    in_pass = record.phase.is_pass and record.phase.kind != JOIN
    return "activations" if in_pass else "rest"


def _parts(records: list[Record], peak: int) -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0)
    for record in records:
        parts[_part_of(record)] += record.size
    # Memory without a record, so that the parts add up to the peak.
    parts["rest"] += peak - sum(parts.values())
    return parts


_CURVE_CATEGORIES = ("state", "F", "B", "logits", "rest")
"""Weights, gradients and optimizer; allocations of F; allocations of B, W and BW; as `PARTS`."""


def _curve_category(record: Record) -> str:
    part = _part_of(record)
    if part == "activations":
        return "F" if record.phase.kind == "F" else "B"
    return part if part in _CURVE_CATEGORIES else "state"


def _over_time(
    records: list[Record], curve: list[tuple[float, int, int]]
) -> list[tuple[float, int, dict[str, int]]]:
    """Return (seconds, bytes, bytes by category) for every point of the curve."""
    changes = [(record.born, record.size, _curve_category(record)) for record in records]
    changes += [(record.died, -record.size, _curve_category(record)) for record in records]
    changes.sort()
    allocated, event = dict.fromkeys(_CURVE_CATEGORIES, 0), 0
    points: dict[int, dict[str, int]] = {}
    # By clock: the peak of an outer phase can be earlier than entries before it.
    for index in sorted(range(len(curve)), key=lambda index: curve[index][2]):
        # An event at clock c is visible from c + 1 on, as in `Ledger.held_at`.
        while event < len(changes) and changes[event][0] < curve[index][2]:
            allocated[changes[event][2]] += changes[event][1]
            event += 1
        beyond = curve[index][1] - sum(allocated.values())
        points[index] = allocated | {"rest": allocated["rest"] + beyond}
    return [(*curve[index][:2], points[index]) for index in range(len(curve))]


def _holders(records: list[Record]) -> list[Holder]:
    """Return the largest allocations by part and module, without weights and optimizer."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for record in records:
        part = _part_of(record)
        if part in ("activations", "logits", "rest"):
            entry = sums.setdefault((part, record.place, record.code), [0, 0])
            entry[0] += record.size
            entry[1] += 1
    largest = sorted(sums.items(), key=lambda item: -item[1][0])[:_MAX_HOLDERS]
    return [
        Holder(part, place, code, size, number) for (part, place, code), (size, number) in largest
    ]


class _Passes:
    """Tracks the names of the passes of a step, and the running module."""

    def __init__(self, ledger: Ledger, before_forward: Callable[[int], None]) -> None:
        self._ledger, self._before_forward = ledger, before_forward
        self._chunks: dict[int, int] = {}
        self._num_passes: dict[tuple[str, int], int] = {}  # by kind and chunk
        self._num_backwards = 0
        self._forward_by_output: dict[int, Phase] = {}
        self._parts: dict[str, Phase] = {}  # phases of the running overlapped passes, by kind
        self._names: dict[int, str] = {}

    def register_modules(self, chunks: list[Any]) -> None:
        """Register the names of the modules of these chunks."""
        for index, chunk in enumerate(chunks):
            self._chunks[id(chunk)] = index
            for name, module in chunk.named_modules():
                parts = [part for part in name.split(".") if part != "module"]
                self._names[id(module)] = ".".join(
                    "*" if part.isdigit() else part for part in parts
                )
        hooks = torch.nn.modules.module
        hooks.register_module_forward_pre_hook(self._enter)
        hooks.register_module_forward_hook(self._leave, always_call=True)
        self._stack: list[str] = []

    def _enter(self, module: Any, args: Any) -> None:
        self._stack.append(self._ledger.place)
        self._ledger.place = self._names.get(id(module), self._ledger.place)

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        if self._stack:
            self._ledger.place = self._stack.pop()

    def begin_step(self) -> None:
        """Count microbatches from zero again."""
        self._num_passes.clear()
        self._num_backwards = 0
        self._forward_by_output.clear()

    def _next(self, kind: str, model: Any) -> Phase:
        """Return the phase of the next pass of this kind through a chunk."""
        chunk = self._chunks.get(id(model), 0)
        microbatch = self._num_passes.get((kind, chunk), 0)
        self._num_passes[kind, chunk] = microbatch + 1
        return Phase(kind, chunk, microbatch)

    def watch_megatrons(self, schedules: Any) -> None:
        """Wrap the passes of Megatron's schedules so that they set the phase."""
        wrap(schedules, "forward_step", self._forward)
        wrap(schedules, "backward_step", self._backward)
        # --overlap-moe-expert-parallel-comm calls neither: parts of F and B of two microbatches
        # alternate, so the phase changes with each part.
        from megatron.core.pipeline_parallel import combined_1f1b, utils

        wrap(combined_1f1b, "combined_forward_backward_step", self._overlapped)
        wrap(utils.ScheduleNode, "forward", functools.partial(self._part, "F"))
        wrap(utils.ScheduleNode, "backward", functools.partial(self._part, "B"))

    def _overlapped(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        models = inspect.signature(call).bind(*args, **kwargs).arguments
        for kind, name in (("F", "f_model"), ("B", "b_model")):
            if models[name] is not None:
                self._parts[kind] = self._next(kind, models[name])
        return call(*args, **kwargs)

    def _part(self, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer_phase = self._ledger.phase
        self._ledger.phase = self._parts.get(kind, outer_phase)
        try:
            return call(*args, **kwargs)
        finally:
            self._ledger.phase = outer_phase

    def _forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model", args[2] if len(args) > 2 else None)
        phase = self._next("F", model)
        self._before_forward(phase.microbatch)
        with self._ledger.during(phase):
            output = call(*args, **kwargs)
        for tensor in tensors_in((output,)):
            # The backward gets this output tensor, which identifies its chunk and microbatch: the
            # order of interleaved backwards would not. Megatron keeps the tensor until then.
            self._forward_by_output[id(tensor)] = phase
        return output

    def _backward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = kwargs.get("output_tensor", args[1] if len(args) > 1 else None)
        # A list, because a generator would keep a tensor that the backward frees.
        forwards = [self._forward_by_output.get(id(tensor)) for tensor in tensors_in((output,))]
        forward = next(filter(None, forwards), Phase("F", 0, self._num_backwards))
        self._num_backwards += 1
        with self._ledger.during(forward._replace(kind="B")):
            return call(*args, **kwargs)


def _main_grads(parameters: Iterable[Any]) -> Iterator[Tensor]:
    for parameter in parameters:
        gradient = getattr(parameter, "main_grad", None)
        if isinstance(gradient, Tensor):
            yield gradient


def _grad_buffers(chunks: Iterable[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(chunk, name, None)  # in a plain module it is a method
            for buffer in () if buffers is None or callable(buffers) else buffers:
                if isinstance(buffer.grad_data, Tensor):
                    yield buffer.grad_data


def _parts_of(tensors: Iterable[Any]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from plain_tensors(tensor)


def _batches(args: Any) -> Iterator[dict[str, Tensor]]:
    """Yield batches in host memory, as the data loader does."""
    shape = (args.micro_batch_size, args.seq_length)
    while True:
        with on_host():
            batch = {
                "tokens": torch.zeros(shape, dtype=torch.int64),
                "labels": torch.zeros(shape, dtype=torch.int64),
                "loss_mask": torch.zeros(shape),
                "position_ids": torch.zeros(shape, dtype=torch.int64),
            }
            if getattr(args, "create_attention_mask_in_dataloader", False):
                mask = (shape[0], 1, shape[1], shape[1])
                batch["attention_mask"] = torch.zeros(mask, dtype=torch.bool)
        yield dict(batch)  # a copy: the program stores its GPU tensors in the batch
