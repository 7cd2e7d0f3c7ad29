"""Replacements of flash-linear-attention that allocate the same memory as its functions.

The sizes are those of fla/ops/gated_delta_rule and its neighbors (0.5.2). Each array is allocated
and freed at the same point, and each kernel is counted with the arrays that it reads and writes.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vshape.rehearsal.device import Current, count_kernel

_CHUNK = 64
"""Tokens of a chunk, in the rule and in the convolution."""


def modules() -> dict[str, dict[str, Any]]:
    """Return the replaced modules by name, with their attributes."""
    return {
        "fla": {"__version__": "0.5.2"},
        "fla.modules": {},
        "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    }


class _RuleInputs(NamedTuple):
    q: Tensor  # [batch, tokens, heads, key channels], as k
    k: Tensor
    v: Tensor  # [batch, tokens, heads, value channels]
    g: Tensor  # [batch, tokens, heads] in fp32
    beta: Tensor

    def count_flops(self, squares: int, channels: tuple[int, int], states: int) -> None:
        """Count FLOPs per token and head: of a chunk's products, and of those with the states.

        Args:
            squares: Products of two squares of a chunk, in multiply-adds per chunk size squared.
            channels: Products of such a square with keys, and with values.
            states: Products of keys, values and states.
        """
        if Current.ledger is not None:
            key, value = self.k.shape[-1], self.v.shape[-1]
            inner = channels[0] * key + channels[1] * value + squares * _CHUNK
            flops = 2.0 * (_CHUNK * inner + states * key * value)
            Current.ledger.count_attention(self.g.numel() * flops, "bfloat16")

    def keys_and_values(self, square: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chunks' keys and values, multiplied by the inverse in `square`."""
        keys, values = torch.empty_like(self.k), torch.empty_like(self.v)
        count_kernel(self.k, self.v, self.beta, square, self.g, keys, values)
        return keys, values

    def new_states(self) -> Tensor:
        batch, tokens, heads, key = self.k.shape
        shape = (batch, ceil(tokens / _CHUNK), heads, key, self.v.shape[-1])
        return torch.empty(shape, dtype=self.k.dtype, device="cuda")

    def states(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state before each chunk, and the values without the states' share."""
        states, new_values = self.new_states(), torch.empty_like(values)
        count_kernel(self.k, keys, values, self.g, states, new_values)
        return states, new_values


class _Rule(torch.autograd.Function):
    """Saves its inputs, the sums of the gate, and the inverse of each chunk's square."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        inputs = _RuleInputs(*tensors)
        sums = torch.empty_like(inputs.g, dtype=torch.float32)
        count_kernel(inputs.g, sums)
        inputs = inputs._replace(g=sums)
        q, k, v, *_ = inputs
        square = torch.zeros(*v.shape[:3], _CHUNK, dtype=k.dtype, device="cuda")
        count_kernel(k, sums, inputs.beta, square)
        keys, values = inputs.keys_and_values(square)
        states, new_values = inputs.states(keys, values)
        out = torch.empty_like(v)
        count_kernel(q, k, new_values, states, sums, out)
        inputs.count_flops(0, (3, 2), 3)
        ctx.save_for_backward(*inputs, square)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *tensors, square = ctx.saved_tensors
        inputs = _RuleInputs(*tensors)
        q, k, v, g, beta = inputs
        grad = grad.contiguous()
        inputs.count_flops(4, (10, 5), 8)
        keys, values = inputs.keys_and_values(square)
        states, new_values = inputs.states(keys, values)
        local_dv = torch.empty_like(grad)
        count_kernel(q, k, g, grad, local_dv)
        d_states, dv = inputs.new_states(), torch.empty_like(local_dv)
        count_kernel(q, k, keys, grad, g, local_dv, d_states, dv)
        del local_dv
        dq, dk, d_keys = torch.empty_like(q), torch.empty_like(k), torch.empty_like(keys)
        dg = torch.empty_like(g)
        count_kernel(q, k, new_values, keys, g, states, d_states, grad, dv, dq, dk, d_keys, dg)
        more_dk, last_dv = torch.empty_like(k), torch.empty_like(v)
        d_beta, more_dg = torch.empty_like(beta), torch.empty_like(g)
        count_kernel(k, v, beta, g, square, d_keys, dv, more_dk, last_dv, d_beta, more_dg)
        count_kernel(dk, more_dk, dk)
        summed_dg = torch.empty_like(dg)
        count_kernel(dg, summed_dg)
        return dq, dk, last_dv, summed_dg, d_beta


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Return [batch, tokens, heads, value channels], and no final state."""
    output: Tensor = _Rule.apply(*(tensor.contiguous() for tensor in (q, k, v, g, beta)))
    return output, None


class _CausalConvolution(torch.autograd.Function):
    """Saves its input, a part of the projection's output; backward computes its output again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        count_kernel(x, x)
        return torch.empty(x.shape, dtype=x.dtype, device="cuda")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        recomputed = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        count_kernel(x, recomputed)
        dx = torch.empty_like(x)
        parts = x.shape[0] * ceil(x.shape[1] / _CHUNK)
        by_part = torch.empty((parts, *weight.shape), dtype=torch.float32, device="cuda")
        count_kernel(x, recomputed, grad, dx, by_part, by_part)
        return dx, torch.empty_like(weight)


def causal_conv1d(x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Return a contiguous tensor of the input's shape, and no final state."""
    output: Tensor = _CausalConvolution.apply(x, weight)
    return output, None


class _L2Norm(torch.autograd.Function):
    """Saves its output and the statistics of its rows, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows = torch.empty(x.shape[:-1], dtype=torch.float32, device="cuda")
        ctx.save_for_backward(out, rows)
        count_kernel(x, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out, rows = ctx.saved_tensors
        dx = torch.empty_like(out)
        count_kernel(out, rows, grad.contiguous(), dx)
        return dx


def l2norm(x: Tensor, *unused: Any, **options: Any) -> Tensor:
    """Return a tensor like `x`."""
    output: Tensor = _L2Norm.apply(x)
    return output
