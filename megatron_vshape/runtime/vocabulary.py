"""Vocabulary parallelism: one rank's rows of the embedding and of the output layer.

Every rank computes its part of the logits and saves their softmax over its own rows. All ranks then
exchange the maximum, the sum and the label's logit of each token (arXiv 2411.05288, Algorithm 2).
For rank i with rows W_i, and the global maximum m and sum l:

    P_i = alpha_i softmax(X W_i^T) with alpha_i = exp(m_i - m) l_i / l <= 1
    loss = log l - (y - m)
    dX = g (sum_i alpha_i softmax_i W_i - W[label])
    dW_i = softmax_i^T (g alpha_i X), minus g X in the labels' rows

g, the gradient of the loss function, is one number per token, so nothing here depends on its masks,
scales and averages.

As in Megatron's loss, the logits have the dtype of the weight, and maximum, sum and loss are fp32.
The softmax is saved in the weight's dtype. The order of summation differs from that of one rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vshape.runtime.weight_jobs import WeightGradKernel, accumulate_weight_grad

WIDE_NUMBERS = 2**26
"""Logits in fp32 at a time: 256 MiB instead of gigabytes per microbatch."""


class Rows(NamedTuple):
    """Map token numbers to the rows of one rank; row 0 for tokens of other ranks."""

    is_local: Tensor  # mask: whether this rank has the row
    row: Tensor

    @classmethod
    def of(cls, numbers: Tensor, first: int, count: int) -> "Rows":
        """Map `numbers` to the rows of the rank with `count` rows from `first` on."""
        is_local = (numbers >= first) & (numbers < first + count)
        # Row 0 for other ranks' tokens keeps the index valid; `only_own` zeroes the result.
        return cls(is_local, torch.where(is_local, numbers - first, 0))

    def only_own(self, values: Tensor) -> Tensor:
        """Zero the values of other ranks' tokens; one value or one row per token."""
        is_local = (
            self.is_local if values.dim() == self.is_local.dim() else self.is_local.unsqueeze(-1)
        )
        return values.masked_fill(~is_local, 0)


def look_up(weight: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Look up the embeddings of tokens [...], as [..., h] with zeros for rows of other ranks.

    Only one rank has a nonzero value, so the sum over ranks is exact in any dtype.
    """
    rows = Rows.of(tokens, first, weight.shape[0])
    return rows.only_own(weight[rows.row])


def add_rows(weight: Tensor, rows: Rows, gradients: Tensor) -> None:
    """Add the gradients [n, h] of n tokens to this rank's rows of the weight gradient."""
    total = getattr(weight, "main_grad", None)
    if total is None:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        total = weight.grad
    total.index_add_(0, rows.row, rows.only_own(gradients).to(total.dtype))


class Statistics(NamedTuple):
    """Per token, [n]: maximum logit, sum of exp(logit - maximum), and the label's logit."""

    maximum: Tensor
    total: Tensor
    label: Tensor  # 0 if the label is in another rank's rows
    best: Tensor  # row of the maximum, the first of equals; 0 if not requested

    @classmethod
    def whole(cls, parts: Tensor, labels: Tensor, vocabulary: int) -> "Statistics":
        """Combine the parts of all ranks, [k, 4, n], in rank order.

        An invalid label, as of ignored tokens, counts as the maximum: Megatron's loss for it is log
        l too.
        """
        maximum, part = parts[:, 0].max(0)
        total = torch.zeros_like(maximum)
        label = torch.zeros_like(maximum)
        for own_most, own_total, own_label, _ in parts:
            total += own_total * torch.exp(own_most - maximum)
            label += own_label
        nobodys = (labels < 0) | (labels >= vocabulary)
        # fp32 has all integers up to 2^24, so `best` (a row number) is exact.
        best = parts[:, 3].gather(0, part.unsqueeze(0)).squeeze(0)
        return cls(maximum, total, torch.where(nobodys, maximum, label), best)

    @property
    def losses(self) -> Tensor:
        """Cross entropy of each token."""
        return torch.log(self.total) - (self.label - self.maximum)

    def share(self, part: "Statistics") -> Tensor:
        """Return the share of a part's rows in each token's softmax."""
        return torch.exp(part.maximum - self.maximum) * part.total / self.total


class Logits(NamedTuple):
    """State of a microbatch's n tokens until the weight gradient of the output layer."""

    hidden: Tensor  # [n, h], the input
    softmax: Tensor  # [n, rows], over the own rows
    labels: Rows
    statistics: Statistics

    @classmethod
    def of(
        cls, weight: Tensor, hidden: Tensor, labels: Tensor, first: int, asks_best: bool = False
    ) -> "Logits":
        """Compute the logits for the rows of `weight`, which start at `first`."""
        rows = Rows.of(labels, first, weight.shape[0])
        softmax = hidden @ weight.t()  # logits until a block of tokens has its softmax in place
        at_once = max(1, WIDE_NUMBERS // len(weight))
        parts = [
            _soften(*block, first, asks_best)
            for block in zip(softmax.split(at_once), rows.row.split(at_once), strict=True)
        ]
        maximum, total, label, best = map(torch.cat, zip(*parts, strict=True))
        return cls(hidden, softmax, rows, Statistics(maximum, total, rows.only_own(label), best))

    def input_gradient(self, weight: Tensor, product: Tensor, combined: Statistics) -> Tensor:
        """Return this rank's part of dX / g, [n, h]; `product` is `softmax` times the weight."""
        scaled = combined.share(self.statistics).unsqueeze(-1).to(product.dtype) * product
        return scaled - self.labels.only_own(weight[self.labels.row])

    def add_weight_gradient(
        self, weight: Tensor, combined: Statistics, gradient: Tensor, kernel: WeightGradKernel
    ) -> None:
        """Add dW of this rank's rows, for the gradient g [n] of the losses."""
        # g X, which both terms of dW share.
        wide = gradient.unsqueeze(-1) * self.hidden
        scaled = _scaled(wide, combined.share(self.statistics), weight.dtype)
        accumulate_weight_grad(weight, self.softmax, scaled, kernel)
        del scaled  # free before the rows, in fp32 too, are made
        # In place: `wide` has no other reader.
        add_rows(weight, self.labels, wide.neg_())


def _soften(logits: Tensor, row: Tensor, first: int, asks_best: bool) -> Statistics:
    """Replace logits [n, rows] by their softmax in place, and return their statistics.

    `label` is the logit in each token's `row`, [n], even if the row is of another rank.
    """
    # At most WIDE_NUMBERS logits, so the fp32 copy is small.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    maximum = wide.amax(-1)
    best = (wide.argmax(-1) + first).to(maximum) if asks_best else torch.zeros_like(maximum)
    label = wide.gather(-1, row.unsqueeze(-1)).squeeze(-1)
    total = wide.sub_(maximum.unsqueeze(-1)).exp_().sum(-1)
    logits.copy_(wide.div_(total.unsqueeze(-1)))
    return Statistics(maximum, total, label, best)


def _scaled(wide: Tensor, share: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [n, h] times each token's share in this dtype, one block of tokens at a time."""
    scaled = torch.empty_like(wide, dtype=dtype)
    at_once = max(1, WIDE_NUMBERS // 8 // wide.shape[1])  # h is less than the own rows
    blocks = (tensor.split(at_once) for tensor in (scaled, share.unsqueeze(-1), wide))
    for into, of_token, values in zip(*blocks, strict=True):
        into.copy_(of_token * values)
    return scaled
