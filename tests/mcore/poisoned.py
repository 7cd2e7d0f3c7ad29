"""A plugin of the farm's ranks: storages that are emptied, or not filled yet, are NaN."""

from typing import Any

import torch
from torch import UntypedStorage

resize = UntypedStorage.resize_


def fill(storage: UntypedStorage) -> None:
    """Make it NaN in every dtype."""
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(0xFF)


def poisoning(storage: UntypedStorage, size: int) -> UntypedStorage:
    """Resize, and fill the memory with values that cannot be mistaken for data."""
    fill(storage)
    result = resize(storage, size)
    fill(storage)
    return result


def start(rank: int, given: Any) -> None:
    """Poison storages in this process."""
    UntypedStorage.resize_ = poisoning  # type: ignore[method-assign]
