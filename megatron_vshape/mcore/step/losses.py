"""The losses of a step: their checks, and their transfer to the rank where the trainer reads them.

A training script makes Megatron validate the loss of every microbatch where it is computed. To test
a device value for NaN, the host must wait for the device. So it would wait in every F of the last
stage and launch no work meanwhile. In the V placement this is on rank 0, which has no idle time.

Megatron acts on the result of a check only after the step, so checking later has no disadvantage.
The calls are stored with their values, and run in order once the values are on the host. One copy
for all values starts after the last pass. A training step finalizes its gradients before it waits
for the copy, so the GPU stays busy. With --rerun-mode disabled, a bad loss raises an exception at
that point; it still names the pass that computed the loss.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.core.program.instructions import Instruction
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.hosts import has_peers
from megatron_vshape.runtime.program_runner import Place


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """Placeholder of a tensor in a nested structure: its index, dtype and shape."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


class LossGatherer:
    """Sends results of the loss rank to other ranks; buffers stay allocated until `wait_for_sends`.

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
        if not has_peers():
            return store if rank == loss_rank else [{}]
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

    def broadcast_tokens(
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

    def wait_for_sends(self) -> None:
        """Wait for all sends; they are complete by the time the step is validated."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return all tensors as one byte tensor, widest dtypes first so that all are aligned."""
    here = (tensor if tensor.device == device else tensor.to(device) for tensor in tensors)
    rows = [tensor.detach().reshape(-1) for tensor in here]
    rows.sort(key=lambda row: -row.itemsize)
    if not rows:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([row.contiguous().view(torch.uint8) for row in rows])


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Replace the tensors in a nested structure by placeholders, and append them to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Placeholder(len(tensors) - 1, value.dtype, tuple(value.shape))
    return _mapped(value, lambda part: _without_tensors(part, tensors))


def _with_tensors(nest: Any, values: Tensor) -> Any:
    """Replace the placeholders in a nested structure by tensors, which are views of `values`."""
    places: list[_Placeholder] = []

    def find(value: Any) -> Any:
        return places.append(value) if isinstance(value, _Placeholder) else _mapped(value, find)

    find(nest)
    starts, end = {}, 0
    for placeholder in sorted(places, key=lambda placeholder: -placeholder.dtype.itemsize):
        starts[placeholder.index], end = end, end + placeholder.num_bytes

    def filled(value: Any) -> Any:
        if not isinstance(value, _Placeholder):
            return _mapped(value, filled)
        tensor_bytes = values[starts[value.index] : starts[value.index] + value.num_bytes]
        return tensor_bytes.view(value.dtype).reshape(value.shape)

    return filled(nest)


def _mapped(value: Any, of: Callable[[Any], Any]) -> Any:
    """Apply `of` to each element of a dict, list or tuple; return any other value unchanged."""
    if isinstance(value, dict):
        return {key: of(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        parts = [of(entry) for entry in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class _Kept(NamedTuple):
    check: Callable[[Tensor], None]  # Megatron's check with all arguments but the result
    result: Tensor
    instruction: Instruction | None  # the running instruction at the call


class _Fetched(NamedTuple):
    checks: list[_Kept]
    values: Tensor  # on the host, valid after `arrived`
    arrived: torch.cuda.Event | None  # None: already valid


class LateChecks:
    """Checks recorded since the step started or since the last `make`."""

    def __init__(self, place: Place) -> None:
        """Set the position of the program, which a failing check reports."""
        self._place = place
        self._kept: list[_Kept] = []
        self._fetched: list[_Fetched] = []

    def add(self, check: Callable[[Tensor], None], result: Tensor) -> None:
        """Store a check with a copy of the result, because Megatron then divides it in place."""
        self._kept.append(_Kept(check, result.detach().clone(), self._place.instruction))

    def fetch(self) -> None:
        """Start to copy the stored results to the host, without waiting."""
        checks_of_step, self._kept = self._kept, []
        for _, alike in groupby(
            checks_of_step, key=lambda check: (check.result.device, check.result.dtype)
        ):
            checks = list(alike)
            results = torch.stack([check.result for check in checks])
            # From a GPU, torch copies into pinned memory, so the copy is asynchronous.
            values = results.to("cpu", non_blocking=True)
            arrived = None
            if results.is_cuda:
                arrived = torch.cuda.Event()
                arrived.record()
            self._fetched.append(_Fetched(checks, values, arrived))

    def make(self) -> None:
        """Run the stored checks, each with the program position of its recording.

        Raises the exceptions of the checks.
        """
        self.fetch()
        fetched, self._fetched = self._fetched, []
        now = self._place.instruction
        for checks, values, arrived in fetched:
            if arrived is not None:
                arrived.synchronize()
            for check, value in zip(checks, values, strict=True):
                # A failing check reports the pass in which the loss was computed.
                self._place.instruction = check.instruction
                check.check(value)
        self._place.instruction = now


class LateFaults:
    """Faults whose conditions stay on the device until the passes of a step have run.

    Reading a condition makes the host wait for all queued device work, so it is read once.
    """

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}  # by message, whether it applies

    def add(self, condition: Tensor | bool, message: str) -> None:
        """Record a fault that applies if `condition` is true.

        Raises:
            UnsupportedError: The condition is known on the host, and true.
        """
        if isinstance(condition, bool):
            if condition:
                raise UnsupportedError(message)
            return
        earlier = self._found.get(message)
        self._found[message] = condition if earlier is None else earlier | condition

    def check(self) -> None:
        """Raise UnsupportedError for the first fault that applies; waits for the device once."""
        conditions, self._found = self._found, {}
        if not conditions:
            return
        for message, applies in zip(
            conditions, torch.stack([*conditions.values()]).tolist(), strict=True
        ):
            if applies:
                raise UnsupportedError(message)


def unlike(tensor: Tensor, expected: Tensor) -> Tensor | bool:
    """Compare the bits of two tensors on the device, where NaN equals NaN.

    Returns:
        Whether they differ: True for different shapes, else a tensor on their device.
    """
    if tensor.shape != expected.shape:
        return True
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
    return (tensor.detach().to(expected).view(bits) != expected.detach().view(bits)).any()


@contextmanager
def checked_late(state: StepState, place: Place) -> Iterator[LateChecks]:
    """Defer the loss checks of this context; yields the object that runs them.

    If a pass fails, no check runs.
    """
    checks = LateChecks(place)
    with state.setting(late_checks=checks):
        yield checks
    checks.fetch()


def can_wait(machine: Any, result: Any, rejection_func: Any, comparison_func: Any) -> bool:
    """Return whether a check has the same result later, on a host copy of the value.

    True for the functions of Megatron's scripts, which depend only on the value. `machine` is
    Megatron's RerunStateMachine.
    """
    function = getattr(rejection_func, "func", rejection_func)  # unwrap a partial
    is_known = function in (torch.isnan, torch.isinf, machine.is_unexpectedly_large)
    return is_known and comparison_func is None and isinstance(result, Tensor) and not result.dim()
