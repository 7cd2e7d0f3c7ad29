"""Options of Megatron that a schedule translates or ignores.

All these options were made for Megatron's schedules. If an option has a meaning for any schedule,
it is translated, otherwise it is ignored. Both are logged in one line. The options can be
Megatron-LM's arguments before validation, or a config (Megatron's, or a library's provider) before
its `__post_init__`: any object with attributes of these names.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any, NamedTuple

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import AUTO_SPLIT, check_layers
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.environment import is_first_rank
from megatron_vshape.mcore.layout import given_layout, hybrid, multi_token
from megatron_vshape.mcore.layout.hybrid import FLAG as PATTERN
from megatron_vshape.mcore.refusals import OVERLAP_OPTION, UnsupportedError, captures_graphs

logger = logging.getLogger(__name__)

SPLIT = "--pipeline-layer-split"


class Treatment(StrEnum):
    """The treatment of an option."""

    TRANSLATED = "translated"
    SET_ASIDE = "ignored"


class TranslationError(ScheduleError):
    """Options for the layers do not fit the model."""

    def __init__(self, text: str, *options: str) -> None:
        """Set the message and the names of the options."""
        super().__init__(text)
        self.options = options


class UnknownLayersError(TranslationError):
    """The number of layers is unknown."""


class Layers(NamedTuple):
    """The layer split that options define."""

    split: str  # a value of --pipeline-layer-split
    how: str  # how it follows from the options


class Translation(NamedTuple):
    """A rule: the options, the text for the log, and the action."""

    names: tuple[str, ...]  # attribute names
    becomes: str
    off: Any = None  # Megatron's value for a disabled option
    layers: Callable[[Any, Placement], Layers] | None = None
    renames: str | None = None  # the attribute that gets the value
    is_chunks: bool = False  # the value is a number of chunks per rank
    for_one_chunk: bool = False  # apply only if ranks have one chunk
    only_if: Callable[[Any], Any] | None = None  # condition for the rule
    usual: str | None = None  # the option that gives Megatron's default value
    enables: str = ""  # a feature of plans
    value_after: Callable[[Any], Any] | None = None  # value after the translation; None: `off`

    @property
    def outcome(self) -> Treatment:
        """Return whether the rule translates or ignores its options."""
        makes = self.layers is not None or self.renames is not None or self.enables
        return Treatment.TRANSLATED if makes else Treatment.SET_ASIDE

    def given(self, options: Any) -> dict[str, Any]:
        """Return the options that are set, with their values."""
        if self.only_if is not None and not self.only_if(options):
            return {}
        usual = None if self.usual is None else getattr(options, self.usual, None)
        values = {name: getattr(options, name, None) for name in self.names}
        return {
            name: value
            for name, value in values.items()
            if value is not None
            and value is not False
            and not given_layout.is_own(value)
            and value != usual
        }

    def wins(self, flag: str) -> bool:
        """Check whether a flag is one of the rule's options."""
        return flag.removeprefix("--").replace("-", "_") in self.names

    def clear(self, options: Any) -> None:
        """Reset the options that are set."""
        for name, value in self.given(options).items():
            setattr(
                options, name, self.off if self.value_after is None else self.value_after(value)
            )


class Notice(NamedTuple):
    """The treatment of options that were set."""

    rule: Translation
    options_text: str  # names, and the values of options that are not switches
    said: str
    outcome: Treatment

    def __str__(self) -> str:
        """Return the line of the log."""
        return f"{self.options_text}: {self.said}"


def written(values: Mapping[str, Any]) -> str:
    """Format options: names, and the values of options that are not switches."""
    return ", ".join(
        name if value is True else f"{name} {given_layout.as_written(value)}"
        for name, value in values.items()
    )


def count_layers(options: Any) -> int | None:
    """Return how many layers the model has, or None where that is not known yet."""
    pattern = getattr(options, hybrid.OPTION, None)
    if pattern is not None:
        return hybrid.num_layers(pattern)
    layers: int | None = getattr(options, "num_layers", None)
    return layers


def _needed_layers(options: Any, name: str) -> int:
    layers = count_layers(options)
    if layers is None:
        raise UnknownLayersError(f"{name} needs the number of layers: add --num-layers", name)
    return layers


def _numbers(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


def _evened(options: Any, placement: Placement, layers: Sequence[int], why: str) -> Layers:
    """Return the balanced split or, without the sizes that it needs, the nearest even split.

    `layers` is the split of the option for its own stages. If its first or last stage is shorter,
    so is that of the result.
    """
    # Balancing needs the sizes of the model, which Megatron-LM's flags define.
    sizes = ("padded_vocab_size", "vocab_size")
    has_vocabulary_size = any(getattr(options, name, None) for name in sizes)
    if has_vocabulary_size and hasattr(options, "group_query_attention"):
        return Layers(AUTO_SPLIT, f"{why}; {SPLIT} {AUTO_SPLIT} instead")
    even = given_layout.nearest(sum(layers), len(placement), *given_layout.less_at_ends(layers))
    return Layers(_numbers(even), f"{why}; the nearest even split instead")


def _of_layout(options: Any, placement: Placement) -> Layers:
    """Return the split of a layout; its stages are in model order, as ours."""
    layout = options.pipeline_model_parallel_layout
    layers, predicting = given_layout.layers_in(layout)
    given_text = f"{given_layout.OPTION} {given_layout.as_written(layout)}"
    total = count_layers(options)
    if total is not None and sum(layers) != total:
        raise ScheduleError(f"{given_text} has {sum(layers)} layers and the model {total}")
    predicts = multi_token.num_predicting(options)
    if predicting != predicts and (predicts or total is not None):
        raise ScheduleError(
            f"{given_text} has multi-token prediction of depth {predicting}, and "
            f"{multi_token.OPTION} is {predicts}: make them agree"
        )
    return _regrouped(options, placement, layers)


def _regrouped(options: Any, placement: Placement, layers: Sequence[int]) -> Layers:
    """Translate the layers of stages that an option defines to the schedule's stages."""
    stages = len(placement)
    regrouped = given_layout.regrouped(layers, stages)
    if regrouped is None:
        divides = not len(layers) % stages or not stages % len(layers)
        why = f"its {len(layers)} stages are no multiple or part of the schedule's {stages}"
        if divides:
            why = f"an inner stage of the schedule's {stages} would have no layers"
        return _evened(options, placement, layers, why)
    how = f"its {len(layers)} stages as the schedule's {stages}"
    return Layers(_numbers(regrouped), how)


def _of_pattern(options: Any, placement: Placement) -> Layers:
    """Translate the `|` of a hybrid model's pattern, as a layout."""
    pattern = getattr(options, hybrid.OPTION)
    layers = hybrid.parts(pattern)
    if len(layers) == len(placement):
        check_layers(f"{PATTERN} {pattern:.80}", layers)
    return _regrouped(options, placement, layers)


def _of_counted_ends(options: Any, placement: Placement) -> Layers:
    """Return the split with embedding and/or loss counted as one layer each."""
    embedding = bool(getattr(options, "account_for_embedding_in_pipeline_split", False))
    loss = bool(getattr(options, "account_for_loss_in_pipeline_split", False))
    total = _needed_layers(options, "account_for_embedding_in_pipeline_split")
    layers = given_layout.nearest(total, len(placement), embedding, loss)
    counted = total + embedding + loss
    how = f"{counted} layers, with embedding and loss, in {len(placement)} stages"
    if counted % len(placement):
        how += ", which do not divide, so the nearest split"
    return Layers(_numbers(layers), how)


FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")


def first_given(options: Any, names: Sequence[str]) -> int | None:
    """Return the value of the first of these options that is set, or None."""
    return next((v for name in names if (v := getattr(options, name, None)) is not None), None)


def _of_ranks(options: Any, placement: Placement) -> Layers:
    """Return the split for the layer counts of the first and the last rank.

    If a rank has several stages, these counts lose their purpose: in the V placement, the first
    rank has both the first and the last stage. Then the first and the last stage are shorter by the
    same number of layers.
    """
    ranks = max(placement) + 1
    total = _needed_layers(options, FIRST[0])
    first, last = first_given(options, FIRST), first_given(options, LAST)
    layers = given_layout.of_ranks(total, ranks, first, last)
    if len(placement) == ranks:
        return Layers(_numbers(layers), "the first and the last stage")
    less = given_layout.less_at_ends(layers)
    if not any(less):
        why = f"a rank has {len(placement) // ranks} stages, and these ends are not the shorter"
        return _evened(options, placement, layers, why)
    stages = given_layout.nearest(total, len(placement), *less)
    return Layers(
        _numbers(stages),
        f"as much shorter a first and a last stage, since a rank has {len(placement) // ranks}",
    )


def _has_no_layer_plans(options: Any) -> bool:
    """Return whether the options include features that layer plans do not support here."""
    fp4 = getattr(options, "fp4", None) or "fp4" in str(getattr(options, "mixed_precision", ""))
    offloads = getattr(options, "fine_grained_activation_offloading", False)
    return bool(captures_graphs(options) or fp4 or offloads)


def _lacks_apex(options: Any) -> bool:
    """Return whether apex is missing; Megatron's local layers then reject fused accumulation."""
    try:
        import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        return True
    return False


_OWN_CHUNKS = "ignored, the schedule defines the chunks per rank"
_OWN_ORDER = "ignored, it affects Megatron's schedules only"
_COUNTED = "translated to the layers of every stage"

TRANSLATIONS = (
    Translation(("num_layers_per_virtual_pipeline_stage",), _OWN_CHUNKS),
    Translation(("num_virtual_stages_per_pipeline_rank",), _OWN_CHUNKS, is_chunks=True),
    Translation(("virtual_pipeline_model_parallel_size",), _OWN_CHUNKS, is_chunks=True),
    Translation(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        _COUNTED,
        False,
        _of_counted_ends,
    ),
    Translation(("pipeline_model_parallel_layout",), _COUNTED, None, _of_layout),
    Translation(
        (hybrid.OPTION,),
        _COUNTED,
        layers=_of_pattern,
        only_if=hybrid.marks_stages,
        value_after=hybrid.without_stages,
    ),
    Translation((*FIRST, *LAST), _COUNTED, None, _of_ranks),
    Translation(
        ("microbatch_group_size_per_vp_stage",), _OWN_ORDER, usual="pipeline_model_parallel_size"
    ),
    Translation(("overlap_p2p_comm_warmup_flush",), _OWN_ORDER, False),
    Translation(
        ("defer_embedding_wgrad_compute",),
        "turned off, W computes the output layer's weight gradient already",
        False,
    ),
    Translation(
        ("overlap_dispatch_backward_with_experts_wgrad",),
        "turned off, W computes the experts' weight gradients already",
        False,
    ),
    Translation(
        ("gradient_accumulation_fusion",),
        "turned off if apex is not installed, whose kernels it requires",
        False,
        only_if=_lacks_apex,
    ),
    Translation(
        ("tp_comm_bulk_wgrad",),
        "turned off, W does not run with that collective; the other overlaps of tp_comm_overlap "
        "stay",
        False,
        only_if=lambda options: getattr(options, "tp_comm_overlap", None),
    ),
    Translation(
        ("overlap_param_gather_with_optimizer_step",),
        "turned off, it needs several chunks per rank",
        False,
        for_one_chunk=True,
    ),
    Translation(
        ("hybrid_override_pattern",),
        f"renamed to {hybrid.OPTION}",
        renames=hybrid.OPTION,
    ),
    Translation(
        ("delay_wgrad_compute",),
        "turned off, W computes the weight gradients already",
        False,
    ),
    Translation(
        (OVERLAP_OPTION, "ep_overlap_early_attn_memory_release"),
        "ignored (no overlap) with CUDA graphs, FP4 or activation offloading",
        False,
        only_if=_has_no_layer_plans,
    ),
    Translation(
        ("fine_grained_activation_offloading",),
        "translated to offloading of whole stages, planned by auto or defined by a schedule file; "
        "ignored by other schedules",
        False,
        enables="offload",
    ),
)
"""Options of Megatron that a schedule translates or ignores."""


@dataclass(frozen=True, slots=True)
class Translated:
    """The result of a translation."""

    layer_split: str | None  # a value of --pipeline-layer-split; None: even split
    notices: tuple[Notice, ...]
    warnings: tuple[str, ...] = ()  # combinations known to be slow

    @property
    def enabled(self) -> frozenset[str]:
        """Return the features of plans that options enable."""
        return frozenset(filter(None, (notice.rule.enables for notice in self.notices)))


def translate(options: Any, placement: Placement, layer_split: str | None = None) -> Translated:
    """Remove the options of `TRANSLATIONS` from `options`, and return their meaning.

    `layer_split` is the value of --pipeline-layer-split, which takes precedence. A second call for
    the same object finds none of these options.

    Raises:
        ScheduleError: An option does not fit the model.
        UnsupportedError: Two options define the same, or no schedule supports an option.
    """
    chunks = len(placement) // (max(placement) + 1)
    notices = _rename(options)  # first: the renamed pattern defines the number of layers
    # The flag that defines the layers of every stage, regardless of other options.
    winner = PATTERN if hybrid.marks_stages(options) else None
    if layer_split is not None:
        winner = SPLIT
    if winner is None:
        _check_one_decides(options)
    for rule in TRANSLATIONS:
        values = rule.given(options)
        if not values or (rule.for_one_chunk and chunks > 1):
            continue
        said, outcome = rule.becomes, rule.outcome
        if rule.layers is not None and winner is not None and not rule.wins(winner):
            said = f"ignored, {winner} defines the layers of each stage"
            outcome = Treatment.SET_ASIDE
        elif rule.layers is not None:
            try:
                layer_split, how = rule.layers(options, placement)
            except UnknownLayersError as error:
                raise UnknownLayersError(str(error), *values) from None
            except ScheduleError as error:
                raise TranslationError(str(error), *values) from None
            said = f"{how}: layers per stage {layer_split}"
        if not (rule.is_chunks and chunks in values.values()):
            notices.append(Notice(rule, written(values), said, outcome))
        rule.clear(options)
    return Translated(layer_split, tuple(notices))


def _rename(options: Any) -> list[Notice]:
    """Move the values of old option names to the new names.

    Raises:
        UnsupportedError: Both names are given.
    """
    notices = []
    for rule in TRANSLATIONS:
        values = rule.given(options)
        if rule.renames is None or not values:
            continue
        (old,) = values
        if getattr(options, rule.renames, None) is not None:
            raise UnsupportedError(
                f"{old} is the old name of {rule.renames}, and both are given: remove {old}", old
            )
        setattr(options, rule.renames, values[old])
        rule.clear(options)
        notices.append(Notice(rule, written(values), rule.becomes, rule.outcome))
    return notices


def _check_one_decides(options: Any) -> None:
    rules = [rule for rule in TRANSLATIONS if rule.layers is not None and rule.given(options)]
    if len(rules) > 1:
        names = " and ".join(written(rule.given(options)) for rule in rules)
        raise UnsupportedError(
            f"{names} each define the layers of each stage: remove all but one",
            *(name for rule in rules for name in rule.given(options)),
        )


def check_splits_nothing_else(args: Namespace, schedule: str) -> None:
    """Raise UnsupportedError if another option than --pipeline-layer-split splits the layers.

    Applies to Megatron's schedules; with ours, --pipeline-layer-split takes precedence.
    """
    for rule in TRANSLATIONS:
        decides = rule.layers is not None or "num_layers_per_virtual_pipeline_stage" in rule.names
        if decides and rule.given(args):
            raise UnsupportedError(
                f"{schedule} does not support {written(rule.given(args))}, because {SPLIT} "
                "defines the layers of each stage: remove one of them"
            )


def log_translated(translated: Translated) -> None:
    """Log a line for every option and every warning, on rank 0."""
    if is_first_rank():
        for notice in translated.notices:
            logger.info("%s", notice)
        for warning in translated.warnings:
            logger.warning("%s", warning)
