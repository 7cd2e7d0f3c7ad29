"""Examine a given configuration before anything runs: supported, translated and rejected options.

The checks of a run (`checks.py`) are repeated without the options that they have rejected, until
they reject nothing more.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.schedule_names import AUTO, is_megatrons_own
from megatron_vshape.mcore.features.overlap import conflicts
from megatron_vshape.mcore.layout import given_layout, hybrid, multi_token
from megatron_vshape.mcore.layout.stage_map import HASH_LAYERS, StageMap, specified_layers
from megatron_vshape.mcore.options import OPTIONS, TRACE_STEPS, Options
from megatron_vshape.mcore.refusals import (
    ENGINE,
    OVERLAP_OPTION,
    MissingError,
    UnsupportedError,
    check_arguments,
    check_derived,
)
from megatron_vshape.mcore.setup.choice import (
    check_batch_size,
    check_stages,
    resolve_schedule,
    translate_and_check,
)
from megatron_vshape.mcore.setup.run_config import ScheduleChoice, Settings
from megatron_vshape.mcore.setup.translate import (
    TRANSLATIONS,
    Notice,
    TranslationError,
    Treatment,
    UnknownLayersError,
    count_layers,
    translate,
    written,
)

DEVICES = "pipeline_model_parallel_size"
LAYERS = "num_layers"

DEFAULTS: Mapping[str, Any] = {
    "transformer_impl": ENGINE,
    "rerun_mode": "validate_results",
    "expert_model_parallel_size": 1,
    "moe_token_dispatcher_type": "allgather",
    "bf16": False,
    "fp16": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "untie_embeddings_and_output_weights": False,
    "fp8_recipe": "delayed",
}
"""Megatron's defaults for options that the checks read."""

PRECISION = "mixed_precision"
"""Megatron-Bridge's option for a named set of options, which it expands before a run starts."""


class Rejection(NamedTuple):
    """Options that prevent a configuration from starting, with the error message of a run."""

    names: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class ExaminedOptions:
    """The treatment of every option that a configuration sets."""

    num_stages: int
    supported: tuple[str, ...]  # names of options used unchanged
    notices: tuple[Notice, ...]  # translated and ignored options
    refused: tuple[Rejection, ...]
    missing: tuple[Rejection, ...] = ()  # options that need a package not installed here
    counts_layers: bool = True  # whether the number of layers, required for stages, is known
    layer_split: str | None = None

    @property
    def starts(self) -> bool:
        """Return whether training with these options starts here."""
        return self.counts_layers and not (self.refused or self.missing)


def package_options_of(options: Mapping[str, Any], schedule: str | None) -> Options:
    """Return this package's options from a configuration, or with the caller's `schedule`.

    Raises:
        ScheduleError: The schedule is one of Megatron's own, or the text of an option is invalid.
    """
    option_values = {name: options.get(option.argument) for name, option in OPTIONS.items()}
    try:
        for name, value in option_values.items():
            option_values[name] = (
                OPTIONS[name].values.of_text(value) if isinstance(value, str) else value
            )
    except ArgumentTypeError as error:
        raise ScheduleError(f"{OPTIONS[name].argument} {error}") from None
    package_options = Options.from_values(option_values)
    if schedule is not None:
        package_options = replace(package_options, schedule=schedule)
        if (
            schedule == AUTO
            and package_options.costs_file is None
            and package_options.profile_steps is None
        ):
            # auto without costs must measure
            package_options = replace(package_options, profile_steps=TRACE_STEPS)
    if is_megatrons_own(package_options.schedule):
        raise ScheduleError(
            f"{package_options.schedule} is Megatron's schedule, which does not need this package: "
            "name one of this package's, such as v-half"
        )
    return package_options


def examine(
    options: Mapping[str, Any],
    package_options: Options,
    defaults: Mapping[str, Any] = DEFAULTS,
) -> ExaminedOptions:
    """Examine options, Megatron's arguments or a library's config, as for a run.

    Missing options have the values of `defaults`. The defaults do not describe a model that a
    library knows by its name.

    Raises:
        ScheduleError: The schedule does not exist for this number of devices.
    """
    choice = resolve_schedule(package_options, options[DEVICES])
    remaining = SimpleNamespace(**{**defaults, **_of_precision(options), **options})
    checked = _Checked([], [], [])
    # Each round removes at least one rejected option, so the loop ends.
    while not _is_settled(remaining, choice, package_options, checked):
        pass
    translated = translate(copy(remaining), choice.placement, package_options.layer_split)
    notices = (*checked.uncounted, *translated.notices)
    handled_names = {name for notice in notices for name in notice.rule.names}
    handled_names |= {
        name for refused in (*checked.refused, *checked.missing) for name in refused.names
    }
    supported_names = [
        name for name, value in options.items() if _is_on(value) and name not in handled_names
    ]
    return ExaminedOptions(
        len(choice.placement),
        tuple(supported_names),
        notices,
        tuple(checked.refused),
        tuple(checked.missing),
        not checked.uncounted and _layers_known(remaining, translated.layer_split),
        translated.layer_split,
    )


class _Checked(NamedTuple):
    refused: list[Rejection]
    missing: list[Rejection]
    uncounted: list[Notice]  # for options that need the number of layers


def _is_settled(
    remaining: SimpleNamespace, choice: ScheduleChoice, package_options: Options, checked: _Checked
) -> bool:
    """Run the checks of a run once, and remove rejected options from `remaining`.

    Returns whether the checks have nothing more to report.
    """
    try:
        _check(copy(remaining), choice, package_options)
        return True
    except UnknownLayersError as error:
        names = error.options
        checked.uncounted.extend(_uncounted(remaining, names))
    except MissingError as error:
        names = error.options
        checked.missing.append(Rejection(names, str(error)))
    except (ScheduleError, UnsupportedError) as error:
        names = error.options if isinstance(error, TranslationError | UnsupportedError) else ()
        checked.refused.extend(
            Rejection(names, why) for why in _reasons(error, names, remaining, choice)
        )
    set_names = [name for name in names if getattr(remaining, name, None) is not None]
    for name in set_names:
        setattr(remaining, name, None)
    return not set_names


def _uncounted(remaining: SimpleNamespace, names: Collection[str]) -> Iterator[Notice]:
    """Yield notices for options whose translation requires the number of layers."""
    for rule in TRANSLATIONS:
        set_options = rule.given(remaining)
        if rule.outcome == Treatment.TRANSLATED and not set_options.keys().isdisjoint(names):
            translation = f"{rule.becomes}, which needs {LAYERS}"
            yield Notice(rule, written(set_options), translation, rule.outcome)


def _reasons(
    error: Exception, names: Collection[str], remaining: SimpleNamespace, choice: ScheduleChoice
) -> list[str]:
    """Return the messages of an error: all of them if it is the first of several conflicts."""
    messages = (
        [str(conflict) for conflict in conflicts(remaining, choice.placement)]
        if OVERLAP_OPTION in names
        else []
    )
    return messages if str(error) in messages else [str(error)]


def _check(args: Any, choice: ScheduleChoice, package_options: Options) -> None:
    """Raise the error that a run with these options would raise before it builds a model."""
    choice, translated = translate_and_check(args, choice, package_options, check_arguments)
    check_derived(args, choice.name)
    layers = _layers(args, choice.placement, translated.layer_split, package_options.costs())
    stage_map = StageMap(choice.placement, layers, multi_token.num_predicting(args))
    ties = not getattr(args, "untie_embeddings_and_output_weights", True)
    ties = getattr(args, "share_embeddings_and_output_weights", ties)
    check_stages(Settings(args, choice, package_options), stage_map, ties)
    check_batch_size(choice, args)


def _layers(
    args: Any, placement: Placement, text: str | None, costs: Costs | None
) -> tuple[int, ...]:
    """Return the layers of every stage; if they are to be balanced, the most even split."""
    count = getattr(args, LAYERS, None)
    if not _layers_known(args, text):  # enough for every check
        return (getattr(args, HASH_LAYERS, None) or 1,) * len(placement)
    if count is None and getattr(args, hybrid.OPTION, None) is None:
        args = copy(args)
        args.num_layers = sum(map(int, str(text).split(",")))
    layers, _ = specified_layers(args, placement, text, costs)
    return layers or given_layout.nearest(count_layers(args) or 0, len(placement))


def _layers_known(args: Any, text: str | None) -> bool:
    """Return whether the number of layers, in total or per stage, is known."""
    names = (LAYERS, hybrid.OPTION, "hybrid_override_pattern")
    counted = any(getattr(args, name, None) is not None for name in names)
    return counted or (text or AUTO) != AUTO


_FP8_RECIPES = (
    ("current_scaling", "tensorwise"),
    ("delayed", "delayed"),
    ("mxfp8", "mxfp8"),
    ("subchannel", "blockwise"),
)
"""Words in names of precision recipes, and their FP8 recipes."""


def _of_precision(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the name of a library's precision recipe stands for."""
    name = str(options.get(PRECISION) or "")
    precision_options: dict[str, Any] = {dtype: True for dtype in ("bf16", "fp16") if dtype in name}
    precision_options |= {dtype: name for dtype in ("fp8", "fp4") if dtype in name}
    for word, recipe in _FP8_RECIPES:
        if word in name:
            precision_options["fp8_recipe"] = recipe
    if "current_scaling" in name:
        precision_options["first_last_layers_bf16"] = True
    return precision_options


def _is_on(value: Any) -> bool:
    return value not in (None, False, "none")
