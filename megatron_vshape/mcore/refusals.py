"""What a schedule of this package does not work with, told before anything is built."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple


class UnsupportedError(ValueError):
    """An option does not go with the schedule; the text names it and says what to change."""


class RefusedError(SystemExit):
    """Ends every rank of a run that cannot go on, alike, with the reason told once."""

    def __init__(self, why: object) -> None:
        """Take the reason; all ranks raise this, and the first prints it."""
        is_first = int(os.environ.get("RANK", "0")) == 0
        super().__init__(f"megatron-vshape: {why}" if is_first else 1)


class Refusal(NamedTuple):
    """An option that is refused while `is_set(value)`."""

    name: str  # of the attribute of Megatron's arguments or config
    option: str  # as the user knows it
    why: str
    is_set: Callable[[Any], bool] = bool
    in_config: bool = True  # a script may set it in the TransformerConfig alone, by the same name
    shows_value: bool = False  # only some of the option's values are refused
    is_derived: bool = False  # known once Megatron has validated its arguments, not before


def _is_given(value: Any) -> bool:
    return value is not None


def _is_other_implementation(value: Any) -> bool:
    return value not in ("local", "transformer_engine")


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


_OWN_ORDER = "it assumes the order of Megatron's own schedules: leave it out"
_UNSPLIT = "its weight gradients cannot be put off yet: leave it out"

REFUSALS = (
    Refusal("mtp_num_layers", "--mtp-num-layers", "multi-token prediction needs its own stage"),
    Refusal(
        "cuda_graph_impl",
        "--cuda-graph-impl (CUDA graphs)",
        _OWN_ORDER,
        lambda value: value not in (None, "none"),
    ),
    Refusal("enable_cuda_graph", "--enable-cuda-graph", _OWN_ORDER),
    Refusal("external_cuda_graph", "--external-cuda-graph", _OWN_ORDER),
    Refusal(
        "fine_grained_activation_offloading", "--fine-grained-activation-offloading", _OWN_ORDER
    ),
    Refusal("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", _OWN_ORDER),
    Refusal("delay_wgrad_compute", "--delay-wgrad-compute", _OWN_ORDER),
    Refusal(
        "use_megatron_fsdp",
        "--use-megatron-fsdp",
        "use DDP, with or without --use-distributed-optimizer",
    ),
    Refusal(
        "use_torch_fsdp2",
        "--use-torch-fsdp2",
        "use DDP, with or without --use-distributed-optimizer",
    ),
    Refusal("tp_comm_overlap", "--tp-comm-overlap (userbuffers)", _UNSPLIT),
    Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        "num_microbatches_with_partial_activation_checkpoints",
        _OWN_ORDER,
        _is_given,
    ),
    Refusal(
        "inprocess_restart",
        "--inprocess-restart",
        "the messages and weight jobs of a step that failed would stay in the process: leave it "
        "out, and have the launcher start the ranks again",
        in_config=False,
    ),
    Refusal("hybrid_context_parallel", "--hybrid-context-parallel", _OWN_ORDER),
    Refusal("use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser", _UNSPLIT),
    Refusal(
        "moe_expert_rank_capacity_factor",
        "--moe-expert-rank-capacity-factor",
        _OWN_ORDER,
        _is_given,
    ),
    Refusal(
        "gtp_weight_remat_size",
        "--tensor-parallel-num-weight-shards above --tensor-model-parallel-size",
        _UNSPLIT,
        _above_one,
        is_derived=True,
    ),
    Refusal(
        "expert_gtp_weight_remat_size",
        "--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size",
        _UNSPLIT,
        _above_one,
        is_derived=True,
    ),
    Refusal(
        "pipeline_model_parallel_comm_backend",
        "--pipeline-model-parallel-comm-backend",
        "messages go over --distributed-backend: leave it out, or make it nccl",
        lambda value: value not in (None, "nccl"),
        shows_value=True,
    ),
    Refusal(
        "perform_rl_step",
        "--perform-rl-step",
        "it takes weights from a rank's first chunk only: leave it out",
    ),
    Refusal(
        "transformer_impl",
        "--transformer-impl",
        "use local or transformer_engine",
        _is_other_implementation,
        in_config=False,
        shows_value=True,
    ),
)
"""Every option of Megatron that no schedule of this package goes with, and what to do instead."""

_TOO_LATE = (
    "its layers are built with it by now: set it where the config is made, and it is turned off"
)
CONFIG_REFUSALS = (
    Refusal("defer_embedding_wgrad_compute", "defer_embedding_wgrad_compute", _TOO_LATE),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        "overlap_dispatch_backward_with_experts_wgrad",
        _TOO_LATE,
    ),
)
"""What is turned off where it is seen in time, and breaks the layers that are built with it."""

LIBRARY_REFUSALS = (
    Refusal(
        "is_hybrid_model",
        "a hybrid model that a library builds",
        "its provider takes one chunk per rank: choose a schedule with one, such as zb-h1",
    ),
)
"""What schedules with several chunks per rank cannot have in a library's own configuration."""

_REDOES = "an iteration begun early would be run, and counted, twice: leave it out"
_NO_COPY = "a step of this optimizer cannot be undone yet: leave it out"
_NEW_SIZE = "the next iteration begins before its size is decided: leave it out"


def _is_given_and_not_none(value: Any) -> bool:
    return value not in (None, "none")


def _is_no_plain_optimizer(value: Any) -> bool:
    return value not in ("adam", "sgd")


def _reruns(value: object) -> bool:
    return value != "disabled"


POST_VALIDATION_REFUSALS = (
    Refusal(
        "rerun_mode",
        "--rerun-mode",
        "it holds all ranks up at the end of every iteration: set --rerun-mode disabled",
        _reruns,
        in_config=False,
        shows_value=True,
    ),
    Refusal(
        "variable_seq_lengths",
        "variable_seq_lengths (microbatches of unlike length)",
        "a message whose length is not known yet would be under way between two iterations",
    ),
    Refusal("num_experts", "--num-experts", _REDOES, _is_given),
    Refusal("fp8", "--fp8-format", _REDOES, _is_given_and_not_none),
    Refusal("fp4", "--fp4-format", _REDOES, _is_given_and_not_none),
    Refusal("qk_clip", "--qk-clip", _REDOES),
    Refusal("log_max_attention_logit", "--log-max-attention-logit", _REDOES),
    Refusal("save_activations_interval", "--save-activations-interval", _REDOES, _is_given),
    Refusal("save_wgrads_interval", "--save-wgrads-interval", _REDOES, _is_given),
    Refusal("save_dgrads_interval", "--save-dgrads-interval", _REDOES, _is_given),
    Refusal("rampup_batch_size", "--rampup-batch-size", _NEW_SIZE, _is_given),
    Refusal("step_batch_size_schedule", "--step-batch-size-schedule", _NEW_SIZE, _is_given),
    Refusal(
        "optimizer",
        "--optimizer",
        "use adam or sgd",
        _is_no_plain_optimizer,
        in_config=False,
        shows_value=True,
    ),
    Refusal("use_precision_aware_optimizer", "--use-precision-aware-optimizer", _NO_COPY),
    Refusal("optimizer_cpu_offload", "--optimizer-cpu-offload", _NO_COPY),
    Refusal("optimizer_cuda_graph", "--optimizer-cuda-graph", _NO_COPY),
    Refusal(
        "use_layer_wise_distributed_optimizer", "--use-layer-wise-distributed-optimizer", _NO_COPY
    ),
    Refusal(
        "overlap_param_gather_with_optimizer_step",
        "--overlap-param-gather-with-optimizer-step",
        "it sends parameters off before a step can be undone: leave it out",
    ),
    Refusal("reuse_grad_buf_for_mxfp8_param_ag", "--reuse-grad-buf-for-mxfp8-param-ag", _NO_COPY),
)
"""Every option of Megatron that --optimizer-post-validation does not go with."""


def check_post_validation(args: Namespace) -> None:
    """Raise UnsupportedError for the first option that post-validation cannot have."""
    for refusal in POST_VALIDATION_REFUSALS:
        _check(refusal, args, "--optimizer-post-validation")


def check_arguments(args: Namespace, schedule: str) -> None:
    """Raise UnsupportedError for the first of Megatron's options that `schedule` cannot have."""
    for refusal in REFUSALS:
        if not refusal.is_derived:
            _check(refusal, args, f"--pipeline-schedule {schedule}")
    if args.distributed_backend == "nccl" and _above_one(getattr(args, "timing_log_level", None)):
        raise UnsupportedError(
            f"--pipeline-schedule {schedule} does not work with --timing-log-level "
            f"{args.timing_log_level} on GPUs: its timers wait within a pass for all that the GPU "
            "does, and that includes messages which only later passes send; use 0 or 1"
        )
    if args.transformer_impl == "transformer_engine" and not has_transformer_engine():
        raise UnsupportedError(
            "--transformer-impl transformer_engine needs Transformer Engine, which is not "
            "installed here: install it, or use --transformer-impl local"
        )


def check_derived(args: Namespace, schedule: str) -> None:
    """Raise UnsupportedError for what other options amount to, once Megatron has worked it out."""
    for refusal in REFUSALS:
        if refusal.is_derived:
            _check(refusal, args, f"--pipeline-schedule {schedule}")


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_config(config: Any, post_validates: bool) -> None:
    """Raise UnsupportedError for an option that a script has set in the TransformerConfig alone."""
    for refusal in (*REFUSALS, *CONFIG_REFUSALS):
        if refusal.in_config:
            _check(refusal, config, "--pipeline-schedule")
    for refusal in POST_VALIDATION_REFUSALS:
        if refusal.in_config and post_validates:
            _check(refusal, config, "--optimizer-post-validation")


def _check(refusal: Refusal, options: Any, flag: str) -> None:
    value = getattr(options, refusal.name, None)
    if refusal.is_set(value):
        option = f"{refusal.option} {value}" if refusal.shows_value else refusal.option
        raise UnsupportedError(f"{flag} does not work with {option}: {refusal.why}")
