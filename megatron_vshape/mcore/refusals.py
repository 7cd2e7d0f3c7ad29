"""Combinations that a schedule of this package rejects, before anything is built.

A message has the problem, the reason and the fix. `REFUSALS` is the table of reasons and fixes. An
entry without a fix advises to remove the feature of this package.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

from megatron_vshape.core.model.files import UnreadableError
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.mcore.options import UnsupportedError as UnsupportedError


class MissingError(UnsupportedError):
    """A library that an option needs is not installed."""


class RefusedError(SystemExit):
    """Ends every rank of a run that cannot continue; the reason is printed once."""

    def __init__(self, why: object, prints: bool | None = None) -> None:
        """Set the reason, and whether this rank prints it; by default, rank 0 does.

        All ranks raise this. For an unreadable file, the first rank of every node prints the
        reason, since the file may be missing on some nodes only.
        """
        if prints is None:
            rank = os.environ.get("RANK", "0")
            of_node = os.environ.get("LOCAL_RANK", rank)
            prints = int(of_node if isinstance(why, UnreadableError) else rank) == 0
        self.why = str(why)
        super().__init__(f"megatron-vshape: {self.why}" if prints else 1)


@contextmanager
def refusing() -> Iterator[None]:
    """End all ranks with one message if a check in this context fails, equally on all ranks."""
    try:
        yield
    except (ScheduleError, UnsupportedError) as error:
        raise RefusedError(error) from None


@contextmanager
def refusing_together() -> Iterator[None]:
    """End all ranks with one message if a check in this context fails on any of them.

    All ranks of the world call this together. The context must not communicate, because a rank
    whose check fails leaves early.
    """
    import torch.distributed as dist

    own: str | None = None
    try:
        yield
    except (ScheduleError, UnsupportedError) as error:
        own = str(error)
    everyones: list[str | None] = [own] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    for rank, fault in enumerate(everyones):
        if fault is not None:
            where = "" if fault == everyones[0] else f"on rank {rank}: "
            raise RefusedError(f"{where}{fault}")


class By(StrEnum):
    """The feature that rejects options."""

    SCHEDULE = "every schedule"
    LATE = "every schedule, of a config"  # turned off if seen in time
    CHUNKS = "schedules with several chunks per rank, or with reordered ranks"
    RECORDING = "CUDA graphs and the paged stash"
    LAYER_PLANS = "Megatron's layer plans, with a schedule"  # or Megatron itself with them
    POST_VALIDATION = "post-validation"
    VOCABULARY = "vocabulary parallelism"
    SLICES = "sequence slices"
    SPLIT_GRAPHS = "CUDA graphs of weight gradients"  # the run goes on: they stay in B


class Refusal(NamedTuple):
    """An option that is rejected if `is_set(value)`, or if `holds(options)`.

    `why` is the reason, `fix` the advice; None: remove the feature that rejects the option.
    """

    name: str  # attribute of Megatron's arguments or config
    why: str
    flag: str | None = None  # if it is not the name with dashes
    is_set: Callable[[Any], bool] = bool
    in_config: bool = True  # also a field of the TransformerConfig
    shows_value: bool = False  # only some values are rejected
    is_derived: bool = False  # known only after Megatron has validated its arguments
    holds: Callable[[Any], bool] | None = None  # for all options
    fix: str | None = None

    @property
    def option(self) -> str:
        """Return the option as a flag."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    def said_of(self, options: Any) -> str | None:
        """Return the option as given in arguments or a config, or None if it is not given."""
        if self.holds is not None:
            return self.option if self.holds(options) else None
        value = getattr(options, self.name, None)
        if not hasattr(options, self.name) or not self.is_set(value):
            return None
        return f"{self.option} {value}" if self.shows_value and value is not None else self.option


def _each(why: str, *names: str, **alike: Any) -> tuple[Refusal, ...]:
    """Return refusals with one reason that differ by name."""
    return tuple(Refusal(name, why, **alike) for name in names)


def _other_than(*fine: object) -> Callable[[Any], bool]:
    return lambda value: value not in fine


_is_given = _other_than(None)


def _is_one_of(*refused: object) -> Callable[[Any], bool]:
    return lambda value: value in refused


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


def _has(part: str) -> Callable[[Any], bool]:
    return lambda value: part in parts_of(value)


def parts_of(scope: Any) -> set[str]:
    """Return the names in a list of layer parts, in any notation."""
    parts = scope if isinstance(scope, list | tuple) else str(scope or "").split(",")
    return {str(getattr(each, "name", each)).strip() for each in parts} - {""}


def _last_is_dense(options: Any) -> bool:
    """Return whether the model's last layer has no experts."""
    frequency, layers = getattr(options, "moe_layer_freq", 1), getattr(options, "num_layers", None)
    if isinstance(frequency, list | tuple):
        return bool(frequency) and not frequency[-1]
    return bool(isinstance(frequency, int) and layers and (layers - 1) % frequency)


def _drops_out_alike(options: Any) -> bool:
    dropouts = (getattr(options, f"{what}_dropout", 0) for what in ("hidden", "attention"))
    return bool(getattr(options, "sequence_parallel", False)) and any(dropouts)


def _frees_what_is_saved(options: Any) -> bool:
    backend = getattr(options, "moe_flex_dispatcher_backend", None)
    flex = getattr(options, "moe_token_dispatcher_type", None) == "flex"
    experts = getattr(options, "num_experts", None) or getattr(options, "num_moe_experts", None)
    alone = experts == getattr(options, "expert_model_parallel_size", None)
    permutes = not alone and not (flex and backend in ("hybridep", "ncclep"))
    some = getattr(options, "first_last_layers_bf16", False)
    return bool(getattr(options, "fp8", None) and some and not permutes)


def _is_hybrid(options: Any) -> bool:
    pattern = getattr(options, "hybrid_layer_pattern", None)
    return pattern is not None or bool(getattr(options, "is_hybrid_model", False))


GRAPH_SCOPES = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
"""Names of the scope of CUDA graphs in releases of Megatron; the last is the parser's."""


def graph_scope(options: Any) -> set[str]:
    """Return the parts of a layer that CUDA graphs cover; empty for the full layer."""
    found = (parts_of(getattr(options, name, None)) for name in GRAPH_SCOPES)
    return next(filter(None, found), set()) - {"full"}


def _verified(options: Any) -> bool:
    recipe = getattr(options, "fp8_recipe", None) or "delayed"
    return str(getattr(recipe, "value", recipe)) in ("delayed", "tensorwise", "blockwise")


def _has_other_layers(options: Any) -> bool:
    """Check for a hybrid model with layers that may have a state from token to token."""
    pattern = getattr(options, "hybrid_layer_pattern", None)
    unknown = bool(getattr(options, "is_hybrid_model", False)) and pattern is None
    return unknown or bool(set(pattern or "") - set("*-E|/"))


def _has_mamba(options: Any) -> bool:
    return "M" in (getattr(options, "hybrid_layer_pattern", None) or "")


def _captures_experts(options: Any) -> bool:
    experts = getattr(options, "num_experts", None) or getattr(options, "num_moe_experts", None)
    return bool(experts) and "moe" in (graph_scope(options) or {"moe"})


OVERLAP_OPTION = "overlap_moe_expert_parallel_comm"
"""Megatron's option for overlapped forward-backward passes, by its layer plans."""

_OVERLAP = f"--{OVERLAP_OPTION.replace('_', '-')}"

ENGINE = "transformer_engine"
"""Default of --transformer-impl."""

BATCH_SIZES = ("rampup_batch_size", "step_batch_size_schedule")
"""Megatron's options that change the number of microbatches of a training step."""

ROUTER_REPLAY = ("moe_enable_routing_replay", "enable_routing_replay", "use_routing_replay")
"""Names of router replay in Megatron, in verl before Megatron had it, and in slime and miles."""

_USE_TE_GRAPHS = "Use --cuda-graph-impl transformer_engine"
_HOST_SYNC = "a schedule synchronizes host and GPU within a step (loss checks, P2P messages)"
_OWN_ORDER = "it supports only Megatron's schedules"
_UNSPLIT = "its weight gradients cannot be computed in W"
_SECOND_MODEL = "a second model for inference would get the stages of the schedule"
_GENERATE = "Remove it, so that the trained model generates"
_TOO_LATE = "the layers are already built with it"
_SET_EARLY = "Set it where the config is created; it is then turned off"
_NEW_ORDER = "graphs and stash are recorded for a fixed number of microbatches"
_NO_RAMP = "Remove it, or train without CUDA graphs and --moe-paged-stash"
_OUTSIDE = "Megatron's layer plans run outside of its context"
_NO_RUN = "the combination is untested"
_REDOES = "an iteration that is undone would be run and counted twice"
_NO_COPY = "a step of this optimizer cannot be undone"
_WANTS_LOGITS = "it needs the full logits, which no rank has"
_WIDE_LOGITS = "each rank computes its rows of the logits in the dtype of the parameters"
_LOGITS_OF_SLICES = "it pairs logits with full microbatches, and these are of slices"
_OF_FULL = "it replays the expert choices of a full microbatch, and not of a slice"
_UNVERIFIED = "equal gradients have not been verified with it"
_TO_CAPTURE = "Remove it to capture weight gradients separately"
_UNTRIED = "the combination is not implemented"
_OF_F_B_W = "graphs capture only F, B and W"
_NO_STATE = "the state between slices is not implemented"
_OF_A_SLICE = "it would be computed per slice instead of per microbatch"
_OWN_KEYS = "every slice has a different number of keys"

_LENGTHS = "variable_seq_lengths (variable-length microbatches)"
_GRAPHS: dict[str, Any] = {
    "flag": "--cuda-graph-impl (CUDA graphs)",
    "is_set": _other_than(None, "none"),
}
_FP8: dict[str, Any] = {"flag": "--fp8-format", "is_set": _other_than(None, "none")}
_FP4: dict[str, Any] = {"flag": "--fp4-format", "is_set": _other_than(None, "none")}
_NO_FSDP = "it supports DDP only"
_DDP = "Use DDP, with or without --use-distributed-optimizer"

REFUSALS: Mapping[By, tuple[Refusal, ...]] = {
    By.SCHEDULE: (
        Refusal(
            "cuda_graph_impl",
            _HOST_SYNC,
            fix=_USE_TE_GRAPHS,
            is_set=_is_one_of("full_iteration"),
            shows_value=True,
        ),
        *_each(
            _HOST_SYNC,
            *GRAPH_SCOPES,
            fix=_USE_TE_GRAPHS,
            flag="--cuda-graph-scope full_iteration",
            is_set=_has("full_iteration"),
        ),
        *_each(
            "Megatron captures these graphs for the pass order of its own schedules",
            *("cuda_graph_impl", "enable_cuda_graph"),
            fix=_USE_TE_GRAPHS,
            flag="--cuda-graph-impl local",
            is_set=_is_one_of("local", True),
        ),
        *_each(_NO_FSDP, "use_megatron_fsdp", "use_torch_fsdp2", fix=_DDP),
        Refusal(
            "num_microbatches_with_partial_activation_checkpoints",
            _OWN_ORDER,
            fix="Remove num_microbatches_with_partial_activation_checkpoints",
            flag="num_microbatches_with_partial_activation_checkpoints",
            is_set=_is_given,
        ),
        Refusal("hybrid_context_parallel", _OWN_ORDER, fix="Remove --hybrid-context-parallel"),
        Refusal(
            "gtp_weight_remat_size",
            _UNSPLIT,
            fix="Make the two sizes equal",
            flag="--tensor-parallel-num-weight-shards above --tensor-model-parallel-size",
            is_set=_above_one,
            is_derived=True,
        ),
        Refusal(
            "expert_gtp_weight_remat_size",
            _UNSPLIT,
            fix="Make the two sizes equal",
            flag="--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size",
            is_set=_above_one,
            is_derived=True,
        ),
        Refusal(
            "pipeline_model_parallel_comm_backend",
            "P2P messages use --distributed-backend",
            fix="Remove it, or set it to nccl",
            is_set=_other_than(None, "nccl"),
            shows_value=True,
        ),
        *(
            Refusal(
                f"rl_inference_{what}_model_parallel_size",
                _SECOND_MODEL,
                fix=_GENERATE,
                is_set=_is_given,
            )
            for what in ("tensor", "pipeline", "expert", "expert_tensor")
        ),
        Refusal(
            "transformer_impl",
            "its layers are not supported",
            fix="Use local or transformer_engine",
            is_set=_other_than(None, "local", "transformer_engine"),
            in_config=False,
            shows_value=True,
        ),
    ),
    By.LATE: (
        *_each(
            _TOO_LATE,
            *("fine_grained_activation_offloading", "delay_wgrad_compute"),
            fix=_SET_EARLY,
        ),
        *(
            Refusal(name, _TOO_LATE, fix=_SET_EARLY, flag=name)
            for name in (
                "defer_embedding_wgrad_compute",
                "overlap_dispatch_backward_with_experts_wgrad",
            )
        ),
    ),
    By.CHUNKS: (
        Refusal(
            "perform_rl_step",
            "its loop uses only the first chunk of each rank, in the order of the ranks",
            fix="Use a schedule with one chunk per rank, such as zb-h1",
        ),
    ),
    By.RECORDING: _each(_NEW_ORDER, *BATCH_SIZES, fix=_NO_RAMP, is_set=_is_given),
    By.SPLIT_GRAPHS: (
        Refusal(
            "transformer_impl",
            "Transformer Engine captures weight gradients only of its own layers",
            fix="Use --transformer-impl transformer_engine to capture them",
            is_set=_is_one_of("local"),
            shows_value=True,
        ),
        Refusal("fp4", _UNVERIFIED, fix=_TO_CAPTURE, **_FP4),
        Refusal(
            "fp8_recipe",
            _UNVERIFIED,
            fix="Use one of these to capture weight gradients separately",
            holds=lambda options: bool(getattr(options, "fp8", None)) and not _verified(options),
            flag="--fp8-recipe other than delayed, tensorwise and blockwise",
        ),
        *_each(_UNVERIFIED, "tp_comm_overlap", "use_transformer_engine_op_fuser", fix=_TO_CAPTURE),
        Refusal("experimental_attention_variant", _UNVERIFIED, fix=_TO_CAPTURE, is_set=_is_given),
        Refusal(
            "hybrid_layer_pattern",
            _UNVERIFIED,
            "Mamba layers",
            fix="No option captures them separately",
            holds=_has_mamba,
        ),
        Refusal(
            "num_experts",
            "their grouped GEMM is not captured separately",
            fix="Restrict --cuda-graph-modules to other parts, such as attn moe_router "
            "moe_preprocess",
            flag="experts in CUDA graphs",
            holds=_captures_experts,
        ),
    ),
    By.LAYER_PLANS: (
        Refusal(
            "expert_model_parallel_size",
            "there is no all-to-all to overlap",
            fix=f"Remove {_OVERLAP}, or increase EP",
            flag="--expert-model-parallel-size 1",
            is_set=_is_one_of(None, 1),
        ),
        Refusal(
            "moe_token_dispatcher_type",
            "Megatron's layer plans need an all-to-all",
            fix="Use alltoall or flex",
            flag="--moe-token-dispatcher-type allgather",
            is_set=_is_one_of("allgather"),
        ),
        Refusal(
            "bf16",
            "Megatron's layer plans need 16-bit training",
            fix="Add --bf16 or --fp16",
            flag="fp32 training",
            holds=lambda options: hasattr(options, "bf16") and not (options.bf16 or options.fp16),
        ),
        Refusal(
            "recompute_granularity",
            "a layer's all-to-all would be repeated in its backward",
            fix="Use --recompute-granularity selective, or no recomputation",
            flag="--recompute-granularity full",
            is_set=_is_one_of("full"),
        ),
        Refusal(
            "recompute_modules",
            "the all-to-all would be repeated in the backward of the experts",
            fix="Remove moe from --recompute-modules",
            flag="--recompute-modules moe",
            is_set=lambda modules: "moe" in (modules or ()),
        ),
        Refusal("moe_shared_expert_overlap", "both overlap the all-to-all"),
        Refusal(
            "mtp_num_layers",
            "Megatron's layer plans support one such layer",
            flag="--mtp-num-layers above 1",
            is_set=_above_one,
        ),
        Refusal(
            "moe_layer_freq",
            "Megatron's layer plans omit the final norm after a dense layer",
            flag="--moe-layer-freq with a dense last layer",
            holds=_last_is_dense,
        ),
        Refusal(
            "sequence_parallel",
            "in Megatron's layer plans all tensor-parallel ranks use the same dropout mask",
            fix="Set --hidden-dropout 0 and --attention-dropout 0",
            flag="--sequence-parallel and dropout",
            holds=_drops_out_alike,
        ),
        Refusal(
            "fp8_recipe",
            "Megatron's layer plans would use one FP8 context for F and another pass's B",
            fix="Use another recipe",
            flag="--fp8-recipe delayed",
            holds=lambda options: (
                bool(getattr(options, "fp8", None))
                and getattr(options, "fp8_recipe", None) == "delayed"
            ),
        ),
        Refusal(
            "first_last_layers_bf16",
            "Megatron's layer plans free activations that experts of such layers need",
            flag="--first-last-layers-bf16 with FP8",
            holds=_frees_what_is_saved,
        ),
        Refusal(
            "fp32_residual_connection",
            "Megatron's layer plans do not support fp32 residuals",
        ),
        Refusal("enable_autocast", _OUTSIDE, flag="enable_autocast"),
        Refusal("cpu_offloading", _OUTSIDE, flag="cpu_offloading"),
        Refusal("variable_seq_lengths", _NO_RUN, flag=_LENGTHS),
        *_each(_NO_RUN, "moe_latent_size", "moe_paged_stash", "use_transformer_engine_op_fuser"),
        Refusal(
            "moe_ncclep_zero_copy",
            "its buffer is needed by two microbatches at once",
        ),
        Refusal(
            "hybrid_layer_pattern",
            "it has no layer plans",
            flag="a hybrid model",
            holds=_is_hybrid,
        ),
    ),
    By.POST_VALIDATION: (
        Refusal(
            "rerun_mode",
            "it synchronizes all ranks at the end of every iteration",
            fix="Set --rerun-mode disabled",
            is_set=_other_than(None, "disabled"),
            in_config=False,
            shows_value=True,
        ),
        Refusal(
            "variable_seq_lengths",
            "the length of the first message of an iteration would not be known in time",
            flag=_LENGTHS,
        ),
        Refusal("num_experts", _REDOES, is_set=_is_given),
        Refusal("fp8", _REDOES, **_FP8),
        Refusal("fp4", _REDOES, **_FP4),
        *_each(_REDOES, "qk_clip", "log_max_attention_logit"),
        *(
            Refusal(f"save_{what}_interval", _REDOES, is_set=_is_given)
            for what in ("activations", "wgrads", "dgrads")
        ),
        *_each(
            "the next iteration starts before its batch size is decided",
            *BATCH_SIZES,
            is_set=_is_given,
        ),
        Refusal(
            "cuda_graph_impl",
            "graphs are captured between two iterations, when the next one has started",
            **_GRAPHS,
        ),
        Refusal("perform_rl_step", "its training data is generated between two iterations"),
        Refusal(
            "optimizer",
            _NO_COPY,
            fix="Use adam or sgd",
            is_set=_other_than(None, "adam", "sgd"),
            in_config=False,
            shows_value=True,
        ),
        *_each(
            _NO_COPY,
            "use_precision_aware_optimizer",
            "optimizer_cpu_offload",
            "optimizer_cuda_graph",
            "use_layer_wise_distributed_optimizer",
        ),
        Refusal(
            "overlap_param_gather_with_optimizer_step",
            "it sends parameters before a step can be undone",
            fix="Remove --overlap-param-gather-with-optimizer-step",
        ),
        Refusal("reuse_grad_buf_for_mxfp8_param_ag", _NO_COPY),
    ),
    By.VOCABULARY: (
        Refusal("optimizer_post_validation", _UNTRIED, in_config=False),
        Refusal(OVERLAP_OPTION, _UNTRIED),
        Refusal("cuda_graph_impl", _OF_F_B_W, **_GRAPHS),
        Refusal("external_cuda_graph", _OF_F_B_W),
        *_each(
            _UNTRIED,
            *("use_mup", "mtp_detach_heads", "fp32_residual_connection", "enable_autocast"),
            *("init_model_with_meta_device", "fp8_output_proj"),
        ),
        Refusal("perform_rl_step", _WANTS_LOGITS),
        *_each(
            _WANTS_LOGITS,
            *("logits_save_dir", "logits_load_dir", "export_kd_teacher_load"),
            in_config=False,
        ),
        Refusal(
            "logit_dtype",
            _WIDE_LOGITS,
            flag="--output-logit-dtype",
            is_set=_is_given,
            in_config=False,
        ),
    ),
    By.SLICES: (
        *_each(_UNTRIED, "optimizer_post_validation", "pipeline_vocab_parallel", in_config=False),
        Refusal(OVERLAP_OPTION, _UNTRIED),
        Refusal(
            "context_parallel_size",
            "Transformer Engine's attention does not support it with slices",
            is_set=_above_one,
            shows_value=True,
        ),
        Refusal("variable_seq_lengths", "all slices have one length", flag=_LENGTHS),
        Refusal("cuda_graph_impl", _OWN_KEYS, **_GRAPHS),
        *_each(_OWN_KEYS, "external_cuda_graph", "enable_cuda_graph"),
        Refusal("experimental_attention_variant", _UNTRIED, is_set=_is_given),
        Refusal("moe_expert_capacity_factor", _OF_A_SLICE, is_set=_is_given),
        Refusal("moe_router_load_balancing_type", _OF_A_SLICE, is_set=_has("sinkhorn")),
        Refusal(
            "mtp_use_repeated_layer",
            "one layer would have keys of several depths",
            fix="Remove --mtp-use-repeated-layer",
        ),
        Refusal(
            "mtp_hsm",
            "it reads hidden states of tokens after the slice, which have not been computed",
        ),
        Refusal(
            "hybrid_layer_pattern",
            _NO_STATE,
            flag="--hybrid-layer-pattern with other layers than *, - and E",
            holds=_has_other_layers,
        ),
        Refusal(
            "position_embedding_type",
            _UNTRIED,
            is_set=_is_one_of("mrope", "relative"),
            shows_value=True,
        ),
        *_each(
            _UNTRIED,
            *("reset_attention_mask", "fp8_dot_product_attention", "fp8_multi_head_attention"),
        ),
        *_each(_OF_FULL, *ROUTER_REPLAY),
        Refusal("perform_rl_step", "it needs logits, and slices compute losses"),
        *_each(_LOGITS_OF_SLICES, "logits_save_dir", "logits_load_dir", in_config=False),
    ),
}
"""Every rejected option of Megatron by feature, with reason and fix."""


def conflicts(options: Any, placement: Placement) -> Iterator[UnsupportedError]:
    """Yield an error for each option that layer plans do not support, if they are enabled."""
    if not getattr(options, OVERLAP_OPTION, False):
        return
    for refusal in REFUSALS[By.LAYER_PLANS]:
        said = refusal.said_of(options)
        if said is not None:
            yield UnsupportedError(_message(_OVERLAP, said, refusal), OVERLAP_OPTION)
    if len(placement) == max(placement) + 1:
        yield UnsupportedError(
            f"{_OVERLAP} does not work with a schedule with one chunk per rank: passes of two "
            f"chunks overlap. Use a schedule such as v-half, or remove {_OVERLAP}",
            OVERLAP_OPTION,
        )


def check_layer_plans(options: Any, placement: Placement) -> None:
    """Raise UnsupportedError for the first option that layer plans do not support."""
    for error in conflicts(options, placement):
        raise error


def check_script(forward_step_func: Callable[..., Any]) -> None:
    """Raise UnsupportedError for a script whose forward step cannot return a layer plan."""
    parameters = inspect.signature(forward_step_func).parameters
    if "return_schedule_plan" not in parameters:
        name = getattr(forward_step_func, "__name__", type(forward_step_func).__name__)
        raise UnsupportedError(
            f"{_OVERLAP} does not work with this script: its forward step {name} takes no "
            "return_schedule_plan, which returns the model's build_schedule_plan. Add it, or "
            f"remove {_OVERLAP}"
        )


def check_slices(
    slices: int, options: Any, others: Mapping[str, object], alike: bool = True
) -> None:
    """Raise UnsupportedError for the first option that slices do not support.

    `options` is Megatron's arguments or a config; `others` has options of this package by label.
    With `alike`, the sequence must be divisible into equal slices.
    """
    if slices == 1:
        return
    _check(REFUSALS[By.SLICES], options, "--pipeline-slices")
    for option, value in others.items():
        if value:
            raise UnsupportedError(
                f"--pipeline-slices does not work with {option}: {_UNTRIED}. Remove "
                "--pipeline-slices"
            )
    if alike:
        check_sequence(slices, getattr(options, "seq_length", None), options)


def even_slices(counts: Iterable[int], length: int | None, options: Any) -> tuple[int, ...]:
    """Return those of the numbers of slices into which `length` tokens divide evenly."""
    unit = _least_tokens(options)
    return tuple(each for each in counts if each == 1 or not (length or 0) % (each * unit))


def _least_tokens(options: Any) -> int:
    """Return the number of tokens that must divide the length of a slice."""
    parts: int = getattr(options, "tensor_model_parallel_size", 1)
    return parts if getattr(options, "sequence_parallel", False) else 1


def check_sequence(slices: int, length: int | None, options: Any) -> None:
    """Raise UnsupportedError unless `length` tokens are divisible into equal slices."""
    unit = _least_tokens(options)
    if length is None or even_slices([slices], length, options):
        return
    fine = [each for each in range(1, length // unit + 1) if not length % (each * unit)]
    nearest = min(fine, key=lambda each: abs(each - slices)) if fine else 1
    multiple = f", each a multiple of {unit} tensor-parallel ranks" if unit > 1 else ""
    raise UnsupportedError(
        f"--pipeline-slices {slices} does not divide {length} tokens into equal "
        f"slices{multiple}. Use --pipeline-slices {nearest}"
    )


def check_vocabulary(shares: bool, options: Any) -> None:
    """Raise UnsupportedError for the first option that vocabulary parallelism does not support."""
    if shares:
        _check(REFUSALS[By.VOCABULARY], options, "--pipeline-vocab-parallel")


def check_post_validation(args: Namespace) -> None:
    """Raise UnsupportedError for the first option that post-validation does not support."""
    _check(REFUSALS[By.POST_VALIDATION], args, "--optimizer-post-validation")


def check_arguments(args: Namespace, schedule: str, placement: Placement) -> None:
    """Raise UnsupportedError for the first Megatron option that `schedule` does not support."""
    known = [each for each in REFUSALS[By.SCHEDULE] if not each.is_derived]
    chunked = () if is_plain(placement) else REFUSALS[By.CHUNKS]
    _check((*known, *chunked), args, f"--pipeline-schedule {schedule}")
    if captures_graphs(args):
        _check(REFUSALS[By.RECORDING], args, f"--pipeline-schedule {schedule} with CUDA graphs")
    if uses_stash(args):
        flag = f"--pipeline-schedule {schedule} with --moe-paged-stash"
        _check(REFUSALS[By.RECORDING], args, flag)
    contexts = getattr(args, "context_parallel_size", 1)
    if getattr(args, "perform_rl_step", False) and _above_one(contexts):
        raise UnsupportedError(
            f"--pipeline-schedule {schedule} does not work with --perform-rl-step and "
            f"--context-parallel-size {contexts} together: {_SECOND_MODEL}. Set "
            "--context-parallel-size 1",
            "perform_rl_step",
        )
    on_gpus = getattr(args, "distributed_backend", "nccl") == "nccl"
    if on_gpus and _above_one(getattr(args, "timing_log_level", None)):
        raise UnsupportedError(
            f"--pipeline-schedule {schedule} does not work with --timing-log-level "
            f"{args.timing_log_level} on GPUs: its timers synchronize the GPU within a pass, which "
            "waits for P2P messages of later passes. Use 0 or 1",
            "timing_log_level",
        )
    if getattr(args, "transformer_impl", ENGINE) == ENGINE and not has_transformer_engine():
        raise MissingError(
            "--transformer-impl transformer_engine needs Transformer Engine, which is not "
            "installed here: install it, or use --transformer-impl local",
            "transformer_impl",
        )


def captures_graphs(options: Any) -> bool:
    """Return whether arguments or a config enable the CUDA graphs of Transformer Engine."""
    by_name = getattr(options, "cuda_graph_impl", None) == "transformer_engine"
    return by_name or bool(getattr(options, "external_cuda_graph", False))


TE_OF_SPLIT_GRAPHS = "2.11.0"
"""The first Transformer Engine release that can capture a W anywhere after its B."""


def check_split_graphs(options: Any) -> None:
    """Raise UnsupportedError if weight gradients of captured layers must stay in B."""
    what = "--pipeline-split-graphs auto"
    _check(REFUSALS[By.SPLIT_GRAPHS], options, what)
    from megatron.core.utils import get_te_version, is_te_min_version

    release = str(get_te_version())
    if release != "0.0.0" and not is_te_min_version(TE_OF_SPLIT_GRAPHS):  # 0: not installed
        raise UnsupportedError(
            f"{what} does not work with Transformer Engine {release}, which captures W right "
            f"after B at best. Use {TE_OF_SPLIT_GRAPHS} or later"
        )


def uses_stash(options: Any) -> bool:
    """Return whether arguments or a config enable Megatron's paged stash (since 0.18)."""
    return bool(getattr(options, "moe_paged_stash", False))


def check_derived(args: Namespace, schedule: str) -> None:
    """Raise UnsupportedError for unsupported values that Megatron derives from options."""
    derived = [each for each in REFUSALS[By.SCHEDULE] if each.is_derived]
    _check(derived, args, f"--pipeline-schedule {schedule}")


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_config(config: Any, post_validates: bool) -> None:
    """Raise UnsupportedError for an option that a script has set only in the TransformerConfig."""
    late = [each for by in (By.SCHEDULE, By.LATE) for each in REFUSALS[by] if each.in_config]
    _check(late, config, "--pipeline-schedule")
    if post_validates:
        ahead = [each for each in REFUSALS[By.POST_VALIDATION] if each.in_config]
        _check(ahead, config, "--optimizer-post-validation")


def check_library(config: Any, schedule: str, placement: Placement) -> None:
    """Raise UnsupportedError for an option in a library's config that `schedule` rejects."""
    check_config(config, post_validates=False)
    _check(() if is_plain(placement) else REFUSALS[By.CHUNKS], config, f"schedule {schedule}")


def is_plain(placement: Placement) -> bool:
    """Return whether every rank has one stage, in the order of the ranks."""
    return placement == tuple(range(len(placement)))


def check_one_module(schedule: str, *given: Any) -> None:
    """Raise UnsupportedError if the trainer passes communicators for several modules of a model.

    Such modules, for example an image encoder and a language model, each have their own pipeline.
    """
    for each in given:
        # By class name, because this check also runs without Megatron.
        if any(base.__name__.startswith("MultiModule") for base in type(each).__mro__):
            raise refused_model(schedule, type(each).__name__)


def refused_model(schedule: str, name: str) -> UnsupportedError:
    """Return the error for a model with more than one stack of layers."""
    return UnsupportedError(
        f"schedule {schedule} does not work with {name}: it needs one stack of layers, and this "
        "model has several. Remove the schedule, and Megatron runs its own"
    )


def _check(refusals: Iterable[Refusal], options: Any, flag: str) -> None:
    for refusal in refusals:
        said = refusal.said_of(options)
        if said is not None:
            raise UnsupportedError(_message(flag, said, refusal), refusal.name)


def _message(flag: str, said: str, refusal: Refusal) -> str:
    """Format problem, reason and fix; `flag` is that of the feature, maybe with a value."""
    fix = refusal.fix or f"Remove {flag.split()[0]}"
    return f"{flag} does not work with {said}: {refusal.why}. {fix}"
