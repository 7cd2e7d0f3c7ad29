"""A plugin of the farm: mamba-ssm's scan and norm in plain torch, for Mamba layers on a CPU.

Megatron's `MambaMixer`, with its linears, convolution and parameters, is unchanged; only the fused
kernels that it imports from mamba-ssm are replaced by torch code (Mamba-2, section 3).
"""

from typing import Any

import torch
from einops import rearrange
from megatron.core.ssm import mamba_mixer
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Gate-less RMS norm over groups of channels, as mamba-ssm's without its gate."""

    def __init__(
        self, size: int, eps: float, group_size: int, device: Any = None, **options: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=options["dtype"]))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each group of channels of `x`, (..., size)."""
        groups = x.unflatten(-1, (-1, self.group_size))
        return functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * (
            self.weight
        )


def scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    decay: Tensor,
    *,
    D: Tensor,
    headdim: int,
    ngroups: int,
    activation: str,
    **options: Any,
) -> Tensor:
    """Compute `mamba_split_conv1d_scan_combined`: (batch, length, heads * headdim)."""
    assert activation == "silu"
    heads = len(decay)
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    length, width = xbc.shape[1], conv1d_weight.shape[1]
    xbc = functional.conv1d(
        xbc.transpose(1, 2),
        conv1d_weight[:, None],
        conv1d_bias,
        padding=width - 1,
        groups=len(conv1d_weight),
    )
    xbc = functional.silu(xbc[..., :length].transpose(1, 2))
    states = (xbc.shape[-1] - inner) // 2
    x, b, c = xbc.split([inner, states, states], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (t.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for t in (b, c))
    dt = functional.softplus(dt.float() + dt_bias)
    state = x.new_zeros(*x.shape[:1], heads, headdim, b.shape[-1])
    outputs = []
    for t in range(length):
        retention = torch.exp(dt[:, t] * decay)[..., None, None]
        state = retention * state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1).flatten(-2) * functional.silu(z)


def start(rank: int, argument: object) -> None:
    """Give Megatron's mixer the scan and the norm."""
    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = True
    mamba_mixer.rearrange = rearrange
    mamba_mixer.mamba_split_conv1d_scan_combined = scan
    mamba_mixer.ExtendedRMSNorm = RMSNorm
