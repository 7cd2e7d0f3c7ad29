"""Options that Megatron's layer plans do not support, with one sentence each."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.mcore.features.overlap import REFUSALS, check_layer_plans, check_script
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.translate import translate

FINE: dict[str, Any] = {
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 8,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "bf16": True,
    "fp16": False,
    "num_layers": 8,
    "num_experts": 64,
    "moe_layer_freq": [0, 0, 0, 1, 1, 1, 1, 1],
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "layernorm", "moe_act", "mlp", "shared_experts"],
    "sequence_parallel": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mtp_num_layers": 1,
    "fp8": "e4m3",
    "fp8_recipe": "mxfp8",
    "first_last_layers_bf16": False,
}
REFUSED = {
    "--expert-model-parallel-size 1": {"expert_model_parallel_size": 1},
    "--moe-token-dispatcher-type allgather": {"moe_token_dispatcher_type": "allgather"},
    "fp32 training": {"bf16": False},
    "--recompute-granularity full": {"recompute_granularity": "full"},
    "--recompute-modules moe": {"recompute_modules": ["moe"]},
    "--moe-shared-expert-overlap": {"moe_shared_expert_overlap": True},
    "--mtp-num-layers above 1": {"mtp_num_layers": 2},
    "--moe-layer-freq with a dense last layer": {"moe_layer_freq": 2},
    "--sequence-parallel and dropout": {"hidden_dropout": 0.1},
    "--fp8-recipe delayed": {"fp8_recipe": "delayed"},
    "--first-last-layers-bf16 with FP8": {"first_last_layers_bf16": True},
    "--fp32-residual-connection": {"fp32_residual_connection": True},
    "enable_autocast": {"enable_autocast": True},
    "cpu_offloading": {"cpu_offloading": True},
    "variable_seq_lengths (variable-length microbatches)": {"variable_seq_lengths": True},
    "--moe-latent-size": {"moe_latent_size": 64},
    "--moe-paged-stash": {"moe_paged_stash": True},
    "--use-transformer-engine-op-fuser": {"use_transformer_engine_op_fuser": True},
    "--moe-ncclep-zero-copy": {"moe_ncclep_zero_copy": True},
    "a hybrid model": {"hybrid_layer_pattern": "*E*E"},
}


def test_every_conflict_is_rejected_with_its_reason() -> None:
    assert list(REFUSED) == [refusal.option for refusal in REFUSALS]
    check_layer_plans(SimpleNamespace(**FINE), v_shape(4))
    for option, conflict in REFUSED.items():
        with pytest.raises(UnsupportedError) as error:
            check_layer_plans(SimpleNamespace(**FINE | conflict), v_shape(4))
        start = f"--overlap-moe-expert-parallel-comm does not work with {option}: "
        assert str(error.value).startswith(start)
        off = FINE | conflict | {"overlap_moe_expert_parallel_comm": False}
        check_layer_plans(SimpleNamespace(**off), v_shape(4))


def test_a_stage_a_rank_is_too_few() -> None:
    with pytest.raises(UnsupportedError, match="a schedule with one chunk per rank: passes"):
        check_layer_plans(SimpleNamespace(**FINE), looping(4, 1))


def test_layer_options_without_conflicts_are_accepted() -> None:
    permuted = {"first_last_layers_bf16": True, "moe_token_dispatcher_type": "alltoall"}
    check_layer_plans(SimpleNamespace(**FINE | permuted), v_shape(4))
    check_layer_plans(SimpleNamespace(**FINE | {"moe_layer_freq": 7}), v_shape(4))


def test_a_script_that_makes_no_plan() -> None:
    def forward_step(data_iterator: Any, model: Any) -> None: ...

    def with_plan(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> None: ...

    check_script(with_plan)
    with pytest.raises(UnsupportedError, match="its forward step forward_step takes no return_sch"):
        check_script(forward_step)


@pytest.mark.parametrize(
    "conflict",
    [
        {"cuda_graph_impl": "transformer_engine"},
        {"mixed_precision": "bf16_with_nvfp4_mixed"},
        {"fine_grained_activation_offloading": True},
    ],
    ids=lambda conflict: next(iter(conflict)),
)
def test_option_is_ignored_without_layer_plans(conflict: dict[str, Any]) -> None:
    options = SimpleNamespace(**FINE | conflict, delay_wgrad_compute=True)
    said = [str(notice) for notice in translate(options, v_shape(4)).notices]
    assert said[0].startswith("delay_wgrad_compute: turned off, W computes the weight gradients")
    assert said[1].startswith("overlap_moe_expert_parallel_comm: ignored (no overlap)")
    assert not options.overlap_moe_expert_parallel_comm
    options = SimpleNamespace(**FINE, delay_wgrad_compute=True)
    assert len(translate(options, v_shape(4)).notices) == 1
    assert options.overlap_moe_expert_parallel_comm
    assert not options.delay_wgrad_compute
