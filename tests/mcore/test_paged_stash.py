"""Megatron's paged stash and its rerun of a step after an overflow (on CPU: stash_on_cpu)."""

import json
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from mcore.farm import Ended, Farm, Train
from mcore.parity import EXPERTS, UNTIED, assert_same_bits
from mcore.stash_on_cpu import PRINTED
from mcore.test_graphs import rows_of

from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.mcore.features.offload import check_offloading
from megatron_vshape.mcore.refusals import UnsupportedError, check_arguments

PLUGIN = "stash_on_cpu"
MODEL = f"--train-iters 3 --clip-grad 0 {EXPERTS} {UNTIED} --eval-iters 1 --eval-interval 2"
STASH = "--moe-paged-stash --moe-expert-rank-capacity-factor 1.5"

pytestmark = pytest.mark.skipif(
    find_spec("megatron.core.transformer.moe.paged_stash") is None,
    reason="megatron-core has the paged stash from 0.18 on",
)


def stash_orders(ended: Ended) -> list[list[list[int]]]:
    """Return the recorded stash order of every rank, in the format of Transformer Engine."""
    orders_by_rank = []
    for text in ended.output:
        lines = [line for line in text.splitlines() if line.startswith(PRINTED)]
        texts = {line.removeprefix(PRINTED) for line in lines}
        orders_by_rank.append(
            [[abs(x) // 10**6 * (1 if x > 0 else -1) for x in json.loads(e)] for e in texts]
        )
    return orders_by_rank


@pytest.mark.parametrize(
    ("schedule", "overflows"),
    [
        ("v-half", True),
        pytest.param("zb-h1", False, marks=pytest.mark.slow),
        pytest.param("v-half", False, marks=pytest.mark.slow),
        pytest.param("zb-h1", True, marks=pytest.mark.slow),
    ],
)
def test_overflowed_step_is_rerun_with_equal_results(
    farm: Farm, train: Train, schedule: str, overflows: bool
) -> None:
    flags = f"--pipeline-schedule {schedule} {MODEL}".split()
    package_run = farm.run(4, *flags, *STASH.split(), plugin=PLUGIN, argument=overflows).check()
    assert_same_bits(package_run, train(4, *flags))
    layers = 1 if schedule == "v-half" else 2  # per stage
    rows = [[chunk for chunk in row for _ in range(layers)] for row in rows_of(schedule, 4, 8)]
    assert stash_orders(package_run) == [[row] for row in rows]
    assert ("rerunning forward-backward" in "".join(package_run.output)) == overflows


@pytest.mark.slow
def test_stash_records_only_the_final_pass_order(farm: Farm) -> None:
    """Steps 2 and 4 are measured; two schedules may alternate in the 24 steps after them."""
    auto = "--pipeline-schedule auto --pipeline-profile-iterations 2:2 --train-iters 32"
    flags = f"{MODEL} {STASH} {auto} --eval-iters 0".split()
    assert [
        len(rank_orders) for rank_orders in stash_orders(farm.run(2, *flags, plugin=PLUGIN).check())
    ] == [1, 1]


def test_unsupported_options_with_the_stash_are_rejected() -> None:
    args: Any = SimpleNamespace(
        transformer_impl="local", moe_paged_stash=True, rampup_batch_size=[8, 8, 64]
    )
    with pytest.raises(UnsupportedError, match="v-half with --moe-paged-stash does not work with"):
        check_arguments(args, "v-half", v_shape(2))
    with pytest.raises(UnsupportedError, match="which --moe-paged-stash stores itself"):
        check_offloading(moves_memory=True, model=args, schedule="v-half")
