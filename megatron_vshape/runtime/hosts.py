"""The other ranks: whether they exist, and how many share a host's memory and processors."""

import os
import re
import socket
from collections.abc import Mapping
from typing import TypeVar

import torch.distributed as dist

_LAUNCHERS = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH's and Intel's launcher
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH
    "PMI_LOCAL_SIZE",  # Cray's
)
_SLURM = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # as in 8(x2),4: of three nodes


_Value = TypeVar("_Value")


def gather_objects(value: _Value, group: dist.ProcessGroup | None = None) -> list[_Value]:
    """Return the values of all ranks of a group, by rank; None: of the world. Collective."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def has_peers() -> bool:
    """Return False if no other rank exists: in a dry run, on torch's backend "fake"."""
    return not dist.is_initialized() or dist.get_backend() != "fake"


def ranks_in_environment(environ: Mapping[str, str] = os.environ) -> int | None:
    """Read the number of ranks on this host from the launcher's environment; None if not set."""
    return _by_launcher(environ) or _by_slurm(environ)


def ranks_of_this_host() -> int:
    """Return the number of ranks on this host; collective over the world.

    If no launcher provides the number (srun without --ntasks-per-node, ranks started by hand), it
    counts the ranks with the same host name.
    """
    name = socket.gethostname()
    num_equal = gather_objects(name).count(name)
    # SLURM's number may be that of the allocation, in which other processes may run.
    return _by_launcher(os.environ) or max(_by_slurm(os.environ) or 1, num_equal)


def _by_launcher(environ: Mapping[str, str]) -> int | None:
    values = (environ.get(name, "") for name in _LAUNCHERS)
    return next((int(value) for value in values if value.isdecimal() and int(value)), None)


def _by_slurm(environ: Mapping[str, str]) -> int | None:
    text = next(filter(None, map(environ.get, _SLURM)), "")
    matches = [_REPEATED.fullmatch(match) for match in text.split(",")]
    counts = [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]
    if None in matches or not any(counts):
        return None
    node = environ.get("SLURM_NODEID", "")
    # The maximum is the safe number for a division of the host's resources.
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else max(counts)
