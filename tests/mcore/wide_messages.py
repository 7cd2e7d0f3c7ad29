"""A plugin of the farm: messages wider than the hidden size, as of models with several streams.

Megatron's models of this kind are newer than 0.19. A message consists of one copy of the hidden
state per stream, each scaled to a share, and its reader sums them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import argument_utils, arguments
from torch import Tensor

STREAMS = 3


def start(rank: int, given: str) -> None:
    """Widen messages: `fixed` as the config specifies, `any` with their shapes sent first.

    With `growing` the number of streams equals the number of layers that have run.
    """
    _changed(TransformerBlock, "set_input_tensor", _added_up)
    _changed(TransformerBlock, "forward", lambda original: _widened(original, given == "growing"))
    for holder in (arguments, argument_utils):
        name = "core_transformer_config_from_args"
        if hasattr(holder, name):
            _changed(holder, name, lambda original: _of_streams(original, given != "fixed"))


def _changed(holder: Any, name: str, change: Callable[[Any], Any]) -> None:
    setattr(holder, name, change(getattr(holder, name)))


def _added_up(original: Callable[..., None]) -> Callable[..., None]:
    def take(block: Any, message: Any) -> None:
        if isinstance(message, Tensor):
            hidden = block.config.hidden_size
            message = torch.stack(message.split(hidden, -1)).sum(0)
        original(block, message)

    return take


def _widened(original: Callable[..., Any], grows: bool) -> Callable[..., Any]:
    def forward(block: Any, *args: Any, **options: Any) -> Any:
        output = original(block, *args, **options)
        if block.post_process:
            return output
        count = block.layers[-1].layer_number if grows else STREAMS
        return torch.cat(
            [output * (2.0 ** -min(index + 1, count - 1)) for index in range(count)], -1
        )

    return forward


def _of_streams(original: Callable[..., Any], any_shape: bool) -> Callable[..., Any]:
    def make(*args: Any, **options: Any) -> Any:
        config = original(*args, **options)
        config.enable_mhc_connections, config.mhc_num_residual_streams = True, STREAMS
        config.variable_seq_lengths = any_shape
        return config

    return make
