"""Number of tokens per expert: balanced, or with a given imbalance for this rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_vshape.rehearsal.adjustments import wrap
from megatron_vshape.rehearsal.device import (
    KnownNumbers,
    ignored,
    on_host,
    tensor_with_values,
    values_of,
)


class Routing:
    """Expert options of the run; `imbalance` is this rank's tokens relative to the mean."""

    topk = 1
    experts = 1
    imbalance = 1.0
    capacity_factor: float | None = None  # of an expert's tokens, beyond which they are dropped
    multiple = 1  # of an expert's tokens, to which they are padded
    padded = 0  # number of counts that are padded
    unit = 1  # of the padded rows

    @classmethod
    def sent(cls, tokens: int, pads: bool = False) -> int:
        """Return the rows of a rank's tokens for all experts; `pads` up to the capacity."""
        rows = tokens * cls.topk
        if cls.capacity_factor is None:
            return cls._padded(rows)
        capacity = math.ceil(rows / cls.experts * cls.capacity_factor) * cls.experts
        return capacity if pads else min(rows, capacity)

    @classmethod
    def received(cls, tokens: int) -> int:
        """Return the rows of this rank's experts, if all ranks of the group have these tokens."""
        rows = int(tokens * cls.topk * cls.imbalance)
        if cls.capacity_factor is None:
            return cls._padded(rows)
        return min(rows, cls.sent(tokens, pads=True))

    @classmethod
    def _padded(cls, rows: int) -> int:
        """Add the mean padding, half a multiple for each count, as counts are random."""
        if cls.multiple == 1:
            return rows
        return round((rows + cls.padded * (cls.multiple - 1) / 2) / cls.unit) * cls.unit

    @classmethod
    def counts(cls, rows: int, local: int) -> Tensor:
        """Return the tokens of each local expert as a tensor with known values."""
        rows_per_expert = rows // (local * cls.multiple) * cls.multiple
        with on_host():
            return tensor_with_values(
                [rows_per_expert] * (local - 1) + [rows - rows_per_expert * (local - 1)]
            )


def route_by_counts(args: Any, imbalance: float) -> None:
    """Make Megatron's dispatchers use these counts instead of the router's."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    Routing.topk, Routing.experts = args.moe_router_topk, args.num_experts
    Routing.imbalance = imbalance
    Routing.capacity_factor = getattr(args, "moe_expert_capacity_factor", None)
    if any(getattr(args, name, False) for name in _PADS):
        align: Any = moe_utils
        Routing.multiple = align.get_align_size_for_quantization(args)
        ranks = args.expert_model_parallel_size
        if args.moe_token_dispatcher_type == "flex":  # pads tokens of its experts on arrival
            Routing.padded, Routing.unit = args.num_experts // ranks, Routing.multiple
        else:  # each rank pads its tokens of all experts
            Routing.padded = args.num_experts
            Routing.unit = Routing.multiple * ranks * args.expert_tensor_parallel_size
    dispatchers: Any = token_dispatcher
    dispatchers.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _exchanged
    gather = dispatchers.MoEAllGatherTokenDispatcher.dispatch_postprocess

    def gathered(self: Any, *inputs: Any, **options: Any) -> Any:
        with ignored():  # the number of rows, see `_permuted`
            tokens, _, probs = gather(self, *inputs, **options)
        return tokens, Routing.counts(tokens.shape[0], self.num_local_experts), probs

    dispatchers.MoEAllGatherTokenDispatcher.dispatch_postprocess = gathered
    wrap(dispatchers, "permute", _permuted)
    wrap(dispatchers, "sort_chunks_by_idxs", _sorted)
    if getattr(dispatchers, "fused_dispatch", None) is not None:
        wrap(dispatchers, "fused_dispatch", _dispatched)
        dispatchers._DeepepManager._indices_to_multihot = _multihot
        dispatchers._DeepepManager._pad_routing_map = lambda self, *padded: padded
    if hasattr(dispatchers, "_HybridEPManager"):
        wrap(dispatchers._HybridEPManager, "setup_metadata", _set_padded_metadata)
    tensor: Any = Tensor
    tensor.masked_select = _routed


_PADS = "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"


def _exchanged(self: Any, point: Any, tokens_per_expert: Any = None) -> Tensor:
    """Set the host values of the all-to-all dispatcher, and return the tokens per expert."""
    local, ranks, shards = self.num_local_experts, self.ep_size, self.tp_size
    if self.drop_and_pad:  # all other sizes are known
        rows = Routing.sent(self.routing_map.shape[0], pads=True)
        return Routing.counts(rows * shards, local)
    tokens = Routing.sent(self.routing_map.shape[0])
    unit = ranks * shards * (local if Routing.multiple == 1 else Routing.multiple)
    if isinstance(getattr(self, "num_out_tokens", None), Tensor):
        self.num_out_tokens = tokens
    received = Routing.received(self.routing_map.shape[0]) if ranks > 1 else tokens
    received = received // unit * unit
    if ranks > 1 or shards > 1:
        self.input_splits = [tokens // ranks] * ranks
        self.output_splits = [received // ranks] * ranks
        self.output_splits_tp = KnownNumbers([received] * shards)
    total = received * shards
    if local > 1:
        rows_per_chunk = total // (shards * ranks * local)
        if self.config.moe_permute_fusion:  # its kernel reads them on the GPU
            counts: Any = torch.full((shards * ranks, local), rows_per_chunk, device="cuda")
        else:
            counts = KnownNumbers([rows_per_chunk] * (local * shards * ranks))
        self.num_global_tokens_per_local_expert = counts
    return Routing.counts(total, local)


def _dispatched(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Dispatch as DeepEP does, with counts that the host knows."""
    *moved, _, handle = call(*args, **options)
    return *moved, Routing.counts(handle.rows, handle.local), handle


def _set_padded_metadata(call: Callable[..., Any], self: Any, *inputs: Any, **options: Any) -> None:
    """Prepare a dispatch by HybridEP, with counts that the host knows if experts are padded."""
    call(self, *inputs, **options)
    if self.drop_and_pad:
        self.tokens_per_expert = Routing.counts(self.num_permuted_tokens, self.num_local_experts)


def _multihot(self: Any, indices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's experts of this rank as a mask, and their weights."""
    shape = indices.shape[0], self.num_local_experts
    mask = torch.zeros(shape, dtype=torch.bool, device="cuda")
    return mask, probs.sum(dim=1, keepdim=True).expand(shape).contiguous()  # keeps the gradient


def _permuted(call: Callable[..., Any], tokens: Tensor, routing_map: Tensor, **options: Any) -> Any:
    """Permute the number of rows of `Routing` if it would be read from GPU values."""
    counts = options.get("tokens_per_expert")
    known_counts = None if counts is None else values_of(counts)
    if known_counts is not None:
        align = options.pop("align_size", 0) if options.get("fused") else 0
        if align:  # the kernel that also pads reads the number of padded rows
            known_counts = [-(-count // align) * align for count in known_counts]
            with on_host():
                options["tokens_per_expert"] = tensor_with_values(known_counts)
        options["num_out_tokens"] = sum(known_counts)
    elif not options.get("num_out_tokens", 1):
        options["num_out_tokens"] = _rows_of(routing_map, routing_map.shape[1])
    return call(tokens, routing_map, **options)


def _sorted(
    call: Callable[..., Any],
    tokens: Tensor,
    sizes: Any,
    order: Any,
    probs: Tensor | None = None,
    fused: bool = False,
) -> Any:
    """Sort chunks by their expert: a kernel that copies all rows, in backward, too.

    Megatron reads the order on the host, where a fake tensor has none.
    """
    if fused:
        return call(tokens, sizes, order, probs=probs, fused=fused)
    return _Sort.apply(tokens), None if probs is None else _Sort.apply(probs)


class _Sort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


def _routed(self: Tensor, mask: Tensor) -> Tensor:
    """Return the selection of a routing map [experts, tokens]: each token once per expert."""
    return self.reshape(-1)[: _rows_of(mask, mask.shape[0])].clone()


def _rows_of(routing_map: Tensor, experts: int) -> int:
    """Return the number of rows for this number of experts, all of them or those of this rank."""
    tokens = routing_map.numel() // experts
    if experts == Routing.experts:
        return Routing.sent(tokens)
    return Routing.received(tokens) * experts // Routing.experts
