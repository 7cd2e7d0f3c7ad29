"""Overlapped forward and backward passes by Megatron's layer plans."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.mcore.refusals import (
    LENGTHS,
    OVERLAP_OPTION,
    Refusal,
    UnsupportedError,
    above_one,
    check_encoder,
    each_of,
    is_one_of,
    num_experts,
    rejection,
)
from megatron_vshape.mcore.setup.features import Feature, Support
from megatron_vshape.mcore.setup.run_config import Settings

if TYPE_CHECKING:
    from megatron_vshape.mcore.setup.plans import PlannedStep
    from megatron_vshape.mcore.setup.run_config import RunConfig, ScheduleChoice
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.stage import StepFeature

_OVERLAP = f"--{OVERLAP_OPTION.replace('_', '-')}"
_OUTSIDE = "Megatron's layer plans run outside of its context"
_NO_RUN = "the combination is untested"


def _is_last_layer_dense(options: Any) -> bool:
    """Return whether the model's last layer has no experts."""
    frequency, layers = getattr(options, "moe_layer_freq", 1), getattr(options, "num_layers", None)
    if isinstance(frequency, list | tuple):
        return bool(frequency) and not frequency[-1]
    return bool(isinstance(frequency, int) and layers and (layers - 1) % frequency)


def _repeats_dropout_masks(options: Any) -> bool:
    dropouts = (getattr(options, f"{module}_dropout", 0) for module in ("hidden", "attention"))
    return bool(getattr(options, "sequence_parallel", False)) and any(dropouts)


def _frees_saved_activations(options: Any) -> bool:
    backend = getattr(options, "moe_flex_dispatcher_backend", None)
    is_flex = getattr(options, "moe_token_dispatcher_type", None) == "flex"
    experts = num_experts(options)
    has_one_expert_per_rank = experts == getattr(options, "expert_model_parallel_size", None)
    permutes = not has_one_expert_per_rank and not (is_flex and backend in ("hybridep", "ncclep"))
    keeps_bf16_layers = getattr(options, "first_last_layers_bf16", False)
    return bool(getattr(options, "fp8", None) and keeps_bf16_layers and not permutes)


REFUSALS = (
    Refusal(
        "expert_model_parallel_size",
        "there is no all-to-all to overlap",
        fix=f"Remove {_OVERLAP}, or increase EP",
        flag="--expert-model-parallel-size 1",
        is_set=is_one_of(None, 1),
    ),
    Refusal(
        "moe_token_dispatcher_type",
        "Megatron's layer plans need an all-to-all",
        fix="Use alltoall or flex",
        flag="--moe-token-dispatcher-type allgather",
        is_set=is_one_of("allgather"),
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
        is_set=is_one_of("full"),
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
        is_set=above_one,
    ),
    Refusal(
        "moe_layer_freq",
        "Megatron's layer plans omit the final norm after a dense layer",
        flag="--moe-layer-freq with a dense last layer",
        holds=_is_last_layer_dense,
    ),
    Refusal(
        "sequence_parallel",
        "in Megatron's layer plans all tensor-parallel ranks use the same dropout mask",
        fix="Set --hidden-dropout 0 and --attention-dropout 0",
        flag="--sequence-parallel and dropout",
        holds=_repeats_dropout_masks,
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
        holds=_frees_saved_activations,
    ),
    Refusal(
        "fp32_residual_connection",
        "Megatron's layer plans do not support fp32 residuals",
    ),
    Refusal("enable_autocast", _OUTSIDE, flag="enable_autocast"),
    Refusal("cpu_offloading", _OUTSIDE, flag="cpu_offloading"),
    Refusal("variable_seq_lengths", _NO_RUN, flag=LENGTHS),
    *each_of(_NO_RUN, "moe_latent_size", "moe_paged_stash", "use_transformer_engine_op_fuser"),
    Refusal(
        "moe_ncclep_zero_copy",
        "its buffer is needed by two microbatches at once",
    ),
    Refusal(
        "hybrid_layer_pattern",
        "it has no layer plans",
        flag="a hybrid model",
        holds=lambda options: (
            getattr(options, "hybrid_layer_pattern", None) is not None
            or bool(getattr(options, "is_hybrid_model", False))
        ),
    ),
)
"""Options that layer plans reject, with a schedule or with Megatron itself."""


def conflicts(options: Any, placement: Placement) -> Iterator[UnsupportedError]:
    """Yield an error for each option that layer plans do not support, if they are enabled."""
    if not getattr(options, OVERLAP_OPTION, False):
        return
    for refusal in REFUSALS:
        description = refusal.said_of(options)
        if description is not None:
            yield UnsupportedError(rejection(_OVERLAP, description, refusal), OVERLAP_OPTION)
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


class OverlapFeature(Feature):
    """Rejects options and schedules that layer plans do not support."""

    support = Support("MoE communication overlap", _OVERLAP)
    refusals = REFUSALS

    def label(self, settings: Settings) -> str | None:
        """Return a description if the schedule file has overlapped passes."""
        return "overlapped passes" if settings.choice.has_overlap else None

    def check(self, settings: Settings) -> ScheduleChoice:
        """Reject options that layer plans do not support, and overlapped passes without them."""
        model, choice = settings.model, settings.choice
        check_layer_plans(model, choice.placement)
        if choice.has_overlap and not getattr(model, OVERLAP_OPTION, False):
            raise ScheduleError(
                f"schedule {choice.name} overlaps forward and backward: add {_OVERLAP}, or choose "
                "another"
            )
        return choice

    def check_chunks(self, pipeline: RunConfig, rank: int, chunks: Sequence[Any]) -> None:
        """Reject an encoder, which the layer plans of its model omit."""
        if pipeline.choice.may_overlap:
            check_encoder(chunks, _OVERLAP, "Megatron's layer plans omit the encoder")

    def notes(self, pipeline: RunConfig, plan: PlannedStep, local_ranks: int | None) -> str:
        """Return that passes run by layer plans, and a setting that prevents their overlap."""
        if not pipeline.choice.may_overlap:
            return ""
        text = "\ntraining passes run by Megatron's layer plans, with overlapped communication"
        if pipeline.choice.kernels and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            text += "; CUDA_DEVICE_MAX_CONNECTIONS=1 prevents the overlap: set it to 32"
        return text

    def in_steps(self, runner: PipelineRunner) -> StepFeature | None:
        """Return the runner of layer plans."""
        if not runner.pipeline.choice.may_overlap:
            return None
        from megatron_vshape.mcore.features.overlap.layer_plans import OverlappedSteps

        return OverlappedSteps()


FEATURE = OverlapFeature()
