"""The losses, brought to where Megatron's trainer reads them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def bring_losses(
    store: list[Any], loss_rank: int, pipeline_group: dist.ProcessGroup, device: torch.device
) -> list[Any]:
    """Return the loss rank's reports on the last pipeline rank too; elsewhere what is there.

    The trainer averages, prints and logs losses on the pipeline's last rank, whichever stage
    that holds. What the loss function reports is any nest of dicts, lists and tensors, so it
    travels as an object, with tensors on the CPU.
    """
    last_rank = pipeline_group.size() - 1
    rank = pipeline_group.rank()
    if loss_rank == last_rank or rank not in (loss_rank, last_rank):
        return store
    ranks = dist.get_process_group_ranks(pipeline_group)
    if rank == loss_rank:
        parcel = [_moved(store, torch.device("cpu"))]
        dist.send_object_list(parcel, dst=ranks[last_rank], group=pipeline_group, device=device)
        return store
    parcel = [None]
    dist.recv_object_list(parcel, src=ranks[loss_rank], group=pipeline_group, device=device)
    return _moved(parcel[0], device)


def _moved(value: Any, device: torch.device) -> Any:
    """Return the nest with its tensors detached and on `device`."""
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, device) for each in value)
    return value
