"""Seconds of a step from counted work: what the hardware states, times what kernels reach of it.

The shares and prices in `Rates` were fitted to published runs by `scripts/fit_rates.py`, a set for
each generation of GPU and none per run; docs/evidence.md has the errors, those with each system
left out of the fit beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.work import Work, is_once, of_replicas


@dataclass(frozen=True, slots=True)
class Rates:
    """What kernels and links reach of the rates that the maker states, by generation of GPU."""

    wide: float = 0.70  # large products in bf16
    eight: float = 0.60  # in 8 bits
    four: float = 0.45  # in 4 bits
    attention: float = 0.45
    attention_in_8_bits: float = 0.35  # of the products' rate in 8 bits
    memory: float = 0.70
    wire: float = 0.78  # of both kinds of links
    kernel_us: float = 2.0  # start and end of a kernel that a graph starts
    launch_us: float = 8.0  # that the host starts when it is not ahead
    exchange_us: float = 15.0
    shards_exposed: float = 1.0  # of tensor parallel exchanges, what is waited for
    experts_exposed: float = 1.0
    experts_left: float = 0.3  # where another microbatch computes beside them
    context_exposed: float = 0.5
    replicas_exposed: float = 0.3  # of data parallel ones


_INSTINCT = Rates(wide=0.55, eight=0.40, attention=0.35, memory=0.6)

RATES = {
    (8, 0): Rates(wide=0.72, attention=0.50, memory=0.6),
    (9, 4): _INSTINCT,
    (9, 5): _INSTINCT,
    (9, 0): Rates(
        wide=0.543, eight=0.600, attention=0.662, memory=0.507, wire=0.742, kernel_us=2.28,
        launch_us=14.1, exchange_us=15.1, shards_exposed=0.745, experts_exposed=0.91,
        experts_left=0.342, replicas_exposed=0.339,
    ),
    (10, 0): Rates(
        wide=0.616, eight=0.615, four=0.557, attention=0.298, memory=0.540, wire=0.552,
        kernel_us=1.77, launch_us=19.8, exchange_us=18.3, shards_exposed=1.0,
        experts_exposed=0.686, experts_left=0.225, replicas_exposed=0.666,
    ),
    (10, 3): Rates(
        wide=0.675, eight=0.749, four=0.432, attention=0.492, attention_in_8_bits=0.373,
        memory=0.412, wire=0.641, kernel_us=2.11, launch_us=8.48, exchange_us=20.7,
        shards_exposed=1.0, experts_exposed=1.27, experts_left=0.186, replicas_exposed=0.226,
    ),
}  # fmt: skip
"""By compute capability.

Those of A100 were set by hand, by the paper's grid search at 3072 tokens (three rows), not by
`fit_rates.py`. Of MI300X (gfx942, as 9.4) the rate of products is 0.55 because the largest measured
of any is 0.58 of the data sheet's (ml-engineering, "Maximum Achievable Matmul FLOPS"); the rest is
a guess, as are those of MI355X (gfx950).
"""

ERRORS = (139, 3.9, 14.7, 7.0)
"""Of published runs, which `scripts/fit_rates.py` prints: how many, the median of the errors in
percent, within how much nine in ten are, and the median error of the ratio of two runs of one model
on one system."""

_FREE = ("isend", "irecv", "send", "recv", "broadcast")
_TILE = 128
_DEPTH_HALF = 64
"""A product of inner size K loses a constant number of steps, K / (K + 64): NVIDIA's guide on
matrix multiplication."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How the traced step stands to the real one."""

    microbatches: int
    traced: int
    ranks: int  # of the pipeline
    chunks: int
    graphs: bool = False  # of a whole step: the host starts no kernels
    host_waits: bool = False  # for numbers of tokens, so that it is not ahead of the GPU
    experts_hidden: bool = False  # --overlap-moe-expert-parallel-comm
    attention_in_8_bits: bool = False  # which no flag of Megatron-LM says, but a recipe may


def rates_of(gpu: Gpu) -> Rates:
    """Return what is reached on such a GPU."""
    return RATES[gpu.capability]


def step_time(work: Work, gpu: Gpu, scale: Scale, rates: Rates | None = None) -> dict[str, float]:
    """Return seconds by part, and their sum as `step_s`."""
    reached = rates or rates_of(gpu)
    if scale.experts_hidden:
        reached = replace(reached, experts_exposed=reached.experts_left)
    within, beside, data = _exchange_s(work, gpu, reached)
    start_us = reached.launch_us if scale.host_waits else reached.kernel_us
    parts = {
        "products": products_s(work, gpu, reached),
        "attention": _attention_s(work, gpu, reached, scale.attention_in_8_bits),
        "memory": work.bytes_moved / gpu.memory_rate / reached.memory,
        "kernels": work.kernels * start_us * 1e-6,
    }
    # FSDP hides exchanges behind the computation, and no more of them than that takes.
    computes = parts["products"] + parts["attention"]
    parts["exchanges"] = within + max(reached.replicas_exposed * beside, beside - computes)
    parts = {name: took * scale.microbatches / scale.traced for name, took in parts.items()}
    busy = sum(parts.values())
    parts["idle"] = busy / max(scale.microbatches, 1) * (scale.ranks - 1) / scale.chunks
    parts["optimizer"] = work.optimizer_bytes / gpu.memory_rate / reached.memory
    parts["data parallel"] = reached.replicas_exposed * data
    return {"step_s": sum(parts.values()), **parts}


def send_us(size: float, gpu: Gpu, apart: int, rates: Rates | None = None) -> float:
    """Return the time of a message of so many bytes to a rank so many GPUs away."""
    reached = rates or rates_of(gpu)
    rate = (gpu.near_rate if apart < gpu.node else gpu.far_rate) * reached.wire
    return size / rate * 1e6 + reached.exchange_us


def products_s(work: Work, gpu: Gpu, rates: Rates) -> float:
    """Return the seconds of the matrix products: by their flops in tiles, or by what they move."""
    took = 0.0
    for (number_format, rows, inner, columns, at), number in work.products.items():
        width, peak, share = _of_format(number_format, gpu, rates)
        tiles = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        flops = 2.0 * tiles * _TILE**2 * (inner + _DEPTH_HALF)
        moved = width * inner * (rows + columns) + 2.0 * rows * columns
        each = max(flops / peak / share, moved / gpu.memory_rate / rates.memory)
        took += number * at * each
    return took


def _attention_s(work: Work, gpu: Gpu, rates: Rates, in_8_bits: bool) -> float:
    took = 0.0
    for name, flops in work.attention_flops.items():
        if in_8_bits or name.endswith("fp8"):
            took += flops / gpu.flops_in_8_bits / rates.attention_in_8_bits
        else:
            took += flops / gpu.bf16_flops / rates.attention
    return took


def _of_format(name: str, gpu: Gpu, rates: Rates) -> tuple[float, float, float]:
    """Return bytes of a number, the stated rate, and what is reached of it."""
    if name == "nvfp4":
        return 0.5, gpu.flops_in_4_bits, rates.four
    if name.endswith("fp8"):
        return 1.0, gpu.flops_in_8_bits, rates.eight
    if name == "float32":  # as tf32
        return 4.0, gpu.bf16_flops / 2, rates.wide
    return 2.0, gpu.bf16_flops, rates.wide


def _exchange_s(work: Work, gpu: Gpu, rates: Rates) -> tuple[float, float, float]:
    """Price the exchanges, in seconds.

    Returns the time waited for those within the model, and the full time of data-parallel ones:
    that of every microbatch (FSDP), and that of the step.
    """
    within = beside = data = 0.0
    for (kind, group, ranks, span), (number, size) in work.exchanges.items():
        if ranks < 2 or kind in _FREE:
            continue
        rate = (gpu.near_rate if span <= gpu.node else gpu.far_rate) * rates.wire
        twice = 2 if kind == "all_reduce" else 1
        took = twice * size * (ranks - 1) / ranks / rate + number * rates.exchange_us * 1e-6
        if is_once(group):
            data += took
        elif of_replicas(group):
            beside += took
        else:
            within += took * _exposed(group, rates)
    return within, beside, data


def _exposed(group: str, rates: Rates) -> float:
    if "EXPERT" in group:
        return rates.experts_exposed
    return rates.context_exposed if "CONTEXT" in group else rates.shards_exposed
