"""Formats the memory estimate of a training command."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_vshape.core.model.kinds import DEVICE, KINDS
from megatron_vshape.rehearsal.gpus import GIB, Fit, Gpu
from megatron_vshape.rehearsal.phases import MODEL, OPTIMIZER, START, STEP, Phase
from megatron_vshape.rehearsal.rank_report import PARTS, GraphBytes, Holder, RankReport

WIDTH = 100
_NAMED = 3  # allocations of the peak that are printed

_MODULES = {
    "output_layer": "the output layer",
    "embedding": "the embedding",
    "self_attention": "attention",
    "cross_attention": "attention",
    "mixer": "the mixer",
    "mlp": "the MLP",
    "experts": "the experts",
    "router": "the router",
    "shared_experts": "the shared experts",
    "mtp": "multi-token prediction",
    "final_layernorm": "the last norm",
    "input_layernorm": "a norm",
    "pre_mlp_layernorm": "a norm",
}


def gib(size: float) -> str:
    """Return bytes as GiB."""
    return f"{size / GIB:.1f}"


def table(reports: Sequence[RankReport], gpu: Gpu) -> list[str]:
    """Format a heading and a row per rank, in GiB."""
    names = ["other" if name == "rest" else name for name in PARTS]
    rows = [["rank", *names, "peak", "reserved", "model states", "spare"]]
    for report in reports:
        memory, spare = report.memory, spare_bytes(report, gpu)
        parts = [gib(memory.parts[name]) for name in PARTS]
        sizes = memory.peak_bytes, memory.reserved_bytes, memory.held_bytes, spare
        rows.append([str(report.stage), *parts, *map(gib, sizes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def format_peak(report: RankReport) -> str:
    """Format the pass in which a rank reaches its peak, and the largest allocations then."""
    sums: dict[str, float] = {}
    for holder in report.memory.holders:
        name = _holder(holder, report.memory.when.phase)
        sums[name] = sums.get(name, 0.0) + holder.bytes
    largest_holders = sorted(sums.items(), key=lambda item: -item[1])[:_NAMED]
    largest = ", ".join(
        f"{name} {gib(size)} GiB" for name, size in largest_holders if size >= GIB / 20
    )
    place = _place_in_words(report.memory.when.place)
    where = f" in {place}" if place else ""
    text = f"rank {report.stage}: peak in {describe_phase(report.memory.when.phase)}{where}"
    return text + (f"; {largest}" if largest else "")


def format_graphs(report: RankReport, graphs: GraphBytes) -> str:
    """Format the memory that a rank with CUDA graphs reserves."""
    pool, other_memory, inputs = map(gib, (graphs.pool, graphs.other, graphs.inputs))
    return (
        f"rank {report.stage} reserves {gib(needed_bytes(report))} GiB: CUDA graphs' pool {pool}, "
        f"their static inputs {inputs}, other memory {other_memory}"
    )


def needed_bytes(report: RankReport) -> int:
    """Compute the bytes that a rank needs: its peak, or the sum of peaks with CUDA graphs."""
    peak, graphs = report.memory.peak_bytes, report.memory.graph_bytes
    return peak if graphs is None else max(peak, graphs.total)


def _unused_bytes(report: RankReport, gpu: Gpu, headroom_bytes: float) -> float:
    """Compute the allocatable memory beyond a rank's peak; negative if it does not fit."""
    return gpu.allocatable_bytes(report.communicators, headroom_bytes) - needed_bytes(report)


def spare_bytes(report: RankReport, gpu: Gpu) -> float:
    """Estimate the memory that neither the allocator reserves nor CUDA and NCCL need."""
    return gpu.allocatable_bytes(report.communicators, 0.0) - report.memory.reserved_bytes


def describe_phase(phase: Phase) -> str:
    """Format a phase of a step, such as `F of microbatch 7`."""
    if phase.is_pass:
        chunk = f", chunk {phase.chunk}" if phase.chunk else ""
        of_device = (kind for kind in KINDS if kind == phase.kind and kind.of == DEVICE)
        label = "".join(f" ({kind.words.removeprefix('the ')})" for kind in of_device)
        return f"{phase.kind}{label} of microbatch {phase.microbatch}{chunk}"
    return {
        START: "the start",
        MODEL: "the construction of the model",
        OPTIMIZER: "the optimizer step",
        STEP: "the end of the step",
    }[phase]


def _place_in_words(place: str) -> str:
    """Return the name of a module's path, empty if it has none."""
    for part in reversed(place.split(".")):
        if part in _MODULES:
            return _MODULES[part]
    return ""


def _holder(holder: Holder, phase: Phase) -> str:
    place = _place_in_words(holder.place)
    if holder.part == "logits":
        return "logits"
    if holder.part == "rest" and phase == MODEL:
        # DDP allocates a buffer for the parameters of each data type, and then frees the originals.
        return "parameters that DDP copies into its buffer"
    if holder.part == "rest":
        return "workspaces and P2P buffers"
    return f"activations of {place}" if place else "other activations of layers"


def format_verdict(reports: Sequence[RankReport], gpu: Gpu, headroom_bytes: float) -> str:
    """Format whether the ranks fit into the GPU, by how much, and the rank that needs most."""
    largest = min(reports, key=lambda report: _unused_bytes(report, gpu, headroom_bytes))
    peak, outside = needed_bytes(largest), gpu.outside_bytes(largest.communicators)
    of_gpu = f"the {gib(gpu.memory_bytes)} GiB of the {gpu.name.upper()}"
    text = f"rank {largest.stage} needs the most memory: a peak of {gib(peak)} GiB"
    outside_text = f"after about {gib(outside)} for CUDA and NCCL"
    fit = gpu.fit_of(peak, largest.communicators, headroom_bytes)
    if fit is Fit.TOO_LARGE:
        limit = gpu.allocatable_bytes(largest.communicators, 0.0)
        step = "" if largest.memory.first_peak_bytes > limit else " (from the second step on)"
        large_ranks = [
            str(report.stage) for report in reports if _unused_bytes(report, gpu, 0.0) < 0
        ]
        too_large = f"; too large: ranks {', '.join(large_ranks)}" if len(large_ranks) > 1 else ""
        return (
            f"Does not fit: {text}, {gib(peak - limit)} GiB above {of_gpu} {outside_text}"
            f"{step}{too_large}."
        )
    if fit is Fit.TIGHT:
        return (
            f"May not fit: {text} of {of_gpu}, and leaves less than the headroom of "
            f"{gib(headroom_bytes)} GiB {outside_text}."
        )
    largest = min(reports, key=lambda report: spare_bytes(report, gpu))
    spare, outside = spare_bytes(largest, gpu), gpu.outside_bytes(largest.communicators)
    text = (
        f"Fits: rank {largest.stage} reserves about {gib(largest.memory.reserved_bytes)} GiB (peak "
        f"{gib(needed_bytes(largest))}) of {of_gpu}"
    )
    outside_text = f"after about {gib(outside)} for CUDA and NCCL"
    if spare < 0:
        return (
            f"{text}, {gib(-spare)} GiB more than are free {outside_text}: torch's allocator has "
            "to return cached blocks. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    return f"{text}; {gib(spare)} GiB are spare {outside_text}."


def remedy_line(most_bytes: float, peak_bytes: float, fit: Fit) -> str:
    """Format the peak of the largest rank in GiB, and the difference to that of the command."""
    saved_bytes = peak_bytes - most_bytes
    how = f"{gib(saved_bytes)} GiB less" if saved_bytes >= 0 else f"{gib(-saved_bytes)} GiB more"
    return f"{gib(most_bytes)} GiB ({how}{'' if fit is Fit.FITS else f'; {fit}'})"


def assumptions(
    gpu: Gpu, imbalance: float, fused: bool, versions: Mapping[str, str]
) -> dict[str, Any]:
    """Return the assumptions of the estimate."""
    return {
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.memory_bytes,
        "attention": "fused kernel" if fused else "unfused, scores are stored",
        "expert_tokens_over_mean": imbalance,
        "counted": "allocated memory of torch; reserved memory by a replay of its allocator",
        "not_counted": "NCCL buffers and CUDA context",
        "time": "counted work at fixed rates, not measured",
        **versions,
    }


def wrap_text(text: str) -> str:
    """Wrap the text to 100 columns."""
    return "\n".join(textwrap.wrap(text, WIDTH, break_on_hyphens=False))
