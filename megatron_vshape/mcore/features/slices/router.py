"""Load-balancing losses per microbatch for routers that see one sequence slice at a time.

Megatron's loss is a sum over experts of tokens routed, n, times router probability, p, both over
the full microbatch: E * coefficient / (topk * T * T) * sum(n * p). The gradient of a token depends
on other tokens only through n, and every F of a microbatch runs before its first B. So the F of
each slice adds to n, and its B uses the n of all slices. Gradients equal those of the full
microbatch. For logging, each F returns the increase of the loss, so the slices add up to the full
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe import router as routers
from torch import Tensor, nn

from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step_state import MutableState, StepState, TokenRange, unwrapped

_LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")
"""Methods of Megatron's router, each of which computes a balancing loss. In the last one, n is a
mean over the calls of a step instead of a sum over the calls of a microbatch."""


class _ExpertLoad:
    """Load of a microbatch so far, per expert: tokens routed and router probabilities, [e]."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.probabilities: Tensor | None = None
        self.reported: Tensor | None = None  # the loss reported so far


class _RouterLoss(NamedTuple):
    """Loads of a router by microbatch and loss."""

    loads: dict[int, dict[str, _ExpertLoad]]
    loss: str  # name of the method that computes it now


class _MicrobatchLoss(torch.autograd.Function):
    """Loss of a slice's probabilities, [tokens, e], with the gradient of the microbatch."""

    @staticmethod
    def forward(
        ctx: Any,
        probabilities: Tensor,
        tokens: Tensor,
        router: _RouterLoss,
        state: StepState,
        weight: float,
        multiplier: int,
    ) -> Tensor:
        part = state.running_tokens
        load = router.loads.setdefault(part.microbatch, {}).setdefault(router.loss, _ExpertLoad())
        is_mean = router.loss == _LOSSES[-1]
        slice_tokens, slice_probabilities = tokens.to(probabilities.dtype), probabilities.sum(dim=0)
        if load.tokens is None or load.probabilities is None or load.reported is None:
            load.tokens = slice_tokens
            load.probabilities = slice_probabilities
            load.reported = torch.zeros_like(slice_probabilities[0])
        else:
            load.tokens = load.tokens + slice_tokens
            load.probabilities = load.probabilities + slice_probabilities
        if is_mean:  # a mean over calls with slices, scaled to the tokens of a microbatch
            load.tokens = slice_tokens * _num_slices(part)
        loss = weight * torch.sum(load.probabilities * load.tokens)
        loss_increase, load.reported = loss - load.reported, loss
        ctx.router, ctx.state = router, state
        ctx.weight, ctx.shape = weight * multiplier, probabilities.shape
        return loss_increase

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        part, loads, loss = ctx.state.running_tokens, ctx.router.loads, ctx.router.loss
        token_gradient = gradient * ctx.weight * loads[part.microbatch][loss].tokens
        if part.begin == 0:
            del loads[part.microbatch][loss]
            if not loads[part.microbatch]:
                del loads[part.microbatch]
        return token_gradient.expand(ctx.shape), None, None, None, None, None


class _ScaledMean(torch.autograd.Function):
    """Scale a mean over the tokens of a slice to its share of the microbatch's mean."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, loss_scale: float, gradient_scale: float) -> Tensor:
        ctx.gradient_scale = gradient_scale
        return mean * loss_scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0] * ctx.gradient_scale, None, None


def _num_slices(part: TokenRange) -> int:
    """Return the number of slices of the microbatch."""
    return part.total // (part.end - part.begin)


class _LossContext(MutableState):
    """The router and loss in computation. Process-wide, as Megatron's loss functions are."""

    def __init__(self) -> None:
        self.state: StepState | None = None
        self.running: _RouterLoss | None = None
        self.per_token = False


_LOSS_CONTEXT = _LossContext()


def balance_full_microbatches(state: StepState, chunks: Sequence[nn.Module]) -> None:
    """Make routers balance full microbatches; calls outside a slice run as before.

    Raises:
        UnsupportedError: A router's loss cannot be computed over slices.
    """
    moe_routers = [
        module
        for chunk in chunks
        for module in unwrapped(chunk).modules()
        if hasattr(module, _LOSSES[0])
    ]
    if not moe_routers:
        return
    if _LOSS_CONTEXT.state is None:
        routers.switch_load_balancing_loss_func = partial(
            _balancing_loss, routers.switch_load_balancing_loss_func
        )
        routers.z_loss_func = partial(_z_loss, routers.z_loss_func)
    _LOSS_CONTEXT.state = state
    for router in moe_routers:
        _check_router(router)
        loads: dict[int, dict[str, _ExpertLoad]] = {}
        state.drop_values.append(loads.clear)
        for name in _LOSSES:
            setattr(
                router,
                name,
                _with_loss_context(router, getattr(router, name), _RouterLoss(loads, name)),
            )
        router.apply_z_loss = _with_loss_context(router, router.apply_z_loss, None)


def _with_loss_context(
    router: Any, inner: Callable[..., Any], router_loss: _RouterLoss | None
) -> Callable[..., Any]:
    per_token = bool(router.calculate_per_token_loss)

    def method(*args: Any, **options: Any) -> Any:
        with _LOSS_CONTEXT.setting(running=router_loss, per_token=per_token):
            return inner(*args, **options)

    return method


def _balancing_loss(inner: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Replace Megatron's switch_load_balancing_loss_func; reads its keyword arguments."""
    state, router = _LOSS_CONTEXT.state, _LOSS_CONTEXT.running
    if state is None or state.tokens is None or router is None:
        return inner(*args, **options)
    slices = _num_slices(state.tokens)
    if options.get("padding_mask") is not None:
        raise UnsupportedError(
            "--pipeline-slices does not work with a padding mask in MoE layers: a slice "
            "does not know the number of tokens of the others. Remove --pipeline-slices"
        )
    total = options["total_num_tokens"] * slices
    weight = options["num_experts"] * options["moe_aux_loss_coeff"]
    weight /= options["topk"] * total * total
    # With per-token loss, Megatron multiplies by the tokens of the call, here those of a slice.
    multiplier = slices if _LOSS_CONTEXT.per_token else 1
    probabilities, tokens = options["probs"], options["tokens_per_expert"]
    loss_increase: Tensor = _MicrobatchLoss.apply(
        probabilities, tokens, router, state, weight, multiplier
    )
    return loss_increase


def _z_loss(inner: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Replace Megatron's z-loss, a mean over tokens."""
    state, mean = _LOSS_CONTEXT.state, inner(*args, **options)
    if state is None or state.tokens is None:
        return mean
    slices = _num_slices(state.tokens)
    # With per-token loss, Megatron multiplies by the tokens of the call, which gives their sum.
    scaled_mean: Tensor = _ScaledMean.apply(
        mean, 1 / slices, 1.0 if _LOSS_CONTEXT.per_token else 1 / slices
    )
    return scaled_mean


def _check_router(router: Any) -> None:
    """Raise UnsupportedError if recompute computes a loss in backward, from one slice only."""
    config = router.config
    recomputes_router = config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    )
    if recomputes_router and router.is_aux_loss_enabled():
        raise UnsupportedError(
            "--pipeline-slices does not work with a load-balancing loss and "
            f"--recompute-granularity {config.recompute_granularity}, which would compute it again "
            "per slice. Set --moe-aux-loss-coeff 0, or recompute modules other than the router"
        )
