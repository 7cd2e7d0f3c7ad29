"""Shared experts and multi-latent attention: gradients equal Megatron's 1F1B."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mcore.conftest import UNTIED
from mcore.farm import Ended, Farm
from mcore.parity import assert_close_gradients

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
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags)
    package_run = train(4, "--pipeline-schedule", "v-half", *flags)
    assert_close_gradients(package_run, megatron_run)
    assert package_run.record["losses"] == megatron_run.record["losses"]


LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 12 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 6 --normalization RMSNorm --disable-bias-linear"
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["v-half", "v-zb --pipeline-slices 4"])
@pytest.mark.parametrize("rope", ["rope", "yarn"])
def test_multi_latent_attention_equals_1f1b(farm: Farm, schedule: str, rope: str) -> None:
    plugin = Path(__file__).with_name("latent_attention.py")
    flags = (*LATENT.split(), UNTIED, "--clip-grad", "0", "--train-iters", "2", "--rope-type", rope)
    megatron_run = farm.run(4, "--pipeline-schedule", "1f1b", *flags, plugin=plugin).check()
    package_run = farm.run(
        4, "--pipeline-schedule", *schedule.split(), *flags, plugin=plugin
    ).check()
    assert any("linear_kv_up_proj" in name for name in megatron_run.merged("gradients"))
    assert_close_gradients(package_run, megatron_run)
    if "slices" not in schedule:  # slices add gradients in another order
        assert package_run.record["losses"] == megatron_run.record["losses"]
    assert "stay in B, because" not in package_run.output[0]  # all weight gradients are deferred
