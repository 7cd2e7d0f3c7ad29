"""Megatron's trainer on Transformer Engine's Python code: its layer spec, DDP and our hooks.

torch replaces the compiled extension (te_on_cpu); all other code is the same as on a GPU.
"""

import pytest
from mcore.conftest import needs_hybrid
from mcore.farm import Ended, Farm, Train
from mcore.parity import (
    FP8,
    RECOMPUTE,
    UNTIED,
    assert_close_gradients,
    assert_same_bits,
    losses,
    relative,
)

TE = (
    "--transformer-impl transformer_engine --attention-backend unfused --clip-grad 0 "
    f"--train-iters 2 --num-layers 4 {UNTIED}"
)
UNFUSED = "--no-gradient-accumulation-fusion"
TWO_BY_TWO = "--pipeline-model-parallel-size 2"
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 4000"
SHARDED = f"--use-distributed-optimizer {OVERLAP} --overlap-param-gather"
EXPERTS = (
    "--num-experts 4 --moe-grouped-gemm --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --disable-bias-linear --moe-token-dispatcher-type alltoall"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 12 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --normalization RMSNorm --disable-bias-linear"
)

MODELS = {
    "dense": UNFUSED,
    "fused": "",
    "bf16": "--bf16",
    "swiglu, RMSNorm": "--swiglu --normalization RMSNorm --disable-bias-linear",
    "grouped queries": "--group-query-attention --num-query-groups 2",
    "sequence parallel": f"{TWO_BY_TWO} --tensor-model-parallel-size 2 --sequence-parallel",
    "context parallel": f"{TWO_BY_TWO} --context-parallel-size 2",
    "hybrid": "--hybrid-layer-pattern *-*-",
    "experts": f"{TWO_BY_TWO} {EXPERTS} --expert-model-parallel-size 2",
    "latent attention": LATENT,
    # Megatron 0.19 hangs in a recomputed MLP with a bias, under Megatron's schedules too.
    "selective recompute": (
        "--recompute-granularity selective --recompute-modules mlp layernorm --disable-bias-linear"
    ),
    "full recompute": RECOMPUTE,
}


@pytest.fixture(scope="module")
def train(te_farm: Farm) -> Train:
    """Return a function that trains with one version of Transformer Engine, on two pipeline ranks.

    Other parallelism has two more ranks.
    """
    finished: dict[str, Ended] = {}

    def run(flags: str, plugin: str = "") -> Ended:
        if flags not in finished:
            without = () if UNFUSED in flags else (UNFUSED,)
            ranks, batch = (4, 8) if TWO_BY_TWO in flags else (2, 4)
            sizes = ("--global-batch-size", str(batch))
            finished[flags] = te_farm.run(
                ranks, *TE.split(), *sizes, *flags.split(), without=without, plugin=plugin
            )
        return finished[flags].check()

    return run


def assert_gradients_equal(package_run: Ended, megatron_run: Ended) -> None:
    names = megatron_run.by_place("gradients")
    assert any("layer_norm_weight" in name for name, *_ in names)  # TE's fused layers
    assert_close_gradients(package_run, megatron_run, view=Ended.by_place)
    assert relative(losses(package_run), losses(megatron_run)) <= 1e-6


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        pytest.param(
            name,
            schedule,
            marks=[needs_hybrid] * (name == "hybrid")
            + [pytest.mark.slow] * ((index % 2 == 0) == (schedule == "v-zb")),
        )
        for index, name in enumerate(MODELS)
        for schedule in ("v-half", "v-zb")
    ],
)
def test_gradients_equal_1f1b(train: Train, model: str, schedule: str) -> None:
    package_run = train(f"--pipeline-schedule {schedule} {MODELS[model]}")
    assert_gradients_equal(package_run, train(f"--pipeline-schedule 1f1b {MODELS[model]}"))
    is_unsplit = "stay in B, because" in package_run.output[0]
    assert not is_unsplit, "a linear layer of TE's is not split"


@pytest.mark.parametrize("fusion", [UNFUSED, ""], ids=["unfused", "fused"])
def test_bucket_is_reduced_in_the_w_that_completes_it(train: Train, fusion: str) -> None:
    flags = f"--pipeline-schedule v-half {TWO_BY_TWO} {fusion}"
    overlapping, unoverlapped = train(f"{flags} {OVERLAP}"), train(flags)
    assert_same_bits(overlapping, unoverlapped, ["gradients"], Ended.by_place)
    for step in (0, 1):
        where = {
            where
            for reduction_step, where, _ in overlapping.records[0]["reductions"]
            if reduction_step == step
        }
        assert where == {"W0.3", "W3.3"}
    assert {where for _, where, _ in unoverlapped.records[0]["reductions"]} == {None}


def test_te_adam_and_distributed_optimizer_in_bf16(train: Train) -> None:
    flags = f"{TWO_BY_TWO} --bf16 {SHARDED}"
    package_run, megatron_run = (
        train(f"--pipeline-schedule {schedule} {flags}") for schedule in ("v-half", "1f1b")
    )
    assert_same_bits(package_run, megatron_run, view=Ended.by_place)
    assert any(name.endswith("exp_avg") for name, *_ in package_run.by_place("moments"))


@pytest.mark.parametrize(
    "model",
    ["grouped queries", pytest.param("bf16", marks=pytest.mark.slow), "full recompute"],
)
def test_slices_equal_unsliced_microbatches_to_rounding(train: Train, model: str) -> None:
    """Slices use a bottom-right causal mask and add weight gradients in parts."""
    megatron_run = train(f"--pipeline-schedule 1f1b {MODELS[model]} {UNFUSED}")
    package_run = train(f"--pipeline-schedule v-zb --pipeline-slices 4 {MODELS[model]} {UNFUSED}")
    assert_gradients_within(package_run, megatron_run, 2e-2 if model == "bf16" else 1e-5)
    losses_of_runs = losses(package_run), losses(megatron_run)
    assert relative(*losses_of_runs) <= (1e-2 if model == "bf16" else 1e-6)


def assert_gradients_within(package_run: Ended, megatron_run: Ended, tolerance: float) -> None:
    """Compare gradients, with the largest number of each as the unit."""
    expected, actual = megatron_run.by_place("gradients"), package_run.by_place("gradients")
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        difference = (actual[name] - gradient).abs().max() / gradient.abs().max()
        assert difference <= tolerance, (name, difference)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("v-half", marks=pytest.mark.slow)])
def test_slices_accumulate_with_is_first_microbatch(train: Train, schedule: str) -> None:
    """TE's backward of the first microbatch would overwrite main_grad in the next slices."""
    fused = f"{MODELS['fused']} {FP8}"
    megatron_run = train(f"--pipeline-schedule 1f1b {fused}", plugin="plugins:fp8_unquantized")
    flags = f"--pipeline-schedule {schedule} --pipeline-slices 2 {fused}"
    package_run = train(flags, plugin="plugins:fp8_unquantized")
    assert_gradients_within(package_run, megatron_run, 1e-5)
