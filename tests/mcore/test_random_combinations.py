"""Random combinations of options are rejected with a reason or match 1F1B."""

import random
from collections.abc import Sequence

import pytest
from mcore.farm import Farm
from mcore.parity import EXPERTS, SEQUENCE, SHARDED, UNTIED, Tolerance, losses, relative

FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
POOLS: Sequence[tuple[int, Sequence[str]]] = (  # maximum number of drawn options per pool
    (1, ("v-half", "v-min", "v-zb", "zb-h1", "zb-h2", "v-half+", "1f1b-v", "v-two-thirds")),
    (
        1,
        (
            SEQUENCE,
            "--context-parallel-size 2",
            SHARDED,
            "--pipeline-model-parallel-size 4",
        ),
    ),
    (
        1,
        (
            UNTIED,
            "--swiglu --normalization RMSNorm --disable-bias-linear",
            EXPERTS,
            f"{EXPERTS} --moe-router-topk 2 --moe-shared-expert-intermediate-size 32",
            f"{EXPERTS} --moe-layer-freq ([0]*2+[1]*6)",
            f"--mtp-num-layers 1 {UNTIED}",
            "--qk-layernorm",
            "--attention-output-gate",
            "--position-embedding-type learned_absolute",
        ),
    ),
    (
        2,
        (
            "--bf16",
            "--calculate-per-token-loss",
            "--clip-grad 0.01",
            f"{SELECTIVE} core_attn",
            f"{SELECTIVE} mlp --disable-bias-linear",
            f"{FULL} uniform",
            f"{FULL} block",
            f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4000",
            "--cross-entropy-loss-fusion",
            "--micro-batch-size 2",
            "--rampup-batch-size 4 4 24 --global-batch-size 8",
            "--eval-iters 1 --eval-interval 2",
            "--decoder-first-pipeline-num-layers 2",
            "--optimizer sgd",
        ),
    ),
    (
        2,
        (
            "--pipeline-vocab-parallel",
            "--pipeline-slices 2",
            "--optimizer-post-validation",
            "--pipeline-layer-split auto",
            "--pipeline-profile-iterations 2:2",
        ),
    ),
)


def draw_options(seed: int) -> tuple[str, list[str], list[str]]:
    """Return a schedule, flags of Megatron, and flags of this package."""
    chance = random.Random(seed)
    drawn = [
        " ".join(chance.sample(pool, chance.randint(min(max_options, 1), max_options)))
        for max_options, pool in POOLS
    ]
    common = "--train-iters 3 --rerun-mode disabled --pipeline-model-parallel-size 2"
    return drawn[0], f"{common} {' '.join(drawn[1:4])}".split(), drawn[4].split()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(32))
def test_random_combination_is_rejected_or_correct(farm: Farm, seed: int) -> None:
    schedule, flags, package_flags = draw_options(seed)
    megatron_run = farm.run(4, *flags, "--pipeline-schedule", "1f1b")
    if any(megatron_run.codes):
        pytest.skip("Megatron does not train it either")
    package_run = farm.run(4, *flags, "--pipeline-schedule", schedule, *package_flags)
    if package_run.codes == [1] * 4 and "megatron-vshape: --" in package_run.output[0]:
        return
    package_run.check()
    assert len(losses(package_run)) == 3
    tolerance = Tolerance(5e-3, 3e-2) if "--bf16" in flags else Tolerance(2e-6, 2e-5)
    assert relative(losses(package_run), losses(megatron_run)) <= tolerance.losses
    norms = package_run.record["grad_norms"], megatron_run.record["grad_norms"]
    assert relative(*norms) <= tolerance.norms
