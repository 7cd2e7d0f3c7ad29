"""What a schedule of this package does not work with, told before anything is built."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple


class UnsupportedError(ValueError):
    """An option does not go with the schedule; the text names it and says what to change."""


class _Refusal(NamedTuple):
    """An option that is refused while `is_set(value)`."""

    name: str  # of the attribute of Megatron's arguments or config
    option: str  # as the user knows it
    why: str
    is_set: Callable[[Any], bool] = bool


def _is_given(value: Any) -> bool:
    return value is not None


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


_DECIDES_CHUNKS = "the schedule decides how many chunks a rank has: leave it out"
_DECIDES_LAYERS = "the schedule splits the layers evenly among its stages: leave it out"
_OWN_ORDER = "it assumes the order of Megatron's own schedules: leave it out"
_UNSPLIT = "its weight gradients cannot be put off yet: leave it out"

_REFUSALS = (
    _Refusal("mtp_num_layers", "--mtp-num-layers", "multi-token prediction needs its own stage"),
    _Refusal(
        "cuda_graph_impl",
        "--cuda-graph-impl (CUDA graphs)",
        _OWN_ORDER,
        lambda value: value not in (None, "none"),
    ),
    _Refusal("enable_cuda_graph", "--enable-cuda-graph", _OWN_ORDER),
    _Refusal("external_cuda_graph", "--external-cuda-graph", _OWN_ORDER),
    _Refusal(
        "fine_grained_activation_offloading", "--fine-grained-activation-offloading", _OWN_ORDER
    ),
    _Refusal("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", _OWN_ORDER),
    _Refusal("delay_wgrad_compute", "--delay-wgrad-compute", _OWN_ORDER),
    _Refusal(
        "variable_seq_lengths",
        "variable_seq_lengths",
        "messages have one shape for all microbatches: pad the sequences",
    ),
    _Refusal("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute", _OWN_ORDER),
    _Refusal(
        "use_megatron_fsdp",
        "--use-megatron-fsdp",
        "use DDP, with or without --use-distributed-optimizer",
    ),
    _Refusal(
        "use_torch_fsdp2",
        "--use-torch-fsdp2",
        "use DDP, with or without --use-distributed-optimizer",
    ),
    _Refusal("tp_comm_overlap", "--tp-comm-overlap (userbuffers)", _UNSPLIT),
    _Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        "num_microbatches_with_partial_activation_checkpoints",
        _OWN_ORDER,
        _is_given,
    ),
    _Refusal(
        "account_for_embedding_in_pipeline_split",
        "--account-for-embedding-in-pipeline-split",
        _DECIDES_LAYERS,
    ),
    _Refusal(
        "account_for_loss_in_pipeline_split",
        "--account-for-loss-in-pipeline-split",
        _DECIDES_LAYERS,
    ),
    _Refusal(
        "decoder_first_pipeline_num_layers",
        "--decoder-first-pipeline-num-layers",
        _DECIDES_LAYERS,
        _is_given,
    ),
    _Refusal(
        "decoder_last_pipeline_num_layers",
        "--decoder-last-pipeline-num-layers",
        _DECIDES_LAYERS,
        _is_given,
    ),
    _Refusal(
        "num_layers_per_virtual_pipeline_stage",
        "--num-layers-per-virtual-pipeline-stage",
        _DECIDES_CHUNKS,
        _is_given,
    ),
    _Refusal(
        "num_virtual_stages_per_pipeline_rank",
        "--num-virtual-stages-per-pipeline-rank",
        _DECIDES_CHUNKS,
        _is_given,
    ),
    _Refusal("hybrid_context_parallel", "--hybrid-context-parallel", _OWN_ORDER),
    _Refusal("hybrid_layer_pattern", "--hybrid-layer-pattern", _UNSPLIT, _is_given),
    _Refusal("use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser", _UNSPLIT),
    _Refusal(
        "moe_shared_expert_overlap",
        "--moe-shared-expert-overlap",
        "its stream would use memory anew that a W still reads: leave it out",
    ),
    _Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        "--overlap-dispatch-backward-with-experts-wgrad",
        _OWN_ORDER,
    ),
    _Refusal(
        "moe_expert_rank_capacity_factor",
        "--moe-expert-rank-capacity-factor",
        _OWN_ORDER,
        _is_given,
    ),
    _Refusal("gtp_weight_remat_size", "--gtp-weight-remat-size", _UNSPLIT, _above_one),
    _Refusal(
        "expert_gtp_weight_remat_size", "--expert-gtp-weight-remat-size", _UNSPLIT, _above_one
    ),
    _Refusal(
        "overlap_param_gather_with_optimizer_step",
        "--overlap-param-gather-with-optimizer-step",
        _OWN_ORDER,
    ),
)

_LAYOUT = _Refusal(
    "pipeline_model_parallel_layout",
    "--pipeline-model-parallel-layout",
    _DECIDES_LAYERS,
    _is_given,
)


def check_arguments(args: Namespace, schedule: str) -> None:
    """Raise UnsupportedError for the first of Megatron's options that `schedule` cannot have."""
    for refusal in (*_REFUSALS, _LAYOUT):
        _check(refusal, args, schedule)
    if args.transformer_impl not in ("local", "transformer_engine"):
        raise UnsupportedError(
            f"--pipeline-schedule {schedule} does not work with --transformer-impl "
            f"{args.transformer_impl}: use local or transformer_engine"
        )
    if args.transformer_impl == "transformer_engine" and not _has_transformer_engine():
        raise UnsupportedError(
            "--transformer-impl transformer_engine needs Transformer Engine, which is not "
            "installed here: install it, or use --transformer-impl local"
        )


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


_CONFIG_ONLY = ("variable_seq_lengths", "num_microbatches_with_partial_activation_checkpoints")


def check_config(config: Any) -> None:
    """Raise UnsupportedError for an option that Megatron has only in its TransformerConfig."""
    for refusal in _REFUSALS:
        if refusal.name in _CONFIG_ONLY:
            _check(refusal, config, "")


def _check(refusal: _Refusal, options: Any, schedule: str) -> None:
    if refusal.is_set(getattr(options, refusal.name, None)):
        flag = f"--pipeline-schedule {schedule}".rstrip()
        raise UnsupportedError(f"{flag} does not work with {refusal.option}: {refusal.why}")
