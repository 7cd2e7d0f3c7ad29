"""torch.distributed without other ranks: communication completes immediately and is counted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from megatron_vshape.rehearsal.device import Current
from megatron_vshape.rehearsal.ledger import tensors_in
from megatron_vshape.rehearsal.step_time import DISPATCH, PERMUTED

_LARGER_SIDE: dict[str, tuple[int, str]] = {
    "all_reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "reduce": (0, "tensor"),
    "gather": (0, "tensor"),
    "scatter": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "_all_gather_base": (0, "output_tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
    "_reduce_scatter_base": (1, "input"),
    "all_to_all": (1, "input_tensor_list"),
    "all_to_all_single": (1, "input"),
    "all_reduce_coalesced": (0, "tensors"),
    "isend": (0, "tensor"),
    "irecv": (0, "tensor"),
    "send": (0, "tensor"),
    "recv": (0, "tensor"),
}
"""Position and name of the larger of input and output of each collective."""


class _Done:
    """A completed communication."""

    def wait(self, *unused: object) -> bool:
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> _Done:
        return self

    def append(self, *unused: object) -> None:
        """Accept another communication of a batch."""


def complete_at_once() -> None:
    """Replace torch.distributed's communication functions; groups use torch's "fake" backend."""
    for name, (position, key) in _LARGER_SIDE.items():
        replacement = _collective(name, position, key)
        for module in (dist, c10d):
            if hasattr(module, name):
                setattr(module, name, replacement)
    owners: tuple[Any, ...] = (dist, c10d)
    for module in owners:
        module.batch_isend_irecv = _run_batch
        module._coalescing_manager = _coalescing
        module.barrier = module.monitored_barrier = lambda *_, **__: None
        module.broadcast_object_list = lambda *_, **__: None
        module.all_gather_object = _all_gather_object
        module.gather_object = lambda *_, **__: None
        module.new_group = _fake_groups(c10d.new_group)


def start_process_group(rank: int, world: int) -> None:
    """Initialize this process as one rank of a world without other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


@functools.cache
def _fake_groups(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def new(ranks: Any = None, *unused: Any, **options: Any) -> Any:
        # Without options of NCCL, which the fake backend rejects.
        supported = ("group_desc", "use_local_synchronization")
        return new_group(
            ranks, backend="fake", **{name: options[name] for name in supported if name in options}
        )

    return new


def _collective(name: str, position: int, key: str) -> Callable[..., Any]:
    at_once = name in ("isend", "irecv")

    def run(*args: Any, **kwargs: Any) -> Any:
        if Current.ledger is not None:
            argument = args[position] if len(args) > position else kwargs.get(key)
            # Bytes of the larger side, from which `link_bytes_of` computes those on each link.
            tensors = argument if isinstance(argument, list | tuple) else (argument,)
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tensors))
            groups = (*args, kwargs.get("group"))
            group = next((word for word in groups if isinstance(word, dist.ProcessGroup)), None)
            count_collective(name, group, size)
        return _Done() if at_once or kwargs.get("async_op") else None

    return run


def count_collective(name: str, group: Any, size: float) -> None:
    """Count a communication of this kind in the group, and the bytes of its larger side."""
    ranks, span = _ranks_and_span(group)
    described = getattr(group, "group_desc", None) or "world"
    work = Current.ledger.work if Current.ledger is not None else None
    if work is not None:
        entry = work.exchanges.setdefault((name, described, ranks, span), [0, 0])
        entry[0] += 1
        entry[1] += size


def count_dispatch(
    group: Any, tokens: int, like: Tensor, copies: int, is_permuted: bool = False
) -> None:
    """Count a dispatch or combine of DeepEP or HybridEP; a token is counted once."""
    kind = f"{DISPATCH}{copies}{PERMUTED * is_permuted}"
    count_collective(kind, group, tokens * like.shape[1] * like.element_size())


@functools.cache
def _ranks_and_span(group: Any) -> tuple[int, int]:
    """Return the number of ranks of a group, and its span from the lowest to the highest rank."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return len(ranks), max(ranks) - min(ranks) + 1


def _run_batch(operations: list[Any]) -> list[_Done]:
    for operation in operations:
        # The replaced isend or irecv, which counts the message.
        operation.op(operation.tensor, group=operation.group)
    return [_Done() for _ in operations]


@contextlib.contextmanager
def _coalescing(*unused: Any, **options: Any) -> Iterator[_Done]:
    yield _Done()


def _all_gather_object(out: list[Any], value: Any, group: Any = None) -> None:
    # All ranks are assumed to have this rank's value.
    out[:] = [value] * len(out)
