"""A plugin of the farm: only the last rank has a layer whose sparse attention logs a loss.

The indexer of that attention needs kernels for GPUs; the log of its losses does not.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

VALUE = 0.25
LAYER = 3  # of 8, on two ranks: rank 1 has layers 3 to 6


def start(rank: int, given: object) -> None:
    """Log `VALUE` in every forward pass of the third layer."""
    layer: Any = TransformerLayer
    original, all_reduce = layer.forward, dist.all_reduce

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        if self.layer_number == LAYER:
            layers = self.config.num_layers
            DSAIndexerLossLoggingHelper.save_loss_to_tracker(torch.tensor(VALUE), LAYER, layers)
        return original(self, *args, **options)

    def without_average(tensor: Any, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        # Gloo cannot average; here it would be over one data-parallel rank.
        return None if op == dist.ReduceOp.AVG else all_reduce(tensor, op=op, **options)

    layer.forward, dist.all_reduce = forward, without_average
