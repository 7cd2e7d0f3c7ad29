"""Full backwards, and layers whose weight gradients stay in B."""

import logging
from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import pytest
from mcore import fake_te
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import with_full_backwards
from megatron_vshape.mcore.features import post_validation
from megatron_vshape.mcore.features.post_validation import FEATURE
from megatron_vshape.mcore.options import Options, add_arguments, options_of
from megatron_vshape.mcore.refusals import (
    UnsupportedError,
    check_arguments,
    check_config,
)
from megatron_vshape.mcore.setup.configure import pipeline_from_args, recomputed_inputs
from megatron_vshape.mcore.setup.megatron_schedules import megatrons_own
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice, Settings
from megatron_vshape.mcore.split import linear_layers

V = v_shape(2)


@pytest.mark.parametrize("name", ["v-half", "zb-h1"])
def test_schedules_with_full_backwards_are_valid(name: str) -> None:
    schedule = with_full_backwards(make(name, 4, 8))
    verify(schedule)
    kinds = {work.kind for row in schedule.order for work in row}
    assert kinds == {Kind.F, Kind.BW}
    plan = Planner(ScheduleChoice(4, name, keeps_full_backward=True)).plan_step(8)
    assert not plan.program.schedule.splits_backward
    assert plan.peak_chunks <= Planner(ScheduleChoice(4, name)).plan_step(8).peak_chunks


class TopKRouter(nn.Linear):
    """Has the name of Megatron's router."""


def test_unsplit_layers_are_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    grouped: Any = fake_te.GroupedLinear()
    del grouped.weight0
    frozen = nn.Linear(2, 2)
    frozen.requires_grad_(False)
    fused: Any = nn.Sequential(fake_te.Linear())
    fused._fused_impl = None  # of Megatron's TEFusedMLP before its first F
    chunk = nn.ModuleDict(
        {
            "embedding": nn.Embedding(4, 2),
            "norm": nn.LayerNorm(2),
            "router": TopKRouter(2, 2),
            "split": fake_te.Linear(),
            "experts": grouped,
            "gate": nn.Linear(2, 1),
            "frozen": frozen,
            "mlp": fused,
        }
    )
    with caplog.at_level(logging.INFO):
        linear_layers.log_unsplit_layers([chunk])
    levels = {record.getMessage(): record.levelno for record in caplog.records}
    assert levels == {
        "the weight gradients of 1 Embedding stay in B, as it should: a lookup has no product to "
        "put off: chunk 0 embedding": logging.INFO,
        "the weight gradients of 1 TopKRouter stay in B, as it should: a router's product is "
        "small: chunk 0 router": logging.INFO,
        "the weight gradients of 1 GroupedLinear stay in B, its experts' weights or biases are one "
        "grouped tensor: chunk 0 experts": logging.WARNING,
        "the weight gradients of 1 Linear stay in B, because it is not computed by one of "
        "Megatron's or Transformer Engine's linear layers: chunk 0 gate": logging.WARNING,
        "the weight gradients of 1 Linear stay in B, as it should: fused operations of Transformer "
        "Engine compute them: chunk 0 mlp.0": logging.INFO,
    }


def test_megatron_rl_requires_one_chunk_in_rank_order() -> None:
    args: Any = SimpleNamespace(
        transformer_impl="local",
        distributed_backend="gloo",
        perform_rl_step=True,
        context_parallel_size=1,
        rerun_mode="disabled",
        optimizer="adam",
    )
    check_arguments(args, "zb-h1", looping(4, 1))
    for placement in (V, (3, 2, 1, 0)):
        with pytest.raises(UnsupportedError, match="with one chunk per rank, such as zb-h1"):
            check_arguments(args, "mine.json", placement)
    with pytest.raises(UnsupportedError, match="--perform-rl-step: its training data is generated"):
        FEATURE.check(Settings(args, ScheduleChoice(4, "zb-h1"), Options(post_validates=True)))
    args.context_parallel_size = (
        2  # Megatron then builds a second model without context parallelism for generation
    )
    with pytest.raises(UnsupportedError, match="--context-parallel-size 2 together: a second"):
        check_arguments(args, "zb-h1", looping(4, 1))


def test_recomputed_inputs_are_listed() -> None:
    args: Any = SimpleNamespace(recompute_granularity="selective", recompute_modules=["core_attn"])
    assert recomputed_inputs(args) == ()
    args.recompute_modules = ["core_attn", "layernorm", "mlp"]
    assert recomputed_inputs(args) == ("layernorm", "mlp")
    args.recompute_granularity = None
    assert recomputed_inputs(args) == ()


def test_unused_options_on_one_rank_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    parser = add_arguments(ArgumentParser())
    args = parser.parse_args(
        ["--pipeline-schedule", "v-half", "--pipeline-trace", "x", "--optimizer-post-validation"]
    )
    args.pipeline_model_parallel_size = 1
    assert pipeline_from_args(args) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "--pipeline-schedule v-half, --pipeline-trace, --optimizer-post-validation unused: one "
        "pipeline rank has nothing to schedule. Set --pipeline-model-parallel-size to 2 or more"
    )


def test_unsupported_config_fields_are_rejected() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    check_config(config)
    check_config(SimpleNamespace(cuda_graph_impl="transformer_engine", enable_cuda_graph=False))
    post_validation.check_config(config)
    for name, value, option in (
        ("delay_wgrad_compute", True, "--delay-wgrad-compute"),
        ("defer_embedding_wgrad_compute", True, "defer_embedding_wgrad_compute: the layers are"),
        ("num_microbatches_with_partial_activation_checkpoints", 2, "num_microbatches_with_"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl local: .* Use --cuda-graph-impl transf"),
        ("enable_cuda_graph", True, ".*Use --cuda-graph-impl transformer_engine"),
    ):
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        setattr(config, name, value)
        with pytest.raises(UnsupportedError, match=f"does not work with {option}"):
            check_config(config)


def test_timeout_is_below_megatrons_watchdogs() -> None:
    parser = add_arguments(ArgumentParser())
    args = parser.parse_args([])
    assert options_of(args).timeout_seconds == 0.9 * 600
    args.distributed_timeout_minutes = 30
    assert options_of(args).timeout_seconds == 0.9 * 1800
    args.pipeline_timeout = 7.0
    assert options_of(args).timeout_seconds == 7


def test_timeout_above_megatrons_watchdogs_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    args = add_arguments(ArgumentParser()).parse_args(["--pipeline-timeout", "600"])
    args.pipeline_model_parallel_size = 1
    args.num_virtual_stages_per_pipeline_rank = args.num_layers_per_virtual_pipeline_stage = None
    args.distributed_timeout_minutes = 10
    pipeline_from_args(args)
    assert [record.message for record in caplog.records] == [
        "--pipeline-timeout 600 is not below --distributed-timeout-minutes 10: Megatron's own "
        "watchdogs may end a stalled run first, without naming the cause"
    ]


def test_schedule_name_can_contain_virtual_stages() -> None:
    args = add_arguments(ArgumentParser()).parse_args(["--pipeline-schedule", "interleaved-1f1b:3"])
    args.pipeline_model_parallel_size, args.distributed_timeout_minutes = 2, 30
    args.num_virtual_stages_per_pipeline_rank = args.num_layers_per_virtual_pipeline_stage = None
    assert pipeline_from_args(args) is None
    assert args.num_virtual_stages_per_pipeline_rank == 3
    assert megatrons_own(args) == "interleaved-1f1b:3"
    with pytest.raises(UnsupportedError, match="contains the number of virtual stages per rank"):
        pipeline_from_args(args)  # as with Megatron's option in addition
