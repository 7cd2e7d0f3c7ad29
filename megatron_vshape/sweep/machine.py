"""How long a kernel, a collective or a message takes on a cluster's devices, in microseconds.

A matrix product is a roofline: compute at an efficiency that depends on its shape, or memory
traffic, whichever is longer. Collectives have a rate that grows with their size.
"""

import math
from dataclasses import dataclass

from megatron_vshape.core.check.simulate import filled
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.sweep.assumptions import Assumptions, assumptions_for
from megatron_vshape.sweep.files import Cluster
from megatron_vshape.view.numbers import GIB


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster with the assumptions about it."""

    cluster: Cluster
    assume: Assumptions

    @classmethod
    def of(cls, cluster: Cluster) -> "Machine":
        """Return the cluster with the assumptions its file leaves or replaces."""
        return cls(cluster, assumptions_for(cluster))

    @property
    def peak_flops_per_us(self) -> float:
        """Return the data sheet's rate of one device."""
        return self.cluster.device.peak_tflops * 1e6

    @property
    def memory_bytes_per_us(self) -> float:
        """Return the memory rate that a stream reaches."""
        return self.cluster.device.memory_tb_per_s * 1e6 * self.assume.memory_fraction

    def product_us(
        self, rows: int, columns: int, depth: int, operand_bytes: int = 2, result_bytes: int = 2
    ) -> float:
        """Return the time of [rows, depth] x [depth, columns], without its launch.

        `result_bytes` counts what is read and written per element of the result.
        """
        flops = 2.0 * rows * columns * depth
        rate = self.peak_flops_per_us * self.assume.gemm_fraction
        pipelining = depth / (depth + self.assume.depth_half)
        compute = flops / (rate * self._tiling(rows, columns) * pipelining)
        traffic = operand_bytes * (rows + columns) * depth + result_bytes * rows * columns
        return max(compute, traffic / self.memory_bytes_per_us)

    def _tiling(self, rows: int, columns: int) -> float:
        """Return the share of tiles and waves that is not padding.

        Work is dealt in tiles, the tiles in waves over the processors, two tiles each; what the
        last tile and the last wave leave empty is lost.
        """
        high, wide = self.assume.tile_rows, self.assume.tile_columns
        tiles = math.ceil(rows / high) * math.ceil(columns / wide)
        used = (rows / high) * (columns / wide) / tiles
        waves = tiles / (2 * self.cluster.device.processors)
        # Small products are cut along their depth too (split-K), so half a wave is the least loss.
        return used * waves / (math.ceil(2 * waves) / 2)

    def attention_us(self, flops: float, sequence: int) -> float:
        """Return the time of flash attention's products; half of them are masked away."""
        assume = self.assume
        fraction = assume.attention_fraction * sequence / (sequence + assume.attention_half_tokens)
        return flops / (self.peak_flops_per_us * fraction)

    def traffic_us(self, num_bytes: float) -> float:
        """Return the time of a layer's kernels that do little but read and write."""
        rate = self.cluster.device.memory_tb_per_s * 1e6 * self.assume.elementwise_fraction
        return num_bytes / rate

    def collective_us(self, num_bytes: float, size: int, stride: int = 1) -> float:
        """Return the time of an all-gather or reduce-scatter of `num_bytes` in all.

        The group's `size` members stand `stride` ranks apart; one that leaves a node runs at the
        network's rate.
        """
        if size == 1:
            return 0.0
        rate = self._link_gb_per_s((size - 1) * stride + 1)
        rate *= num_bytes / (num_bytes + self.assume.collective_half_bytes)
        return (size - 1) / size * num_bytes / (rate * 1e3)

    def message_us(self, num_bytes: float, stride: int, num_devices: int) -> float:
        """Return the time of a message to the next pipeline device, `stride` ranks on.

        The slowest hop counts: every hop is on the way of every microbatch.
        """
        if num_devices == 1:
            return 0.0
        rate = self._link_gb_per_s(num_devices * stride)
        return self.assume.message_us + num_bytes / (rate * 1e3)

    def copied(self, costs: Costs) -> Costs:
        """Return the costs where all that a stage holds may wait in host memory.

        As they are where the cluster's file says nothing of a link there. Those who share a link
        all copy, so that each has its part of the rate.
        """
        link = self.cluster.host_link
        if link is None:
            return costs
        held, byte_us = costs.held_after_forward_bytes, link.shared_by / (1e3 * link.gb_per_s)
        copied_us = tuple(byte_us * max(num_bytes, 1.0) for num_bytes in held)
        return costs.with_copies_of(copied_us, held, copied_us, link.half_duplex)

    @property
    def in_host_bytes(self) -> float:
        """Return how much of a device may wait in host memory."""
        link = self.cluster.host_link
        if link is None or link.memory_gib is None:
            return math.inf
        return filled(link.memory_gib * GIB)

    def _link_gb_per_s(self, num_ranks: int) -> float:
        """Return the rate reached among so many ranks: that of the network, if a node has fewer."""
        if num_ranks <= self.cluster.devices_per_node:
            return self.cluster.inside_node_gb_per_s * self.assume.collective_fraction
        return self.cluster.between_nodes_gb_per_s * self.assume.network_fraction
