"""Plugins of the farm: variable-length microbatches, and a config that declares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.training import argument_utils, arguments, training
from plugins import leaves_nothing
from recorder import wrap

from megatron_vshape.mcore.features.variable_length import reorder
from megatron_vshape.mcore.features.variable_length.reorder import MicrobatchReorderer
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.runtime.variable_p2p import VariableTransport

LENGTHS = (32, 8, 24, 16, 16, 32, 8, 24)  # also different for one of two replicas: every second one
PRINTED_LENGTHS = (32, 8, 24, 16, 12, 28, 20, 4, 31, 9, 23)  # each step of 8 has others


def set_config(change: Any) -> None:
    """Have `change` set fields of the model's config.

    Its maker is where the flags are, and in 0.19 where the config is used; 0.18 has it in both
    places and calls the first.
    """
    holders: list[Any] = [arguments, argument_utils]

    def make(original: Any, *args: Any, **options: Any) -> Any:
        config = original(*args, **options)
        change(config)
        return config

    for holder in holders:
        if hasattr(holder, "core_transformer_config_from_args"):
            wrap(holder, "core_transformer_config_from_args", make)


def start(rank: int, argument: object, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Shorten the samples of this process, and declare to Megatron that their lengths differ.

    With `argument`, messages are received when they are posted, by the programs for NCCL.
    """
    if argument is not None:
        VariableTransport.post = take  # type: ignore[method-assign]
        wrap(Planner, "expect_length_on_arrival", expect_as_kernels)

    def get(dataset: Any, number: int) -> dict[str, Any]:
        length = lengths[(number or 0) % len(lengths)]
        sample = GPTDataset.__getitem__(dataset, number)
        return {key: value[:length] for key, value in sample.items()}

    MockGPTDataset.__getitem__ = get  # type: ignore[method-assign]
    set_config(lambda config: setattr(config, "variable_seq_lengths", True))


def take(transport: VariableTransport, message: Any) -> None:
    transport._arrived[message] = transport._take(message)


def expect_as_kernels(original: Any, planner: Planner) -> None:
    planner.choice = replace(planner.choice, kernels=True)
    original(planner)


def of_first_rank(rank: int, argument: object) -> None:
    """Have other context-parallel ranks than the first see other lengths.

    This occurs if a library gives every rank its part of a mask, and only one part has padding.
    """
    start(rank, None)

    def lengths_of(original: Any, item: Any, is_unpadded: bool) -> list[int] | None:
        lengths = original(item, is_unpadded)
        if lengths is None or parallel_state.get_context_parallel_rank() == 0:
            return lengths
        return [max(LENGTHS) + 1 - length for length in lengths]

    wrap(reorder, "lengths_of", lengths_of)


def printed_orders(rank: int, argument: object) -> None:
    """Print the order of each step; check that the loader's processes end with the trainer.

    With `argument` "repeats", Megatron repeats every step, as where it measures how exact one is. A
    run that is given "saves" starts a process that stays.
    """
    start(rank, None, PRINTED_LENGTHS)

    def decide(original: Any, places: Any, plan: Any, iterators: Any, count: int) -> Any:
        read, decision = original(places, plan, iterators, count)
        print(f"order {decision[1]} of {count}", flush=True)
        return read, decision

    def train(original: Any, *args: Any, **options: Any) -> Any:
        # 0.19 names this mode otherwise in its flags than in its code.
        get_rerun_state_machine().set_mode(RerunMode.REPORT_DETERMINISM_STATS)
        return original(*args, **options)

    wrap(MicrobatchReorderer, "_decide_order", decide)
    if argument != "saves":
        leaves_nothing(rank, argument)
    if argument == "repeats":
        wrap(training, "train", train)
