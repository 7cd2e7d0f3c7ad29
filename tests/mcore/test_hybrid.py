"""HybridModel, whose layers are a pattern of symbols: its stages, and the numbers of 1F1B."""

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from mcore.conftest import needs_hybrid
from mcore.farm import Ended, Train
from mcore.parity import EVALUATED, EXPERTS, UNTIED, assert_same_training
from megatron.core import __version__

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, linear, v_shape
from megatron_vshape.mcore.layout.hybrid import cut_pattern
from megatron_vshape.mcore.layout.shared_vocabulary import SharedEnds
from megatron_vshape.mcore.layout.sizes import option_reader, sizes_of
from megatron_vshape.mcore.layout.stage_map import split_layers
from megatron_vshape.mcore.setup.configure import pipeline_from_args
from megatron_vshape.mcore.setup.plans import PlannedStep, Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.mcore.setup.translate import translate


@needs_hybrid
@pytest.mark.parametrize(
    ("schedule", "predicting"),
    [
        pytest.param(
            *("v-half", "*E"),
            # Two layers per depth with experts: one loss more than Megatron itself makes room for.
            marks=pytest.mark.skipif(__version__ >= "0.20", reason="stock Megatron fails as well"),
        ),
        pytest.param("v-half", "*-/*-", marks=pytest.mark.slow),
        pytest.param("zb-h1", "*E/*E", marks=pytest.mark.slow),
    ],
)
def test_experts_with_multi_token_prediction(train: Train, schedule: str, predicting: str) -> None:
    flags = (
        f"--hybrid-layer-pattern *-*-*-*E/{predicting} --moe-z-loss-coeff 1e-3 {EXPERTS} {UNTIED}"
    )
    # Megatron's own 1F1B crashes with these flags, with or without multi-token prediction.
    megatron_run = train(1, *flags.split(), *EVALUATED.split())
    package_run = train(2, "--pipeline-schedule", schedule, *flags.split(), *EVALUATED.split())
    assert_same_training(package_run, megatron_run)
    for name in ("load_balancing_loss", "z_loss", "mtp_1 loss"):
        assert logged_losses(package_run, name) == pytest.approx(
            logged_losses(megatron_run, name), rel=1e-5
        )


def logged_losses(run: Ended, name: str) -> list[float]:
    """Return the values of a metric in the log of the last rank, one per step."""
    values = re.findall(rf"{name}: ([0-9.E+-]+)", run.output[-1])
    assert len(values) == 2, run.output[-1]
    return [float(value) for value in values]


def test_a_pattern_is_cut_between_any_two_layers() -> None:
    """Multi-token prediction comes after the stages."""
    assert cut_pattern("M*-M", (0, 2, 2, 0)) == "|M*|-M|"
    assert cut_pattern("M|*-M", (3, 1)) == "M*-|M"
    assert cut_pattern("M*-M/M*/M*", (0, 2, 2, 0)) == "|M*|-M|/M*/M*"
    layer_split = split_layers(model_arguments("M*-M/M*/M*"), v_shape(2), None, None)
    assert layer_split.layers == (1, 1, 1, 1)


TWINS = {  # by what they have: the depths of MTP, the layers of stages of the GPT, a shared head
    "even": (0, None, False),
    "split": (0, "0,2,1,1,1,1,2,0", False),
    "multi-token prediction": (2, None, False),
    "shared vocabulary": (0, None, True),
    "all of them": (1, "0,2,1,1,1,1,1,1", True),
}


@pytest.mark.parametrize("name", ["v-half", "v-half+", "v-zb", "1f1b-v", "v-min"])
@pytest.mark.parametrize(("depths", "split", "shares"), TWINS.values(), ids=TWINS)
def test_estimates_equal_those_of_the_gpt(
    name: str, depths: int, split: str | None, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bubble, the peak and the pass order, of the same model as a GPT and as a pattern."""
    monkeypatch.setattr("megatron_vshape.core.planner.search.default_steps", lambda _: 10_000)

    def plan(model_args: Namespace, text: str | None) -> PlannedStep:
        choice = ScheduleChoice(4, name, shards_output_layer=shares)
        ends = SharedEnds() if shares else None
        layer_split = split_layers(model_args, choice.placement, text, None, ends=ends)
        return Planner(replace(choice, estimate=layer_split.estimate)).plan_step(8)

    in_symbols = split and ",".join(str(2 * int(count)) for count in split.split(","))
    gpt = plan(model_arguments(None, num_layers=8, mtp_num_layers=depths), split)
    hybrid = plan(model_arguments("*-" * 8 + "/*-" * depths), in_symbols)
    assert hybrid.timeline.bubble == gpt.timeline.bubble
    assert hybrid.relative_peak == gpt.relative_peak
    assert hybrid.schedule.order == gpt.schedule.order


def model_arguments(pattern: str | None, **changed: object) -> Namespace:
    """Return Megatron's arguments for the sizes of a small model."""
    sizes: dict[str, object] = {
        "num_layers": None,
        "hybrid_layer_pattern": pattern,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "group_query_attention": False,
        "seq_length": 64,
        "vocab_size": 1000,
    }
    return Namespace(**(sizes | changed))


def test_auto_places_multi_token_prediction_alone_in_the_last_stage() -> None:
    """The last stage has only its layers and output layers: their time exceeds that of a rank."""
    layer_split = split_layers(model_arguments("*-" * 8 + "/*-/*-"), v_shape(4), "auto", None)
    assert (layer_split.layers[0], layer_split.layers[-1]) == (0, 0)
    assert layer_split.estimate is not None
    last, mean = layer_split.estimate.forward_us[-1], sum(layer_split.estimate.forward_us) / 4
    assert last > mean


def test_costs_of_symbols() -> None:
    """Layers with more products and activations count as more, and all together as their number."""
    experts: dict[str, object] = {"num_experts": 8, "moe_router_topk": 4}
    sizes = sizes_of(option_reader(model_arguments("M*-E", **experts)), 0)
    mamba, attention, mlp, routed = sizes.shares
    assert attention.time + routed.time == pytest.approx(1)  # a layer of the GPT with experts
    # Per token, with 64 = h: 5 h^2, 8 h^2 and 4 x 8 h^2; Mamba's projections are 6 h^2 and more.
    assert mlp.time / attention.time == pytest.approx(8 / 5)
    assert routed.time == pytest.approx(4 * mlp.time)
    assert mamba.time > 6 / 5 * attention.time
    assert mlp.memory / attention.memory == pytest.approx(10 / 6)
    assert routed.state == pytest.approx(8 * mlp.state)  # of all experts


BIG = {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "group_query_attention": True,
    "num_query_groups": 8,
    "ffn_hidden_size": 28672,
    "swiglu": True,
    "seq_length": 8192,
    "vocab_size": 128_256,
}
"""Llama-3 70B."""


@pytest.mark.parametrize(
    ("placement", "full_blocks", "half_blocks"),
    [
        (v_shape(4), 1.036, 1.013),
        (v_shape(8), 1.085, 1.039),
        (v_shape(16), 1.184, 1.091),
        (linear(8), 1.085, 1.062),
        (linear(16), 1.184, 1.138),
    ],
    ids=["V, PP 4", "V, PP 8", "V, PP 16", "PP 8", "PP 16"],
)
def test_auto_cuts_within_blocks(
    placement: Placement, full_blocks: float, half_blocks: float
) -> None:
    """The busiest rank over the mean of all, with cuts between blocks and between any layers."""

    def busiest(model_args: Namespace) -> float:
        costs = split_layers(model_args, placement, "auto", None).estimate
        assert costs is not None
        work = [0.0] * (max(placement) + 1)
        for stage, rank in enumerate(placement):
            work[rank] += costs.stages[stage].total_us
        return max(work) * len(work) / sum(work)

    assert busiest(model_arguments(None, num_layers=80, **BIG)) == pytest.approx(
        full_blocks, abs=0.001
    )
    assert busiest(model_arguments("*-" * 80, **BIG)) <= half_blocks


@pytest.mark.parametrize(
    ("pattern", "placement", "layers"),
    [
        ("*-*-|*-*-|*-*-|*-*-", v_shape(4), "2,2,2,2,2,2,2,2"),  # stock's, of one chunk
        ("*-|*-|*-|*-|*-|*-|*-|*-", linear(4), "4,4,4,4"),  # and of two
        ("|*-*-|*-*-|", v_shape(2), "0,4,4,0"),
        ("*-*-*|-*-", linear(2), "5,3"),
        ("*-*-|*-|*-/*-", v_shape(2), "auto"),  # no multiple or part
    ],
)
def test_stages_of_a_pattern_are_regrouped(pattern: str, placement: Placement, layers: str) -> None:
    model_args = model_arguments(pattern)
    translated = translate(model_args, placement)
    assert translated.layer_split == layers
    assert model_args.hybrid_layer_pattern == pattern.replace("|", "")
    (notice,) = translated.notices
    assert str(notice).startswith(f"hybrid_layer_pattern {pattern}: its ")
    assert str(notice).endswith(f"layers per stage {layers}")


def test_the_flag_wins_over_the_pattern() -> None:
    model_args = model_arguments("M|*|-|M")
    translated = translate(model_args, v_shape(2), "1,1,1,1")
    assert translated.layer_split == "1,1,1,1"
    (notice,) = translated.notices
    assert notice.said == "ignored, --pipeline-layer-split defines the layers of each stage"


@pytest.mark.parametrize(
    ("pattern", "split", "said"),
    [
        ("M*||-|M", None, "leaves stage 1 without layers"),
        ("M*-M*", None, "5 layers do not divide among 4 stages"),
        ("M*-M*", "1,1,1,1", "adds up to 4 layers and the model has 5"),
    ],
)
def test_patterns_that_do_not_fit(pattern: str, split: str | None, said: str) -> None:
    model_args = model_arguments(pattern)
    with pytest.raises(ScheduleError) as rejected:
        split_layers(
            model_args, v_shape(2), translate(model_args, v_shape(2), split).layer_split, None
        )
    assert said in str(rejected.value)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize(
    ("schedule", "pattern", "fix"),
    [
        ("interleaved-1f1b", "*-*-|*-*-", "has 4 on 2 pipeline ranks: use 1f1b, or remove every |"),
        ("1f1b", "*-|*-|*-|*-", "has 2 on 2 pipeline ranks: use interleaved-1f1b:2, or remove"),
        ("interleaved-1f1b:3", "*-|*-|*-|*-", "has 6 on 2 pipeline ranks: use interleaved-1f1b:2"),
        ("1f1b", "*-*-|*-|*-", "has 2 on 2 pipeline ranks: remove every | from the pattern"),
    ],
)
def test_megatron_schedules_require_a_pattern_with_stages(
    schedule: str, pattern: str, fix: str
) -> None:
    """Before the first step, and not in the report at the end, which comes before the last save."""
    args = model_arguments(
        pattern,
        pipeline_schedule=schedule,
        pipeline_model_parallel_size=2,
        num_virtual_stages_per_pipeline_rank=None,
        num_layers_per_virtual_pipeline_stage=None,
        distributed_timeout_minutes=10,
        global_batch_size=8,
        micro_batch_size=1,
    )
    with pytest.raises(ScheduleError) as rejected:
        pipeline_from_args(args)
    assert fix in str(rejected.value)
    assert str(rejected.value).startswith(f"--hybrid-layer-pattern {pattern} has ")


@needs_hybrid
def test_a_report_that_fails_does_not_lose_the_last_checkpoint(
    train: Train, tmp_path: Path
) -> None:
    plugin = "plugins:failing_report"
    saves = ("--save", str(tmp_path), "--save-interval", "100", "--ckpt-format", "torch_dist")
    run = train(2, "--pipeline-schedule", "v-half", *saves, plugin=plugin)
    assert "no closing report: the costs are for 2 stages" in "".join(run.output)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
