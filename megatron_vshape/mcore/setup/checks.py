"""Checks of a run's options before anything is built, for training and for `doctor`.

Megatron's interleaved 1F1B supports only some numbers of microbatches and raises within a step
otherwise, so `check_interleaved` compares those of training steps and evaluations at start.

This module imports neither torch nor Megatron, so that `doctor` runs the same checks without them.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

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
from megatron_vshape.mcore.refusals import BATCH_SIZES, UnsupportedError
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


class Count(NamedTuple):
    """A number of microbatches, and the options that determine it."""

    number: int
    calls: str  # the steps that have this number
    fix: str  # the options to change


def changes(args: Namespace) -> bool:
    """Return whether the number of microbatches of a training step changes."""
    return any(getattr(args, name, None) is not None for name in BATCH_SIZES)


def in_training(args: Namespace) -> int | None:
    """Return the microbatches of a training step; None if the number changes or is unknown."""
    if changes(args):
        return None
    return _number(args, args.global_batch_size, args.micro_batch_size)


def in_evaluation(args: Namespace) -> int | None:
    """Return the microbatches of an evaluation step; None without evaluation or if unknown."""
    if not (getattr(args, "eval_iters", None) or getattr(args, "full_validation", False)):
        return None
    samples = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    each = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
    return _number(args, samples, each)


def _number(args: Namespace, samples: int | None, each: int) -> int | None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    shares = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    shares *= args.context_parallel_size
    copies = world // shares
    if samples is None or not copies:
        return None
    return samples // (each * copies) or None


def fixed_counts(args: Namespace) -> Iterator[Count]:
    """Yield the numbers of microbatches that the validated arguments determine."""
    training, evaluation = in_training(args), in_evaluation(args)
    if training is not None and not getattr(args, "skip_train", False):
        sizes = "--global-batch-size / (--micro-batch-size x data-parallel size)"
        yield Count(training, "a training step", f"Make {sizes}")
    if evaluation is not None:
        sizes = "--eval-global-batch-size / (--eval-micro-batch-size x data-parallel size)"
        yield Count(evaluation, "an evaluation step", f"Set --eval-iters 0, or make {sizes}")


def changing_counts(args: Namespace) -> Iterator[Count]:
    """Yield the numbers of microbatches of all remaining training steps, if they change.

    Called before the first step and after a checkpoint is loaded. Uses Megatron's calculator in the
    same way as its training loop.
    """
    if not changes(args):
        return
    from megatron.core import num_microbatches_calculator as calculator

    option = next(name for name in BATCH_SIZES if getattr(args, name, None) is not None)
    flag, seen = f"--{option.replace('_', '-')}", set[int]()
    consumed = args.consumed_train_samples
    for iteration in range(args.iteration, args.train_iters):
        calculator.update_num_microbatches(consumed, consistency_check=False)
        number = calculator.get_num_microbatches()
        if number not in seen:
            seen.add(number)
            sizes = f"all batch sizes of {flag} / (--micro-batch-size x data-parallel size)"
            yield Count(number, f"training step {iteration + 1} ({flag})", f"Make {sizes}")
        consumed += calculator.get_current_running_global_batch_size()
    # Restore the calculator's state for the first step.
    calculator.update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def check_interleaved(args: Namespace, counts: Iterator[Count]) -> None:
    """Raise UnsupportedError for a number that Megatron's interleaved 1F1B does not support."""
    if getattr(args, "virtual_pipeline_model_parallel_size", None) is None:
        return
    ranks = args.pipeline_model_parallel_size
    group = getattr(args, "microbatch_group_size_per_vp_stage", None) or ranks
    for count in counts:
        if not runs_interleaved(count.number, ranks, group):
            rest = "" if group == ranks else f", or leave a rest of at least {ranks}"
            raise UnsupportedError(
                f"--pipeline-schedule {args.pipeline_schedule} does not work with {count.number} "
                f"microbatches, the number in {count.calls}: Megatron's interleaved schedule runs "
                f"them in groups of {group}. {count.fix} a multiple of {group}{rest}, or choose a "
                "schedule of this package, such as v-half, which runs any number"
            )


def runs_interleaved(number: int, ranks: int, group: int) -> bool:
    """Return whether Megatron's interleaved 1F1B supports a number of microbatches."""
    return ranks <= group <= number and not 0 < number % group < ranks
