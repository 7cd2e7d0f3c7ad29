"""Losses of multi-token prediction where all pipeline ranks share the vocabulary.

Megatron makes them within F of the last stage, of logits by the model's own output layer, and hangs
them on the graph of what leaves that stage (`process_mtp_loss`). Its logits begin only after F, so
it is given zeros for the losses. They are a function of the hidden state whose gradient B asks for,
and the graph says what theirs is as soon as F has run. What Megatron counts of them for the log is
counted once they are known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from megatron_vshape.mcore.replaced import Replaced

COUNTS = ("save_metrics_to_tracker", "save_loss_to_tracker")
"""Megatron's names of the tracker of layer losses; the second up to 0.18."""


class _LaterLosses(torch.autograd.Function):
    """Zeros for the losses of a hidden state; `take` returns its gradient once B wants that."""

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
    """What one layer has made of a microbatch."""

    hidden: Tensor  # [s, b, h] or a part of the sequence
    losses: Tensor  # [s, b, 1], the zeros
    labels: Tensor | None = None  # [b, s]
    weights: Tensor | None = None  # by which losses count in the mean that is logged, [b, s]
    count: Callable[[Tensor, Tensor], None] | None = None  # for the log: their mean, and hits
    gradient: Tensor | None = None  # of the losses, [b, s]


@dataclass(eq=False)
class FurtherLosses:
    """Those of a step's microbatches, on the rank that makes the loss."""

    layers: int
    shapes: Mapping[int, tuple[int, int]]  # [b, s] of the microbatches on this rank
    _made: dict[int, list[_Layer]] = field(default_factory=dict)
    _hidden_gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Call the model inside, in F of the last stage."""
        made = self._made[microbatch] = []
        counted: list[inspect.BoundArguments] = []
        helper = MTPLossLoggingHelper
        count = next(getattr(helper, name) for name in COUNTS if hasattr(helper, name))
        signature = inspect.signature(count)

        def keep(*args: Any, **options: Any) -> None:
            counted.append(signature.bind(*args, **options))

        with Replaced() as replaced:
            replaced.put(helper, count.__name__, keep)
            yield
        for layer, given in zip(made, counted, strict=False):
            mean = given.arguments["loss"]
            if mean.requires_grad:  # else no token counts
                (weights,) = torch.autograd.grad(mean, layer.losses, retain_graph=True)
                layer.weights = _by_sequence(weights)
            given.arguments["loss"] = mean.detach()
            layer.count = partial(_count, count, given)

    def begin(self, microbatch: int, hidden: Tensor) -> Tensor | None:
        """Return what stands for the logits of the next layer; None if the model's own come."""
        made = self._made[microbatch]
        if len(made) == self.layers:
            return None
        take = partial(self._hidden_gradients.pop, (microbatch, len(made)))
        losses: Tensor = _LaterLosses.apply(hidden, (*self.shapes[microbatch][::-1], 1), take)
        made.append(_Layer(hidden.detach(), losses))
        return losses

    def keep_labels(self, microbatch: int, labels: Tensor, logits: Tensor) -> Tensor | None:
        """Take a layer's labels; return what stands for its losses, None if these are no layer's.

        `logits` is what `begin` returned for it.
        """
        for layer in self._made[microbatch]:
            if layer.losses is logits:
                layer.labels = labels
                return _by_sequence(logits)
        return None

    def end(self, microbatch: int, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stage's output and the labels with those of all layers, as more sequences.

        `hidden` is what F has returned, with its graph.
        """
        made = self._made[microbatch]
        if not made:
            return hidden.detach(), labels
        losses, nothing = [each.losses for each in made], hidden.new_zeros(()).expand_as(hidden)
        gradients = torch.autograd.grad(hidden, losses, nothing, retain_graph=True)
        for layer, gradient in zip(made, gradients, strict=True):
            layer.gradient = _by_sequence(gradient)
        whole = torch.cat([hidden.detach(), *(layer.hidden for layer in made)], dim=1)
        return whole, torch.cat([labels, *(_known(layer.labels) for layer in made)])

    def forget(self, microbatch: int) -> None:
        """Let go of a microbatch that nothing is learned from."""
        self._made.pop(microbatch, None)

    def learn(
        self, microbatch: int, losses: Sequence[Tensor], best: Sequence[Tensor]
    ) -> list[Tensor]:
        """Count every layer's true losses for the log, and return their gradients; all are [b, s].

        `best` is which row of the vocabulary has the largest logit.
        """
        gradients = []
        made = self._made.pop(microbatch)
        for layer, true, found in zip(made, losses, best, strict=True):
            weights = torch.zeros_like(true) if layer.weights is None else layer.weights
            hits = (found == _known(layer.labels)) & (weights != 0)
            if layer.count is not None:
                layer.count((weights * true).sum(), hits.sum().float())
            gradients.append(_known(layer.gradient))
        return gradients

    def keep_gradients(self, microbatch: int, gradients: Sequence[Tensor]) -> None:
        """Take the gradients of all layers' hidden states, for B."""
        for layer, gradient in enumerate(gradients):
            self._hidden_gradients[microbatch, layer] = gradient


def _count(
    count: Callable[..., None], given: inspect.BoundArguments, mean: Tensor, hits: Tensor
) -> None:
    given.arguments["loss"] = mean
    if "correct" in given.arguments:
        given.arguments["correct"] = hits
    count(*given.args, **given.kwargs)


def _by_sequence(numbers: Tensor) -> Tensor:
    """Return numbers of tokens, [s, b, 1], as [b, s]."""
    return numbers.squeeze(-1).t()


def _known(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("a layer of multi-token prediction has made logits and no losses")
    return tensor
