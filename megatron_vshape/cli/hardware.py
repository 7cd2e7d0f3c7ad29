"""The GPUs of a command: by name, or by a cluster file as `sweep` reads it."""

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_vshape.cli.help import MODEL, group
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.gpus import Gpu


def add_cluster_argument(parser: argparse.ArgumentParser) -> None:
    """Add --cluster."""
    group(parser, MODEL).add_argument(
        "--cluster",
        type=Path,
        metavar="FILE.yaml",
        help="Cluster file with number, memory, rates and links of the GPUs, as sweep reads it "
        "(instead of a GPU type)",
    )


def of_cluster(path: Path) -> tuple[int, Gpu]:
    """Read the number of GPUs, and the GPU with its links, from a cluster file.

    Raises:
        ScheduleError: the file cannot be read, or sets an unknown value.
    """
    try:
        from megatron_vshape.sweep.configurations import SweepError
        from megatron_vshape.sweep.files import Cluster, load
        from megatron_vshape.sweep.machine import Machine
    except ImportError as error:
        raise ScheduleError(
            f"--cluster needs {error.name}: pip install 'megatron-vshape[sweep]'"
        ) from None
    try:
        cluster = load(path, Cluster)
        machine = Machine.of(cluster)
    except SweepError as error:
        raise ScheduleError(f"--cluster {error}") from None
    gpu = machine.gpu
    if not machine.known:
        gpu = replace(gpu, name=cluster.device.name.lower())
    host_rate = gpu.host_rate if cluster.host_link is None else cluster.host_link.gb_per_s * 1e9
    return cluster.num_devices, replace(gpu, beside_gib=machine.beside_gib, host_rate=host_rate)
