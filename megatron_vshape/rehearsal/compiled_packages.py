"""Replacements of other compiled packages: Apex, DeepEP, mamba-ssm, flash-linear-attention."""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vshape.rehearsal import exchanges, gated_delta, mamba
from megatron_vshape.rehearsal.device import Current
from megatron_vshape.rehearsal.routing import Routing

_SOFTMAXES = ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda")


def replace_packages() -> None:
    """Make imports of these packages return replacements that compute shapes only."""
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
    _module("deep_ep", HybridEPBuffer=_HybridBuffer, Buffer=_DeepBuffer)
    _module("deep_ep.utils", EventHandle=_PastEvent, EventOverlap=_PastEvent)
    for name, members in (mamba.modules() | gated_delta.modules()).items():
        _module(name, **members)


def _module(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = None
    module.__dict__.update(members)
    sys.modules[name] = module


def _accumulate(x: Tensor, dy: Tensor, out: Tensor) -> None:
    if Current.ledger is not None:
        Current.ledger.add_cublas_workspace()
        wide = x.shape[-1]
        name = str(x.dtype).removeprefix("torch.")
        Current.ledger.count_gemm(name, dy.shape[-1], x.numel() // wide, wide)


class _Norm(torch.autograd.Function):
    """Apex's norm: saves its input and the statistics of the rows in fp32."""

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
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, shape: Any, epsilon: float, *extra: Any
    ) -> Any:
        ctx.further = len(extra)
        return _Norm.forward(ctx, x, gamma, beta, epsilon)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return (*_Norm.backward(ctx, dy)[:3], None, None, *[None] * ctx.further)


class _Adam(torch.optim.Optimizer):
    """Apex's Adam, Megatron's choice without Transformer Engine's; moments like weights."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "bias_correction": True, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Create the moments of parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter][name] = torch.zeros_like(parameter.data)


class _PastEvent:
    """A completed event of DeepEP's stream."""

    def __init__(self, *unused: Any) -> None:
        """Accept an event to wrap."""

    def current_stream_wait(self) -> None:
        """Return immediately."""


class _Handle(NamedTuple):
    tokens: int  # tokens of this rank
    arrive: int  # tokens of all ranks with an expert on this rank
    rows: int  # rows of this rank's experts
    local: int  # number of local experts


class _NoBytes:
    """Configuration of DeepEP's buffers, which are outside of torch's allocator."""

    def get_nvl_buffer_size_hint(self, *unused: int) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class _DeepBuffer:
    """DeepEP's buffer: a rank gets a token once, for any number of its experts."""

    num_nvl_bytes = num_rdma_bytes = 0

    def __init__(self, group: Any, *sizes: int) -> None:
        self.group = group

    @staticmethod
    def set_num_sms(number: int) -> None:
        """Accept the number of multiprocessors."""

    @staticmethod
    def get_dispatch_config(ranks: int) -> _NoBytes:
        """Return the configuration of the buffers."""
        return _NoBytes()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, indices: Tensor, experts: int, **options: Any) -> tuple[Any, ...]:
        """Return the counts per rank, per node and per expert, and each token's ranks."""
        ranks = self.group.size()
        per_rank = torch.empty(ranks, dtype=torch.int32, device="cuda")
        per_node = torch.empty(max(1, ranks // 8), dtype=torch.int32, device="cuda")
        per_expert = torch.empty(experts, dtype=torch.int32, device="cuda")
        is_token_in_rank = torch.empty(indices.shape[0], ranks, dtype=torch.bool, device="cuda")
        return per_rank, per_node, per_expert, is_token_in_rank, _PastEvent()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        topk_idx: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return the tokens of this rank's experts, their experts and their weights."""
        exchanges.count_dispatch(self.group, x.shape[0], x, Routing.topk)
        if topk_idx is None:
            return (
                torch.empty(handle.arrive, x.shape[1], dtype=x.dtype, device="cuda"),
                *(None,) * 4,
                _PastEvent(),
            )
        assert num_tokens_per_expert is not None
        ranks, tokens = self.group.size(), x.shape[0]
        arrive = int(tokens * ranks * (1 - (1 - 1 / ranks) ** Routing.topk) * Routing.imbalance)
        local = num_tokens_per_expert.shape[0] // ranks
        rows = Routing.received(tokens) // local * local
        received = torch.empty(arrive, x.shape[1], dtype=x.dtype, device="cuda")
        chosen = torch.empty(arrive, topk_idx.shape[1], dtype=topk_idx.dtype, device="cuda")
        weights = torch.empty(arrive, topk_idx.shape[1], dtype=torch.float32, device="cuda")
        handle = _Handle(tokens, arrive, rows, local)
        return received, chosen, weights, [0] * local, handle, _PastEvent()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **options: Any
    ) -> tuple[Any, ...]:
        """Return every token once, and its weights."""
        tokens = handle.tokens
        exchanges.count_dispatch(self.group, tokens, x, Routing.topk)
        out = torch.empty(tokens, x.shape[1], dtype=x.dtype, device="cuda")
        if topk_weights is None:
            return out, None, _PastEvent()
        weights = torch.empty(tokens, topk_weights.shape[1], dtype=torch.float32, device="cuda")
        return out, weights, _PastEvent()


class _HybridBuffer:
    """DeepEP's buffer across nodes; its own memory is outside torch's allocator and not counted."""

    def __init__(self, group: Any = None, **options: Any) -> None:
        """Accept the arguments of the original."""
        self._group = group

    def dispatch_with_permute(
        self,
        hidden: Tensor,
        routing_map: Any = None,
        probs: Any = None,
        num_of_experts_per_rank: int = 1,
        handle: Any = None,
        num_permuted_tokens: int | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return the tokens of this rank's experts, in the given number or that of `Routing`."""
        if handle is None:
            local = num_of_experts_per_rank
            tokens = hidden.shape[0]
            rows = num_permuted_tokens or Routing.received(tokens) // local * local
            table = torch.empty(tokens * Routing.topk * local, dtype=torch.int32, device="cuda")
            handle = (tokens, rows, local, table)
        tokens, rows, local, _ = handle
        exchanges.count_dispatch(self._group, tokens, hidden, Routing.topk, is_permuted=True)
        moved = torch.empty(rows, hidden.shape[1], dtype=hidden.dtype, device="cuda")
        scores = None if probs is None else torch.empty(rows, dtype=torch.float32, device="cuda")
        return moved, scores, None, Routing.counts(rows, local), handle

    def combine_with_unpermute(
        self, hidden: Tensor, probs: Any = None, handle: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        """Return every token once."""
        tokens = handle[0]
        exchanges.count_dispatch(self._group, tokens, hidden, Routing.topk, is_permuted=True)
        out = torch.empty(tokens, hidden.shape[1], dtype=hidden.dtype, device="cuda")
        if probs is None:
            return out, None
        return out, torch.empty(tokens, Routing.experts, dtype=torch.float32, device="cuda")
