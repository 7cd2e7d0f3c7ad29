"""Replacements of mamba-ssm and causal-conv1d that allocate the same memory as their functions.

The sizes are those of mamba_ssm/ops/triton/ssd_combined.py and its neighbors (2.3.2), and of
causal_conv1d/cpp_functions.py (1.6). Each array is allocated and freed at the same point, and each
kernel is counted with the arrays that it reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vshape.rehearsal.device import Current, count_kernel

_TILE = 32  # minimum rows of a kernel's tile; determines the number of partial sums


def modules() -> dict[str, dict[str, Any]]:
    """Return the replaced modules by name, with their attributes."""
    return {
        "causal_conv1d": {
            "__version__": "1.6.0",
            "causal_conv1d_fn": causal_conv1d_fn,
            "causal_conv1d_update": None,
        },
        "mamba_ssm": {"__version__": "2.3.2"},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
    }


def _wide(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cuda")


class _ScanInputs(NamedTuple):
    """Tensors that a scan reads, and `z` if it gates its output."""

    x: Tensor
    b: Tensor
    c: Tensor
    z: Tensor | None


@dataclass(frozen=True, slots=True)
class _Scan:
    """The sizes of a scan over chunks of tokens."""

    batch: int
    tokens: int
    heads: int
    head: int  # channels of a head
    groups: int
    state: int  # state size of a channel
    chunk: int

    @property
    def chunks(self) -> int:
        return ceil(self.tokens / self.chunk)

    @property
    def splits(self) -> int:
        """Return the number of partial sums over a group's heads, which fill the GPU."""
        units = torch.cuda.get_device_properties(0).multi_processor_count
        heads = self.heads // self.groups
        heads_per_split = max(min(ceil(self.batch * self.chunks * self.heads / units), heads), 1)
        return ceil(heads / heads_per_split)

    def steps(self, *dims: int) -> Tensor:
        return _wide(self.batch, self.heads, self.chunks, *dims, self.chunk)

    def inputs(self, mixed: Tensor, convolved: Tensor) -> _ScanInputs:
        """Return z of a layer's input [z, ...], and the convolution's output [x, B, C]."""
        inner, shared = self.heads * self.head, self.groups * self.state
        x, b, c = convolved.split([inner, shared, shared], dim=-1)
        return _ScanInputs(x, b, c, mixed[..., :inner])

    def states(self, dtype: torch.dtype) -> Tensor:
        shape = (self.batch, self.chunks, self.heads, self.head, self.state)
        return torch.empty(shape, dtype=dtype, device="cuda")

    def squares(self, *dims: int) -> Tensor:
        return _wide(self.batch, self.chunks, *dims, self.groups, self.chunk, self.chunk)

    def forward(self, inputs: _ScanInputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the output and the tensor saved for backward; they differ if gated."""
        x, b, c, z = inputs
        self.count_flops(1.0)
        steps = self.steps(), self.steps()
        count_kernel(steps)
        wide = self.states(torch.float32)
        count_kernel(x, b, steps, wide)
        states = self.states(dtype)
        last = _wide(self.batch, self.heads, self.head, self.state)
        count_kernel(wide, states, last)
        del wide
        squares = self.squares()
        count_kernel(b, c, squares)
        shape = (self.batch, self.tokens, self.heads, self.head)
        out = torch.empty(shape, dtype=x.dtype, device="cuda")
        saved = out if z is None else torch.empty_like(out)
        count_kernel(squares, x, steps, c, states, z, out, () if z is None else saved)
        del steps, states, last, squares
        return out, saved

    def backward(
        self, grad: Tensor, saved: Tensor, inputs: _ScanInputs, dtype: torch.dtype
    ) -> None:
        """Allocate and free the temporary tensors of the backward."""
        x, b, c, z = inputs
        self.count_flops(2.5)
        steps = self.steps(), self.steps()
        count_kernel(steps)
        squares = self.squares()
        count_kernel(b, c, squares)
        wide = self.states(torch.float32)
        count_kernel(x, b, steps, wide)
        states, last = self.states(torch.float32), _wide(self.batch, self.heads, self.head)
        count_kernel(wide, states)
        del wide, last
        shape = (self.batch, self.tokens, self.heads, self.head)
        ungated = None if z is None else torch.empty(shape, dtype=x.dtype, device="cuda")
        if ungated is not None:
            count_kernel(x, z, saved, grad, z, ungated)
        d_states = self.states(torch.float32)
        count_kernel(c, steps[0], grad, d_states)
        narrow = self.states(dtype), self.states(dtype)
        parts = _wide(self.batch, self.heads, self.chunks, ceil(self.head * self.state / 64))
        count_kernel(states, d_states, narrow, parts)
        del states, d_states, parts
        d_steps = self.steps()
        count_kernel(x, steps, b, squares, grad, narrow[0], x, d_steps)
        by_group = self._sum_of_splits(x, steps, narrow[0], b), self.steps()
        by_group_too = self._sum_of_splits(grad, steps[0], narrow[1], c), self.steps()
        d_squares_by_split = self.squares(self.splits)
        count_kernel(x, steps, grad, d_squares_by_split)
        d_squares = self.squares()
        count_kernel(d_squares_by_split, d_squares)
        del d_squares_by_split
        count_kernel(c, d_squares, by_group, b)
        count_kernel(b, d_squares, by_group_too, c)
        per_tile = self.steps(ceil(self.chunk / _TILE))
        count_kernel(x, steps, grad, squares, per_tile)
        summed = self.steps()
        count_kernel(per_tile, summed)
        del steps, squares, ungated, narrow, d_steps, by_group, by_group_too, d_squares, per_tile
        del summed

    def _sum_of_splits(self, *reads: Any) -> Tensor:
        splits = _wide(self.batch, self.tokens, self.splits, self.groups, self.state)
        count_kernel(*reads, splits, splits)  # written, and read by the sum
        del splits
        total = _wide(self.batch, self.tokens, self.groups, self.state)
        count_kernel(total)
        return total

    def count_flops(self, times: float) -> None:
        """Count the FLOPs within and between chunks; causal ones count half."""
        if Current.ledger is not None:
            rows = self.batch * self.tokens
            within = self.chunk * (self.groups * self.state + self.heads * self.head)
            between = 4.0 * self.heads * self.head * self.state
            Current.ledger.count_attention(times * rows * (within + between), "bfloat16")


class _SplitScan(torch.autograd.Function):
    """The convolution and the scan of a layer; saves its input and the scan's output."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, weight: Tensor, *inputs: Any) -> Tensor:
        bias, d_bias, a, d, scan, dtype = inputs
        out, saved = scan.forward(scan.inputs(mixed, _convolved(mixed, weight)), dtype)
        ctx.scan, ctx.dtype = scan, dtype
        ctx.save_for_backward(mixed, weight, bias, saved, a, d, d_bias)
        flat: Tensor = out.view(*out.shape[:2], -1)
        return flat

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        mixed, weight, bias, saved, a, d, d_bias = ctx.saved_tensors
        convolved = _convolved(mixed, weight)
        d_mixed = torch.empty_like(mixed)
        d_convolved = torch.empty_like(convolved)
        ctx.scan.backward(grad, saved, ctx.scan.inputs(mixed, convolved), ctx.dtype)
        count_kernel(convolved, d_convolved, d_convolved)  # the convolution's backward
        del convolved, d_convolved
        grads = [torch.empty_like(parameter, dtype=torch.float32) for parameter in (weight, bias)]
        small = [torch.empty_like(parameter) for parameter in (d_bias, a, d)]
        return d_mixed, *grads, *small, None, None


def _convolved(mixed: Tensor, weight: Tensor) -> Tensor:
    """Return the output of the convolution, which requires aligned channels."""
    shape = (*mixed.shape[:2], weight.shape[0])
    copy = torch.empty(shape, dtype=mixed.dtype, device="cuda") if mixed.shape[-1] % 8 else None
    out = torch.empty(shape, dtype=mixed.dtype, device="cuda")
    del copy
    count_kernel(out, out)
    return out


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    headdim: int | None = None,
    ngroups: int = 1,
    state_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """Return [batch, tokens, channels], gated by the first channels of the input."""
    heads, head = D.shape[0], headdim or D.shape[-1]
    state = (conv1d_weight.shape[0] - heads * head) // ngroups // 2
    batch, tokens, _ = zxbcdt.shape
    scan = _Scan(batch, tokens, heads, head, ngroups, state, chunk_size)
    dtype = state_dtype or zxbcdt.dtype
    small = (conv1d_bias, dt_bias, A, D)
    output: Tensor = _SplitScan.apply(zxbcdt, conv1d_weight, *small, scan, dtype)
    return output


class _ChunkScan(torch.autograd.Function):
    """The scan alone; saves its inputs and output, and the time steps in fp32."""

    @staticmethod
    def forward(ctx: Any, scan: _Scan, dtype: torch.dtype, *inputs: Tensor | None) -> Tensor:
        out, saved = scan.forward(_inputs_of_scan(inputs), dtype)
        ctx.scan, ctx.dtype = scan, dtype
        ctx.save_for_backward(saved, scan.steps(), *inputs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved, _, *inputs = ctx.saved_tensors
        grads = [None if tensor is None else torch.empty_like(tensor) for tensor in inputs]
        ctx.scan.backward(grad, saved, _inputs_of_scan(inputs), ctx.dtype)
        return None, None, *grads


def _inputs_of_scan(inputs: Sequence[Any]) -> _ScanInputs:
    x, _, _, b, c, *_, z = inputs  # x, dt, A, B, C, D, dt_bias, z
    return _ScanInputs(x, b, c, z)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """Return [batch, tokens, heads, channels of a head]."""
    batch, tokens, heads, head = x.shape
    scan = _Scan(batch, tokens, heads, head, B.shape[2], B.shape[3], chunk_size)
    inputs = (x, dt, A, B, C, D, dt_bias, z)
    output: Tensor = _ChunkScan.apply(scan, state_dtype or C.dtype, *inputs)
    return output


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        count_kernel(x, x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        wide = [
            parameter if parameter is None else _wide(*parameter.shape)
            for parameter in (weight, bias)
        ]
        count_kernel(x, grad, x)
        return torch.empty_like(x), *wide


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *unused: Any, **options: Any
) -> Tensor:
    """Return a tensor of the input's shape."""
    output: Tensor = _Convolution.apply(x, weight, bias)
    return output


class _GatedNorm(torch.autograd.Function):
    """Saves the inputs and the statistics of each group of a row, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, z: Tensor | None, groups: int) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight, z, _wide(groups * flat.shape[0]))
        ctx.groups, ctx.shape = groups, x.shape
        count_kernel(flat, z, flat)
        return torch.empty_like(flat).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, z, _ = ctx.saved_tensors
        dx = torch.empty_like(x).view(ctx.shape)
        dz = None if z is None else torch.empty_like(z)
        count_kernel(x, grad, dx, z, dz)
        warps = min(max((weight.numel() // ctx.groups) // 256, 1), 8)
        units = torch.cuda.get_device_properties(0).multi_processor_count
        _wide(ceil(units * ceil(4 / warps) / ctx.groups), weight.numel())
        return dx, torch.empty_like(weight), dz, None


class GatedNorm(torch.nn.Module):
    """mamba-ssm's RMSNorm over groups of a row; gated if `z` is given."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return a tensor like `x`."""
        groups = x.shape[-1] // (self.group_size or x.shape[-1])
        output: Tensor = _GatedNorm.apply(x, self.weight, z, groups)
        return output
