"""Mixtures of experts with shared ones: the gradients of Megatron's own 1F1B.

Multi-latent attention is not here: Megatron 0.19 has it with Transformer Engine's attention only.
"""

from collections.abc import Callable

import pytest
import torch
from mcore.conftest import UNTIED
from mcore.farm import Ended

EXPERTS = (
    "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--moe-shared-expert-intermediate-size 16 --disable-bias-linear"
)
MODELS = {
    "shared experts": EXPERTS,
    "shared experts, overlap": (
        f"{EXPERTS} --pipeline-model-parallel-size 2 --overlap-grad-reduce --ddp-bucket-size 4000"
    ),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_gradients_equal_1f1b(train: Callable[..., Ended], model: str) -> None:
    flags = (*model.split(), UNTIED, "--clip-grad", "0", "--train-iters", "2")
    theirs = train(4, "--pipeline-schedule", "1f1b", *flags)
    ours = train(4, "--pipeline-schedule", "v-half", *flags)
    expected, found = theirs.merged("gradients"), ours.merged("gradients")
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    assert ours.record["losses"] == theirs.record["losses"]
