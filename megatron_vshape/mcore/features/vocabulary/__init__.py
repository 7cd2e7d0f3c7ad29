"""Vocabulary parallelism: all pipeline ranks share the embedding and the output layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import (
    GRAPHS,
    OVERLAP_OPTION,
    UNTRIED,
    Refusal,
    UnsupportedError,
    check_refusals,
    each_of,
    is_given,
)
from megatron_vshape.mcore.setup.features import Feature, Settings

if TYPE_CHECKING:
    from megatron_vshape.mcore.layout.stage_map import StageMap
    from megatron_vshape.mcore.setup.choice import ScheduleConfig
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.step_hooks import StepFeature

FLAG = "--pipeline-vocab-parallel"

_WANTS_LOGITS = "it needs the full logits, which no rank has"
_WIDE_LOGITS = "each rank computes its rows of the logits in the dtype of the parameters"
_OF_F_B_W = "graphs capture only F, B and W"

REFUSALS = (
    Refusal("optimizer_post_validation", UNTRIED, in_config=False),
    Refusal(OVERLAP_OPTION, UNTRIED),
    Refusal("cuda_graph_impl", _OF_F_B_W, **GRAPHS),
    Refusal("external_cuda_graph", _OF_F_B_W),
    *each_of(
        UNTRIED,
        *("use_mup", "mtp_detach_heads", "fp32_residual_connection", "enable_autocast"),
        *("init_model_with_meta_device", "fp8_output_proj"),
    ),
    Refusal("perform_rl_step", _WANTS_LOGITS),
    *each_of(
        _WANTS_LOGITS,
        *("logits_save_dir", "logits_load_dir", "export_kd_teacher_load"),
        in_config=False,
    ),
    Refusal(
        "logit_dtype",
        _WIDE_LOGITS,
        flag="--output-logit-dtype",
        is_set=is_given,
        in_config=False,
    ),
)
"""Options that vocabulary parallelism rejects."""


def check_model_options(model: Any) -> None:
    """Raise UnsupportedError for the first option that vocabulary parallelism does not support."""
    check_refusals(REFUSALS, model, FLAG)


class VocabularyFeature(Feature):
    """Shares the vocabulary if the option or the schedule file does."""

    flag = FLAG
    refusals = REFUSALS

    def configure(self, choice: ScheduleConfig, options: Options) -> ScheduleConfig:
        """Return the choice with the option; a schedule file with vocabulary passes implies it."""
        return replace(choice, shares=choice.shares or options.vocab_parallel)

    def check(self, settings: Settings) -> None:
        """Reject options that vocabulary parallelism does not support."""
        if settings.choice.shares:
            check_model_options(settings.model)

    def check_stages(self, settings: Settings, stage_map: StageMap) -> None:
        """Reject offloading, which the plans cannot combine with vocabulary passes."""
        choice = settings.choice
        if choice.shares and (choice.copies or settings.may_offload):
            raise UnsupportedError(
                f"{FLAG} does not work with offloading of activations: the combination is not "
                "implemented. Remove one of the two"
            )

    def in_steps(self, runner: PipelineRunner) -> StepFeature:
        """Return the passes of the vocabulary."""
        from megatron_vshape.mcore.features.vocabulary.step import VocabularySharing

        return VocabularySharing(runner.pipeline.choice.shares)


FEATURE = VocabularyFeature()
