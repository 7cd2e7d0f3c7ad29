"""V schedules with every other parallelism of Megatron equal its 1F1B."""

from collections.abc import Callable

import pytest
from mcore.conftest import UNTIED
from mcore.farm import Ended
from mcore.parity import BF16, FP32, assert_same_training

Train = Callable[..., Ended]

STEPS = ("--train-iters", "2", "--eval-interval", "2", "--eval-iters", "1")
EXPERTS = (
    "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--disable-bias-linear --moe-token-dispatcher-type alltoall"
)
# gloo gathers only parts of one size, and expert-tensor-parallel ranks have tokens by their number.
EXPERT_PARALLEL = (
    f"{EXPERTS} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {UNTIED}"
)
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4000"
TENSOR = "--tensor-model-parallel-size 2"
SEQUENCE = f"{TENSOR} --sequence-parallel"
CONTEXT = "--context-parallel-size 2"

LAYOUTS = {
    "everything": (8, f"{SEQUENCE} {CONTEXT} {EXPERT_PARALLEL} {OVERLAP}"),
    "SP": (4, SEQUENCE),
    "CP": (4, CONTEXT),
    "EP": (4, EXPERT_PARALLEL),
    "TP, DP": (8, TENSOR),
    "SP, CP": (8, SEQUENCE + " " + CONTEXT),
    "SP, DP, sharded optimizer, overlap": (8, f"{SEQUENCE} {OVERLAP}"),
    "CP, DP, sharded optimizer": (8, f"{CONTEXT} {SHARDED} {UNTIED}"),
    "CP, EP": (4, f"{CONTEXT} {EXPERT_PARALLEL}"),
    "SP, EP": (4, f"{SEQUENCE} {EXPERT_PARALLEL}"),
    "SP, DP, EP": (8, f"{SEQUENCE} {EXPERT_PARALLEL} {OVERLAP}"),
    "CP, DP, EP": (8, f"{CONTEXT} {EXPERT_PARALLEL} {SHARDED}"),
    "EP, DP": (8, f"{EXPERT_PARALLEL} {OVERLAP}"),
}
OPTIONS = {
    "per-token loss": "--calculate-per-token-loss",
    "learned positions": "--position-embedding-type learned_absolute",
    "no clipping": "--clip-grad 0",
    "bf16": "--bf16",
}


def train_both(train: Train, ranks: int, schedule: str, *flags: str) -> tuple[Ended, Ended]:
    flags = (*STEPS, "--pipeline-model-parallel-size", "2", *flags)
    megatron_run = train(ranks, "--pipeline-schedule", "1f1b", *flags)
    return train(ranks, "--pipeline-schedule", schedule, *flags), megatron_run


FAST = "CP, EP"  # tensor parallelism with overlaps: test_hiding; all of it: nightly


@pytest.mark.parametrize("schedule", ["v-half", pytest.param("v-zb", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in LAYOUTS],
)
def test_parallelisms(train: Train, layout: str, schedule: str) -> None:
    ranks, flags = LAYOUTS[layout]
    runs = train_both(train, ranks, schedule, *flags.split())
    assert_same_training(*runs, view=Ended.by_place)


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", ["everything", "SP, CP"])
def test_options_with_parallelisms(train: Train, layout: str, option: str) -> None:
    ranks, flags = LAYOUTS[layout]
    runs = train_both(train, ranks, "v-half", *flags.split(), *OPTIONS[option].split())
    assert_same_training(*runs, BF16 if option == "bf16" else FP32, view=Ended.by_place)
