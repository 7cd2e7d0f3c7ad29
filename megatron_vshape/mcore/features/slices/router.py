"""Load-balancing losses per microbatch for routers that see one sequence slice at a time.

Megatron's loss is a sum over experts of tokens routed, n, times router probability, p, both over
the full microbatch: E * coefficient / (topk * T * T) * sum(n * p). The gradient of a token depends
on other tokens only through n, and every F of a microbatch runs before its first B. So the F of
each slice adds to n, and its B uses the n of all slices. Gradients equal those of the full
microbatch. For logging, each F returns the increase of the loss, so the slices add up to the full
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe import router as routers
from torch import Tensor, nn

from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step_state import StepState, TokenRange, unwrapped

LOSSES = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")
"""Methods of Megatron's router, each of which computes a balancing loss. In the last one, n is a
mean over the calls of a step instead of a sum over the calls of a microbatch."""


class _Load:
    """Load of a microbatch so far, per expert: tokens routed and router probabilities, [e]."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.likely: Tensor | None = None
        self.reported: Tensor | None = None  # the loss reported so far


class _Router(NamedTuple):
    """Loads of a router by microbatch and loss."""

    kept: dict[int, dict[str, _Load]]
    loss: str  # name of the method that computes it now


class _OfMicrobatch(torch.autograd.Function):
    """Loss of a slice's probabilities, [tokens, e], with the gradient of the microbatch."""

    @staticmethod
    def forward(
        ctx: Any,
        likely: Tensor,
        tokens: Tensor,
        router: _Router,
        state: StepState,
        weight: float,
        counts: int,
    ) -> Tensor:
        part = state.running_tokens
        load = router.kept.setdefault(part.microbatch, {}).setdefault(router.loss, _Load())
        is_mean = router.loss == LOSSES[-1]
        own, sums = tokens.to(likely.dtype), likely.sum(dim=0)
        if load.tokens is None or load.likely is None or load.reported is None:
            load.tokens, load.likely, load.reported = own, sums, torch.zeros_like(sums[0])
        else:
            load.tokens, load.likely = load.tokens + own, load.likely + sums
        if is_mean:  # a mean over calls with slices, scaled to the tokens of a microbatch
            load.tokens = own * slices_of(part)
        loss = weight * torch.sum(load.likely * load.tokens)
        grown, load.reported = loss - load.reported, loss
        ctx.router, ctx.state, ctx.weight, ctx.like = router, state, weight * counts, likely.shape
        return grown

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        part, kept, loss = ctx.state.running_tokens, ctx.router.kept, ctx.router.loss
        of_one = gradient * ctx.weight * kept[part.microbatch][loss].tokens
        if part.begin == 0:
            del kept[part.microbatch][loss]
            if not kept[part.microbatch]:
                del kept[part.microbatch]
        return of_one.expand(ctx.like), None, None, None, None, None


class _Share(torch.autograd.Function):
    """Scale a mean over the tokens of a slice to its share of the microbatch's mean."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, reported: float, back: float) -> Tensor:
        ctx.back = back
        return mean * reported

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0] * ctx.back, None, None


def slices_of(part: TokenRange) -> int:
    """Return the number of slices of the microbatch."""
    return part.total // (part.end - part.begin)


class _Making:
    """The router and loss in computation. Process-wide, as Megatron's loss functions are."""

    def __init__(self) -> None:
        self.state: StepState | None = None
        self.running: _Router | None = None
        self.per_token = False

    @contextmanager
    def by(self, router: _Router | None, per_token: bool) -> Iterator[None]:
        """Attribute losses to this router inside the context."""
        before = self.running, self.per_token
        self.running, self.per_token = router, per_token
        try:
            yield
        finally:
            self.running, self.per_token = before


_MAKING = _Making()


def install(state: StepState, chunks: Sequence[nn.Module]) -> None:
    """Make routers balance full microbatches; calls outside a slice run as before.

    Raises:
        UnsupportedError: A router's loss cannot be computed over slices.
    """
    found = [
        module
        for chunk in chunks
        for module in unwrapped(chunk).modules()
        if hasattr(module, LOSSES[0])
    ]
    if not found:
        return
    if _MAKING.state is None:
        routers.switch_load_balancing_loss_func = partial(
            _balance, routers.switch_load_balancing_loss_func
        )
        routers.z_loss_func = partial(_z_loss, routers.z_loss_func)
    _MAKING.state = state
    for router in found:
        _check(router)
        kept: dict[int, dict[str, _Load]] = {}
        state.kept.append(kept)
        for name in LOSSES:
            setattr(router, name, _told(router, getattr(router, name), _Router(kept, name)))
        router.apply_z_loss = _told(router, router.apply_z_loss, None)


def _told(router: Any, inner: Callable[..., Any], own: _Router | None) -> Callable[..., Any]:
    per_token = bool(router.calculate_per_token_loss)

    def made(*args: Any, **options: Any) -> Any:
        with _MAKING.by(own, per_token):
            return inner(*args, **options)

    return made


def _balance(inner: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Replace Megatron's switch_load_balancing_loss_func; reads its keyword arguments."""
    state, router = _MAKING.state, _MAKING.running
    if state is None or state.tokens is None or router is None:
        return inner(*args, **options)
    slices = slices_of(state.tokens)
    if options.get("padding_mask") is not None:
        raise UnsupportedError(
            "--pipeline-slices does not work with a padding mask in MoE layers: a slice "
            "does not know the number of tokens of the others. Remove --pipeline-slices"
        )
    total = options["total_num_tokens"] * slices
    weight = options["num_experts"] * options["moe_aux_loss_coeff"]
    weight /= options["topk"] * total * total
    # With per-token loss, Megatron multiplies by the tokens of the call, here those of a slice.
    counts = slices if _MAKING.per_token else 1
    likely, tokens = options["probs"], options["tokens_per_expert"]
    grown: Tensor = _OfMicrobatch.apply(likely, tokens, router, state, weight, counts)
    return grown


def _z_loss(inner: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Replace Megatron's z-loss, a mean over tokens."""
    state, mean = _MAKING.state, inner(*args, **options)
    if state is None or state.tokens is None:
        return mean
    slices = slices_of(state.tokens)
    # With per-token loss, Megatron multiplies by the tokens of the call, which gives their sum.
    shared: Tensor = _Share.apply(mean, 1 / slices, 1.0 if _MAKING.per_token else 1 / slices)
    return shared


def _check(router: Any) -> None:
    """Raise UnsupportedError if recompute computes a loss in backward, from one slice only."""
    config = router.config
    again = config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    )
    if again and router.is_aux_loss_enabled():
        raise UnsupportedError(
            "--pipeline-slices does not work with a load-balancing loss and "
            f"--recompute-granularity {config.recompute_granularity}, which would compute it again "
            "per slice. Set --moe-aux-loss-coeff 0, or recompute modules other than the router"
        )
