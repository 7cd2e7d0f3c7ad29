"""A plugin of the farm: messages wider than the hidden size, as of models with several streams.

Megatron's models of this kind are newer than 0.19. A message consists of one copy of the hidden
state per stream, each scaled to a share, and its reader sums them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from recorder import wrap
from torch import Tensor
from variable_lengths import set_config

STREAMS = 3


def start(rank: int, argument: str) -> None:
    """Widen messages: `fixed` as the config specifies, `any` with their shapes sent first.

    With `growing` the number of streams equals the number of layers that have run.
    """

    def receive(original: Any, block: Any, message: Any) -> None:
        if isinstance(message, Tensor):
            message = torch.stack(message.split(block.config.hidden_size, -1)).sum(0)
        original(block, message)

    def forward(original: Any, block: Any, *args: Any, **options: Any) -> Any:
        output = original(block, *args, **options)
        if block.post_process:
            return output
        count = block.layers[-1].layer_number if argument == "growing" else STREAMS
        shares = [2.0 ** -min(index + 1, count - 1) for index in range(count)]
        return torch.cat([output * share for share in shares], -1)

    def declare(config: Any) -> None:
        config.enable_mhc_connections, config.mhc_num_residual_streams = True, STREAMS
        config.variable_seq_lengths = argument != "fixed"

    wrap(TransformerBlock, "set_input_tensor", receive)
    wrap(TransformerBlock, "forward", forward)
    set_config(declare)
