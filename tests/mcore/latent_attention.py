"""A plugin of the farm: an attention that multi-latent attention can use on a CPU.

Megatron supports it with Transformer Engine's attention only: its local attention requires keys and
values of the same size. Both sides of a comparison use this attention.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor


def _of_any_size(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any
    ) -> None:
        original(self, *args, **options)

    return init


def _attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any):
    """Return causal attention of [s, b, n, h] tensors, as [s, b, n * the values' h]."""
    scores = torch.einsum("qbnh,kbnh->bnqk", query, key) / math.sqrt(query.shape[-1])
    queries, keys = scores.shape[-2:]  # the queries of a slice are the last ones of the keys
    future = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("bnqk,kbnh->qbnh", weights, value).flatten(2)


def start(rank: int, given: object) -> None:
    """Give Megatron's attention the sizes and the products."""
    attention: Any = DotProductAttention
    attention.__init__ = _of_any_size(attention.__init__)
    attention.forward = _attend
