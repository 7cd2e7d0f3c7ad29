"""Whether a rank fits into the memory of its GPU: the one rule of rehearse, advise and sweep."""

from __future__ import annotations

from enum import StrEnum

from megatron_vshape.rehearsal.gpus import GIB, Gpu

HEADROOM = 0.04
"""Default share of a GPU's memory to keep free for fragmentation of torch's allocator."""


class Fit(StrEnum):
    """Result of the rule, in the words of reports."""

    FITS = "fits"
    TIGHT = "may not fit"  # not with the headroom
    TOO_LARGE = "does not fit"


def outside_bytes(gpu: Gpu, communicators: int) -> float:
    """Estimate the memory of CUDA and NCCL, which is outside of torch's allocator."""
    return gpu.beside_gib * GIB + communicators * gpu.communicator_bytes


def allocatable_bytes(gpu: Gpu, communicators: int, headroom_bytes: float) -> float:
    """Compute the largest peak of allocated memory with which a rank fits."""
    return gpu.memory_bytes - headroom_bytes - outside_bytes(gpu, communicators)


def fit_of(peak_bytes: float, gpu: Gpu, communicators: int, headroom_bytes: float) -> Fit:
    """Compare a rank's peak of allocated memory with the memory of the GPU.

    The rule uses allocated memory because plans have no sequence of allocations to replay. The
    headroom covers the difference to reserved memory.
    """
    if peak_bytes <= allocatable_bytes(gpu, communicators, headroom_bytes):
        return Fit.FITS
    if peak_bytes <= allocatable_bytes(gpu, communicators, 0.0):
        return Fit.TIGHT
    return Fit.TOO_LARGE
