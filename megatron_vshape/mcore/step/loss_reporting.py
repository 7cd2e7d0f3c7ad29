"""The losses, brought to where Megatron's trainer reads them."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.mcore.layout import multi_token


class Courier:
    """Brings the loss rank's results to others; what it sends is kept until `forget`.

    With post-validation the ranks of a pipeline are in different steps at a time, and the loss
    rank may be the first to go on: it does not wait until their steps end too.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def bring_losses(
        self,
        store: list[Any],
        loss_rank: int,
        pipeline_group: dist.ProcessGroup,
        device: torch.device,
    ) -> list[Any]:
        """Return the loss rank's reports on the last pipeline rank too; elsewhere what is there.

        The trainer averages, prints and logs losses on the pipeline's last rank, whichever stage
        that holds. What the loss function reports is any nest of dicts, lists and tensors, so it
        travels as an object, with tensors on the CPU. What Megatron has counted of multi-token
        prediction goes along.
        """
        last_rank = pipeline_group.size() - 1
        rank = pipeline_group.rank()
        if loss_rank == last_rank or rank not in (loss_rank, last_rank):
            return store
        if rank == loss_rank:
            news = store, multi_token.take_metrics()
            content = pickle.dumps(_moved(news, torch.device("cpu")))
            parcel = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
            size = torch.tensor([parcel.numel()], dtype=torch.int64, device=device)
            self._send(size, last_rank, pipeline_group)
            self._send(parcel, last_rank, pipeline_group)
            return store
        size = torch.empty(1, dtype=torch.int64, device=device)
        dist.recv(size, group=pipeline_group, group_src=loss_rank)
        parcel = torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.recv(parcel, group=pipeline_group, group_src=loss_rank)
        # Written by another rank of this very run.
        brought, metrics = _moved(pickle.loads(parcel.cpu().numpy().tobytes()), device)
        multi_token.add_metrics(metrics)
        reports: list[Any] = brought
        return reports

    def bring_tokens(
        self, tokens: Tensor, loss_rank: int, pipeline_group: dist.ProcessGroup
    ) -> Tensor:
        """Return the loss rank's number of tokens, on every rank of the pipeline."""
        if pipeline_group.rank() != loss_rank:
            dist.recv(tokens, group=pipeline_group, group_src=loss_rank)
            return tokens
        for rank in range(pipeline_group.size()):
            if rank != loss_rank:
                self._send(tokens.clone(), rank, pipeline_group)
        return tokens

    def _send(self, tensor: Tensor, rank: int, group: dist.ProcessGroup) -> None:
        work = dist.isend(tensor, group=group, group_dst=rank)
        if work is not None:
            self._under_way.append((work, tensor))

    def forget(self) -> None:
        """Wait until what was sent has left; by the time the step is validated, it has."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()


def _moved(value: Any, device: torch.device) -> Any:
    """Return the nest with its tensors detached and on `device`."""
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        moved = [_moved(each, device) for each in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value
