"""Sequence slices: a microbatch runs in several slices of its sequence."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.request import SLICES
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.mcore.hook import Hook
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import (
    GRAPHS,
    LENGTHS,
    OVERLAP_OPTION,
    ROUTER_REPLAY,
    UNTRIED,
    Refusal,
    UnsupportedError,
    above_one,
    check_encoder,
    check_refusals,
    each_of,
    has_part,
    is_given,
    is_one_of,
    parts_of,
)
from megatron_vshape.mcore.setup.features import Feature, Support, features
from megatron_vshape.mcore.setup.run_config import Settings, check_sequence, even_slices

if TYPE_CHECKING:
    from megatron_vshape.mcore.setup.run_config import RunConfig, ScheduleChoice
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.stage import StepFeature
    from megatron_vshape.mcore.step_state import StepState

logger = logging.getLogger(__name__)

FLAG = "--pipeline-slices"

_LOGITS_OF_SLICES = "it pairs logits with full microbatches, and these are of slices"
_REPLAYS_MICROBATCH = "it replays the expert choices of a full microbatch, and not of a slice"
_NO_STATE = "the state between slices is not implemented"
_PER_SLICE = "it would be computed per slice instead of per microbatch"
_SAVES_PER_SLICE = "it would save the values of a slice as those of a microbatch"
_VARYING_KEYS = "every slice has a different number of keys"


def _has_other_layers(options: Any) -> bool:
    """Check for a hybrid model with layers that may have a state from token to token."""
    pattern = getattr(options, "hybrid_layer_pattern", None)
    has_unknown_layers = bool(getattr(options, "is_hybrid_model", False)) and pattern is None
    return has_unknown_layers or bool(set(pattern or "") - set("*-E|/"))


_FP8_MODULES = {"mlp", "moe", "shared_experts", "mla_up_proj"}
"""Values of --recompute-modules whose recomputation runs FP8 GEMMs."""


def _recomputes_delayed_fp8(options: Any) -> bool:
    """Check for recomputed FP8 layers with delayed scaling, which a custom recipe may have."""
    recipe = getattr(options, "fp8_recipe", None) or "delayed"
    is_delayed = getattr(recipe, "value", recipe) in ("delayed", "custom")
    if not getattr(options, "fp8", None) or not is_delayed:
        return False
    granularity = getattr(options, "recompute_granularity", None)
    modules = parts_of(getattr(options, "recompute_modules", None))
    return granularity == "full" or (granularity == "selective" and bool(modules & _FP8_MODULES))


REFUSALS = (
    Refusal(OVERLAP_OPTION, UNTRIED),
    Refusal(
        "context_parallel_size",
        "Transformer Engine's attention does not support it with slices",
        is_set=above_one,
        shows_value=True,
    ),
    Refusal("variable_seq_lengths", "all slices have one length", flag=LENGTHS),
    Refusal("cuda_graph_impl", _VARYING_KEYS, **GRAPHS),
    *each_of(_VARYING_KEYS, "external_cuda_graph", "enable_cuda_graph"),
    Refusal("experimental_attention_variant", UNTRIED, is_set=is_given),
    # FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute takes the oldest saved scale.
    Refusal(
        "fp8_recipe",
        "Transformer Engine recomputes with the saved FP8 scales in the order of the forwards, and "
        "the slices of a microbatch run backward in the reverse order",
        fix="Use another --fp8-recipe, or recompute only core_attn and layernorm",
        flag="--fp8-recipe delayed or custom with recomputed FP8 layers",
        holds=_recomputes_delayed_fp8,
    ),
    Refusal("moe_expert_capacity_factor", _PER_SLICE, is_set=is_given),
    *(
        Refusal(
            "moe_router_load_balancing_type",
            _PER_SLICE,
            is_set=has_part(balancing),
            shows_value=True,
        )
        for balancing in ("sinkhorn", "quantile_balancing")
    ),
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
        UNTRIED,
        is_set=is_one_of("mrope", "relative"),
        shows_value=True,
    ),
    *each_of(
        UNTRIED,
        *("reset_attention_mask", "fp8_dot_product_attention", "fp8_multi_head_attention"),
    ),
    *each_of(_REPLAYS_MICROBATCH, *ROUTER_REPLAY),
    Refusal("perform_rl_step", "it needs logits, and slices compute losses"),
    *each_of(_LOGITS_OF_SLICES, "logits_save_dir", "logits_load_dir", in_config=False),
    *(
        Refusal(f"save_{values}_interval", _SAVES_PER_SLICE, is_set=is_given, in_config=False)
        for values in ("activations", "dgrads", "tokens_per_expert")
    ),
)
"""Options that slices reject."""


def check_slices(
    slices: int, options: Any, other_features: Iterable[str] = (), equal_slices: bool = True
) -> None:
    """Raise UnsupportedError for the first option that slices do not support.

    `options` is Megatron's arguments or a config; `other_features` has the names of other features.
    With `equal_slices`, the sequence must be divisible into equal slices.
    """
    if slices == 1:
        return
    check_refusals(REFUSALS, options, FLAG)
    for name in other_features:
        raise UnsupportedError(f"{FLAG} does not work with {name}: {UNTRIED}. Remove {FLAG}")
    if equal_slices:
        check_sequence(slices, getattr(options, "seq_length", None), options)


class SlicesFeature(Feature):
    """Runs a microbatch in slices, whose number is given or chosen with the schedule."""

    support = Support("sequence slices", FLAG, with_slices=True)
    refusals = REFUSALS

    def label(self, settings: Settings) -> str | None:
        """Return the flag if a microbatch has several slices."""
        slices = settings.choice.slices
        return FLAG if isinstance(slices, int) and slices > 1 else None

    def configure(self, choice: ScheduleChoice, options: Options) -> ScheduleChoice:
        """Return the choice with the number of slices of the option or the schedule file."""
        return replace(choice, slices=_slices(options, choice))

    def check(self, settings: Settings) -> ScheduleChoice:
        """Reject options that a given number of slices does not support.

        Returns the choice with the numbers of slices that auto may choose for this model.
        """
        model, choice = settings.model, settings.choice
        if isinstance(choice.slices, int):
            check_slices(choice.slices, model, _other_features(settings))
            return choice
        try:
            check_slices(max(choice.slices), model, _other_features(settings), equal_slices=False)
        except UnsupportedError as error:
            logger.info("microbatches stay whole: %s", error)
            return replace(choice, slices=1)
        length = getattr(model, "seq_length", None)
        return replace(choice, slices=even_slices(choice.slices, length, model))

    def check_chunks(self, pipeline: RunConfig, rank: int, chunks: Sequence[Any]) -> None:
        """Reject an encoder, whose model merges the images of a full microbatch."""
        if pipeline.choice.slices not in (1, (1,)):
            check_encoder(chunks, FLAG, "it merges images into full sequences")

    def hooks(self) -> tuple[Hook, ...]:
        """Return the feature's replacements of Megatron's attributes."""
        from megatron_vshape.mcore.features.slices.step import HOOKS

        return HOOKS

    def in_steps(self, runner: PipelineRunner) -> StepFeature:
        """Return the slices' part in steps."""
        from megatron_vshape.mcore.features.slices.step import Slicing

        return Slicing()


FEATURE = SlicesFeature()


def share_slices(state: StepState, chunks: Sequence[Any], choice: ScheduleChoice) -> None:
    """Make attention and routers use the slices of a microbatch together, if the run has any."""
    max_slices = choice.slices if isinstance(choice.slices, int) else max(choice.slices)
    if max_slices > 1:
        from megatron_vshape.mcore.features.slices import attention, router

        attention.attend_to_earlier_slices(state, chunks)
        router.balance_full_microbatches(state, chunks)


def _other_features(settings: Settings) -> list[str]:
    """Return the names of what slices do not support in this run: other features, profiling."""
    unsupported = (feature for feature in features() if not feature.support.with_slices)
    labels = [feature.label(settings) for feature in unsupported]
    profiles = "--pipeline-profile-iterations or --pipeline-trace"
    return [*filter(None, labels), *[profiles] * (settings.options.profile_steps is not None)]


def _slices(options: Options, choice: ScheduleChoice) -> int | tuple[int, ...]:
    """Return the number of slices per microbatch: from the schedule file or the option.

    Raises:
        ScheduleError: The option contradicts the file, or the option is auto with a schedule that
            has a fixed number of slices.
    """
    option, file_slices = options.slices, 1 if choice.from_file is None else choice.from_file.slices
    if option == AUTO and choice.name == AUTO:
        return SLICES
    if option == AUTO and choice.from_file is not None:
        return file_slices
    if isinstance(option, str):
        raise ScheduleError(
            "--pipeline-slices auto requires --pipeline-schedule auto: with "
            f"{choice.name}, set a number"
        )
    if choice.from_file is not None and option not in (1, file_slices):
        raise ScheduleError(
            f"the schedule file {choice.name} has {file_slices} slices per microbatch, not the "
            f"{option} of --pipeline-slices: remove the option, or use another file"
        )
    return max(option, file_slices)
