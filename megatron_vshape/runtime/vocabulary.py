"""One device's part of a vocabulary: its rows of the embedding and of the output layer.

Every device makes its part of the logits and keeps their softmax over its own rows; what the parts
are to the whole is known once all have told each token's maximum, sum and logit of the label
(arXiv 2411.05288, Algorithm 2). For device i with rows W_i, and m, l the whole's maximum and sum:
P_i = alpha_i softmax(X W_i^T) with alpha_i = exp(m_i - m) l_i / l, which is at most 1; the loss is
log l - (y - m); dX = g (sum_i alpha_i softmax_i W_i - W[label]); dW_i = softmax_i^T (g alpha_i X),
less g X in the labels' rows. g, the gradient of the loss function, is one number per token, so that
nothing here depends on what that does with masks, scales and averages.

As in Megatron's own loss the logits have the dtype of the weight, and maximum, sum and loss are in
fp32; the softmax is kept in the weight's dtype. The sums have another order than on one device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vshape.runtime.weight_jobs import WeightGradKernel, accumulate_weight_grad

WIDE_NUMBERS = 2**26
"""Logits in fp32 at a time: 256 MiB instead of gigabytes per microbatch."""


class Rows(NamedTuple):
    """Which of some numbers of tokens are a device's, and its rows of them; 0 for all others."""

    own: Tensor  # as the numbers, whether it has the row
    row: Tensor

    @classmethod
    def of(cls, numbers: Tensor, first: int, count: int) -> "Rows":
        """Return the rows of the `numbers` on the device that has `count` from `first` on."""
        own = (numbers >= first) & (numbers < first + count)
        return cls(own, torch.where(own, numbers - first, 0))

    def only_own(self, values: Tensor) -> Tensor:
        """Return the values, one or one row per number, with zeros where the row is not own."""
        own = self.own if values.dim() == self.own.dim() else self.own.unsqueeze(-1)
        return values.masked_fill(~own, 0)


def look_up(weight: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Return the embeddings of the tokens [...] whose rows are own, [..., h], zeros elsewhere.

    Over all devices one is not zero, so their sum is exact in any dtype.
    """
    rows = Rows.of(tokens, first, weight.shape[0])
    return rows.only_own(weight[rows.row])


def add_rows(weight: Tensor, rows: Rows, gradients: Tensor) -> None:
    """Add the gradients, [n, h] for n numbers, to those of the own rows among them."""
    total = getattr(weight, "main_grad", None)
    if total is None:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        total = weight.grad
    total.index_add_(0, rows.row, rows.only_own(gradients).to(total.dtype))


class Statistics(NamedTuple):
    """Of each token, [n]: the maximum of logits, the sum of exp(logit - maximum), the label's."""

    most: Tensor
    total: Tensor
    label: Tensor  # 0 where no row of the part is the label's
    best: Tensor  # which row has the maximum, the first where several have; 0 if nobody asks

    @classmethod
    def whole(cls, parts: Tensor, labels: Tensor, vocabulary: int) -> "Statistics":
        """Return those of all rows from the parts' [k, 4, n], added up in their order.

        A label that is no token's, as of what is ignored, counts as the maximum: Megatron's own
        loss of it is log l too.
        """
        most, part = parts[:, 0].max(0)
        total = torch.zeros_like(most)
        label = torch.zeros_like(most)
        for own_most, own_total, own_label, _ in parts:
            total += own_total * torch.exp(own_most - most)
            label += own_label
        nobodys = (labels < 0) | (labels >= vocabulary)
        best = parts[:, 3].gather(0, part.unsqueeze(0)).squeeze(0)
        return cls(most, total, torch.where(nobodys, most, label), best)

    @property
    def losses(self) -> Tensor:
        """Return the cross entropy of each token."""
        return torch.log(self.total) - (self.label - self.most)

    def share(self, part: "Statistics") -> Tensor:
        """Return what each token's softmax over a part's rows is to that over all rows."""
        return torch.exp(part.most - self.most) * part.total / self.total


class Logits(NamedTuple):
    """What a device keeps of a microbatch's n tokens until the output layer's weight gradient."""

    hidden: Tensor  # [n, h], the input
    softmax: Tensor  # [n, rows], over the own rows
    labels: Rows
    statistics: Statistics

    @classmethod
    def of(
        cls, weight: Tensor, hidden: Tensor, labels: Tensor, first: int, asks_best: bool = False
    ) -> "Logits":
        """Return the part of the logits for the rows of `weight`, which begin at `first`."""
        rows = Rows.of(labels, first, weight.shape[0])
        softmax = hidden @ weight.t()  # logits until a block of tokens has its softmax in place
        at_once = max(1, WIDE_NUMBERS // len(weight))
        parts = [
            _soften(*block, first, asks_best)
            for block in zip(softmax.split(at_once), rows.row.split(at_once), strict=True)
        ]
        most, total, label, best = map(torch.cat, zip(*parts, strict=True))
        return cls(hidden, softmax, rows, Statistics(most, total, rows.only_own(label), best))

    def input_gradient(self, weight: Tensor, product: Tensor, whole: Statistics) -> Tensor:
        """Return this part of dX / g, [n, h]; `product` is `softmax` times the weight."""
        scaled = whole.share(self.statistics).unsqueeze(-1).to(product.dtype) * product
        return scaled - self.labels.only_own(weight[self.labels.row])

    def add_weight_gradient(
        self, weight: Tensor, whole: Statistics, gradient: Tensor, kernel: WeightGradKernel
    ) -> None:
        """Add dW of the own rows, for the gradient g [n] of the losses."""
        wide = gradient.unsqueeze(-1) * self.hidden
        scaled = _scaled(wide, whole.share(self.statistics), weight.dtype)
        accumulate_weight_grad(weight, self.softmax, scaled, kernel)
        del scaled  # before the rows, in fp32 too
        add_rows(weight, self.labels, wide.neg_())


def _soften(logits: Tensor, row: Tensor, first: int, asks_best: bool) -> Statistics:
    """Turn logits [n, rows] into their softmax, in place, and return what they were.

    `label` is what stands in each token's `row`, [n], whosever that is.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    most = wide.amax(-1)
    best = (wide.argmax(-1) + first).to(most) if asks_best else torch.zeros_like(most)
    label = wide.gather(-1, row.unsqueeze(-1)).squeeze(-1)
    total = wide.sub_(most.unsqueeze(-1)).exp_().sum(-1)
    logits.copy_(wide.div_(total.unsqueeze(-1)))
    return Statistics(most, total, label, best)


def _scaled(wide: Tensor, share: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [n, h] times each token's share, in this dtype, made a block of tokens at a time."""
    made = torch.empty_like(wide, dtype=dtype)
    at_once = max(1, WIDE_NUMBERS // 8 // wide.shape[1])  # h is less than the own rows
    blocks = (each.split(at_once) for each in (made, share.unsqueeze(-1), wide))
    for into, of_token, values in zip(*blocks, strict=True):
        into.copy_(of_token * values)
    return made
