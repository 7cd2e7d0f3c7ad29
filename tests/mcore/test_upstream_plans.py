"""Megatron's own tests of its layer plans, driven by this package's passes, on four CPU ranks."""

import os
import sys
from pathlib import Path

import pytest
from runtime.ranks import run_ranks

CHECKOUT = Path(os.environ.get("MEGATRON_LM_PATH", ""))
FOLDER = CHECKOUT / "tests" / "unit_tests" / "a2a_overlap"
HOW = (
    "MEGATRON_LM_PATH names no checkout with tests of layer plans; get one with git clone --depth "
    "1 --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM.git (the same comparisons of "
    "the installed release are in test_layer_plans)"
)


LEFT_OUT = {
    "padding_mask": "the plans do not hand it to the router, so the driver refuses it",
    "zero_copy": "NCCL EP is there on a GPU alone",
}
"""Of the files that run, what cannot here: by a part of a test's name, and why.

Of what the tests are parametrized with there is no flex dispatcher and no FP8, which need
Transformer Engine and a GPU. Nor do these files run: test_cuda_graphed_schedule_chunk_1f1b (CUDA
graphs), test_fsdp_1f1b_overlap (Megatron's FSDP, which is refused) and test_delay_wgrad_compute (an
option that is turned off here, and FSDP).
"""


def on_rank(rank: int, checkout: str, kind: str) -> dict[str, str]:
    sys.path.insert(0, checkout)  # its Megatron, and its package of tests
    sys.modules.pop("tests", None)  # this project's folder
    from megatron_vshape.mcore import cpu

    cpu.install()
    from mcore import upstream_plans

    return upstream_plans.ran(checkout, kind, LEFT_OUT)


@pytest.mark.slow
@pytest.mark.skipif(not (CHECKOUT.name and FOLDER.is_dir()), reason=HOW)
@pytest.mark.parametrize("kind", ["B", "BW"])
def test_upstreams_own_tests_pass(kind: str) -> None:
    first, *others = run_ranks(4, on_rank, str(CHECKOUT.resolve()), kind, timeout_s=550)
    assert others == [first] * 3
    left = {name: why for name, why in first.items() if why != "passed"}
    assert [why for name, why in left.items() if not any(part in name for part in LEFT_OUT)] == []
    # layers: dense, shared experts, early release, experts, multi-token prediction; chunks: six
    assert len(first) - len(left) >= 11
