"""A plugin of the farm: variable-length microbatches, and a config that declares them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.training import argument_utils, arguments

from megatron_vshape.core.program.instructions import Message
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.runtime.variable_p2p import VariableTransport

LENGTHS = (32, 8, 24, 16, 16, 32, 8, 24)  # also different for one of two replicas: every second one


def start(rank: int, given: object) -> None:
    """Shorten the samples of this process, and declare to Megatron that their lengths differ.

    With `given`, messages are received when they are posted, by the programs for NCCL.
    """
    if given is not None:
        VariableTransport.post = _take  # type: ignore[method-assign]
        Planner.expect_length_on_arrival = _as_kernels(Planner.expect_length_on_arrival)  # type: ignore[method-assign]
    MockGPTDataset.__getitem__ = _cut(GPTDataset.__getitem__)  # type: ignore[method-assign]
    name = "core_transformer_config_from_args"
    # Where the flags are, and in 0.19 where the model's config is made; 0.18 has it in both places
    # and calls the first.
    holders: list[Any] = [arguments, argument_utils]
    for holder in holders:
        if hasattr(holder, name):
            setattr(holder, name, _of_any_length(getattr(holder, name)))


def _take(transport: VariableTransport, message: Message) -> None:
    transport._arrived[message] = transport._take(message)


def _as_kernels(original: Callable[[Planner], None]) -> Callable[[Planner], None]:
    def expect(planner: Planner) -> None:
        planner.choice = replace(planner.choice, kernels=True)
        original(planner)

    return expect


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
