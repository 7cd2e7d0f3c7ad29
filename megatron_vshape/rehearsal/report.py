"""Formats the memory estimate of a training command."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_vshape.core.model.kinds import DEVICE, KINDS
from megatron_vshape.rehearsal.gpus import GIB, Fit, Gpu
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


def table(found: Sequence[RankReport], gpu: Gpu) -> list[str]:
    """Format a heading and a row per rank, in GiB."""
    names = ["other" if name == "rest" else name for name in PARTS]
    rows = [["rank", *names, "peak", "reserved", "model states", "spare"]]
    for each in found:
        parts = [gib(each.parts[name]) for name in PARTS]
        spare = _spare_bytes(each, gpu)
        sizes = each.peak_bytes, each.reserved_bytes, each.held_bytes, spare
        rows.append([str(each.stage), *parts, *map(gib, sizes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def when(found: RankReport) -> str:
    """Format the pass in which a rank reaches its peak, and the largest allocations then."""
    sums: dict[str, float] = {}
    for each in found.holders:
        name = _holder(each, found.when.phase)
        sums[name] = sums.get(name, 0.0) + each.bytes
    most = sorted(sums.items(), key=lambda item: -item[1])[:_NAMED]
    largest = ", ".join(f"{name} {gib(size)} GiB" for name, size in most if size >= GIB / 20)
    place = place_in_words(found.when.place)
    where = f" in {place}" if place else ""
    text = f"rank {found.stage}: peak in {pass_in_words(found.when.phase)}{where}"
    return text + (f"; {largest}" if largest else "")


def with_graphs(found: RankReport, graphs: GraphBytes) -> str:
    """Format the memory that a rank with CUDA graphs reserves."""
    pool, other, inputs = map(gib, (graphs.pool, graphs.other, graphs.inputs))
    return (
        f"rank {found.stage} reserves {gib(needed(found))} GiB: CUDA graphs' pool {pool}, their "
        f"static inputs {inputs}, other memory {other}"
    )


def needed(found: RankReport) -> int:
    """Compute the bytes that a rank needs: its peak, or the sum of peaks with CUDA graphs."""
    graphs = found.graph_bytes
    return found.peak_bytes if graphs is None else max(found.peak_bytes, graphs.total)


def _unused_bytes(found: RankReport, gpu: Gpu, headroom_bytes: float) -> float:
    """Compute the allocatable memory beyond a rank's peak; negative if it does not fit."""
    return gpu.allocatable_bytes(found.communicators, headroom_bytes) - needed(found)


def _spare_bytes(found: RankReport, gpu: Gpu) -> float:
    """Estimate the memory that neither the allocator reserves nor CUDA and NCCL need."""
    return gpu.allocatable_bytes(found.communicators, 0.0) - found.reserved_bytes


def pass_in_words(phase: str) -> str:
    """Format a phase of a step, as in `F 0 7`: F of microbatch 7."""
    words = phase.split()
    if len(words) == 3:
        chunk = f", chunk {words[1]}" if words[1] != "0" else ""
        of_device = (kind for kind in KINDS if kind == words[0] and kind.of == DEVICE)
        label = "".join(f" ({kind.words.removeprefix('the ')})" for kind in of_device)
        return f"{words[0]}{label} of microbatch {words[2]}{chunk}"
    return {
        "model": "the construction of the model",
        "optimizer": "the optimizer step",
        "step": "the end of the step",
    }.get(phase, phase or "the start")


def place_in_words(place: str) -> str:
    """Return the name of a module's path, empty if it has none."""
    for part in reversed(place.split(".")):
        if part in _MODULES:
            return _MODULES[part]
    return ""


def _holder(holder: Holder, phase: str) -> str:
    place = place_in_words(holder.place)
    if holder.part == "logits":
        return "logits"
    if holder.part == "rest" and phase == "model":
        # DDP allocates a buffer for the parameters of each data type, and then frees the originals.
        return "parameters that DDP copies into its buffer"
    if holder.part == "rest":
        return "workspaces and P2P buffers"
    return f"activations of {place}" if place else "other activations of layers"


def verdict(found: Sequence[RankReport], gpu: Gpu, headroom_bytes: float) -> str:
    """Format whether the ranks fit into the GPU, by how much, and the rank that needs most."""
    most = min(found, key=lambda each: _unused_bytes(each, gpu, headroom_bytes))
    peak, outside = needed(most), gpu.outside_bytes(most.communicators)
    of_gpu = f"the {gib(gpu.memory_bytes)} GiB of the {gpu.name.upper()}"
    text = f"rank {most.stage} needs the most memory: a peak of {gib(peak)} GiB"
    taken = f"after about {gib(outside)} for CUDA and NCCL"
    fit = gpu.fit_of(peak, most.communicators, headroom_bytes)
    if fit is Fit.TOO_LARGE:
        limit = gpu.allocatable_bytes(most.communicators, 0.0)
        step = "" if most.first_peak_bytes > limit else " (from the second step on)"
        others = [str(each.stage) for each in found if _unused_bytes(each, gpu, 0.0) < 0]
        too_large = f"; too large: ranks {', '.join(others)}" if len(others) > 1 else ""
        return (
            f"Does not fit: {text}, {gib(peak - limit)} GiB above {of_gpu} {taken}"
            f"{step}{too_large}."
        )
    if fit is Fit.TIGHT:
        return (
            f"May not fit: {text} of {of_gpu}, and leaves less than the headroom of "
            f"{gib(headroom_bytes)} GiB {taken}."
        )
    most = min(found, key=lambda each: _spare_bytes(each, gpu))
    spare, outside = _spare_bytes(most, gpu), gpu.outside_bytes(most.communicators)
    text = (
        f"Fits: rank {most.stage} reserves about {gib(most.reserved_bytes)} GiB (peak "
        f"{gib(needed(most))}) of {of_gpu}"
    )
    taken = f"after about {gib(outside)} for CUDA and NCCL"
    if spare < 0:
        return (
            f"{text}, {gib(-spare)} GiB more than are free {taken}: torch's allocator has to "
            "return cached blocks. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    return f"{text}; {gib(spare)} GiB are spare {taken}."


def remedy_line(most_bytes: float, peak_bytes: float, fit: Fit) -> str:
    """Format the peak of the largest rank in GiB, and the difference to that of the command."""
    less = peak_bytes - most_bytes
    how = f"{gib(less)} GiB less" if less >= 0 else f"{gib(-less)} GiB more"
    return f"{gib(most_bytes)} GiB ({how}{'' if fit is Fit.FITS else f'; {fit}'})"


def assumed(gpu: Gpu, imbalance: float, fused: bool, versions: Mapping[str, str]) -> dict[str, Any]:
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


def wrapped(text: str) -> str:
    """Wrap the text to 100 columns."""
    return "\n".join(textwrap.wrap(text, WIDTH, break_on_hyphens=False))
