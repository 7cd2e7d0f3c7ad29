"""Communicators of pairs over NCCL: their settings, whichever class of torch's they are made by.

Up to torch 2.14 "nccl" is ProcessGroupNCCL. From 2.15 on it is ProcessGroupNCCL2, unless
TORCH_DIST_USE_NCCL2=0. That one makes a communicator as soon as a device is bound, out of the
world's, together with all ranks of the world, unless it is told to be lazy; the first one does so
where a device was bound to the world's group. A pair that is made lazily is made by its two ranks
alone, when they first meet.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_vshape.runtime.hosts import told_ranks

CLASSES = ("ProcessGroupNCCL", "ProcessGroupNCCL2")
"""Known classes of the backend "nccl"; others are used alike, with a log line."""

THREAD_BLOCKS = 4
"""Maximum thread blocks of a P2P kernel, which occupies them until its peer arrives.

NCCL's own choice is up to 32, of 132 multiprocessors of an H100. Not measured yet; max_ctas of `pp`
in Megatron's --nccl-communicator-config-path sets another number.
"""

THREAD_BLOCKS_IN_NODE = 8
"""The same within a node, whose links are several times faster. Not measured."""

_TORCHS = ("blocking", "split_share", "comm_name")
"""Settings that torch itself writes into a group's options when it makes the communicator."""

_UNSET = -(2**31)
"""NCCL_CONFIG_UNDEF_INT."""


def pair_options(
    like: dist.ProcessGroup | None, timeout: timedelta, ranks: Sequence[int] = ()
) -> Any:
    """Return the options of these ranks' communicator; `timeout` is what torch's watchdog allows.

    If the user has given the group `like` settings of its own, they are taken over. Else a pair has
    a stream of high priority, so that a message does not wait behind what is computed, and few
    thread blocks.
    """
    theirs = None if like is None else _options_of(like)
    own = {} if theirs is None else _set_fields(theirs.config)
    is_high = True if theirs is None or not own else theirs.is_high_priority_stream
    options = dist.ProcessGroupNCCL.Options(is_high)
    # One by one: the whole would share a name's memory, which NCCL frees with each communicator.
    most = THREAD_BLOCKS_IN_NODE if _are_of_one_node(ranks) else THREAD_BLOCKS
    for name, value in (own or {"max_ctas": most}).items():
        setattr(options.config, name, value)
    options._timeout = timeout
    if hasattr(options, "lazy_init"):
        options.lazy_init = True
    return options


def _are_of_one_node(ranks: Sequence[int]) -> bool:
    """Return whether the ranks share a node, as far as the launcher has told how many do."""
    size = told_ranks() or 1
    return len({rank // size for rank in ranks}) == 1 < len(ranks)


def _options_of(group: dist.ProcessGroup) -> Any:
    return getattr(group._get_backend(torch.device("cuda")), "options", None)


def _set_fields(config: Any) -> dict[str, int | str]:
    """Return the settings of a communicator that its user has not left to NCCL."""
    names = [each for each in dir(config) if not each.startswith("_") and each not in _TORCHS]
    values = {name: getattr(config, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | str) and value not in (_UNSET, "")
    }


@contextmanager
def made_by_pairs() -> Iterator[None]:
    """Have groups made meanwhile be made by their own ranks alone, when they first meet.

    An older class would split them off the world's communicator if a device is bound to that, all
    ranks of the world for every pair in turn.
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
    """Return the bytes of the device's memory that are taken, and not by torch's allocator.

    NCCL's buffers, the CUDA context, loaded kernels, and whatever else runs on the device. 0 for a
    device that is no GPU.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)
