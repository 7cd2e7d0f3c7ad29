"""Seconds of a step from counted work, by rates; a first estimate, with nothing fitted to rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_vshape.rehearsal.gpus import Gpu

if TYPE_CHECKING:
    from megatron_vshape.rehearsal.ledger import Work

_GEMM = {8: 0.80, 9: 0.65, 10: 0.60}
_ATTENTION = {8: 0.50, 9: 0.45, 10: 0.40}
"""Of the peak, by the generation of GPU: what large products and fused attention reach."""
_MEMORY, _WIRE = 0.7, 0.78
_EXPOSED = 0.3  # of data parallel exchanges, what the backward does not hide
_START_S = 15e-6  # of an exchange
_SPEED = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 4.0, "float32": 0.5}
"""Of products in other formats than bf16, over bf16's; fp32 runs as tf32."""
_FREE = ("isend", "irecv", "send", "recv", "broadcast")


@dataclass(frozen=True, slots=True)
class Scale:
    """How the traced step stands to the real one."""

    microbatches: int
    traced: int
    ranks: int  # of the pipeline
    chunks: int
    schedule: bool  # one of ours: its idle time is the simulator's to say


def step_time(work: Work, gpu: Gpu, scale: Scale) -> dict[str, float]:
    """Return seconds by part, and their sum as `step_s`."""
    generation = min(max(gpu.capability[0], 8), 10)
    products = sum(flops / _SPEED.get(name, 1.0) for name, flops in work.gemm_flops.items())
    parts = {
        "products": products / gpu.bf16_flops / _GEMM[generation],
        "attention": work.attention_flops / gpu.bf16_flops / _ATTENTION[generation],
        "memory": work.bytes_moved / gpu.memory_rate / _MEMORY,
    }
    parts["exchanges"], data = _exchange_s(work, gpu)
    parts = {name: took * scale.microbatches / scale.traced for name, took in parts.items()}
    busy = sum(parts.values())
    parts["idle"] = busy / max(scale.microbatches, 1) * (scale.ranks - 1) / scale.chunks
    parts["optimizer"] = work.optimizer_bytes / gpu.memory_rate / _MEMORY
    parts["data parallel"] = _EXPOSED * data
    return {"step_s": sum(parts.values()), **parts}


def _exchange_s(work: Work, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds of exchanges within the model, and of data parallel ones."""
    within = data = 0.0
    for (kind, group, ranks, span), (number, size) in work.exchanges.items():
        if ranks < 2 or kind in _FREE:
            continue
        rate = (gpu.near_rate if span <= gpu.node else gpu.far_rate) * _WIRE
        twice = 2 if kind == "all_reduce" else 1
        took = twice * size * (ranks - 1) / ranks / rate + number * _START_S
        if "DATA" in group or "INTRA_DIST" in group or group == "world":
            data += took
        else:
            within += took
    return within, data
