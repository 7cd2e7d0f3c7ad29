"""Dry runs of LoRA: bytes and GEMMs follow from the sizes of the adapters."""

from pathlib import Path
from typing import Any

import pytest
from rehearsal.warm import Warm, rehearse

pytest.importorskip("megatron.core")

HIDDEN, LAYERS, FFN, VOCABULARY, RANK, EXPERTS = 256, 4, 1152, 1152, 8, 8
EXPERT_FFN = 192
TINY = f"""
    --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 16 --bf16
    --untie-embeddings-and-output-weights --position-embedding-type rope --disable-bias-linear
    --vocab-size {VOCABULARY} --attention-dropout 0 --hidden-dropout 0 --no-rope-fusion
    --ffn-hidden-size {FFN}
""".split()
LOCAL = [*TINY, "--transformer-impl", "local", "--no-persist-layer-norm"]
WITH_EXPERTS = [
    *TINY,
    *f"""--num-experts {EXPERTS} --moe-router-topk 2 --moe-grouped-gemm --swiglu
    --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size {EXPERT_FFN}
    --moe-router-load-balancing-type none --expert-model-parallel-size 2""".split(),
]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
LORA = ["--lora-rank", str(RANK)]
ATTENTION = RANK * (HIDDEN + 3 * HIDDEN + 2 * HIDDEN)  # of linear_qkv and linear_proj
MLP = RANK * 2 * (HIDDEN + FFN)
EXPERT = RANK * (HIDDEN + 2 * EXPERT_FFN + EXPERT_FFN + HIDDEN)


def estimate(warm: Warm, folder: Path, flags: list[str], *options: str) -> list[dict[str, Any]]:
    """Return the estimated ranks."""
    _, report = rehearse(warm, folder, flags, "--alone", *options)
    ranks: list[dict[str, Any]] = report["ranks"]
    return ranks


def gemm_flops(rank: dict[str, Any], kind: str) -> float:
    """Return the FLOPs of the last passes of this kind, one per chunk."""
    return sum(
        2.0 * rows * inner * columns * gemms * number
        for passes in rank["kinds"]
        if passes["kind"] == kind
        for _, rows, inner, columns, gemms, number in passes["work"]["products"]
    )


@pytest.mark.usefixtures("te_python")
@pytest.mark.parametrize(
    ("flags", "options", "tp", "adapters"),
    [
        (LOCAL, LORA, 1, ATTENTION + MLP),
        ([*TINY, *TP2], LORA, 2, (ATTENTION + MLP) // 2),
        ([*LOCAL, *TP2], [*LORA, "--lora-targets", "*.linear_fc?"], 2, MLP // 2),
        (WITH_EXPERTS, LORA, 1, ATTENTION + EXPERT),
        (WITH_EXPERTS, [*LORA, "--lora-per-expert"], 1, ATTENTION + EXPERTS // 2 * EXPERT),
    ],
    ids=["local", "te-tp2", "mlp-tp2", "experts", "per-expert"],
)
def test_only_adapters_have_gradients_and_optimizer_state(
    warm: Warm, tmp_path: Path, flags: list[str], options: list[str], tp: int, adapters: int
) -> None:
    (rank,) = estimate(warm, tmp_path, flags, *options)
    mlp = 2 * HIDDEN * FFN // tp
    if flags is WITH_EXPERTS:  # half of the experts, and the router
        mlp = EXPERTS // 2 * 3 * HIDDEN * EXPERT_FFN + EXPERTS * HIDDEN
    layer = 4 * HIDDEN**2 // tp + mlp + 4 * HIDDEN
    vocabulary = -(-VOCABULARY // (128 * tp)) * 128  # of this rank, padded
    frozen = LAYERS * layer + 2 * vocabulary * HIDDEN + 2 * HIDDEN
    adapters *= LAYERS
    assert rank["parameters"] == frozen + adapters
    parts = rank["held_parts"]
    storages = 8 * LAYERS * (EXPERTS // 2 if "--lora-per-expert" in options else 1)
    padding = 512 * storages  # of each storage of an adapter, at most
    weights = 2 * (frozen + adapters)
    assert weights <= parts["weights"] <= weights + padding + 0.01 * weights
    assert 4 * adapters <= parts["gradients"] <= 4 * adapters + padding
    assert 12 * adapters <= parts["optimizer"] <= 12 * adapters + 3 * padding


@pytest.mark.usefixtures("te_python")
def test_frozen_layers_keep_no_inputs_and_have_no_weight_gradients(
    warm: Warm, tmp_path: Path
) -> None:
    (full,) = estimate(warm, tmp_path, TINY)
    (lora,) = estimate(warm, tmp_path, TINY, *LORA, "--lora-targets", "linear_proj")
    assert gemm_flops(full, "B") == pytest.approx(2 * gemm_flops(full, "F"))
    assert gemm_flops(lora, "B") < 1.1 * gemm_flops(lora, "F")
    kept, kept_frozen = (
        next(passes["adds_bytes"] for passes in rank["kinds"] if passes["kind"] == "F")
        for rank in (full, lora)
    )
    # Of every layer, the normed input of linear_qkv and linear_fc1, and the input of linear_fc2.
    values = 2 * 128 * LAYERS * (2 * HIDDEN + FFN)
    # In the first layer, nothing before the adapter has a backward.
    assert 1 < (kept - kept_frozen) / (2 * values) < 1.3


@pytest.mark.parametrize("flags", [FULL, ["--pipeline-schedule", "v-half"]], ids=["full", "v"])
def test_adapters_get_gradients_with_recomputation_and_a_split_backward(
    warm: Warm, tmp_path: Path, flags: list[str]
) -> None:
    pipeline = ["--pipeline-model-parallel-size", "2"]
    ranks = estimate(warm, tmp_path, [*LOCAL, *pipeline, *flags], *LORA)
    for rank in ranks:
        forward = gemm_flops(rank, "F")
        factor = 2 if FULL[0] in flags else 1  # recomputation runs the forward again
        assert 0.75 * factor < gemm_flops(rank, "B") / forward < 1.15 * factor
        if "v-half" in flags:
            assert 0 < gemm_flops(rank, "W") < 0.1 * forward


@pytest.mark.parametrize(
    ("flags", "options", "error"),
    [
        ([], ["--lora-targets", "q_proj"], "add --lora-rank 8"),
        (
            [],
            [*LORA, "--lora-targets", "linear_qkv,q_proj"],
            "--lora-targets q_proj matches no linear layer of this model: use names among "
            "linear_fc1, linear_fc2, linear_proj, linear_qkv, or all-linear",
        ),
        (
            TP2,
            ["--lora-rank", "3"],
            "cannot be sharded by --tensor-model-parallel-size 2: --lora-rank 3 has to be",
        ),
    ],
)
def test_unsupported_adapters_are_rejected(
    warm: Warm, tmp_path: Path, flags: list[str], options: list[str], error: str
) -> None:
    ran = warm(tmp_path, "rehearse", *options, "--", "pretrain_gpt.py", *LOCAL, *flags)
    assert ran.returncode == 2
    assert error in " ".join(ran.stderr.split())
