"""Losses of multi-token prediction with vocabulary parallelism.

Megatron computes these losses within the F of the last stage, from logits of the model's output
layer, and attaches them to the graph of the stage's output (`process_mtp_loss`). Here the LOGITS
pass runs after F, so Megatron gets zeros for the losses. The zeros are a function of the hidden
state, whose gradient B needs, and the graph gives their own gradient as soon as F has run. The
metrics for the log are recorded once the losses are known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from megatron_vshape.mcore.hook import Replaced

_RECORD_METHODS = ("save_metrics_to_tracker", "save_loss_to_tracker")
"""Megatron's names of the method that records layer losses; the second up to 0.18."""


class _LaterLosses(torch.autograd.Function):
    """Zeros for the losses of a hidden state; `take` returns its gradient in B."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, shape: Sequence[int], take: Callable[[], Tensor]
    ) -> Tensor:
        ctx.take = take
        return torch.zeros(shape, dtype=torch.float32, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.take(), None, None


@dataclass(slots=True)
class _Layer:
    """The tensors of one layer and microbatch."""

    hidden: Tensor  # [s, b, h] or a part of the sequence
    losses: Tensor  # [s, b, 1], the zeros
    labels: Tensor | None = None  # [b, s]
    weights: Tensor | None = None  # weights of the losses in the logged mean, [b, s]
    record: Callable[[Tensor, Tensor], None] | None = None  # records the mean and the hits
    gradient: Tensor | None = None  # gradient of the losses, [b, s]


@dataclass(eq=False)
class FurtherLosses:
    """The multi-token prediction losses of a step's microbatches, on the loss rank."""

    num_layers: int
    shape_of: Callable[[int], tuple[int, int]]  # [b, s] of a microbatch on this rank
    _layers: dict[int, list[_Layer]] = field(default_factory=dict)
    _hidden_gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Context for the model's call in the F of the last stage."""
        layers = self._layers[microbatch] = []
        calls: list[inspect.BoundArguments] = []
        helper = MTPLossLoggingHelper
        record = next(getattr(helper, name) for name in _RECORD_METHODS if hasattr(helper, name))
        signature = inspect.signature(record)

        def keep(*args: Any, **options: Any) -> None:
            calls.append(signature.bind(*args, **options))

        with Replaced() as replaced:
            replaced.put(helper, record.__name__, keep)
            yield
        for layer, call in zip(layers, calls, strict=False):
            mean = call.arguments["loss"]
            if mean.requires_grad:  # otherwise no token has a loss weight
                (weights,) = torch.autograd.grad(mean, layer.losses, retain_graph=True)
                layer.weights = _by_sequence(weights)
            call.arguments["loss"] = mean.detach()
            layer.record = partial(_record_loss, record, call)

    def begin(self, microbatch: int, hidden: Tensor) -> Tensor | None:
        """Return the replacement of the next layer's logits; None for the main logits."""
        layers = self._layers[microbatch]
        if len(layers) == self.num_layers:
            return None
        take = partial(self._hidden_gradients.pop, (microbatch, len(layers)))
        losses: Tensor = _LaterLosses.apply(hidden, (*self.shape_of(microbatch)[::-1], 1), take)
        layers.append(_Layer(hidden.detach(), losses))
        return losses

    def keep_labels(self, microbatch: int, labels: Tensor, logits: Tensor) -> Tensor | None:
        """Store a layer's labels; return its zero losses, or None if `logits` belong to no layer.

        `logits` is the return value of `begin` for the layer.
        """
        for layer in self._layers[microbatch]:
            if layer.losses is logits:
                layer.labels = labels
                return _by_sequence(logits)
        return None

    def end(self, microbatch: int, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stage's output and labels, with those of all layers appended as sequences.

        `hidden` is the output of F with its graph.
        """
        layers = self._layers[microbatch]
        if not layers:
            return hidden.detach(), labels
        losses, zeros = [layer.losses for layer in layers], hidden.new_zeros(()).expand_as(hidden)
        # Megatron attaches a loss by a function whose gradient does not depend on the output's, so
        # zeros are enough.
        gradients = torch.autograd.grad(hidden, losses, zeros, retain_graph=True)
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.gradient = _by_sequence(gradient)
        output = torch.cat([hidden.detach(), *(layer.hidden for layer in layers)], dim=1)
        return output, torch.cat([labels, *(_required(layer.labels) for layer in layers)])

    def forget(self, microbatch: int) -> None:
        """Free a microbatch without training."""
        self._layers.pop(microbatch, None)

    def record_losses(
        self, microbatch: int, losses: Sequence[Tensor], best_rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """Record every layer's true losses for the log; return their gradients, all [b, s].

        `best_rows` has the index of the vocabulary row with the largest logit.
        """
        gradients = []
        layers = self._layers.pop(microbatch)
        for layer, true_losses, best_row in zip(layers, losses, best_rows, strict=True):
            weights = torch.zeros_like(true_losses) if layer.weights is None else layer.weights
            hits = (best_row == _required(layer.labels)) & (weights != 0)
            if layer.record is not None:
                layer.record((weights * true_losses).sum(), hits.sum().float())
            gradients.append(_required(layer.gradient))
        return gradients

    def keep_gradients(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        """Store the gradients of all layers' hidden states for B."""
        for layer, gradient in enumerate(gradients):
            self._hidden_gradients[microbatch, layer] = gradient


def _record_loss(
    record: Callable[..., None], call: inspect.BoundArguments, mean: Tensor, hits: Tensor
) -> None:
    call.arguments["loss"] = mean
    if "correct" in call.arguments:
        call.arguments["correct"] = hits
    record(*call.args, **call.kwargs)


def _by_sequence(numbers: Tensor) -> Tensor:
    """Transpose values per token from [s, b, 1] to [b, s]."""
    return numbers.squeeze(-1).t()


def _required(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("a layer of multi-token prediction has made logits and no losses")
    return tensor
