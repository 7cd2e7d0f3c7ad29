"""Estimate the seconds of a step: counted work divided by the rates that kernels and links reach.

`benchmarks/fit_rates.py` fits the constants to published runs and writes them to `fitted.py`, with
the errors of the runs that were left out of the fit. benchmarks/evidence.md has all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_vshape.rehearsal.fitted import BY_GENERATION, SHARED
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.work import ExchangeKey, Work, is_once, of_replicas


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of the data sheet's rates, and fixed times.

    The first six depend on the generation of GPU, the others are shared by all generations. The
    defaults are the starting point of the fit, with these sources:

    * `wide`: cuBLAS reaches 0.6 to 0.75 of the peak in bf16 (ml-engineering, "Maximum Achievable
      Matmul FLOPS"); `memory`: half of the peak, because the counts are of unfused kernels.
    * `wire`: NVLink in NCCL's all-gather, 350 of 450 GB/s on H100 (nccl-tests).
    * `network`: 43 to 47 of 50 GB/s per NIC between nodes (DeepEP's README).
    * `dispatch`: all-to-alls in a node reach less of NVLink than rings.
    * `module_us`: a forward of four GEMMs needs 2.6 ms of the host (70B, TP 8, on an H200:
      benchmarks/evidence.md).
    """

    wide: float = 0.65  # large matrix products in bf16
    eight: float = 0.63  # in 8 bits
    four: float = 0.5  # in 4 bits
    attention: float = 0.5
    attention_in_8_bits: float = 0.4  # of the rate of 8-bit products
    memory: float = 0.5
    wire: float = 0.77  # of NVLink in rings
    dispatch: float = 0.5  # of NVLink in all-to-alls
    network: float = 0.85  # of the links between nodes
    kernel_us: float = 2.0  # start and end of a kernel
    launch_us: float = 30.0  # host time per counted kernel (an operation of PyTorch)
    module_us: float = 400.0  # and per GEMM: the Python code of its module
    exchange_us: float = 15.0
    shards_exposed: float = 0.8  # share of tensor-parallel collectives that nothing overlaps
    shards_left: float = 0.4  # of them, with --tp-comm-overlap
    experts_left: float = 0.3  # of all-to-alls with --overlap-moe-expert-parallel-comm
    context_exposed: float = 0.5
    replicas_exposed: float = 0.4  # of data-parallel collectives


_INSTINCT = Rates(wide=0.55, eight=0.40, attention=0.35, memory=0.6)
_AMPERE = Rates(wide=0.72, attention=0.50, memory=0.6)

RATES = {
    (8, 0): _AMPERE,
    (8, 9): _AMPERE,
    (9, 1): _INSTINCT,
    (9, 4): _INSTINCT,
    (9, 5): _INSTINCT,
    **{generation: Rates(**SHARED, **fitted) for generation, fitted in BY_GENERATION.items()},
}
"""By compute capability.

A100's were set by hand, by the paper's grid search at 3072 tokens (three rows). Of MI300X (gfx942,
as 9.4) the rate of products is 0.55 because the largest measured one is 0.58 of the data sheet's
(ml-engineering, "Maximum Achievable Matmul FLOPS"); the rest is a guess, as are those of MI250X
(gfx90a, as 9.1) and MI355X (gfx950).
"""

DISPATCH = "token dispatch, top "
"""Kind of a DeepEP or HybridEP dispatch, followed by the experts per token. Its bytes count each
token once; the number of copies depends on the GPUs of a node."""

PERMUTED = ", permuted"
"""End of the kind if the dispatch also sorts the tokens by expert, as HybridEP does."""

_FREE = ("isend", "irecv", "send", "recv", "broadcast")
_TILE = 128
_DEPTH_HALF = 64
"""A product of inner size K loses a constant number of steps, K / (K + 64): NVIDIA's guide on
matrix multiplication."""


_SHARPNESS = 4
"""Exponent of the mean of GPU and host time: nearly the larger one, more where both are close."""

_SHARPNESS_IF_WAITING = 1.5
"""The same with a plain all-to-all of experts: the host reads the number of tokens from the GPU in
every layer, so it cannot start kernels ahead. 1 would be the sum of both times."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Relation of the counted step to the real one."""

    microbatches: int
    counted: int  # microbatches in the work
    ranks: int  # of the pipeline
    chunks: int
    graphs: bool = False  # of a full step: the host starts no kernels
    experts_hidden: bool = False  # --overlap-moe-expert-parallel-comm
    shards_overlapped: bool = False  # --tp-comm-overlap
    attention_in_8_bits: bool = False  # no flag of Megatron-LM sets it, but a recipe may


def rates_of(gpu: Gpu) -> Rates:
    """Return the rates of the GPU's generation, with those that its cluster file sets."""
    return replace(RATES[gpu.capability], **dict(gpu.shares))


def step_time(work: Work, gpu: Gpu, scale: Scale, rates: Rates | None = None) -> dict[str, float]:
    """Estimate the seconds of a step by part, and their sum as `step_s`."""
    achieved = rates or rates_of(gpu)
    parts = {
        "products": _gemms_s(work, gpu, achieved),
        "attention": _attention_s(work, gpu, achieved, scale.attention_in_8_bits),
        "memory": work.bytes_moved / gpu.memory_rate / achieved.memory,
        "kernels": work.kernels * achieved.kernel_us * 1e-6,
    }
    parts["exchanges"] = _exposed_collectives_s(work, gpu, achieved, scale, sum(parts.values()))
    # Ring attention sends keys and values while it computes with those that it has.
    parts["exchanges"] += max(0.0, _ring_s(work, gpu, achieved) - parts["attention"])
    on_gpu = sum(parts.values())
    host = 0.0 if scale.graphs else _host_s(work, achieved)
    parts["host"] = with_host_s(on_gpu, host, _reads_token_counts(work)) - on_gpu
    # Per microbatch.
    per_microbatch = {name: seconds / scale.counted for name, seconds in parts.items()}
    microbatch = sum(per_microbatch.values())
    parts = {name: seconds * scale.microbatches for name, seconds in per_microbatch.items()}
    # The bubble of (interleaved) 1F1B: ranks - 1 passes of one chunk, forward and backward.
    parts["idle"] = microbatch * (scale.ranks - 1) / scale.chunks
    parts["optimizer"] = optimizer_s(work, gpu, achieved)
    # Gradients of a chunk are reduced while the chunks before it still run backward.
    meanwhile = microbatch * (1 + scale.ranks * (scale.chunks - 1) / scale.chunks)
    parts["data parallel"] = exposed_s(data_parallel_s(work, gpu, achieved), meanwhile, achieved)
    return {"step_s": sum(parts.values()), **parts}


def optimizer_s(work: Work, gpu: Gpu, rates: Rates) -> float:
    """Estimate the seconds of the optimizer, and of other memory traffic once per step."""
    return (work.optimizer_bytes + work.once_bytes) / gpu.memory_rate / rates.memory


def data_parallel_s(work: Work, gpu: Gpu, rates: Rates) -> float:
    """Estimate the seconds of the data-parallel collectives of a step if nothing overlaps them."""
    return sum(
        collective_s(key, traffic, gpu, rates)
        for key, traffic in work.exchanges.items()
        if _costs_time(key) and is_once(key[1])
    )


def exposed_s(full: float, meanwhile: float, rates: Rates) -> float:
    """Return the exposed seconds of data-parallel collectives.

    Args:
        full: their time if nothing overlaps them.
        meanwhile: computation that runs at the same time.
        rates: `replicas_exposed` is the share of the first and last buckets, always exposed.
    """
    return max(rates.replicas_exposed * full, full - meanwhile)


def send_us(size: float, gpu: Gpu, gpu_distance: int) -> float:
    """Estimate the microseconds of a P2P message between ranks `gpu_distance` GPUs apart."""
    rates = rates_of(gpu)
    if gpu_distance < gpu.node:
        return size / gpu.near_rate / rates.wire * 1e6 + rates.exchange_us
    return size / gpu.far_rate / rates.network * 1e6 + rates.exchange_us


def with_host_s(on_gpu_s: float, host_s: float, waits: bool) -> float:
    """Return the seconds of work on the GPU that the host starts in `host_s`.

    Args:
        on_gpu_s: seconds of the kernels.
        host_s: seconds of the host's calls.
        waits: whether the host waits for the GPU in every layer, for the plain all-to-all.
    """
    sharpness = _SHARPNESS_IF_WAITING if waits else _SHARPNESS
    total: float = (on_gpu_s**sharpness + host_s**sharpness) ** (1 / sharpness)
    return total


def _reads_token_counts(work: Work) -> bool:
    """Return whether experts exchange tokens by the plain all-to-all."""
    return any(
        kind.startswith("all_to_all") and "EXPERT" in group for kind, group, *_ in work.exchanges
    )


def _host_s(work: Work, rates: Rates) -> float:
    """Estimate the seconds in which the host starts the kernels that no CUDA graph replays."""
    gemms = sum(work.products.values()) - work.captured_gemms
    kernels = work.kernels - work.captured
    return (kernels * rates.launch_us + gemms * rates.module_us) * 1e-6


def _gemms_s(work: Work, gpu: Gpu, rates: Rates) -> float:
    """Estimate the seconds of the matrix products: FLOPs in tiles, or bytes moved if longer."""
    seconds = 0.0
    for (number_format, rows, inner, columns, gemms), number in work.products.items():
        width, peak, share = _rate_of_format(number_format, gpu, rates)
        tiles = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        # Partial tiles cost as much as complete ones.
        flops = 2.0 * tiles * _TILE**2 * (inner + _DEPTH_HALF)
        # Inputs in their format, and a 16-bit result.
        moved = width * inner * (rows + columns) + 2.0 * rows * columns
        seconds_per_gemm = max(flops / peak / share, moved / gpu.memory_rate / rates.memory)
        seconds += number * gemms * seconds_per_gemm
    return seconds


def _attention_s(work: Work, gpu: Gpu, rates: Rates, in_8_bits: bool) -> float:
    seconds = 0.0
    for name, flops in work.attention_flops.items():
        if in_8_bits or name.endswith("fp8"):
            seconds += flops / gpu.flops_in_8_bits / rates.attention_in_8_bits
        else:
            seconds += flops / gpu.bf16_flops / rates.attention
    return seconds


def _rate_of_format(name: str, gpu: Gpu, rates: Rates) -> tuple[float, float, float]:
    """Return bytes of a number, the rate of the data sheet, and the achieved fraction."""
    if name == "nvfp4":
        return 0.5, gpu.flops_in_4_bits, rates.four
    if name.endswith("fp8"):
        return 1.0, gpu.flops_in_8_bits, rates.eight
    if name == "float32":  # as tf32
        return 4.0, gpu.bf16_flops / 2, rates.wide
    return 2.0, gpu.bf16_flops, rates.wide


def _exposed_collectives_s(
    work: Work, gpu: Gpu, rates: Rates, scale: Scale, computes: float
) -> float:
    """Estimate the exposed seconds of the collectives of every microbatch.

    Args:
        work: counts of all counted microbatches.
        gpu: GPU and links.
        rates: shares that they reach.
        scale: whether all-to-alls overlap the computation of another microbatch.
        computes: seconds of the computation.
    """
    within = experts = replicas = 0.0
    for key, traffic in work.exchanges.items():
        if not _costs_time(key) or is_once(key[1]):
            continue
        seconds = collective_s(key, traffic, gpu, rates)
        # Collectives once per step are skipped above, so these are FSDP's per-layer gathers.
        if of_replicas(key[1]):
            replicas += seconds  # FSDP, in every microbatch
        elif "EXPERT" in key[1]:
            experts += seconds
        else:
            within += seconds * _exposed_share(key[1], scale, rates)
    if scale.experts_hidden:
        experts = max(rates.experts_left * experts, experts - computes)
    return within + experts + exposed_s(replicas, computes, rates)


def _ring_s(work: Work, gpu: Gpu, rates: Rates) -> float:
    """Estimate the seconds of the messages of context parallelism (--cp-comm-type p2p)."""
    seconds = 0.0
    for (kind, group, ranks, span), (number, size) in work.exchanges.items():
        if kind == "isend" and "CONTEXT" in group:
            is_near = ranks_per_node(ranks, span, gpu.node) >= ranks
            rate = gpu.near_rate * rates.wire if is_near else gpu.far_rate * rates.network
            seconds += size / rate + number * rates.exchange_us * 1e-6
    return seconds


def _exposed_share(group: str, scale: Scale, rates: Rates) -> float:
    """Return the exposed share of a collective of context or tensor parallelism."""
    if "CONTEXT" in group:
        return rates.context_exposed
    return rates.shards_left if scale.shards_overlapped else rates.shards_exposed


def _costs_time(key: ExchangeKey) -> bool:
    kind, _, ranks, _ = key
    # P2P overlaps with other passes; `idle` and plans model its effect.
    return ranks > 1 and kind not in _FREE


def collective_s(key: ExchangeKey, traffic: Sequence[float], gpu: Gpu, rates: Rates) -> float:
    """Estimate the seconds of collectives, of which `traffic` has the number and the bytes."""
    (kind, _, ranks, span), (number, size) = key, traffic
    linked = link_bytes_of(kind, ranks, span, size, gpu.node)
    near = rates.dispatch if kind.startswith((DISPATCH, "all_to_all")) else rates.wire
    # Both kinds of links transfer at the same time.
    seconds = max(linked.near / gpu.near_rate / near, linked.far / gpu.far_rate / rates.network)
    if kind.endswith(PERMUTED):
        # Read every received token and write it once per expert, or the reverse.
        copies = _copies_of(kind)
        tokens = size * (ranks * _hit_probability(ranks, copies) + copies)
        seconds += tokens / gpu.memory_rate / rates.memory
    return seconds + number * rates.exchange_us * 1e-6


class LinkBytes(NamedTuple):
    """Bytes that a rank receives over each kind of link."""

    near: float
    far: float


def ranks_per_node(ranks: int, span: int, node: int) -> int:
    """Count the ranks of a group that share a node; its ranks are evenly spaced over `span`."""
    stride = (span - 1) / (ranks - 1) if ranks > 1 else 1.0
    return max(1, min(ranks, int(node // max(stride, 1.0))))


def link_bytes_of(kind: str, ranks: int, span: int, size: float, node: int) -> LinkBytes:
    """Split the bytes of one collective by kind of link.

    * A plain all-to-all sends each rank its part directly.
    * DeepEP and HybridEP send a token once to each node, and from there over NVLink once to each
      rank that has one of its experts.
    * Gather, scatter and reduction run in rings. The number of rings is the number of the group's
      ranks in a node, so each rank sends its share of the bytes to the next node.

    Args:
        kind: name of the collective, or `DISPATCH`, a number, and possibly `PERMUTED`.
        ranks: ranks of the group.
        span: distance from the first to the last rank, plus one.
        size: bytes of the larger side.
        node: GPUs that NVLink connects.
    """
    within = ranks_per_node(ranks, span, node)
    nodes = math.ceil(ranks / within)
    if kind.startswith(DISPATCH):
        copies = _copies_of(kind)
        near = size * (ranks - 1) * _hit_probability(ranks, copies)
        return LinkBytes(
            near if within > 1 else 0.0, size * (nodes - 1) * _hit_probability(nodes, copies)
        )
    if kind.startswith("all_to_all"):
        return LinkBytes(size * (within - 1) / ranks, size * (ranks - within) / ranks)
    around = size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    return LinkBytes(around if within > 1 else 0.0, around / within if nodes > 1 else 0.0)


def _copies_of(kind: str) -> int:
    """Return the experts per token of a dispatch."""
    return int(kind.removeprefix(DISPATCH).removesuffix(PERMUTED))


def _hit_probability(places: int, copies: int) -> float:
    """Estimate the probability that a token has an expert in a given place (uniform routing)."""
    return 1 - (1 - 1 / places) ** copies
