"""Transfer of losses to the rank where Megatron's trainer reads them."""

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
    """Placeholder of a tensor in a nested structure: its index, dtype and shape."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


class LossGatherer:
    """Sends results of the loss rank to other ranks; buffers stay allocated until `forget`.

    With post-validation, the ranks of a pipeline can be in different steps, and the loss rank may
    be the first to continue. So it does not wait for the other ranks.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._form = b""  # pickled structure of the last reports sent or received

    def send_to_last_rank(
        self,
        store: list[Any],
        loss_rank: int,
        pipeline_group: dist.ProcessGroup,
        device: torch.device,
    ) -> list[Any]:
        """Return the loss rank's reports also on the last pipeline rank; elsewhere return `store`.

        The trainer averages, prints and logs losses on the last rank of the pipeline, whichever
        stage it has. The loss function may report any nested structure of dicts, lists and tensors.
        All tensors are sent from device to device as one byte tensor, without a wait on the host of
        the loss rank. The structure is sent only if it differs from that of the previous step. The
        metrics of multi-token prediction are sent along.
        """
        last_rank = pipeline_group.size() - 1
        rank = pipeline_group.rank()
        if loss_rank == last_rank or rank not in (loss_rank, last_rank):
            return store
        if rank == loss_rank:
            self._send_nest((store, multi_token.take_metrics()), last_rank, pipeline_group, device)
            return store
        # Unpickling is safe: the sender is a rank of this run.
        brought, metrics = self._receive_nest(loss_rank, pipeline_group, device)
        multi_token.add_metrics(metrics)
        reports: list[Any] = brought
        return reports

    def _send_nest(
        self, nest: Any, rank: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        tensors: list[Tensor] = []
        form = pickle.dumps(_without_tensors(nest, tensors))
        # The structure rarely changes, so in most steps only the tensors are sent.
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
        """Return the loss rank's number of tokens on every rank of the pipeline."""
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
        """Wait for all sends; they are complete by the time the step is validated."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return all tensors as one byte tensor, widest dtypes first so that all are aligned."""
    here = (each if each.device == device else each.to(device) for each in tensors)
    rows = [each.detach().reshape(-1) for each in here]
    rows.sort(key=lambda each: -each.itemsize)
    if not rows:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([each.contiguous().view(torch.uint8) for each in rows])


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Replace the tensors in a nested structure by placeholders, and append them to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1, value.dtype, tuple(value.shape))
    return _mapped(value, lambda each: _without_tensors(each, tensors))


def _with_tensors(nest: Any, values: Tensor) -> Any:
    """Replace the placeholders in a nested structure by tensors, which are views of `values`."""
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
    """Apply `of` to each element of a dict, list or tuple; return any other value unchanged."""
    if isinstance(value, dict):
        return {key: of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [of(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
