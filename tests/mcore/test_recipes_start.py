"""The checks of published recipes report the same as the start of a run."""

from __future__ import annotations

import json
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from mcore.other_trainer import DeferredConfig
from megatron.training.arguments import add_megatron_arguments
from recipes import (
    DEFAULTS,
    ExaminedOptions,
    examine,
    package_options_of,
)

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore import refusals
from megatron_vshape.mcore.options import add_arguments, options_from
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup import configure
from megatron_vshape.mcore.setup.configure import pipeline_from_config
from megatron_vshape.mcore.setup.plans import Planner

PARSED = add_arguments(add_megatron_arguments(ArgumentParser())).parse_args([])
DEFAULT_SEARCH = {
    "pipeline_schedule": "v-half",
    "pipeline_model_parallel_size": 4,
    "num_layers": 16,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "transformer_impl": "local",
}
OVERLAPPED = {
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
}

BALANCED = {"pipeline_layer_split": "auto", "vocab_size": 1000}

TABLE: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"num_layers": 18}, "18 layers do not divide among 8 stages"),
    ({"num_layers": 18, "pipeline_schedule": "zb-h1"}, "18 layers do not divide among 4 stages"),
    ({"num_layers": 20, "pipeline_schedule": "zb-h1"}, None),
    ({"num_layers": 18, "pipeline_layer_split": "2,2,2,3,3,2,2,2"}, None),
    ({"pipeline_layer_split": "2,2,2,3,3,2,2,2"}, "adds up to 18 layers and the model has 16"),
    ({"pipeline_layer_split": "auto"}, "needs the size of the vocabulary"),
    ({"pipeline_layer_split": "auto", "vocab_size": 1000}, None),
    ({"hybrid_layer_pattern": "M*" * 9, "num_layers": None}, "18 layers do not divide among 8"),
    ({"hybrid_layer_pattern": "M*-|M|*-|*-", "num_layers": None}, None),
    ({"hybrid_layer_pattern": "M*-E|" * 3 + "M*-E", "num_layers": None}, None),
    ({"hybrid_layer_pattern": "M*" * 9, "num_layers": None} | BALANCED, None),
    ({"pipeline_model_parallel_layout": "Ett|" + "tt|" * 6 + "ttL"}, None),
    ({"pipeline_model_parallel_layout": "Ett|" + "tt|" * 6 + "tL"}, "has 15 layers and the mod"),
    ({"cuda_graph_impl": "full_iteration"}, "does not work with --cuda-graph-impl full_iter"),
    ({"cuda_graph_impl": "local"}, "does not work with --cuda-graph-impl local"),
    ({"optimizer_post_validation": True}, "does not work with --rerun-mode validate_results"),
    ({"optimizer_post_validation": True, "rerun_mode": "disabled"}, None),
    (
        {"optimizer_post_validation": True, "rerun_mode": "disabled", "fp8": "hybrid"},
        "--optimizer-post-validation does not work with --fp8-format",
    ),
    (
        {
            "optimizer_post_validation": True,
            "rerun_mode": "disabled",
            "rampup_batch_size": [1, 1, 9],
        },
        "--optimizer-post-validation does not work with --rampup-batch-size",
    ),
    ({"pipeline_vocab_parallel": True, "vocab_size": 1000}, None),
    (
        {"pipeline_vocab_parallel": True, "use_mup": True},
        "vocab-parallel does not work with --use-",
    ),
    ({"use_mup": True}, None),
    ({"transformer_impl": "transformer_engine"}, "Transformer Engine, which is not installed here"),
    ({"transformer_impl": None}, None),
    ({"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized: its"),
    (OVERLAPPED, None),
    (OVERLAPPED | {"fp8": "hybrid", "fp8_recipe": "delayed"}, "with --fp8-recipe delayed"),
    (
        OVERLAPPED | {"sequence_parallel": True},
        "does not work with --sequence-parallel and dropout",
    ),
    (OVERLAPPED | {"bf16": False}, "does not work with fp32 training"),
    ({"overlap_moe_expert_parallel_comm": True}, "with --expert-model-parallel-size 1"),
    (OVERLAPPED | {"pipeline_schedule": "zb-h1"}, "with a schedule with one chunk per rank"),
    (OVERLAPPED | {"cuda_graph_impl": "transformer_engine"}, None),  # ignored
    ({"timing_log_level": 2, "distributed_backend": "nccl"}, None),
    ({"use_megatron_fsdp": True}, "--use-megatron-fsdp: it supports DDP only. Use DDP"),
    ({"moe_paged_stash": True, "rampup_batch_size": [1, 1, 9]}, "with --moe-paged-stash does not"),
    ({"gtp_weight_remat_size": 2}, "--tensor-parallel-num-weight-shards above"),
    (
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
        "v-half does not work with --cuda-graph-scope full_iteration: a schedule synchronizes",
    ),
    (
        {"rl_inference_tensor_model_parallel_size": 1},
        "--rl-inference-tensor-model-parallel-size: a second model",
    ),
    (
        {"pipeline_model_parallel_comm_backend": "ucc"},
        "--pipeline-model-parallel-comm-backend ucc",
    ),
    ({"account_for_loss_in_pipeline_split": True, "num_layers": 15}, None),
    (
        {
            "account_for_loss_in_pipeline_split": True,
            "pipeline_model_parallel_layout": "Et*4|t*4|t*4|t*4L",
        },
        "each define the layers of each stage",
    ),
]
"""Options in addition to the defaults, and a part of the rejection message or None."""


@pytest.fixture(autouse=True)
def _no_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "has_transformer_engine", lambda: False)


def examine_options(options: dict[str, Any]) -> ExaminedOptions:
    return examine(options, package_options_of(options, None), DEFAULTS)


def doctor_reasons(options: dict[str, Any]) -> list[str]:
    report = examine_options(options)
    assert report.starts == (not report.refused and not report.missing)
    return [obstacle.why for obstacle in (*report.refused, *report.missing)]


def megatron_arguments(options: dict[str, Any]) -> Namespace:
    """Return Megatron's arguments as its parser leaves them, with these options set."""
    return Namespace(**{**vars(PARSED), "distributed_backend": "gloo", **options})


def training_error(options: dict[str, Any]) -> str | None:
    args = megatron_arguments(options)
    try:
        pipeline = configure.pipeline_from_args(args)
        args.data_parallel_size, args.micro_batch_size, args.global_batch_size = 1, 1, 8
        configure.check_and_plan_run(pipeline, pipeline and Planner(pipeline.choice), args)
    except (ScheduleError, UnsupportedError) as error:
        return str(error)
    assert pipeline is not None
    return None


def library_error(options: dict[str, Any]) -> str | None:
    names = {field.name for field in fields(DeferredConfig)}
    config = DeferredConfig(**{name: options[name] for name in options if name in names})
    config.hidden_dropout = options.get("hidden_dropout", config.hidden_dropout)
    for name in set(options) - names:
        setattr(config, name, options[name])
    keywords = {"schedule": options["pipeline_schedule"]}
    for name in ("layer_split", "vocab_parallel"):
        if f"pipeline_{name}" in options:
            keywords[name] = options[f"pipeline_{name}"]
    try:
        pipeline_from_config(config, options_from(keywords))
    except (ScheduleError, UnsupportedError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(("changed", "why"), TABLE)
def test_doctor_reports_the_expected_reason(changed: dict[str, Any], why: str | None) -> None:
    options = DEFAULT_SEARCH | changed
    by_doctor, by_training = doctor_reasons(options), training_error(options)
    if why is None:
        assert (by_doctor, by_training) == ([], None)
    else:
        assert by_training in by_doctor
        assert why in str(by_training)
        assert "\n" not in str(by_training)


def generate_options(count: int) -> Iterator[dict[str, Any]]:
    """Yield configurations of a few of the table's options each, the same in every run."""
    draw = random.Random(36)
    parts = [changed for changed, _ in TABLE if changed]
    for _ in range(count):
        options = dict(DEFAULT_SEARCH)
        for changed in draw.sample(parts, draw.choice((1, 2, 2, 3))):
            options |= changed
        options["pipeline_schedule"] = draw.choice(("v-half", "zb-h1", "v-min", "1f1b-v"))
        yield options


def test_doctor_and_training_report_the_same_rejections() -> None:
    verdicts = set()
    for options in generate_options(60):
        by_doctor, by_training = doctor_reasons(options), training_error(options)
        assert (not by_doctor) == (by_training is None), options
        assert by_training is None or by_training in by_doctor, options
        verdicts.add(by_training is None)
    assert verdicts == {True, False}


def test_recipe_accepted_by_doctor_starts() -> None:
    started = 0
    for options in generate_options(60):
        if "optimizer_post_validation" not in options and not doctor_reasons(options):
            assert library_error(options) is None, options
            started += 1
    assert started > 5


def test_recipe_without_number_of_layers_is_not_accepted() -> None:
    options = {name: value for name, value in DEFAULT_SEARCH.items() if name != "num_layers"}
    assert not examine_options(options).starts
    assert not examine_options(options | {"num_layers_in_last_pipeline_stage": 3}).starts
    assert examine_options(options | {"pipeline_layer_split": "2,2,2,2,2,2,2,2"}).starts


def test_all_rejected_options_are_reported() -> None:
    options = DEFAULT_SEARCH | {"num_layers": 18, "use_mup": True, "hybrid_context_parallel": True}
    options |= {"pipeline_vocab_parallel": True, "cuda_graph_impl": "transformer_engine"}
    reasons = doctor_reasons(options)
    assert len(reasons) == len(set(reasons)) == 4
    for part in ("hybrid-context", "--cuda-graph-impl", "--use-mup", "18 layers do not divide"):
        assert any(part in reason for reason in reasons)


def test_defaults_equal_megatrons_parser() -> None:
    assert {name: getattr(PARSED, name) for name in DEFAULTS} == DEFAULTS


def test_named_mixed_precision_recipes_are_resolved() -> None:
    base = DEFAULT_SEARCH | {"optimizer_post_validation": True, "rerun_mode": "disabled"}
    assert not doctor_reasons(base | {"mixed_precision": "bf16_mixed"})
    for name, option in (("bf16_with_mxfp8_mixed", "fp8"), ("bf16_with_nvfp4_mixed", "fp4")):
        (why,) = doctor_reasons(base | {"mixed_precision": name})
        assert f"--{option}-format" in why


UNKNOWN = "the number of layers is in the model's own config"
HYBRID_RECIPES = {
    "nemotron_3_super_pretrain_64gpu_h100_bf16_config": (None, None),
    "nemotron_3_super_sft_16gpu_h100_bf16_32k_config": (None, None),
    "nemotron_3_super_pretrain_config": (None, None),
    "nemotron_3_ultra_peft_32gpu_h100_bf16_openmathinstruct2_packed_config": (UNKNOWN, UNKNOWN),
    "nemotron_3_ultra_pretrain_24gpu_h100_bf16_config": (UNKNOWN, UNKNOWN),
    "nemotron_3_ultra_sft_192gpu_h100_bf16_openmathinstruct2_packed_config": (UNKNOWN, UNKNOWN),
    "nemotronh_47b_sft_16gpu_h100_bf16_config": ("98 layers do not divide among 4 stages", None),
}
"""Rejection reason of each hybrid recipe of Megatron-Bridge under v-half and zb-h1."""


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
def test_hybrid_recipes_of_megatron_bridge(schedule: str) -> None:
    file = Path(__file__).parents[1] / "data" / "bridge_recipes.json"
    recipes = {
        recipe["recipe"]: recipe["options"] for recipe in json.loads(file.read_text())["recipes"]
    }
    hybrid = {name for name, options in recipes.items() if options.get("is_hybrid_model")}
    assert hybrid == HYBRID_RECIPES.keys()
    for name, verdicts in HYBRID_RECIPES.items():
        report = examine(recipes[name], package_options_of(recipes[name], schedule), defaults={})
        reasons = [obstacle.why for obstacle in report.refused] + [UNKNOWN] * (
            not report.counts_layers
        )
        verdict = verdicts[schedule == "zb-h1"]
        assert len(reasons) == (verdict is not None), reasons
        assert verdict is None or verdict in reasons[0]
        if "do not divide" in str(verdict):  # the message recommends auto, which starts
            balanced = recipes[name] | BALANCED
            assert not examine(
                balanced, package_options_of(balanced, schedule), defaults={}
            ).refused
