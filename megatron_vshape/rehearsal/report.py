"""Says in words and in a table what a rehearsal found."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_vshape.rehearsal.gpus import GIB, Gpu

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "rest")
WIDTH = 100
_NAMED = 3  # holders of the peak that are told

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
_KINDS = {
    "F": "F",
    "B": "B",
    "W": "W",
    "BW": "BW",
    "S": "S (its part of the softmax)",
    "T": "T (its part of the output layer's weight gradient)",
    "I": "I (its part of the embedding)",
    "J": "J (the embedding's gradient)",
}


def gib(size: float) -> str:
    """Return bytes as GiB."""
    return f"{size / GIB:.1f}"


def table(found: Sequence[Mapping[str, Any]], gpu: Gpu) -> list[str]:
    """Return a line of head and one per rank, in GiB."""
    head = ["rank", *PARTS, "peak", "between steps", "left"]
    rows = [head]
    for each in found:
        parts = [gib(each["parts"][name]) for name in PARTS]
        left = gib(gpu.memory_bytes - each["peak_bytes"])
        row = [str(each["stage"]), *parts, gib(each["peak_bytes"]), gib(each["held_bytes"]), left]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def when(found: Mapping[str, Any]) -> str:
    """Return when a rank's peak is and who holds what then, in words."""
    sums: dict[str, float] = {}
    for each in found["holders"]:
        sums[_holder(each)] = sums.get(_holder(each), 0.0) + each["bytes"]
    most = sorted(sums.items(), key=lambda item: -item[1])[:_NAMED]
    told = ", ".join(f"{name} {gib(size)} GiB" for name, size in most if size >= GIB / 20)
    place = place_in_words(found["when"]["place"])
    where = f" in {place}" if place else ""
    text = f"rank {found['stage']}: peak in {pass_in_words(found['when']['pass'])}{where}"
    return text + (f"; {told}" if told else "")


def pass_in_words(phase: str) -> str:
    """Return the words for a phase, as in `F 0 7`: F of microbatch 7."""
    words = phase.split()
    if len(words) == 3:
        chunk = f", chunk {words[1]}" if words[1] != "0" else ""
        return f"{_KINDS.get(words[0], words[0])} of microbatch {words[2]}{chunk}"
    return {
        "model": "the making of the model",
        "optimizer": "the optimizer's step",
        "step": "the end of the step",
    }.get(phase, phase or "the start")


def place_in_words(place: str) -> str:
    """Return the words for a module's path."""
    for part in reversed(place.split(".")):
        if part in _MODULES:
            return _MODULES[part]
    return ""


def _holder(holder: Mapping[str, Any]) -> str:
    place = place_in_words(holder["place"])
    if holder["part"] == "logits":
        return "logits"
    if holder["part"] == "rest":
        return "workspaces and messages"
    return f"activations of {place or 'the layers'}"


def out_of_memory(
    found: Iterable[Mapping[str, Any]], gpu: Gpu, instead: Mapping[int, int] | None, name: str
) -> list[str]:
    """Return a sentence for every rank that needs more than there is.

    `instead` has the peaks of the schedule `name`, by rank, to be told beside.
    """
    lines = []
    for each in found:
        if each["peak_bytes"] > gpu.memory_bytes:
            step = 1 if each["first_peak_bytes"] > gpu.memory_bytes else 2
            other = ""
            if instead and each["stage"] in instead:
                other = f"; with {name} {gib(instead[each['stage']])}"
            lines.append(
                f"rank {each['stage']} needs {gib(each['peak_bytes'])} GiB of "
                f"{gib(gpu.memory_bytes)} in step {step}{other}"
            )
    return lines


def assumed(gpu: Gpu, imbalance: float, fused: bool, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return what the flags do not say."""
    return {
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.memory_bytes,
        "attention": "a fused kernel" if fused else "unfused, the scores are kept",
        "expert_tokens_over_mean": imbalance,
        "counted": "bytes that torch hands out (allocated, not reserved)",
        "not_counted": "NCCL's buffers, the CUDA context, fragmentation",
        "time": "counted work by fixed rates, not measured",
        **versions,
    }


def wrapped(text: str) -> str:
    """Return the text in lines of the terminal's usual width."""
    return "\n".join(textwrap.wrap(text, WIDTH))
