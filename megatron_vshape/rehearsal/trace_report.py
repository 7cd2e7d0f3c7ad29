"""The report of a rank from its ledger, its steps and its model."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from megatron_vshape.rehearsal.allocator import AllocatorSettings, Lifetime, Replayed, replay
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.graph_pools import GraphPool
from megatron_vshape.rehearsal.ledger import NEVER, Ledger, PassRecord
from megatron_vshape.rehearsal.memory_parts import (
    largest_holders,
    memory_over_time,
    part_of,
    parts_of,
)
from megatron_vshape.rehearsal.rank_job import RankJob, Reference
from megatron_vshape.rehearsal.rank_report import (
    MemoryReport,
    ModelReport,
    ParallelSizes,
    PassReport,
    PeakMoment,
    Provenance,
    RankReport,
    StepReport,
)
from megatron_vshape.rehearsal.step_time import Scale, step_time
from megatron_vshape.rehearsal.traced_steps import BuiltModel, TracedSteps
from megatron_vshape.rehearsal.work import ExchangeKey, Work, repeated

_CURVE_POINTS = 4000


def launches_of(args: Any) -> Scale:
    """Return how the kernels of a run are launched and which collectives overlap."""
    return Scale(
        microbatches=1,
        counted=1,
        ranks=1,
        chunks=1,
        graphs=getattr(args, "cuda_graph_impl", "none") == "full_iteration",
        experts_hidden=bool(getattr(args, "overlap_moe_expert_parallel_comm", False)),
        shards_overlapped=bool(getattr(args, "tp_comm_overlap", False)),
    )


def report_of_trace(
    job: RankJob, ledger: Ledger, model: BuiltModel, steps: TracedSteps, seconds: float
) -> RankReport:
    """Return the report of a rank: peak, passes with their work, step time of 1F1B.

    The peak is that of the ledger, or of the replay of the allocator if larger.

    Args:
        job: the rank.
        ledger: memory and work of its last step.
        model: its chunks.
        steps: its steps.
        seconds: duration of the dry run.
    """
    from megatron_vshape.mcore.hooks.registry import megatron_version

    args, launches = model.args, launches_of(model.args)
    many = job.batch_microbatches or steps.batch_microbatches
    scale = replace(
        launches,
        microbatches=many,
        counted=steps.microbatches,
        ranks=args.pipeline_model_parallel_size,
        chunks=max(len(model.chunks), 1),
    )
    passes = [record for record in ledger.passes if record.phase.is_pass]
    keys = repeated((record.phase.microbatch, record.did) for record in passes)
    # The last microbatch of each chunk, because the first one also casts weights.
    last = [record.did for record in passes if record.phase.microbatch == steps.traced - 1]
    kinds = _pass_reports(passes, keys, job.gpu, launches, model.pool)
    work = _with_once_bytes(ledger.work, kinds)
    work = work.plus(steps.repeated_work, steps.microbatches - steps.traced)
    work = work.repeating(keys, last, steps.microbatches)
    at_peak = ledger.held_at(ledger.peak_at)
    graphs = None if model.pool is None else model.pool.peaks()
    replayed = _replayed(job, ledger, args)
    peak = max(ledger.peak_bytes, replayed.allocated)
    memory = MemoryReport(
        peak_bytes=peak,
        first_peak_bytes=steps.peaks[-1],
        graph_bytes=graphs,
        reserved_bytes=replayed.reserved + (graphs.pool + graphs.inputs if graphs else 0),
        held_bytes=steps.held_bytes + replayed.unsplit,
        held_parts=steps.held_parts,
        replaced_bytes=_replaced_bytes(ledger, "activations", "rest"),
        update_bytes=_replaced_bytes(ledger, "optimizer"),
        held_between_passes_bytes=_peak_between_passes(passes),
        parts=parts_of(at_peak, peak),
        when=PeakMoment(ledger.peak_phase, ledger.peak_place),
        holders=largest_holders(at_peak),
        curve=memory_over_time(ledger.records, ledger.curve[:_CURVE_POINTS]),
    )
    step = StepReport(
        microbatches=many,
        traced_microbatches=steps.traced,
        kinds=kinds,
        work=work,
        time=step_time(work, job.gpu, scale),
        scale=launches,
    )
    provenance = Provenance(
        megatron=megatron_version(),
        transformer_engine=getattr(sys.modules.get("transformer_engine"), "__version__", ""),
        seconds=seconds,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    communicators = len({key[1:] for key in work.exchanges if key[2] > 1})
    return RankReport(
        job.name,
        job.rank,
        job.stage,
        _sizes(job, model),
        communicators,
        memory,
        _model_report(model, job.reference),
        step,
        provenance,
    )


def _model_report(model: BuiltModel, reference: Reference | None) -> ModelReport:
    chunks = model.chunks
    parameters = [sum(weight.numel() for weight in chunk.parameters()) for chunk in chunks]
    return ModelReport(
        parameters=sum(parameters),
        chunk_parameters=parameters,
        chunk_layers=[_layers(chunk) for chunk in chunks],
        chunk_dummy_bytes=[_dummy_bytes(chunk) for chunk in chunks],
        message_bytes=_message_bytes(model.args) * (1 + (reference is Reference.FORWARD)),
        shards_optimizer=bool(model.args.use_distributed_optimizer),
    )


def _replayed(job: RankJob, ledger: Ledger, args: Any) -> Replayed:
    """Replay the allocations outside of CUDA graphs with the allocator settings of the run."""
    lives = [
        Lifetime(record.size, record.born, None if record.died == NEVER else record.died)
        for record in ledger.records
        # Neither is in the general pool: fused storages never exist, graphs have a private pool.
        if record.size and not (record.fused or record.graphed)
    ]
    registers = bool(getattr(args, "nccl_ub", False))
    settings = AllocatorSettings.of_run(os.environ, job.has_schedule, registers)
    return replay(lives, ledger.emptied, ledger.step_start, settings)


def _sizes(job: RankJob, model: BuiltModel) -> ParallelSizes:
    args = model.args
    return ParallelSizes(
        world=job.world,
        dp=args.data_parallel_size,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vp=len(model.chunks),
    )


def _pass_reports(
    passes: Sequence[PassRecord],
    keys: set[ExchangeKey],
    gpu: Gpu,
    launches: Scale,
    graph_pool: GraphPool | None,
) -> list[PassReport]:
    """Summarize the passes per kind and chunk.

    The work is that of the pass with least memory traffic: the first one also casts weights, and
    the last one scales and reduces the gradients of the step.
    """
    records: dict[tuple[str, int], list[PassRecord]] = {}
    for record in passes:
        records.setdefault((record.phase.kind, record.phase.chunk), []).append(record)
    reports = []
    for (kind, chunk), ran in sorted(records.items()):
        did = min((record.did for record in reversed(ran)), key=lambda work: work.bytes_moved)
        work = did.repeating(keys, [did])
        seconds = step_time(work, gpu, launches)
        pool = graph_pool if kind == "F" else None
        reports.append(
            PassReport(
                kind=kind,
                chunk=chunk,
                number=len(ran),
                adds_bytes=median(record.after_bytes - record.before_bytes for record in ran),
                meanwhile_bytes=median(record.most_bytes - record.before_bytes for record in ran),
                seconds=seconds["step_s"],
                waited_seconds=seconds["exchanges"],
                work=work,
                static_bytes=None if pool is None else pool.inputs_of(chunk),
            )
        )
    return reports


def _with_once_bytes(work: Work, kinds: Sequence[PassReport]) -> Work:
    """Separate the memory traffic that is not in every pass: it does not repeat per microbatch."""
    repeated_bytes = sum(report.number * report.work.bytes_moved for report in kinds)
    if not repeated_bytes:
        return work
    return replace(work, bytes_moved=repeated_bytes, once_bytes=work.bytes_moved - repeated_bytes)


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


def _peak_between_passes(passes: Sequence[PassRecord]) -> int:
    """Return the peak at the end of a pass, relative to the start of the first."""
    if not passes:
        return 0
    return max(record.after_bytes for record in passes) - passes[0].before_bytes


def _replaced_bytes(ledger: Ledger, *parts: str) -> int:
    """Return the bytes that stay allocated between steps until the next step allocates them again.

    Workspaces and dummy gradients stay for all steps. Of the optimizer, these are fp32 copies of
    gradients, which are freed before the passes.
    """
    return sum(
        record.size
        for record in ledger.records
        if record.born < ledger.step_start <= record.died < NEVER and part_of(record) in parts
    )
