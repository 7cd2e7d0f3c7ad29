"""Checks of a run's options before anything is built, for training and for `doctor`.

This module imports neither torch nor Megatron, so that `doctor` runs the same checks without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megatron_vshape.core.ask import AUTO
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
from megatron_vshape.mcore.refusals import (
    BATCH_SIZES,
    OVERLAP_OPTION,
    UnsupportedError,
    captures_graphs,
    check_layer_plans,
    check_post_validation,
    check_slices,
    check_vocabulary,
    even_slices,
    uses_stash,
)
from megatron_vshape.mcore.setup.choice import ScheduleConfig, not_sliced
from megatron_vshape.mcore.setup.translate import Translated, translate

logger = logging.getLogger(__name__)

Check = Callable[[Any, str, Placement], None]
"""Rejects options of arguments or a config for a schedule with this name and placement."""


def take_options(
    model: Any, choice: ScheduleConfig, options: Options, check: Check
) -> tuple[ScheduleConfig, Translated]:
    """Translate options made for Megatron's schedules, and reject unsupported options.

    Returns the choice with the numbers of slices that this model supports. `model` is Megatron's
    arguments or a library's config, each with its own `check`.

    Raises:
        ScheduleError: An option does not fit the model.
        UnsupportedError: The schedule does not support an option.
    """
    translated = translate(model, choice.placement, options.layer_split)
    check(model, choice.name, choice.placement)
    if options.post_validates:
        check_post_validation(model)
    check_vocabulary(choice.shares, model)
    may_copy = translated.may_offload and choice.name == AUTO
    check_copies(choice.copies or may_copy, model, choice.name)
    if isinstance(choice.slices, int):
        check_slices(choice.slices, model, not_sliced(choice, options, translated.may_offload))
    choice = with_slices(model, choice, options, translated.may_offload)
    return choice, replace(translated, warnings=tuple(known_to_lose(model, choice)))


def check_copies(copies: bool, model: Any, schedule: str) -> None:
    """Raise UnsupportedError if offloaded activations belong to a CUDA graph or a stash."""
    if copies and captures_graphs(model):
        raise UnsupportedError(
            f"schedule {schedule} offloads activations, which CUDA graphs do not support: use a "
            "schedule without offloading, or remove --cuda-graph-impl"
        )
    if copies and uses_stash(model):
        raise UnsupportedError(
            f"schedule {schedule} offloads activations, which --moe-paged-stash stores itself: "
            "use a schedule without offloading, or remove --moe-paged-stash"
        )


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


def with_slices(
    model: Any, choice: ScheduleConfig, options: Options, may_offload: bool = False
) -> ScheduleConfig:
    """Return the choice with the numbers of slices that auto may choose from for this model."""
    if isinstance(choice.slices, int):
        return choice
    try:
        others = not_sliced(choice, options, may_offload)
        check_slices(max(choice.slices), model, others, alike=False)
    except UnsupportedError as error:
        logger.info("microbatches stay whole: %s", error)
        return replace(choice, slices=1)
    length = getattr(model, "seq_length", None)
    return replace(choice, slices=even_slices(choice.slices, length, model))


def check_stages(
    model: Any,
    choice: ScheduleConfig,
    stage_map: StageMap,
    may_offload: bool,
    ties_ends: bool,
) -> None:
    """Check the stages, and the options that depend on the placement.

    Raises:
        ScheduleError: Megatron does not support the ranks of the first and the last stage, or the
            schedule has overlapped passes and the model's layers have no layer plans.
        UnsupportedError: Layer plans or vocabulary parallelism do not support an option of the
            model.
    """
    check_layer_plans(model, choice.placement)
    if choice.has_overlap and not getattr(model, OVERLAP_OPTION, False):
        flag = OVERLAP_OPTION.replace("_", "-")
        raise ScheduleError(
            f"schedule {choice.name} overlaps forward and backward: add --{flag}, or choose another"
        )
    if not choice.loss_last:
        check_ends(stage_map)
    multi_token.check_ends(stage_map)
    if choice.shares and (choice.copies or may_offload):
        raise UnsupportedError(
            "--pipeline-vocab-parallel does not work with offloading of activations: the "
            "combination is not implemented. Remove one of the two"
        )
    check_hash_layers(stage_map, getattr(model, HASH_LAYERS, None) or 0)
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
