"""GPUs that estimates support: memory, peak rates and links, and whether a rank fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

GIB = 2**30
MIB = 2**20

_NCCL_BYTES = 16 * 2 * 4 * MIB
"""Approximate buffers of a communicator: NCCL_BUFFSIZE (4 MiB) for 16 channels and two peers of a
ring. Both numbers depend on the machine."""

HEADROOM = 0.04
"""Default share of a GPU's memory to keep free for fragmentation of torch's allocator."""


class Fit(StrEnum):
    """Whether the peak memory of a rank fits into its GPU, in the words of reports."""

    FITS = "fits"
    TIGHT = "may not fit"  # not with the headroom
    TOO_LARGE = "does not fit"


class Software(StrEnum):
    """Libraries of a run, which set its memory outside of torch's allocator.

    The commands assume `TRANSFORMER_ENGINE`. A cluster file can name the other (`software`).
    """

    TRANSFORMER_ENGINE = "transformer-engine"
    """torch 2.11, CUDA 13.0, Transformer Engine 2.20."""
    TORCH = "torch"
    """torch 2.1 or later and Megatron's local layers, without Transformer Engine."""


MEASURED_GIB: Mapping[tuple[Software, int], float] = {
    (Software.TRANSFORMER_ENGINE, 9): 2.3,
    (Software.TORCH, 8): 0.5,
}
"""Memory of the CUDA context and of libraries, without NCCL, by software and major compute
capability. Hopper: 2.2 to 2.3 GiB after three steps (benchmarks/allocator.md). A100: 0.48 to 0.51
GiB in out-of-memory messages of users (benchmarks/evidence/outside_memory.csv)."""

_OUTSIDE_GIB = MEASURED_GIB[Software.TRANSFORMER_ENGINE, 9]
"""Memory of the CUDA context and of libraries that is assumed for all GPUs."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. Rates are per second, from data sheets; `Rates` has the achieved fractions of them."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int  # as nvidia-smi shows it
    multiprocessors: int
    bf16_flops: float
    flops_in_8_bits: float
    flops_in_4_bits: float
    memory_rate: float
    near_rate: float  # bytes to GPUs of the same node, one way
    far_rate: float  # bytes to other nodes, one way
    node: int  # GPUs that the fast links connect
    host_rate: float  # bytes to host memory, one way, as measured for copies
    beside_gib: float = _OUTSIDE_GIB  # outside of torch's allocator
    communicator_bytes: int = _NCCL_BYTES
    shares: tuple[tuple[str, float], ...] = ()  # of `Rates` by name, that a cluster file sets

    @property
    def per_host(self) -> int:
        """Number of GPUs of a host, which torchrun starts together: 4 with Grace CPUs."""
        return min(4, self.node) if self.name in _GRACE else self.node

    def outside_bytes(self, communicators: int) -> float:
        """Estimate the memory of CUDA and NCCL, which is outside of torch's allocator."""
        return self.beside_gib * GIB + communicators * self.communicator_bytes

    def allocatable_bytes(self, communicators: int, headroom_bytes: float) -> float:
        """Compute the largest peak of allocated memory with which a rank fits."""
        return self.memory_bytes - headroom_bytes - self.outside_bytes(communicators)

    def fit_of(self, peak_bytes: float, communicators: int, headroom_bytes: float) -> Fit:
        """Compare a rank's peak of allocated memory with the memory of the GPU.

        This is the one rule of rehearse, advise and sweep. It uses allocated memory because plans
        have no sequence of allocations to replay. The headroom covers the difference to reserved
        memory.
        """
        if peak_bytes <= self.allocatable_bytes(communicators, headroom_bytes):
            return Fit.FITS
        if peak_bytes <= self.allocatable_bytes(communicators, 0.0):
            return Fit.TIGHT
        return Fit.TOO_LARGE

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Gpu:
        """Return the GPU of its fields in JSON."""
        major, minor = plain["capability"]
        shares = tuple((str(name), float(value)) for name, value in plain["shares"])
        return cls(**{**plain, "capability": (major, minor), "shares": shares})

    def workspace_bytes(self, environment: Mapping[str, str]) -> int:
        """Return torch's workspace for a cuBLAS handle: aten/src/ATen/cuda/CublasHandlePool.cpp."""
        text = environment.get("CUBLAS_WORKSPACE_CONFIG", "")
        parts = [part for part in text.split(":") if part.isdigit()]
        pairs = list(zip(parts[::2], parts[1::2], strict=False))
        if pairs:
            return sum(int(kib) * 1024 * int(number) for kib, number in pairs)
        return 32 * MIB if self.capability[0] >= 9 else 8 * MIB + 128 * 1024


def _gpu(
    name: str, capability: str, memory_mib: int, units: int, tera: str, tb: float, *links: float
) -> Gpu:
    near_gb, far_gb, node, host_gb = links
    major, minor = capability.split(".")
    wide, eight, four = (float(rate) * 1e12 for rate in tera.split("/"))
    rates = (wide, eight, four, tb * 1e12, near_gb * 1e9, far_gb * 1e9)
    host_values = int(node), host_gb * 1e9
    return Gpu(name, (int(major), int(minor)), memory_mib * MIB, units, *rates, *host_values)


_GRACE = frozenset({"gh200", "gb200", "gb300"})
"""GPUs with Grace CPUs."""

GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", "8.0", 81920, 108, "312/312/312", 2.0, 300, 25, 8, 25),
        _gpu("a100-64gb", "8.0", 65536, 124, "358/358/358", 1.64, 300, 12.5, 4, 25),
        _gpu("a100-40gb", "8.0", 40960, 108, "312/312/312", 1.555, 300, 25, 8, 25),
        _gpu("a100-pcie", "8.0", 81920, 108, "312/312/312", 1.935, 25, 25, 8, 25),
        _gpu("a100-pcie-40gb", "8.0", 40960, 108, "312/312/312", 1.555, 25, 25, 8, 25),
        _gpu("a800", "8.0", 81920, 108, "312/312/312", 2.0, 200, 25, 8, 25),
        _gpu("l40s", "8.9", 46068, 142, "362/733/733", 0.864, 25, 25, 8, 25),
        _gpu("h100", "9.0", 81559, 132, "989/1979/1979", 3.35, 450, 50, 8, 50),
        _gpu("h100-64gb", "9.0", 65247, 132, "989/1979/1979", 1.64, 450, 25, 4, 50),
        _gpu("h100-pcie", "9.0", 81559, 114, "756/1513/1513", 2.0, 50, 50, 8, 50),
        _gpu("h20", "9.0", 97871, 78, "148/296/296", 4.0, 450, 50, 8, 50),
        _gpu("h800", "9.0", 81559, 132, "989/1979/1979", 3.35, 200, 50, 8, 50),
        _gpu("h200", "9.0", 143771, 132, "989/1979/1979", 4.8, 450, 50, 8, 50),
        _gpu("gh200", "9.0", 97871, 132, "989/1979/1979", 4.0, 450, 50, 4, 180),
        _gpu("b200", "10.0", 183359, 148, "2250/4500/9000", 8.0, 900, 50, 8, 50),
        _gpu("b300", "10.3", 275040, 148, "2250/4500/13500", 8.0, 900, 100, 8, 50),
        _gpu("gb200", "10.0", 189471, 152, "2500/5000/10000", 8.0, 900, 50, 72, 180),
        _gpu("mi250x", "9.1", 65520, 110, "191.5/191.5/191.5", 1.638, 100, 12.5, 8, 25),
        _gpu("mi300x", "9.4", 196592, 304, "1307/2615/2615", 5.3, 448, 50, 8, 50),
        _gpu("mi355x", "9.5", 294896, 256, "2517/5033/10066", 8.0, 537, 50, 8, 50),
        _gpu("gb300", "10.3", 284208, 152, "2500/5000/15000", 8.0, 900, 100, 72, 180),
    )
}
"""By the name for --gpus: compute capability, memory (MiB), multiprocessors, bf16, 8-bit and 4-bit
GEMMs (TFLOP/s, dense; an unsupported format has the rate of the next wider one), memory (TB/s),
links within and between nodes (GB/s, one way), number of GPUs that the fast links connect, and the
link to the host (PCIe 4 and 5 with 16 lanes; for NVLink-C2C the achieved rate). GPUs without NVLink
use PCIe within a node. A cluster file (--cluster) sets other links.

Cards of supercomputers: gh200 has 96 GB of HBM3. a100-64gb is Leonardo's: 124 instead of 108 units,
400 Gbit/s per node of four (Cineca's system page; Turisini et al., LEONARDO, 2023). h100-64gb is
MareNostrum 5's: NDR200 per GPU, four per node; its memory rate is not published and set as that of
the other card with four stacks of HBM2e. mi250x is one die of two, a GPU of its own to torch: half
of AMD's data sheet, in nodes of eight dies with 200 Gbit/s per two (LUMI, Frontier). A link between
dies has 50 GB/s (AMD, MI250 microarchitecture); neighbors of a ring are assumed to have two. Its
gfx90a is 9.1 here, because 9.0 is Hopper's capability."""
