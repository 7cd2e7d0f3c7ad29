"""A linear layer of plain torch whose weight gradient can wait for W."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vshape.runtime import weight_jobs
from megatron_vshape.runtime.weight_jobs import accumulate_weight_grad, weight_grad


class SplitLinear(nn.Linear):
    """`nn.Linear`, with the same arguments and parameters, that can leave its weight gradient.

    Its gradients go to `weight.main_grad` if the weight has that, else to `weight.grad`. The
    bias gradient is a sum over the rows, cheap, and stays in B.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight^T + bias for an input of [..., in_features]."""
        output: Tensor = _SplitLinear.apply(input, self.weight, self.bias)
        return output


class _SplitLinear(torch.autograd.Function):
    """y = x @ weight^T + bias; in backward the weight's share becomes a job if a bucket is open."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input)
        # The parameter itself, not through save_for_backward: under a checkpoint that returns
        # another tensor, without main_grad.
        ctx.weight = weight
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad_output = grad_output.detach()
        grad_input = grad_output.matmul(ctx.weight) if needs_input else None
        grad_weight = _weight_grad(ctx.weight, grad_output, x.detach()) if needs_weight else None
        grad_bias = None
        if needs_bias:
            grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(dim=0)
        return grad_input, grad_weight, grad_bias


def _weight_grad(weight: Tensor, grad_output: Tensor, x: Tensor) -> Tensor | None:
    """Return the weight gradient; None if it is left to W or already accumulated."""
    if weight_jobs.is_open():
        job = functools.partial(accumulate_weight_grad, weight, grad_output, x)
        weight_jobs.defer(job, weights=[weight], tensors=[grad_output, x])
        return None
    if hasattr(weight, "main_grad"):
        accumulate_weight_grad(weight, grad_output, x)
        return None
    # Returned, so that hooks and torch.autograd.grad work as they do with nn.Linear.
    return weight_grad(grad_output, x)
