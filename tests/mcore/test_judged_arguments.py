"""Every argument of Megatron's parser has a judgement, and closed lists have no unreviewed value.

A failure means that Megatron has a new option or a new value of one: judge it, see CONTRIBUTING.md.
"""

import ast
import dataclasses
import enum
import inspect
import textwrap
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

import megatron.core
import megatron.core.extensions.kitchen as kitchen
import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import enums
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import checkpointing
from megatron.training.arguments import add_megatron_arguments

from megatron_vshape.mcore.hooks import training
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.refusals import REFUSALS, By, Refusal
from megatron_vshape.mcore.setup.judged_arguments import TOPICS, Judgement
from megatron_vshape.mcore.setup.judgements import (
    arguments_of,
    judgements,
    warn_of_unjudged,
    words,
)
from megatron_vshape.mcore.setup.translate import TRANSLATIONS

MAJOR, MINOR, *_ = megatron.core.__version__.split(".")
RELEASE = int(MAJOR), int(MINOR)
FIRST_COMPLETE = (0, 19)
"""Older releases lack arguments that the lists do not mark as newer."""

WITHOUT_EFFECT = (Judgement.NO_EFFECT, Judgement.BY_MEGATRON)

CHOICES = {
    "async_strategy": "nvrx mcore",
    "attention_backend": "flash fused unfused local auto",
    "batch_invariant_backend": "te_native deepgemm triton",
    "ckpt_convert_format": "torch torch_dist",
    "ckpt_format": "torch torch_dist torch_dcp fsdp_dtensor",
    "ckpt_fully_parallel_load_exchange_algo": "broadcast gather_rounds gather_object",
    "ckpt_fully_parallel_load_process_group": "dp ep_dp",
    "ckpt_fully_parallel_save_process_group": "dp ep_dp",
    "cross_entropy_fusion_impl": "native te",
    "cuda_graph_impl": "none local transformer_engine full_iteration",
    "dataloader_type": "single cyclic external",
    "dist_ckpt_strictness": "assume_ok_unexpected log_unexpected log_all raise_unexpected "
    "raise_all return_unexpected return_all ignore_all",
    "distributed_backend": "nccl gloo",
    "dsa_kernel_backend": "none tilelang cudnn",
    "empty_unused_memory_level": "0 1 2",
    "error_injection_type": "correct_result transient_error persistent_error",
    "exp_avg_dtype": "fp32 fp16 bf16 fp8",
    "exp_avg_sq_dtype": "fp32 fp16 bf16 fp8",
    "experimental_attention_variant": "gated_delta_net dsa gdn>=0.20 gdn2>=0.20",
    "flash_attention_version": "2 3 4",
    "fp4": "e2m1",
    "fp4_recipe": "nvfp4 custom",
    "fp8": "e4m3 hybrid",
    "fp8_amax_compute_algo": "most_recent max",
    "fp8_recipe": "tensorwise delayed mxfp8 blockwise custom",
    "inprocess_granularity": "node rank",
    "kitchen_attention_backend": "sdpa fa",
    "logit_dtype": "bf16 fp32",
    "logits_save_dtype": "fp16 bf16 fp32",
    "lr_decay_style": "constant linear cosine inverse-square-root WSD",
    "lr_wsd_decay_style": "exponential linear cosine minus_sqrt",
    "main_grads_dtype": "fp32 bf16",
    "main_params_dtype": "fp32 fp16",
    "mamba_training_ssm_states_dtype": "fp32 bf16",
    "moe_combine_bwd_dtype": "bf16 mxfp8",
    "moe_dispatch_fwd_dtype": "bf16 mxfp8",
    "moe_flex_dispatcher_backend": "deepep hybridep ncclep",
    "moe_router_dtype": "fp32 fp64",
    "moe_router_load_balancing_type": "aux_loss seq_aux_loss global_aux_loss sinkhorn "
    "quantile_balancing none",
    "moe_router_score_function": "softmax sigmoid sqrtsoftplus",
    "moe_token_dispatcher_type": "allgather alltoall flex",
    "moe_token_drop_policy": "probs position",
    "muon_fp32_matmul_prec": "low medium high",
    "muon_scalar_optimizer": "adam lion",
    "muon_scale_mode": "spectral unit_rms_norm shape_scaling",
    "muon_tp_mode": "blockwise duplicated distributed",
    "no_weight_decay_cond_type": "apply_wd_to_qk_layernorm",
    "non_persistent_ckpt_type": "global local in_memory",
    "non_persistent_local_ckpt_algo": "fully_parallel atomic",
    "normalization": "LayerNorm RMSNorm",
    "optimizer": "adam sgd muon dist_muon lion soap adaptive_muon",
    "pipeline_model_parallel_comm_backend": "nccl ucc",
    "position_embedding_type": "learned_absolute rope yarn mrope relative none",
    "recompute_granularity": "full selective",
    "recompute_method": "uniform block",
    "rerun_mode": "disabled validate_results report_stats",
    "rl_sequence_packing_algo": "fifo round-robin",
    "rope_type": "rope yarn",
    "sharp_enabled_group": "dp dp_replica",
    "softmax_type": "vanilla off-by-one learnable",
    "symmetric_ar_type": "two_shot one_shot multimem_all_reduce",
    "timing_log_level": "0 1 2",
    "tp_comm_bootstrap_backend": "nccl mpi gloo",
    "transformer_impl": "local transformer_engine inference_optimized",
    "weight_decay_incr_style": "constant linear cosine",
}
"""Reviewed choices of the arguments that affect a run with a schedule."""

CONFIG_FIELDS = """
    _cpu_offloading_context activation_func activation_func_fp8_input_store autocast_dtype
    batch_p2p_comm batch_p2p_sync beta_fast beta_slow bias_activation_fusion cpu_offloading
    cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_weights
    cuda_graph_retain_backward_graph cuda_graph_use_single_mempool deallocate_pipeline_outputs
    disable_parameter_transpose_cache embedding_init_method enable_autocast
    experimental_attention_variant_loss_scale_func finalize_model_grads_func fp4_param
    fp8_dot_product_attention fp8_multi_head_attention fp8_param fused_single_qkv_rope
    gated_linear_unit grad_scale_func grad_sync_func hetereogenous_dist_checkpoint
    heterogeneous_block_specs inference_sampling_seed init_method memory_efficient_layer_norm
    moe_grad_scale_func moe_router_topk_limited_devices moe_token_dropping mtp_grad_scale_func
    no_sync_func num_moe_experts original_max_position_embeddings output_layer_init_method
    param_sync_func params_dtype persist_layer_norm pipeline_dtype quant_recipe softmax_scale
    timers tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_overlap_disable_fc1
    tp_comm_overlap_disable_qkv tp_only_amax_red use_inference_optimized_layers use_kitchen
    use_te_rng_tracker variable_seq_lengths

    average_in_collective bucket_size check_for_nan_in_grad fsdp_all_gather_in_start_param_sync
    grad_reduce_in_fp32 megatron_fsdp_cuda_graph_mode megatron_fsdp_use_decoupled_grad num_buckets
    pad_buckets_for_high_nccl_busbw param_name_patterns_for_fp32_local_accumulation
    reduce_scatter_with_fp32_accumulation use_custom_fsdp

    adaptive_muon_beta2 adaptive_muon_eps adaptive_muon_moment2_method decoupled_weight_decay
    grad_norm_skip_threshold soap_precondition_frequency<0.20 soap_shampoo_beta
    soap_use_kl_shampoo store_param_remainders use_layer_wise_distributed_optimizer
"""
"""Reviewed fields of Megatron's configs that are no arguments: libraries can set them."""


@cache
def actions() -> dict[str, Action]:
    """Return the arguments of Megatron's parser, those of optional libraries included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kitchen, "HAVE_KITCHEN", True)
        parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return {action.dest: action for action in parser._actions if action.dest != "help"}


def in_release(text: str, release: tuple[int, int] = RELEASE) -> set[str]:
    return {word.name for word in words(text) if word.is_in(release)}


def assert_reviewed(values: Iterable[str], reviewed: str) -> None:
    """Fail for a value that is not reviewed, and for a reviewed one that is gone."""
    expected = in_release(reviewed)
    assert set(values) - expected == set()
    if RELEASE >= FIRST_COMPLETE:
        assert expected - set(values) == set()


def test_every_argument_is_judged() -> None:
    listed = in_release(" ".join(topic.names for topic in TOPICS))
    derived = {
        name
        for name, judged in judgements().items()
        if judged.judgement in (Judgement.REJECTED, Judgement.TRANSLATED, Judgement.IGNORED)
    }
    assert actions().keys() - listed - derived == set()
    if RELEASE >= FIRST_COMPLETE:
        assert listed - actions().keys() == set()


def test_an_argument_is_judged_once() -> None:
    names = [word.name for topic in TOPICS for word in words(topic.names)]
    assert len(names) == len(set(names))
    rules = {name for rule in TRANSLATIONS for name in rule.names}
    refusals = (*REFUSALS[By.SCHEDULE], *REFUSALS[By.CHUNKS])
    rules |= {name for refusal in refusals for name in arguments_of(refusal)}
    assert rules & set(names) == set()


def test_judgements_follow_from_the_rejections_and_translations() -> None:
    table = judgements()
    assert table["use_megatron_fsdp"].judgement == Judgement.REJECTED
    assert table["tensor_parallel_num_weight_shards"].judgement == Judgement.REJECTED
    assert table["pipeline_model_parallel_layout"].judgement == Judgement.TRANSLATED
    assert table["delay_wgrad_compute"].judgement == Judgement.IGNORED
    context = table["context_parallel_size"]
    assert context.judgement == Judgement.SUPPORTED
    assert context.rejected_with == ("--pipeline-slices",)


def test_an_argument_of_a_refusal_is_its_attribute_and_its_flag() -> None:
    derived = Refusal("gtp_size", "reason", flag="--num-weight-shards above --size")
    assert arguments_of(derived) == {"gtp_size", "num_weight_shards"}
    assert arguments_of(Refusal("num_experts", "reason", flag="experts")) == {"num_experts"}


def test_names_have_ranges_of_releases() -> None:
    assert in_release("a b>=0.20 c<0.19 d>=0.18<0.20", (0, 19)) == {"a", "d"}
    assert in_release("a b>=0.20 c<0.19 d>=0.18<0.20", (0, 20)) == {"a", "b"}
    assert in_release("a b>=0.20 c<0.19 d>=0.18<0.20", (0, 17)) == {"a", "c"}


def test_choices_of_arguments_are_reviewed() -> None:
    table = judgements()
    choices_by_argument = {
        name: {str(getattr(choice, "name", choice)) for choice in action.choices}
        for name, action in actions().items()
        if action.choices is not None
        and table[name].judgement not in WITHOUT_EFFECT
        and name != "exit_signal"  # signals of the operating system
    }
    assert choices_by_argument.keys() - CHOICES.keys() == set()
    for name, choices in choices_by_argument.items():
        assert_reviewed(choices, CHOICES[name])


def test_fields_of_configs_are_reviewed() -> None:
    configs: tuple[Any, ...] = (
        TransformerConfig,
        MLATransformerConfig,
        DistributedDataParallelConfig,
        OptimizerConfig,
    )
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    assert_reviewed(fields - actions().keys() - judgements().keys(), CONFIG_FIELDS)


def recompute_modules() -> set[str]:
    """Return the modules that Megatron's config accepts, which its source lists."""
    source = textwrap.dedent(inspect.getsource(TransformerConfig.__post_init__))
    lists = [
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "allowed_modules"
    ]
    (modules,) = [set(names) for names in lists if "layernorm" in names]
    return modules


def layer_symbols() -> set[str]:
    """Return the symbols of a hybrid model's pattern."""
    try:
        module = import_module("megatron.core.models.hybrid.hybrid_layer_allocation")
    except ModuleNotFoundError:  # before 0.18
        module = import_module("megatron.core.ssm.mamba_hybrid_layer_allocation")
    symbols = module.Symbols
    return {symbols.PIPE, symbols.MTP_SEPARATOR, *symbols.VALID_LAYERS}


def members(module: Any, name: str, former_name: str = "") -> set[str]:
    kind: type[enum.Enum] = getattr(module, name, None) or getattr(module, former_name)
    return {member.name for member in kind}


CLOSED_LISTS: dict[str, tuple[Callable[[], set[str]], str]] = {
    "modules of selective recomputation": (
        recompute_modules,
        "core_attn gdn_norm_out layernorm mla_up_proj mlp moe moe_act shared_experts "
        "gdp_in_proj>=0.20 gdp_qkv>=0.20 mhc>=0.20",
    ),
    "symbols of hybrid models": (layer_symbols, "M G * D + - E | /"),
    "modules of CUDA graphs": (
        lambda: members(enums, "CudaGraphModule", "CudaGraphScope"),
        "attn mlp moe moe_router moe_preprocess mamba "
        "full_iteration<0.18 full_iteration_inference<0.18",
    ),
    "layers of a layout": (
        lambda: members(enums, "LayerType"),
        "embedding loss encoder decoder mtp",
    ),
    "masks of attention": (
        lambda: members(enums, "AttnMaskType"),
        "padding causal no_mask padding_causal arbitrary causal_bottom_right",
    ),
    "kinds of checkpoints": (
        lambda: members(checkpointing, "CheckpointType"),
        "LEGACY LOCAL GLOBAL TORCH_DCP FSDP_DTENSOR",
    ),
}
"""Closed lists in Megatron that are no choices of an argument, and their reviewed values."""


@pytest.mark.parametrize("title", CLOSED_LISTS)
def test_values_of_closed_lists_are_reviewed(title: str) -> None:
    values, reviewed = CLOSED_LISTS[title]
    assert_reviewed(values(), reviewed)


def test_arguments_without_a_judgement_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    defaults = {"fast_math": False, "warp": "1.0", "lr": None}
    warn_of_unjudged(Namespace(fast_math=False, warp=1.0, lr=1e-3, of_a_library=True), defaults)
    assert caplog.messages == []
    warn_of_unjudged(Namespace(fast_math=True, warp=2.0, lr=1e-3), defaults)
    (message,) = caplog.messages
    assert "these options of Megatron: fast_math, warp." in message


def test_defaults_of_megatron_do_not_include_arguments_of_a_library() -> None:
    def megatron(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--new-option", type=int, default=3)
        return parser

    parser, session = ArgumentParser(add_help=False), Session()
    parser.add_argument("--before")
    training.add_megatron_arguments(session, megatron)(parser).add_argument("--after")
    assert session.process.megatron_defaults == {"new_option": 3}
