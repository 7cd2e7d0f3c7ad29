"""Memory of a rank other than activations, so that a memory limit can apply to the full device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from megatron_vshape.mcore.setup.choice import GIB
from megatron_vshape.runtime import nccl
from megatron_vshape.runtime.weight_jobs import plain_tensors

T = TypeVar("T")

ADAM_STATES = 2
"""Number of fp32 moments per parameter in Adam."""


class StaticMemory(NamedTuple):
    """Bytes of one rank, by the categories in the log."""

    parameters: int
    gradients: int
    optimizer: int
    copy: int  # backup to roll back a step: see `features.post_validation.backup`
    no_tensors: int  # NCCL buffers, CUDA context, loaded kernels: see nccl.outside_allocator

    @property
    def total(self) -> int:
        """Return the sum of all categories."""
        return sum(self)


def static_memory(
    model: Sequence[nn.Module], optimizer: Any, post_validates: bool = False
) -> StaticMemory:
    """Return this rank's bytes before the first step, after the P2P communicators exist.

    The optimizer state is an estimate of Adam's allocation in its first step. It has two fp32
    moments of every parameter in this rank's shard (distributed optimizer), plus fp32 copies of
    parameters if the optimizer keeps them. With `post_validates`, the updated parameters and
    moments count twice.
    """
    own = [each for chunk in model for each in chunk.parameters()]
    main_grads = [getattr(each, "main_grad", None) for each in own]
    gradients = [each for each in main_grads if isinstance(each, Tensor)]
    stepped = [each for group in optimizer.param_groups for each in group["params"]]
    held = {_storage(each) for each in own}
    # A stepped parameter outside the model's storages is an fp32 copy.
    copies = [each for each in stepped if _storage(each) not in held]
    moments = ADAM_STATES * 4 * sum(each.numel() for each in stepped)
    return StaticMemory(
        _bytes(own),
        _bytes(gradients),
        _bytes(copies) + moments,
        _bytes(stepped) + moments if post_validates else 0,
        nccl.outside_allocator(own[0].device),
    )


def _storage(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage; quantized tensors have no data pointer."""
    name: int = tensor.untyped_storage()._cdata
    return name


def _bytes(tensors: Iterable[Tensor]) -> int:
    plain = [part for each in tensors for part in plain_tensors(each)]
    return sum(each.numel() * each.element_size() for each in plain)


def most_of_replicas(
    own: T, pipeline_group: dist.ProcessGroup, size: Callable[[T], float]
) -> list[T]:
    """Return the largest value among data-parallel replicas, per pipeline rank.

    All ranks of the world call this and get the same result. Replicas may differ, for example if an
    optimizer shards by layer, and each would then plan a different schedule.
    """
    place = pipeline_group.rank()
    everyones = [(place, own)] * dist.get_world_size()
    dist.all_gather_object(everyones, (place, own))
    return [
        max((each for at, each in everyones if at == rank), key=size)
        for rank in range(pipeline_group.size())
    ]


def table(
    everyones: Sequence[StaticMemory], reserved_bytes: Sequence[float], limit_bytes: float
) -> str:
    """Format how the memory limit is divided, one line per rank, in GiB.

    `reserved_bytes` minus the static memory is reserved for P2P buffers.
    """
    names = [each.replace("_", " ") for each in StaticMemory._fields]
    lines = ["GiB per rank: " + ", ".join([*names, "messages", "activations may take"])]
    for rank, (each, reserved) in enumerate(zip(everyones, reserved_bytes, strict=True)):
        values = [*each, reserved - each.total, limit_bytes - reserved]
        lines.append(f"  rank {rank}: " + ", ".join(f"{value / GIB:.3f}" for value in values))
    return "\n".join(lines)
