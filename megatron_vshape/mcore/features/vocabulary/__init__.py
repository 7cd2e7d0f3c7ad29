"""Vocabulary parallelism: all pipeline ranks share the embedding and the output layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.planner.vocabulary import is_shared
from megatron_vshape.mcore.hook import Hook
from megatron_vshape.mcore.layout.shared_vocabulary import FLAG
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import (
    GRAPHS,
    OVERLAP_OPTION,
    UNTRIED,
    Refusal,
    check_encoder,
    check_refusals,
    each_of,
    is_given,
)
from megatron_vshape.mcore.setup.features import Feature, Support
from megatron_vshape.mcore.setup.run_config import Settings

if TYPE_CHECKING:
    from megatron_vshape.mcore.setup.run_config import RunConfig, ScheduleChoice
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.stage import StepFeature


_NEEDS_LOGITS = "it needs the full logits, which no rank has"
_NO_FORWARD = "it saves tensors of the output layer, whose forward does not run"
_WIDE_LOGITS = "each rank computes its rows of the logits in the dtype of the parameters"
_OF_F_B_W = "graphs capture only F, B and W"


def _is_of_mcore_bridge(config: Any) -> bool:
    """Check for a config of mcore_bridge, the package of ms-swift."""
    packages = (base.__module__.partition(".")[0] for base in type(config).__mro__)
    return "mcore_bridge" in packages


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
    Refusal(
        "hf_model_type",
        "mcore_bridge loads and saves the embedding and the output layer as weights of one stage",
        flag="a model of mcore_bridge (ms-swift)",
        holds=_is_of_mcore_bridge,
    ),
    Refusal("perform_rl_step", _NEEDS_LOGITS),
    *each_of(
        _NEEDS_LOGITS,
        *("logits_save_dir", "logits_load_dir", "export_kd_teacher_load"),
        in_config=False,
    ),
    *(
        Refusal(f"save_{values}_interval", _NO_FORWARD, is_set=is_given, in_config=False)
        for values in ("activations", "dgrads")
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

    support = Support("vocabulary parallelism", FLAG)
    refusals = REFUSALS

    def label(self, settings: Settings) -> str | None:
        """Return the flag, or a description if a schedule file enables the feature."""
        if settings.options.vocab_parallel:
            return FLAG
        return "vocabulary parallelism" if settings.choice.shards_output_layer else None

    def configure(self, choice: ScheduleChoice, options: Options) -> ScheduleChoice:
        """Return the choice with the option; a schedule file with vocabulary passes implies it."""
        file = choice.from_file
        shares = options.vocab_parallel or (file is not None and is_shared(file))
        return replace(choice, shards_output_layer=shares)

    def check_chunks(self, pipeline: RunConfig, rank: int, chunks: Sequence[Any]) -> None:
        """Reject changes of embedding, output layer and loss, whose forward does not run."""
        if pipeline.choice.shards_output_layer:
            from megatron_vshape.mcore.features.vocabulary.model import check_ends

            check_encoder(chunks, FLAG, "it uses the embedding of the first stage")
            ends = pipeline.ends(rank, 0)[0], pipeline.ends(rank, len(chunks) - 1)[1]
            check_ends(chunks[0], chunks[-1], ends)

    def hooks(self) -> tuple[Hook, ...]:
        """Return the feature's replacements of Megatron's attributes."""
        from megatron_vshape.mcore.features.vocabulary.loss_of_logits import HOOKS

        return HOOKS

    def in_steps(self, runner: PipelineRunner) -> StepFeature:
        """Return the passes of the vocabulary."""
        from megatron_vshape.mcore.features.vocabulary.step import VocabularySharing

        return VocabularySharing()


FEATURE = VocabularyFeature()
