"""Sequence and context parallelism on a CPU, where Megatron's local layers reject them.

Its local norm and its local attention each assert an unsharded sequence: the norm because its
parameters are not marked, the attention because only Transformer Engine's has a ring. Both fixes
are small: Megatron itself sums the gradients of marked parameters, and attention gathers the keys
and values. Both sides of a comparison use them.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn


def install() -> None:
    """Replace the two in this process."""
    WrappedTorchNorm.__new__ = _marked_norm  # type: ignore[assignment,method-assign]
    attention: Any = DotProductAttention
    attention.__init__ = _allowing_context_parallelism(attention.__init__)
    attention.forward = _with_gathered_keys(attention.forward)
    if "transformer_engine" in sys.modules:  # whose attention without a GPU has no ring either
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        TEDotProductAttention.forward = _with_gathered_keys(TEDotProductAttention.forward)


def _marked_norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any
) -> nn.Module:
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    norm = kind(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _allowing_context_parallelism(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **options: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            original(self, config, *args, **options)
        finally:
            config.context_parallel_size = size

    return init


def _with_gathered_keys(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return causal attention of this rank's queries, [s, b, n, h], to the keys of all ranks."""

    @functools.wraps(original)
    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
    ):
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return original(self, query, key, value, *arguments, **options)
        key, value = (
            gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value)
        )
        local_positions = _positions(group.rank(), group.size(), len(query))
        all_of = torch.cat([_positions(r, group.size(), len(query)) for r in range(group.size())])
        scores = torch.einsum("qbnh,kbnh->bnqk", query, key) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(local_positions[:, None] < all_of, -math.inf)
        return torch.einsum("bnqk,kbnh->qbnh", scores.softmax(-1), value).flatten(2)

    return forward


def _positions(rank: int, size: int, length: int) -> Tensor:
    """Return the positions of a rank's tokens: one block from the start and one from the end."""
    piece = length // 2
    first, second = rank * piece, (2 * size - 1 - rank) * piece
    return torch.cat([torch.arange(first, first + piece), torch.arange(second, second + piece)])
