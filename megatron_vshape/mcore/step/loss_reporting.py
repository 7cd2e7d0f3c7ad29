"""The losses, brought to where Megatron's trainer reads them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.mcore.layout import multi_token


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a nest has a tensor: its kind, and its place among all of them."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


class Courier:
    """Brings the loss rank's results to others; what it sends is kept until `forget`.

    With post-validation the ranks of a pipeline are in different steps at a time, and the loss
    rank may be the first to go on: it does not wait until their steps end too.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._form = b""  # of the last reports that were sent or received

    def bring_losses(
        self,
        store: list[Any],
        loss_rank: int,
        pipeline_group: dist.ProcessGroup,
        device: torch.device,
    ) -> list[Any]:
        """Return the loss rank's reports on the last pipeline rank too; elsewhere what is there.

        The trainer averages, prints and logs losses on the pipeline's last rank, whichever stage
        that holds. What the loss function reports is any nest of dicts, lists and tensors. Its
        tensors travel from device to device as the bytes of one; the host of the loss rank waits
        for none of them. The rest travels as an object, where it is not that of the step before.
        What Megatron has counted of multi-token prediction goes along.
        """
        last_rank = pipeline_group.size() - 1
        rank = pipeline_group.rank()
        if loss_rank == last_rank or rank not in (loss_rank, last_rank):
            return store
        if rank == loss_rank:
            self._send_nest((store, multi_token.take_metrics()), last_rank, pipeline_group, device)
            return store
        # Written by another rank of this very run.
        brought, metrics = self._receive_nest(loss_rank, pipeline_group, device)
        multi_token.add_metrics(metrics)
        reports: list[Any] = brought
        return reports

    def _send_nest(
        self, nest: Any, rank: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        tensors: list[Tensor] = []
        form = pickle.dumps(_without_tensors(nest, tensors))
        is_new = form != self._form
        values = _packed(tensors, device)
        sizes = torch.tensor([values.numel(), len(form) if is_new else 0], device=device)
        parcels = [sizes, values]
        if is_new:
            self._form = form
            parcels.append(torch.frombuffer(bytearray(form), dtype=torch.uint8).to(device))
        for parcel in parcels:
            if parcel.numel():
                self._send(parcel, rank, group)

    def _receive_nest(self, rank: int, group: dist.ProcessGroup, device: torch.device) -> Any:
        sizes = torch.empty(2, dtype=torch.int64, device=device)
        dist.recv(sizes, group=group, group_src=rank)
        parcels = []
        for size in sizes.tolist():
            parcels.append(torch.empty(size, dtype=torch.uint8, device=device))
            if size:
                dist.recv(parcels[-1], group=group, group_src=rank)
        values, form = parcels
        if form.numel():
            self._form = form.cpu().numpy().tobytes()
        return _with_tensors(pickle.loads(self._form), values)

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


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of all tensors in one, the widest numbers first, where all are aligned."""
    here = (each if each.device == device else each.to(device) for each in tensors)
    rows = [each.detach().reshape(-1) for each in here]
    rows.sort(key=lambda each: -each.itemsize)
    if not rows:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([each.contiguous().view(torch.uint8) for each in rows])


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return the nest with places where its tensors were, which are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1, value.dtype, tuple(value.shape))
    return _mapped(value, lambda each: _without_tensors(each, tensors))


def _with_tensors(nest: Any, values: Tensor) -> Any:
    """Return the nest with its tensors in place, which are parts of `values`, their bytes."""
    places: list[_Place] = []

    def find(value: Any) -> Any:
        return places.append(value) if isinstance(value, _Place) else _mapped(value, find)

    find(nest)
    starts, end = {}, 0
    for place in sorted(places, key=lambda each: -each.dtype.itemsize):
        starts[place.at], end = end, end + place.num_bytes

    def filled(value: Any) -> Any:
        if not isinstance(value, _Place):
            return _mapped(value, filled)
        own = values[starts[value.at] : starts[value.at] + value.num_bytes]
        return own.view(value.dtype).reshape(value.shape)

    return filled(nest)


def _mapped(value: Any, of: Callable[[Any], Any]) -> Any:
    """Return a nest of the same types with `of` of each of its parts; anything else as it is."""
    if isinstance(value, dict):
        return {key: of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [of(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
