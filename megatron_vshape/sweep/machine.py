"""Rates of a cluster for counted work, and the links to its hosts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from megatron_vshape.core.check.simulate import filled
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.offload_costs import with_copies_of
from megatron_vshape.rehearsal.gpus import BESIDE_GIB, GPUS, Gpu
from megatron_vshape.rehearsal.step_time import RATES, Rates
from megatron_vshape.sweep.configurations import SweepError
from megatron_vshape.sweep.files import Cluster
from megatron_vshape.view.numbers import GIB

UNKNOWN = "h100"
"""GPU whose estimates are used for an unknown device name."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster, its device as a GPU model, and the achieved rates of kernels."""

    cluster: Cluster
    gpu: Gpu
    rates: Rates
    beside_gib: float  # memory per device outside torch's allocator
    known: bool  # whether the rates are for this device

    @classmethod
    def of(cls, cluster: Cluster) -> "Machine":
        """Combine the cluster with default rates, unless its file overrides them.

        Raises:
            SweepError: the cluster file names an assumption that does not exist.
        """
        device = cluster.device
        named = [name for name in GPUS if name in device.name.lower()]
        like = GPUS[max(named, key=len, default=UNKNOWN)]
        wide = device.peak_tflops * 1e12
        gpu = replace(
            like,
            memory_bytes=int(device.memory_gib * GIB),
            multiprocessors=device.processors,
            bf16_flops=wide,
            flops_in_8_bits=wide * like.flops_in_8_bits / like.bf16_flops,
            flops_in_4_bits=wide * like.flops_in_4_bits / like.bf16_flops,
            memory_rate=device.memory_tb_per_s * 1e12,
            near_rate=cluster.inside_node_gb_per_s * 1e9,
            far_rate=cluster.between_nodes_gb_per_s * 1e9,
            node=cluster.devices_per_node,
        )
        given = dict(cluster.assumptions)
        beside = given.pop("beside_gib", BESIDE_GIB)
        rates = RATES[like.capability] if named else Rates()
        known = [each.name for each in fields(Rates)]
        for name in given:
            if name not in known:
                raise SweepError(
                    f"the cluster {cluster.name:.60}: there is no assumption {name!r:.60}; there "
                    f"are beside_gib, {', '.join(known)}"
                )
        gpu = replace(gpu, shares=tuple(given.items()))
        return cls(cluster, gpu, replace(rates, **given), beside, bool(named))

    def assumptions(self) -> Iterator[tuple[str, float, str]]:
        """Yield the assumptions: name, value and source."""
        fitted = "a guess: no GPU of that name is known"
        if self.known:
            fitted = f"{self.gpu.name.upper()}: rehearsal/step_time.py, benchmarks/evidence.md"
        values = {"beside_gib": (self.beside_gib, "an estimate: CUDA's context, NCCL's buffers")}
        values |= {
            each.name: (getattr(self.rates, each.name), fitted) for each in fields(self.rates)
        }
        for name, (value, source) in values.items():
            yield name, value, "the cluster file" if name in self.cluster.assumptions else source

    def copied(self, costs: Costs) -> Costs:
        """Make all activations of a stage offloadable, if the cluster has a host link."""
        link = self.cluster.host_link
        if link is None:
            return costs
        held, byte_us = costs.held_after_forward_bytes, 1 / (1e3 * link.gb_per_s)
        copied_us = tuple(byte_us * max(num_bytes, 1.0) for num_bytes in held)
        return with_copies_of(costs, copied_us, held, copied_us)

    @property
    def in_host_bytes(self) -> float:
        """Host memory per device for offloaded activations."""
        link = self.cluster.host_link
        if link is None or link.memory_gib is None:
            return math.inf
        return filled(link.memory_gib * GIB)
