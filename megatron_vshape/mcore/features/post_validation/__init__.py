"""Optimizer post-validation: start the next step before the last one is validated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_vshape.mcore.hook import Hook
from megatron_vshape.mcore.refusals import (
    BATCH_SIZES,
    FP4,
    FP8,
    GRAPHS,
    LENGTHS,
    Refusal,
    check_refusals,
    each_of,
    is_given,
    other_than,
)
from megatron_vshape.mcore.setup.features import Feature, Support
from megatron_vshape.mcore.setup.run_config import Settings

if TYPE_CHECKING:
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.stage import StepFeature

FLAG = "--optimizer-post-validation"

_REPEATED_ITERATION = "an iteration that is undone would be run and counted twice"
_NO_COPY = "a step of this optimizer cannot be undone"

REFUSALS = (
    Refusal(
        "rerun_mode",
        "it synchronizes all ranks at the end of every iteration",
        fix="Set --rerun-mode disabled",
        is_set=other_than(None, "disabled"),
        in_config=False,
        shows_value=True,
    ),
    Refusal(
        "variable_seq_lengths",
        "the length of the first message of an iteration would not be known in time",
        flag=LENGTHS,
    ),
    Refusal("num_experts", _REPEATED_ITERATION, is_set=is_given),
    Refusal("fp8", _REPEATED_ITERATION, **FP8),
    Refusal("fp4", _REPEATED_ITERATION, **FP4),
    *each_of(_REPEATED_ITERATION, "qk_clip", "log_max_attention_logit"),
    *(
        Refusal(f"save_{tensors}_interval", _REPEATED_ITERATION, is_set=is_given)
        for tensors in ("activations", "wgrads", "dgrads")
    ),
    *each_of(
        "the next iteration starts before its batch size is decided",
        *BATCH_SIZES,
        is_set=is_given,
    ),
    Refusal(
        "cuda_graph_impl",
        "graphs are captured between two iterations, when the next one has started",
        **GRAPHS,
    ),
    Refusal("perform_rl_step", "its training data is generated between two iterations"),
    Refusal(
        "optimizer",
        _NO_COPY,
        fix="Use adam or sgd",
        is_set=other_than(None, "adam", "sgd"),
        in_config=False,
        shows_value=True,
    ),
    *each_of(
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
)
"""Options that post-validation rejects."""


def check_config(config: Any) -> None:
    """Raise UnsupportedError for an option of a config that post-validation does not support."""
    check_refusals([refusal for refusal in REFUSALS if refusal.in_config], config, FLAG)


class PostValidationFeature(Feature):
    """Rejects options of iterations that cannot be repeated, or that all ranks end together."""

    support = Support("post-validation", FLAG)
    refusals = REFUSALS

    def label(self, settings: Settings) -> str | None:
        """Return the flag if it is given."""
        return FLAG if settings.options.post_validates else None

    def hooks(self) -> tuple[Hook, ...]:
        """Return the feature's replacements of Megatron's attributes."""
        from megatron_vshape.mcore.features.post_validation.early_step import HOOKS

        return HOOKS

    def in_steps(self, runner: PipelineRunner) -> StepFeature | None:
        """Return the part that starts the next step early."""
        if not runner.pipeline.options.post_validates:
            return None
        from megatron_vshape.mcore.features.post_validation.early_step import EarlyStart

        return EarlyStart(runner)


FEATURE = PostValidationFeature()
