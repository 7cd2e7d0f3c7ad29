"""Vocabulary parallelism against the unsplit vocabulary: losses and gradients, without ranks."""

import pytest
import torch
from live_bytes import LivePeak
from torch import Tensor

from megatron_vshape.runtime import vocabulary
from megatron_vshape.runtime.vocabulary import Logits, Rows, Statistics, add_rows, look_up
from megatron_vshape.runtime.weight_jobs import WeightGradKernel

TOKENS, HIDDEN, VOCABULARY = 24, 16, 40


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, the weight, labels of which two are nobody's, and g."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype) * 3
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw).to(dtype)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    gradient = torch.rand(TOKENS, generator=draw, dtype=torch.float64)
    labels[3], labels[7] = -100, VOCABULARY + 5
    gradient[3] = gradient[7] = gradient[11] = 0  # ignored, and masked
    return hidden, weight, labels, gradient


def by_parts(
    hidden: Tensor, weight: Tensor, labels: Tensor, gradient: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, dX and dW with the vocabulary split over a number of devices."""
    count = VOCABULARY // parts
    shards = [rows.clone().requires_grad_() for rows in weight.split(count)]
    logits_by_shard = [
        Logits.of(w.detach(), hidden, labels, count * index) for index, w in enumerate(shards)
    ]
    everyones = torch.stack([torch.stack(logits.statistics) for logits in logits_by_shard])
    statistics = Statistics.whole(everyones, labels, VOCABULARY)
    input_gradients = [
        logits.input_gradient(shard.detach(), logits.softmax @ shard.detach(), statistics)
        for logits, shard in zip(logits_by_shard, shards, strict=True)
    ]
    for logits, shard in zip(logits_by_shard, shards, strict=True):
        logits.add_weight_gradient(shard, statistics, gradient, WeightGradKernel.MATMUL_ADD)
    grads = [shard.grad for shard in shards if shard.grad is not None]
    return (
        statistics.losses,
        gradient.unsqueeze(-1) * torch.stack(input_gradients).sum(0),
        torch.cat(grads),
    )


def at_once(
    hidden: Tensor, weight: Tensor, labels: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same from the unsplit formula, in float64."""
    hidden, weight = (operand.double().requires_grad_() for operand in (hidden, weight))
    logits = hidden @ weight.t()
    is_in_vocabulary = (labels >= 0) & (labels < VOCABULARY)
    target_logits = logits.gather(
        -1, torch.where(is_in_vocabulary, labels, 0).unsqueeze(-1)
    ).squeeze(-1)
    losses = logits.logsumexp(-1) - torch.where(
        is_in_vocabulary, target_logits, logits.amax(-1).detach()
    )
    losses.backward(gradient)
    assert hidden.grad is not None
    assert weight.grad is not None
    return losses.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 3e-2)],
)
def test_parts_equal_the_unsplit_vocabulary(
    parts: int, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, labels, gradient = inputs(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    results = by_parts(hidden, weight, labels, gradient.to(wide), parts)
    for mine, expected in zip(results, at_once(hidden, weight, labels, gradient), strict=True):
        error = (mine.double() - expected).norm() / expected.norm()
        assert error <= tolerance


def test_large_logits_do_not_overflow() -> None:
    """The maximum of one part is far above the others', whose exponentials vanish."""
    hidden, weight, labels, gradient = inputs(torch.float64)
    weight[5] *= 500
    results = by_parts(hidden, weight, labels, gradient, 8)
    for mine, expected in zip(results, at_once(hidden, weight, labels, gradient), strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_tokens_equal_the_unsplit_vocabulary(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last block that is not full included."""
    hidden, weight, labels, gradient = inputs(dtype)
    expected_results = by_parts(hidden, weight, labels, gradient.float(), 2)
    monkeypatch.setattr(vocabulary, "WIDE_NUMBERS", 7 * VOCABULARY // 2)
    blocks = by_parts(hidden, weight, labels, gradient.float(), 2)
    for mine, expected in zip(blocks, expected_results, strict=True):
        assert torch.equal(mine, expected)


def test_logits_are_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the tensors kept until T, memory has one block of tokens in fp32 and scalars."""
    tokens, rows, block = 512, 256, 64
    monkeypatch.setattr(vocabulary, "WIDE_NUMBERS", block * rows)
    hidden = torch.randn(tokens, 8, dtype=torch.bfloat16)
    weight = torch.randn(rows, 8, dtype=torch.bfloat16)
    labels = torch.randint(rows, (tokens,))
    with LivePeak() as live_peak:
        Logits.of(weight, hidden, labels, 0, asks_best=True)
    retained_bytes, wide, per_token = 2 * tokens * rows, 4 * block * rows, 64 * tokens
    assert (
        retained_bytes + wide
        <= live_peak.max_memory_allocated()
        <= retained_bytes + wide + per_token
    )


def test_weight_gradient_needs_two_fp32_copies_of_its_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Besides the tensors of S: one copy scaled by the gradient, and one for the labels' rows."""
    tokens, rows, size = 512, 64, 256
    monkeypatch.setattr(vocabulary, "WIDE_NUMBERS", 8 * 64 * size)
    hidden = torch.randn(tokens, size, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(rows, size, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(rows, size)
    labels = torch.randint(rows, (tokens,))
    logits = Logits.of(weight.detach(), hidden, labels, 0)
    with LivePeak() as live_peak:
        kernel = WeightGradKernel.MATMUL_ADD
        logits.add_weight_gradient(weight, logits.statistics, torch.randn(tokens), kernel)
    twice, products, per_token = 2 * 4 * tokens * size, 4 * rows * size, 64 * tokens
    assert live_peak.max_memory_allocated() <= twice + products + per_token


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_argmax_is_the_first_of_equal_rows(parts: int) -> None:
    hidden, weight, labels, _ = inputs(torch.bfloat16)
    weight[33:] = weight[:7]
    logits, count = hidden @ weight.t(), VOCABULARY // parts
    logits_by_shard = [
        Logits.of(w, hidden, labels, count * index, True)
        for index, w in enumerate(weight.split(count))
    ]
    everyones = torch.stack(
        [torch.stack(shard_logits.statistics) for shard_logits in logits_by_shard]
    )
    statistics = Statistics.whole(everyones, labels, VOCABULARY)
    assert torch.equal(statistics.best.long(), logits.argmax(-1))
    assert (statistics.best < 7).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_lookups_and_their_gradient_equal_the_unsplit_embedding(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw).to(dtype)
    tokens = torch.randint(VOCABULARY, (3, 8), generator=draw)  # some more than once
    gradients = torch.randn(3, 8, HIDDEN, generator=draw).double()
    shards = [rows.clone() for rows in weight.split(10)]
    embeddings = sum(look_up(shard, tokens, 10 * index) for index, shard in enumerate(shards))
    assert isinstance(embeddings, Tensor)
    assert torch.equal(embeddings, weight[tokens])  # exact, in any dtype
    for index, shard in enumerate(shards):
        shard.main_grad = torch.zeros(10, HIDDEN, dtype=torch.float64)  # type: ignore[attr-defined]
        add_rows(shard, Rows.of(tokens.flatten(), 10 * index, 10), gradients.flatten(0, 1))
    expected = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.float64)
    expected.index_add_(0, tokens.flatten(), gradients.flatten(0, 1))
    total = torch.cat([shard.main_grad for shard in shards])  # type: ignore[attr-defined]
    torch.testing.assert_close(total, expected)


def test_live_bytes_peak_inside_an_expression() -> None:
    with LivePeak() as live_bytes:
        values = torch.ones(100)
        live_bytes.reset_peak_memory_stats()
        assert live_bytes.max_memory_allocated() == live_bytes.memory_allocated() == 400
        result = (values + 1).sum()
        assert live_bytes.memory_allocated() == 400 + result.nbytes
        assert live_bytes.max_memory_allocated() == pytest.approx(800, abs=8)
