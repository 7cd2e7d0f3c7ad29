"""V schedules with every other parallelism of Megatron equal its 1F1B."""

from collections.abc import Callable

import pytest
import torch
from mcore.conftest import UNTIED
from mcore.farm import Ended
from mcore.test_training import losses, relative

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


def assert_equal(package_run: Ended, megatron_run: Ended, bf16: bool = False) -> None:
    """Compare losses, grad norms, evaluations, and the parameters of every rank's place."""
    assert len(losses(package_run)) == 2
    assert relative(losses(package_run), losses(megatron_run)) <= (2e-3 if bf16 else 1e-6)
    norms = (package_run.record["grad_norms"], megatron_run.record["grad_norms"])
    assert relative(*norms) <= (2e-2 if bf16 else 1e-5)
    for mine, yours in zip(
        package_run.record["evaluations"], megatron_run.record["evaluations"], strict=True
    ):
        assert mine["lm loss"] == pytest.approx(yours["lm loss"], rel=2e-3 if bf16 else 1e-6)
    mine, yours = package_run.by_place("parameters"), megatron_run.by_place("parameters")
    assert mine.keys() == yours.keys()
    for name in yours:
        torch.testing.assert_close(
            mine[name], yours[name], rtol=0, atol=4e-3 if bf16 else 1e-5, msg=str(name)
        )


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
    assert_equal(*train_both(train, ranks, schedule, *flags.split()))


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", ["everything", "SP, CP"])
def test_options_with_parallelisms(train: Train, layout: str, option: str) -> None:
    ranks, flags = LAYOUTS[layout]
    runs = train_both(train, ranks, "v-half", *flags.split(), *OPTIONS[option].split())
    assert_equal(*runs, bf16=option == "bf16")
