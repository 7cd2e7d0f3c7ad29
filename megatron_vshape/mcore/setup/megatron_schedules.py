"""Megatron's own schedules: named by the user, or chosen by auto because no plan is faster.

Megatron's interleaved 1F1B supports only some numbers of microbatches and raises within a step
otherwise, so `check_interleaved` compares those of training steps and evaluations at start.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import check_layers
from megatron_vshape.core.model.placement import looping
from megatron_vshape.core.schedule_names import BaselineSpec, with_chunks
from megatron_vshape.environment import is_first_rank
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.layout.multi_token import num_predicting
from megatron_vshape.mcore.layout.stage_map import megatrons_text, split_layers
from megatron_vshape.mcore.options import INPUTS_OF_PLANS, OPTIONS, Options, options_of
from megatron_vshape.mcore.refusals import UnsupportedError, changing_batch_size
from megatron_vshape.mcore.setup.translate import check_splits_nothing_else

logger = logging.getLogger(__name__)


def set_megatrons_own(args: Namespace, options: Options) -> None:
    """Set the schedule and the layer split in Megatron's arguments, if the flags name them.

    Raises:
        ScheduleError: The stages do not fit the model.
        UnsupportedError: An option requires a schedule of this package, or two options conflict.
    """
    ranks = args.pipeline_model_parallel_size
    if options.post_validates and ranks > 1:
        raise UnsupportedError(
            "--optimizer-post-validation needs a schedule of this package: add "
            "--pipeline-schedule, v-zb for example"
        )
    _reject_flags_for_ours(options, ranks)
    _set_virtual_stages(args, options.schedule)
    _split_megatrons_own(args, options)


INTERLEAVED_CHUNKS = 2
"""Chunks per rank of interleaved-1f1b if the user gives no number."""


def choose_megatrons(args: Namespace, baseline: BaselineSpec) -> None:
    """Set Megatron's schedule in its arguments, as if the user had named it, and log that."""
    args.pipeline_schedule = baseline.name
    for name in INPUTS_OF_PLANS:
        setattr(args, OPTIONS[name].argument, None)
    args.num_virtual_stages_per_pipeline_rank = baseline.chunks
    if getattr(args, hybrid.OPTION, None) is not None:
        _split_megatrons_own_hybrid(args, Options(schedule=baseline.name))
    if is_first_rank():
        logger.info(
            "no plan within the limit is faster than Megatron's %s, which runs with %d %s per rank",
            baseline.name,
            baseline.chunks or 1,
            "virtual stages" if baseline.chunks else "stage",
        )


def _reject_flags_for_ours(options: Options, ranks: int) -> None:
    """Raise UnsupportedError for the first flag without effect, if there is a pipeline."""
    splits = options.layer_split is not None
    for flag in options.flags_for_ours():
        if ranks > 1 and not (flag == "--pipeline-costs" and splits):
            what = "Megatron's own schedule" if options.schedule is None else options.schedule
            raise UnsupportedError(
                f"{flag} has no effect with {what}: remove it, or set --pipeline-schedule to a "
                "schedule of this package, such as v-half"
            )


def megatrons_own(args: Namespace) -> str | None:
    """Return Megatron's schedule if the flags name one for a pipeline, else None."""
    options, ranks = options_of(args), args.pipeline_model_parallel_size
    return options.schedule if options.asks_for_megatrons_own and ranks > 1 else None


def _set_virtual_stages(args: Namespace, name: str | None) -> None:
    has_chunks = (
        args.num_virtual_stages_per_pipeline_rank is not None
        or args.num_layers_per_virtual_pipeline_stage is not None
    )
    if name == "1f1b" and has_chunks:
        raise UnsupportedError(
            "--pipeline-schedule 1f1b has one chunk per rank: remove Megatron's option for virtual "
            "stages, or use interleaved-1f1b"
        )
    named_schedule = with_chunks(name or "")
    if named_schedule is not None and has_chunks:
        raise UnsupportedError(
            f"--pipeline-schedule {name} contains the number of virtual stages per rank: remove "
            "it, or Megatron's option for virtual stages"
        )
    alone = args.pipeline_model_parallel_size == 1
    if (name == "interleaved-1f1b" or named_schedule is not None) and not has_chunks and not alone:
        chunks = INTERLEAVED_CHUNKS if named_schedule is None else named_schedule.chunks
        args.num_virtual_stages_per_pipeline_rank = chunks


def _split_megatrons_own(args: Namespace, options: Options) -> None:
    """Pass a layer split to Megatron in its own form."""
    text, ranks = options.layer_split, args.pipeline_model_parallel_size
    if ranks > 1 and options.schedule and getattr(args, hybrid.OPTION, None) is not None:
        _split_megatrons_own_hybrid(args, options)
        return
    if text is None or ranks == 1:
        return
    if options.schedule is None:
        raise UnsupportedError(
            f"--pipeline-layer-split {text:.80} needs --pipeline-schedule, such as 1f1b or v-half"
        )
    check_splits_nothing_else(args, options.schedule)
    chunks = args.num_virtual_stages_per_pipeline_rank or 1
    placement = looping(ranks, chunks)
    split = split_layers(args, placement, text, options.costs(), encoder=options.encoder)
    args.pipeline_model_parallel_layout = megatrons_text(split.layers, num_predicting(args))
    args.num_virtual_stages_per_pipeline_rank = None  # the layout text defines the number


def _split_megatrons_own_hybrid(args: Namespace, options: Options) -> None:
    """Mark the stages in the pattern of layers, where Megatron reads them.

    Raises:
        ScheduleError: the pattern marks another number of stages than the schedule has.
    """
    pattern, ranks = args.hybrid_layer_pattern, args.pipeline_model_parallel_size
    chunks = args.num_virtual_stages_per_pipeline_rank or 1
    args.num_virtual_stages_per_pipeline_rank = None  # the pattern defines the number
    if not hybrid.marks_stages(args):
        split = split_layers(args, looping(ranks, chunks), options.layer_split, options.costs())
        args.hybrid_layer_pattern = hybrid.cut_pattern(pattern, split.layers)
        return
    pattern_option = f"{hybrid.FLAG} {pattern:.80}"
    if options.layer_split is not None:
        raise UnsupportedError(
            f"{pattern_option} defines the layers of each stage with {hybrid.BEGINS_STAGE}, as "
            f"--pipeline-layer-split does: remove one of them"
        )
    parts = hybrid.parts(pattern)
    if len(parts) == ranks * chunks:
        check_layers(pattern_option, parts)
        return
    schedules_by_stages = {
        ranks * num_chunks: f"interleaved-1f1b:{num_chunks}"
        for num_chunks in range(2, len(parts) + 1)
    }
    fits = (schedules_by_stages | {ranks: "1f1b"}).get(len(parts))
    raise ScheduleError(
        f"{pattern_option} has {len(parts)} stages, and --pipeline-schedule {options.schedule} has "
        f"{ranks * chunks} on {ranks} pipeline ranks: {f'use {fits}, or ' if fits else ''}remove "
        f"every {hybrid.BEGINS_STAGE} from the pattern"
    )


class Count(NamedTuple):
    """A number of microbatches, and the options that determine it."""

    number: int
    calls: str  # the steps that have this number
    fix: str  # the options to change


def in_training(args: Namespace) -> int | None:
    """Return the microbatches of a training step; None if the number changes or is unknown."""
    if changing_batch_size(args) is not None:
        return None
    return _number(args, args.global_batch_size, args.micro_batch_size)


def in_evaluation(args: Namespace) -> int | None:
    """Return the microbatches of an evaluation step; None without evaluation or if unknown."""
    if not (getattr(args, "eval_iters", None) or getattr(args, "full_validation", False)):
        return None
    samples = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    micro_batch_size = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
    return _number(args, samples, micro_batch_size)


def _number(args: Namespace, samples: int | None, micro_batch_size: int) -> int | None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    shares = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    shares *= args.context_parallel_size
    copies = world // shares
    if samples is None or not copies:
        return None
    return samples // (micro_batch_size * copies) or None


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
    option = changing_batch_size(args)
    if option is None:
        return
    from megatron.core import num_microbatches_calculator as calculator

    flag, seen_numbers = f"--{option.replace('_', '-')}", set[int]()
    consumed = args.consumed_train_samples
    for iteration in range(args.iteration, args.train_iters):
        calculator.update_num_microbatches(consumed, consistency_check=False)
        number = calculator.get_num_microbatches()
        if number not in seen_numbers:
            seen_numbers.add(number)
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
            remainder_text = "" if group == ranks else f", or leave a rest of at least {ranks}"
            name = getattr(args, "pipeline_schedule", None)
            schedule = "virtual pipeline stages" if name is None else f"--pipeline-schedule {name}"
            raise UnsupportedError(
                f"{schedule} do{'es' * (name is not None)} not work with {count.number} "
                f"microbatches, the number in {count.calls}: Megatron's interleaved schedule runs "
                f"them in groups of {group}. {count.fix} a multiple of {group}{remainder_text}, or "
                "choose a schedule of this package, such as v-half, which runs any number"
            )


def check_first_step(args: Namespace) -> None:
    """Check the conditions that Megatron's own schedules check only in a step.

    Raises:
        UnsupportedError: A step would raise an error.
    """
    check_interleaved(args, chain(fixed_counts(args), changing_counts(args)))
    check_sequence_length(args)


def check_sequence_length(args: Namespace) -> None:
    """Raise UnsupportedError if sequence parallelism cannot divide the sequences of a step."""
    length, ranks = getattr(args, "seq_length", None), args.tensor_model_parallel_size
    copies = args.context_parallel_size
    varies = getattr(args, "variable_seq_lengths", False)
    if length is None or varies or not getattr(args, "sequence_parallel", False):
        return
    if length // copies % ranks:
        tokens = f"--seq-length {length}"
        tokens += f" / --context-parallel-size {copies}" * (copies > 1)
        raise UnsupportedError(
            f"--sequence-parallel does not work with {tokens}: --tensor-model-parallel-size "
            f"{ranks} does not divide the tokens of a rank. Make --seq-length a multiple of "
            f"{ranks * copies}, or remove --sequence-parallel"
        )


def runs_interleaved(number: int, ranks: int, group: int) -> bool:
    """Return whether Megatron's interleaved 1F1B supports a number of microbatches."""
    return ranks <= group <= number and not 0 < number % group < ranks
