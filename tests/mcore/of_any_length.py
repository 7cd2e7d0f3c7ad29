"""A plugin of the farm: microbatches of unlike length, and a config that says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import megatron.training.argument_utils as argument_utils
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

LENGTHS = (32, 8, 24, 16)


def start(rank: int, given: object) -> None:
    """Cut the samples of this process, and tell Megatron that they differ."""
    MockGPTDataset.__getitem__ = _cut(GPTDataset.__getitem__)  # type: ignore[method-assign]
    name = "core_transformer_config_from_args"
    setattr(argument_utils, name, _of_any_length(getattr(argument_utils, name)))


def _cut(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def get(dataset: Any, number: int) -> dict[str, Any]:
        length = LENGTHS[(number or 0) % len(LENGTHS)]
        return {key: value[:length] for key, value in original(dataset, number).items()}

    return get


def _of_any_length(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        config = original(*args, **options)
        config.variable_seq_lengths = True
        return config

    return make
