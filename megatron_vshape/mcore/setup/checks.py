"""Checks of a run's options before anything is built, for training and for `doctor`.

This module imports neither torch nor Megatron, so that `doctor` runs the same checks without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.stage_map import (
    HASH_LAYERS,
    StageMap,
    check_ends,
    check_hash_layers,
    check_tied_embeddings,
)
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import BATCH_SIZES
from megatron_vshape.mcore.setup.choice import ScheduleConfig
from megatron_vshape.mcore.setup.features import Settings, features
from megatron_vshape.mcore.setup.translate import Translated, translate

logger = logging.getLogger(__name__)

Check = Callable[[Any, str, Placement], None]
"""Rejects options of arguments or a config for a schedule with this name and placement."""


def take_options(
    model: Any, choice: ScheduleConfig, options: Options, check: Check
) -> tuple[ScheduleConfig, Translated]:
    """Translate options made for Megatron's schedules, and reject unsupported options.

    Returns the choice without alternatives that this model does not support. `model` is Megatron's
    arguments or a library's config, each with its own `check`.

    Raises:
        ScheduleError: An option does not fit the model.
        UnsupportedError: The schedule does not support an option.
    """
    translated = translate(model, choice.placement, options.layer_split)
    check(model, choice.name, choice.placement)
    settings = Settings(model, choice, options, translated.may_offload)
    for feature in features():
        feature.check(settings)
    choice = fitted(settings)
    return choice, replace(translated, warnings=tuple(known_to_lose(model, choice)))


def fitted(settings: Settings) -> ScheduleConfig:
    """Return the choice without alternatives that the model does not support."""
    for feature in features():
        settings = replace(settings, choice=feature.fit(settings))
    return settings.choice


def known_to_lose(model: Any, choice: ScheduleConfig) -> Iterator[str]:
    """Yield a warning for combinations that are slower than Megatron's schedule."""
    whole = getattr(model, "recompute_granularity", None) == "full"
    if whole and choice.name in NAMES and make(choice.name, 2, 2).splits_backward:
        yield (
            f"schedule {choice.name} splits the backward, and --recompute-granularity full "
            "prevents "
            "that: it is slower than interleaved-1f1b and may need no recomputation; "
            "megatron-vshape advise compares them"
        )


def check_stages(settings: Settings, stage_map: StageMap, ties_ends: bool) -> None:
    """Check the stages, and the options that depend on the placement.

    Raises:
        ScheduleError: Megatron does not support the ranks of the first and the last stage, or a
            feature does not support the stages.
        UnsupportedError: A feature does not support an option of the model.
    """
    for feature in features():
        feature.check_stages(settings, stage_map)
    if not settings.choice.loss_last:
        check_ends(stage_map)
    multi_token.check_ends(stage_map)
    check_hash_layers(stage_map, getattr(settings.model, HASH_LAYERS, None) or 0)
    if ties_ends:
        check_tied_embeddings(stage_map)


def check_batch_size(choice: ScheduleConfig, args: Any) -> None:
    """Raise ScheduleError if the batch size changes and the schedule is for one number."""
    option = next((each for each in BATCH_SIZES if getattr(args, each, None) is not None), None)
    if choice.from_file is not None and option is not None:
        raise ScheduleError(
            f"the schedule file {choice.name} is for one number of microbatches, and this run "
            f"changes it: remove --{option.replace('_', '-')}, or use a schedule by name"
        )
