"""The GPUs of a command, by name or by cluster file, and their memory to keep free."""

import argparse
from pathlib import Path

from megatron_vshape.cli.help import MEMORY, MODEL, group
from megatron_vshape.cli.options import headroom_of
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.gpus import GPUS, HEADROOM
from megatron_vshape.tuning.configurations import SweepError
from megatron_vshape.tuning.machine import Machine


def add_cluster_argument(parser: argparse.ArgumentParser) -> None:
    """Add --cluster."""
    group(parser, MODEL).add_argument(
        "--cluster",
        type=Path,
        metavar="FILE.yaml",
        help="Cluster file with number, memory, rates and links of the GPUs, as sweep reads it "
        "(instead of a GPU type)",
    )


def add_headroom_argument(parser: argparse.ArgumentParser) -> None:
    """Add --headroom."""
    group(parser, MEMORY).add_argument(
        "--headroom",
        metavar="SHARE|XGiB",
        help="Part of every GPU's memory to keep free, e.g. for a rollout engine: 5%%, 0.05 or "
        f"4GiB (default: {HEADROOM:.0%}%)",
    )


def headroom_bytes_of(text: str | None, memory_bytes: float) -> float:
    """Return the memory of a GPU that --headroom keeps free, in bytes.

    Raises:
        ScheduleError: the text is neither a share nor GiB, or nothing would be left.
    """
    return headroom_of(text or f"{HEADROOM:.0%}", memory_bytes, in_bytes=True)


def machine_of(options: argparse.Namespace) -> Machine:
    """Return the GPUs of --gpus or --cluster.

    Raises:
        ScheduleError: neither or both are given, the GPU is unknown, or the file cannot be read.
    """
    if (options.gpus is None) == (options.cluster is None):
        raise ScheduleError("advise needs one of --gpus NxGPU, as in 128xH100, and --cluster FILE")
    if options.cluster is not None:
        return of_cluster(options.cluster)
    number, _, name = options.gpus.lower().partition("x")
    if not number.isdigit() or not int(number) or name not in GPUS:
        raise ScheduleError(
            f"--gpus {options.gpus!r:.40} is not a number, an x and a GPU, as in 128xH100; "
            f"supported GPUs: {', '.join(GPUS)}"
        )
    return Machine(GPUS[name], int(number))


def of_cluster(path: Path) -> Machine:
    """Read the GPUs with their links from a cluster file.

    Raises:
        ScheduleError: the file cannot be read, or sets an unknown value.
    """
    try:
        from megatron_vshape.tuning.files import Cluster, load
    except ImportError as error:
        raise ScheduleError(
            f"--cluster needs {error.name}: pip install 'megatron-vshape[sweep]'"
        ) from None
    try:
        return Machine.of(load(path, Cluster))
    except SweepError as error:
        raise ScheduleError(f"--cluster {error}") from None
