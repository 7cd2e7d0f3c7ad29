"""Numbers of microbatches in a run: training steps, batch-size schedules, evaluation.

Megatron's interleaved 1F1B supports only some numbers and raises within a step otherwise. The
checks here run before the first step.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from megatron_vshape.mcore.refusals import BATCH_SIZES, UnsupportedError


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
