"""A plugin of the farm: gives Megatron's trainer functions for data that is no loss."""

import functools
from typing import Any

import megatron.training


def process(data: Any, iteration: int, writer: Any) -> None:
    """Print the data of an evaluation."""
    print(f"non-loss data of iteration {iteration}: {data}")


def collect(model: Any) -> str:
    """Return data of this rank; called on all ranks."""
    return f"{len(model)} chunks"


def start(rank: int, names: list[str]) -> None:
    """Pass the functions that `given` names."""
    functions = {"process_non_loss_data_func": process, "non_loss_data_func": collect}
    chosen = {name: functions[name] for name in names}
    original: Any = megatron.training.pretrain

    @functools.wraps(original)
    def pretrain(*args: Any, **options: Any) -> None:
        original(*args, **options, **chosen)

    megatron.training.pretrain = pretrain
