"""Stand-ins for the other compiled packages that NVIDIA's images have: Apex, DeepEP, mamba-ssm."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor

from megatron_vshape.rehearsal import exchanges, mamba
from megatron_vshape.rehearsal.device import Current
from megatron_vshape.rehearsal.hops import DISPATCH
from megatron_vshape.rehearsal.routing import Routing

_SOFTMAXES = ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda")


def install() -> None:
    """Put them where they are imported from."""
    _module(
        "fused_weight_gradient_mlp_cuda",
        wgrad_gemm_accum_fp32=_accumulate,
        wgrad_gemm_accum_fp16=_accumulate,
    )
    for name in ("apex", "apex.contrib", "apex.contrib.layer_norm", "apex.normalization"):
        _module(name)
    _module("apex.optimizers", FusedAdam=_Adam, FusedSGD=torch.optim.SGD)
    _module("apex.contrib.layer_norm.layer_norm", FastLayerNormFN=_Norm)
    _module("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=_AffineNorm)
    for name in (*_SOFTMAXES, "scaled_softmax_cuda"):
        _module(
            name,
            forward=lambda x, *_: torch.empty_like(x),
            backward=lambda grad, *_: grad,
            get_batch_per_block=lambda *_: 4,
        )
    _module("deep_ep", HybridEPBuffer=HybridBuffer, Buffer=None)
    _module("deep_ep.utils", EventHandle=None, EventOverlap=None)
    for name, members in mamba.modules().items():
        _module(name, **members)


def _module(name: str, **members: Any) -> None:
    made = types.ModuleType(name)
    made.__path__ = []
    made.__spec__ = None
    made.__dict__.update(members)
    sys.modules[name] = made


def _accumulate(x: Tensor, dy: Tensor, out: Tensor) -> None:
    if Current.ledger is not None:
        Current.ledger.cublas()
        wide = x.shape[-1]
        name = str(x.dtype).removeprefix("torch.")
        Current.ledger.product(name, dy.shape[-1], x.numel() // wide, wide)


class _Norm(torch.autograd.Function):
    """Apex's norm: keeps its input and the statistics of the rows in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, lean: bool = False
    ) -> Tensor:
        rows = x.numel() // x.shape[-1]
        mean, spread = (torch.empty(rows, dtype=torch.float32, device="cuda") for _ in range(2))
        ctx.save_for_backward(x.view(-1, x.shape[-1]), gamma, mean, spread)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        _, gamma, *_ = ctx.saved_tensors
        return torch.empty_like(dy), torch.empty_like(gamma), torch.empty_like(gamma), None, None


class _AffineNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, shape: Any, epsilon: float, *rest: Any
    ) -> Any:
        ctx.further = len(rest)
        return _Norm.forward(ctx, x, gamma, beta, epsilon)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return (*_Norm.backward(ctx, dy)[:3], None, None, *[None] * ctx.further)


class _Adam(torch.optim.Optimizer):
    """Apex's Adam, which Megatron takes where Transformer Engine's is not: moments like weights."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "bias_correction": True, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make the moments of parameters that have a gradient."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and not self.state[each]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[each][name] = torch.zeros_like(each.data)


class HybridBuffer:
    """DeepEP's buffer across nodes; what it holds itself is not torch's, and so not counted."""

    def __init__(self, group: Any = None, **options: Any) -> None:
        """Accept what the real one does."""
        self._group = group

    def _sent(self, tokens: int, like: Tensor) -> None:
        """Count the bytes of the tokens; `hops` knows how often a token is sent."""
        size = tokens * like.shape[1] * like.element_size()
        exchanges.count(f"{DISPATCH}{Routing.topk}", self._group, size)

    def dispatch_with_permute(
        self,
        hidden: Tensor,
        routing_map: Any = None,
        probs: Any = None,
        num_of_experts_per_rank: int = 1,
        handle: Any = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return the tokens of this rank's experts, as many as routing says."""
        if handle is None:
            local = num_of_experts_per_rank
            tokens = hidden.shape[0]
            rows = int(tokens * Routing.topk * Routing.imbalance) // local * local
            table = torch.empty(tokens * Routing.topk * local, dtype=torch.int32, device="cuda")
            handle = (tokens, rows, local, table)
        tokens, rows, local, _ = handle
        self._sent(tokens, hidden)
        moved = torch.empty(rows, hidden.shape[1], dtype=hidden.dtype, device="cuda")
        scores = None if probs is None else torch.empty(rows, dtype=torch.float32, device="cuda")
        return moved, scores, None, Routing.counts(rows, local), handle

    def combine_with_unpermute(
        self, hidden: Tensor, probs: Any = None, handle: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        """Return every token once."""
        tokens = handle[0]
        self._sent(tokens, hidden)
        out = torch.empty(tokens, hidden.shape[1], dtype=hidden.dtype, device="cuda")
        if probs is None:
            return out, None
        return out, torch.empty(tokens, Routing.experts, dtype=torch.float32, device="cuda")
