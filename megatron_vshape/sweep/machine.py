"""A cluster as counted work is priced on it, and the links to its devices' hosts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from megatron_vshape.core.check.simulate import filled
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.rehearsal.gpus import BESIDE_GIB, GPUS, Gpu
from megatron_vshape.rehearsal.step_time import RATES, Rates
from megatron_vshape.sweep.files import Cluster, SweepError
from megatron_vshape.view.numbers import GIB

UNKNOWN = "h100"
"""As which a device is rehearsed whose name has no known GPU's in it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster, its device as one that work is priced on, and what kernels reach of its rates."""

    cluster: Cluster
    gpu: Gpu
    rates: Rates
    beside_gib: float  # of a device, that torch does not hand out
    known: bool  # whether the rates are of such a device

    @classmethod
    def of(cls, cluster: Cluster) -> "Machine":
        """Return the cluster with the rates that its file leaves or replaces.

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
        return cls(cluster, gpu, replace(rates, **given), beside, bool(named))

    def assumptions(self) -> Iterator[tuple[str, float, str]]:
        """Yield what is assumed, by name, with its value and its source."""
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
        """Return the costs where all that a stage holds may wait in host memory.

        As they are where the cluster's file says nothing of a link there.
        """
        link = self.cluster.host_link
        if link is None:
            return costs
        held, byte_us = costs.held_after_forward_bytes, 1 / (1e3 * link.gb_per_s)
        copied_us = tuple(byte_us * max(num_bytes, 1.0) for num_bytes in held)
        return costs.with_copies_of(copied_us, held, copied_us)

    @property
    def in_host_bytes(self) -> float:
        """Return how much of a device may wait in host memory."""
        link = self.cluster.host_link
        if link is None or link.memory_gib is None:
            return math.inf
        return filled(link.memory_gib * GIB)
