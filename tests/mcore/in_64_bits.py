"""A plugin of the farm's ranks: trains in 64 bits, where rounding cannot hide a fault."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.training import arguments, initialize


def start(rank: int, given: Any) -> None:
    """Set the type of parameters, gradients and messages after Megatron has parsed its options."""
    for module in (arguments, initialize):
        module.validate_args = _in_64_bits(arguments.validate_args)


def _in_64_bits(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate(args: Namespace, *arguments: Any, **options: Any) -> Any:
        result = original(args, *arguments, **options)
        args.params_dtype = torch.float64
        torch.set_default_dtype(torch.float64)  # norms have no other type to follow
        return result

    return validate
