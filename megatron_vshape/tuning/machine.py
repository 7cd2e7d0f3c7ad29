"""GPUs of a run: number, rates, links, memory, and links to their hosts."""

import logging
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

from megatron_vshape.core.check.simulate import usable_host_bytes
from megatron_vshape.core.model.costs import Costs, with_copies_of
from megatron_vshape.rehearsal.gpus import GPUS, MEASURED_GIB, Gpu
from megatron_vshape.rehearsal.step_time import Rates
from megatron_vshape.tuning.configurations import SweepError
from megatron_vshape.view.numbers import GIB

if TYPE_CHECKING:  # needs pydantic, and `advise` reads no files
    from megatron_vshape.tuning.files import Cluster

logger = logging.getLogger(__name__)

UNKNOWN = "h100"
"""GPU whose formats and capability are used for an unknown device name."""


REMOVED = {
    "pass_us": "a virtual stage costs no fixed time",
    "launch_on_grace_us": "hosts with Grace CPUs have launch_us and module_us, too",
}
"""Assumptions of earlier versions that are ignored, and the reasons."""


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs that a configuration runs on."""

    gpu: Gpu
    num_devices: int
    has_measured_rates: bool = True  # whether the rates are for this GPU
    copies: bool = False  # whether plans offload activations to the hosts
    moved_limit_bytes: float = math.inf  # host memory per device for them

    @classmethod
    def of(cls, cluster: "Cluster") -> "Machine":
        """Return the GPUs of a cluster file.

        Raises:
            SweepError: the cluster file names an assumption that does not exist, or software that
                was not measured on its GPU.
        """
        device, link = cluster.device, cluster.host_link
        gpu_name = gpu_of_device(device.name)
        like = GPUS[gpu_name or UNKNOWN]
        for name in REMOVED.keys() & cluster.assumptions.keys():
            logger.warning("assumption %s is ignored: %s.", name, REMOVED[name])
        assumptions = {
            name: value for name, value in cluster.assumptions.items() if name not in REMOVED
        }
        # A cluster file's own value includes NCCL's buffers.
        communicator = 0 if "beside_gib" in assumptions else like.communicator_bytes
        outside_gib = assumptions.pop("beside_gib", _beside_gib(cluster, like))
        rate_names = [rate.name for rate in fields(Rates)]
        for name in assumptions:
            if name not in rate_names:
                raise SweepError(
                    f"the cluster {cluster.name:.60}: there is no assumption {name!r:.60}; there "
                    f"are beside_gib, {', '.join(rate_names)}"
                )
        # The rates fitted to a GPU are no better guess for an unknown one than the round defaults.
        shares = assumptions if gpu_name else asdict(Rates()) | assumptions
        wide = device.peak_tflops * 1e12
        gpu = replace(
            like,
            name=gpu_name or device.name.lower(),
            memory_bytes=int(device.memory_gib * GIB),
            multiprocessors=device.processors,
            bf16_flops=wide,
            flops_in_8_bits=wide * like.flops_in_8_bits / like.bf16_flops,
            flops_in_4_bits=wide * like.flops_in_4_bits / like.bf16_flops,
            memory_rate=device.memory_tb_per_s * 1e12,
            near_rate=cluster.inside_node_gb_per_s * 1e9,
            far_rate=cluster.between_nodes_gb_per_s * 1e9,
            node=cluster.devices_per_node,
            host_rate=like.host_rate if link is None else link.gb_per_s * 1e9,
            beside_gib=outside_gib,
            communicator_bytes=communicator,
            shares=tuple(shares.items()),
        )
        host_gib = None if link is None else link.memory_gib
        return cls(
            gpu,
            cluster.num_devices,
            bool(gpu_name),
            link is not None,
            math.inf if host_gib is None else usable_host_bytes(host_gib * GIB),
        )

    def copied(self, costs: Costs) -> Costs:
        """Make all activations of a stage offloadable, if plans use the link to the host."""
        if not self.copies:
            return costs
        activation_bytes, byte_us = costs.held_after_forward_bytes, 1e6 / self.gpu.host_rate
        copied_us = tuple(byte_us * max(num_bytes, 1.0) for num_bytes in activation_bytes)
        return with_copies_of(costs, copied_us, activation_bytes, copied_us)


def gpu_of_device(device_name: str) -> str:
    """Return the known GPU that a device name contains as a whole word, "" if there is none.

    GH200-96GB contains gh200, but not h200.
    """
    matches = [
        name
        for name in GPUS
        if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", device_name.lower())
    ]
    return max(matches, key=len, default="")


def _beside_gib(cluster: "Cluster", gpu: Gpu) -> float:
    """Return the memory of the CUDA context and of libraries for the software of a cluster file.

    Raises:
        SweepError: the software was not measured on GPUs of this generation.
    """
    generation, software = gpu.capability[0], cluster.software
    if software is None:
        return gpu.beside_gib
    if (software, generation) not in MEASURED_GIB:
        measured = ", ".join(name for name, major in MEASURED_GIB if major == generation) or "none"
        raise SweepError(
            f"the cluster {cluster.name:.60}: software {software} was not measured on GPUs like "
            f"{gpu.name.upper()} (measured there: {measured}). Remove software, or set the memory "
            "of CUDA and libraries: assumptions: {beside_gib: GIB}"
        )
    return MEASURED_GIB[software, generation]
