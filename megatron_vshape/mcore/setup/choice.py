"""The schedule of a run: a name or a file, the inputs of its plans, and the checks of both.

This module imports neither torch nor Megatron, so that recipes can be checked without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megatron_vshape.core.evaluation import evaluate_named, find_schedule
from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.stage_map import (
    HASH_LAYERS,
    StageMap,
    check_deepstack,
    check_ends,
    check_hash_layers,
    check_tied_embeddings,
    num_deepstack_levels,
)
from megatron_vshape.mcore.options import Options, schedule_names
from megatron_vshape.mcore.refusals import changing_batch_size
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.setup.run_config import ScheduleChoice, Settings
from megatron_vshape.mcore.setup.translate import Translated, translate

MOST_CHUNKS = 12
"""Maximum number of chunks per rank of auto, and of the schedules of Megatron that it tries."""


def resolve_schedule(options: Options, num_devices: int, loss_last: bool = False) -> ScheduleChoice:
    """Find the schedule that the options name (a name or a file), with all options of features.

    Makes no schedule yet: this needs the number of microbatches (`plans.Planner`).

    Raises:
        ScheduleError: The schedule is neither a name nor a file; or the file is unreadable, for
            another number of devices, incomplete, deadlocks, or has microbatches out of order; or
            costs or memory limit do not fit the schedule.
        UnsupportedError: An option has an invalid value.
    """
    options.check()
    name, limit = str(options.schedule), options.memory_limit_gib
    choice = ScheduleChoice(num_devices, name, costs=options.costs(), loss_last=loss_last)
    if choice.plans_by_costs:
        _check_adaptive(choice, limit, measures=options.profile_steps is not None)
        if isinstance(limit, str):  # a schedule whose activation memory is the limit
            choice = replace(choice, limit_of=limit)
        elif limit is not None:
            choice = replace(choice, limit_bytes=limit * GIB)
    elif limit is not None:
        raise ScheduleError(
            f"--pipeline-memory-limit requires --pipeline-schedule auto; the memory of {name} is "
            "fixed"
        )
    else:
        choice = replace(choice, from_file=_read_file(name, num_devices))
    # A feature changes only its own fields; without its option, none.
    for feature in features():
        choice = feature.configure(choice, options)
    return choice


def _read_file(name: str, num_devices: int) -> Schedule | None:
    """Read and verify the schedule file at the path `name`; None for a schedule's name."""
    schedule = find_schedule(name, schedule_names())
    if isinstance(schedule, str):
        return None
    if schedule.num_devices != num_devices:
        raise ScheduleError(
            f"the schedule file {name} is for {schedule.num_devices} devices, this run has "
            f"{num_devices} pipeline ranks: make --pipeline-model-parallel-size fit"
        )
    return schedule


def _check_adaptive(choice: ScheduleChoice, limit: float | str | None, measures: bool) -> None:
    """Raise ScheduleError for inputs that the adaptive scheduler does not support.

    With `measures`, the run measures costs if none are given.
    """
    name, num_devices, costs = choice.name, choice.num_devices, choice.costs
    counts = [chunks * num_devices for chunks in range(2, MOST_CHUNKS + 1 if name == AUTO else 3)]
    if costs is not None and costs.num_stages not in counts:
        range_text = f" to {counts[-1]}, a multiple of {num_devices}" if name == AUTO else ""
        raise ScheduleError(
            f"--pipeline-costs is for {costs.num_stages} stages, --pipeline-schedule {name} on "
            f"{num_devices} pipeline ranks has {counts[0]}{range_text}"
        )
    if isinstance(limit, str):
        try:
            evaluate_named(limit, PlanRequest(AUTO, num_devices, num_devices))
        except ScheduleError as error:
            raise ScheduleError(
                f"--pipeline-memory-limit is a number of GiB or a schedule: {error}"
            ) from None
    if name == AUTO and costs is None and not measures:
        raise ScheduleError(
            "--pipeline-schedule auto needs costs: give --pipeline-costs FILE, or "
            "--pipeline-profile-iterations A:B to measure them"
        )


Check = Callable[[Any, str, Placement], None]
"""Rejects options of arguments or a config for a schedule with this name and placement."""


def translate_and_check(
    model: Any, choice: ScheduleChoice, options: Options, check: Check
) -> tuple[ScheduleChoice, Translated]:
    """Translate options for Megatron's stages and reset them in `model`; reject unsupported ones.

    Returns the choice without alternatives that this model does not support, and the translated
    options. `model` is Megatron's arguments or a library's config, each with its own `check`.

    Raises:
        ScheduleError: An option does not fit the model.
        UnsupportedError: The schedule does not support an option.
    """
    # First, as it resets the options that it translates: the checks see only those that remain.
    translated = translate(model, choice.placement, options.layer_split)
    check(model, choice.name, choice.placement)
    settings = Settings(model, replace(choice, enabled=translated.enabled), options)
    choice = check_features(settings)
    return choice, replace(translated, warnings=tuple(known_to_lose(model, choice)))


def check_features(settings: Settings) -> ScheduleChoice:
    """Return the choice without the alternatives (numbers of slices) that the model rules out.

    Without their options, features accept everything, and return the same choice. Raises as
    `Feature.check`.
    """
    for feature in features():
        settings = Settings(settings.model, feature.check(settings), settings.options)
    return settings.choice


def known_to_lose(model: Any, choice: ScheduleChoice) -> Iterator[str]:
    """Yield a warning for combinations that are slower than Megatron's schedule or train less."""
    has_full_recompute = getattr(model, "recompute_granularity", None) == "full"
    if has_full_recompute and choice.name in NAMES and make(choice.name, 2, 2).splits_backward:
        yield (
            f"schedule {choice.name} splits the backward, and --recompute-granularity full "
            "prevents that: it is slower than interleaved-1f1b and may need no recomputation; "
            "megatron-vshape advise compares them"
        )
    if has_full_recompute and num_deepstack_levels(model):
        yield (
            "with --recompute-granularity full, deepstack mergers get no gradients, under "
            "Megatron's schedules too: use selective recomputation to train them"
        )


def check_stages(settings: Settings, stage_map: StageMap, ties_ends: bool) -> None:
    """Raise ScheduleError if Megatron or the model does not support the stages."""
    # Only Megatron-LM's trainer reads the data on rank 0 for all.
    if not settings.choice.loss_last:
        check_ends(stage_map)
    multi_token.check_ends(stage_map)
    check_hash_layers(stage_map, getattr(settings.model, HASH_LAYERS, None) or 0)
    check_deepstack(stage_map, settings.model)
    if ties_ends:
        check_tied_embeddings(stage_map)


def check_batch_size(choice: ScheduleChoice, args: Any) -> None:
    """Raise ScheduleError if the batch size changes and the schedule is for one number."""
    option = changing_batch_size(args)
    if choice.from_file is not None and option is not None:
        raise ScheduleError(
            f"the schedule file {choice.name} is for one number of microbatches, and this run "
            f"changes it: remove --{option.replace('_', '-')}, or use a schedule by name"
        )
