"""Peak FLOP/s of GPUs, for the MFU in the log."""

from __future__ import annotations

import re

import torch

# Dense 16-bit peaks in TFLOP/s, from the vendors' data sheets. The first entry whose words occur in
# the device name applies, so variants come before their base model.
_TERAFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.0),
    ("H200 NVL", 836.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 150.0),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("V100-SXM2", 125.0),
    ("V100-PCIE", 112.0),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the device's peak in FLOP/s, or None if unknown.

    Only GPUs of the table with 16-bit dtypes are known. The peak of a CPU, or in fp32, depends on
    too many factors.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    for name, teraflops in _TERAFLOPS:
        if re.search(rf"\b{re.escape(name)}\b", device_name):
            return teraflops * 1e12
    return None
