"""Settings of the two-rank NCCL communicators, for both of torch's NCCL classes.

Up to torch 2.14, "nccl" is ProcessGroupNCCL; from 2.15 it is ProcessGroupNCCL2, unless
TORCH_DIST_USE_NCCL2=0. Both can split a communicator off the world's, which is collective over the
world: ProcessGroupNCCL2 as soon as a device is bound, unless it is set to be lazy; ProcessGroupNCCL
if a device is bound to the world's group. A lazy communicator of a pair is created by its two ranks
only, at their first message.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_vshape.runtime.hosts import ranks_in_environment

CLASSES = ("ProcessGroupNCCL", "ProcessGroupNCCL2")
"""Known classes of the backend "nccl". Others are used in the same way, with a log line."""

THREAD_BLOCKS = 4
"""Maximum thread blocks of a P2P kernel, which occupies them until its peer arrives.

NCCL's default is up to 32, of 132 multiprocessors of an H100. Not measured. To set another number,
use max_ctas of `pp` in Megatron's --nccl-communicator-config-path.
"""

THREAD_BLOCKS_IN_NODE = 8
"""The same within a node, where links are several times faster. Not measured."""

_TORCHS = ("blocking", "split_share", "comm_name")
"""Settings that torch writes into the options of a group when it creates the communicator."""

_UNSET = -(2**31)
"""NCCL_CONFIG_UNDEF_INT."""


def pair_options(
    like: dist.ProcessGroup | None, timeout: timedelta, ranks: Sequence[int] = ()
) -> Any:
    """Return the communicator options of these ranks; `timeout` is the limit of torch's watchdog.

    Settings that the user has given the group `like` are copied. Otherwise the communicator uses
    few thread blocks and a high-priority stream, so that messages do not queue behind computation.
    """
    group_options = (
        None if like is None else getattr(like._get_backend(torch.device("cuda")), "options", None)
    )
    set_fields = {} if group_options is None else _set_fields(group_options.config)
    is_high = (
        True if group_options is None or not set_fields else group_options.is_high_priority_stream
    )
    options = dist.ProcessGroupNCCL.Options(is_high)
    # torchrun, and SLURM by default, number ranks node by node; a wrong guess costs only speed.
    node_size = ranks_in_environment() or 1
    are_of_one_node = len({rank // node_size for rank in ranks}) == 1 < len(ranks)
    max_blocks = THREAD_BLOCKS_IN_NODE if are_of_one_node else THREAD_BLOCKS
    # Copy field by field: a copied config would share the name's memory, which NCCL frees with
    # each communicator.
    for name, value in (set_fields or {"max_ctas": max_blocks}).items():
        setattr(options.config, name, value)
    options._timeout = timeout
    if hasattr(options, "lazy_init"):
        options.lazy_init = True
    return options


def _set_fields(config: Any) -> dict[str, int | str]:
    """Return the user's settings of a communicator, without the defaults."""
    names = [name for name in dir(config) if not name.startswith("_") and name not in _TORCHS]
    values = {name: getattr(config, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | str) and value not in (_UNSET, "")
    }


@contextmanager
def made_by_pairs() -> Iterator[None]:
    """Return a context in which new groups are created by their ranks only, at the first message.

    The older class would split each pair off the world's communicator if a device is bound to it:
    all ranks of the world, for one pair after the other.
    """
    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if world is None or bound is None or hasattr(dist.ProcessGroupNCCL.Options, "lazy_init"):
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def class_of(group: dist.ProcessGroup) -> str:
    """Return the name of the class that carries the group's messages."""
    return type(group._get_backend(torch.device("cuda"))).__name__


def outside_allocator(device: torch.device) -> int:
    """Return the GPU memory used outside torch's allocator, in bytes; 0 on a CPU.

    This includes NCCL's buffers, the CUDA context, loaded kernels and other processes.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)
