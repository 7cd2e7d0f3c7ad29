"""Convert a configuration to the trainer's command line."""

from pathlib import Path

from megatron_vshape.core.model.layers import AUTO_SPLIT
from megatron_vshape.core.model.placement import looping
from megatron_vshape.tuning.configurations import (
    POST_VALIDATION,
    Configuration,
    Layout,
    count_stages,
    layers_of_stages,
)
from megatron_vshape.tuning.files import Loaded

_TRAINING = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --min-lr 1e-5 --lr-decay-style constant "
    "--eval-iters 0 --eval-interval 1000000 --log-interval 1 --num-workers 0"
).split()


def trainer_command(
    loaded: Loaded, it: Configuration, schedule_file: Path | None = None
) -> list[str]:
    """Return the trainer's script and flags; the sweep's own flags come last to take precedence.

    `schedule_file` replaces the schedule's name, for planned schedules.
    """
    run, subject = loaded.sweep.run, loaded.subject
    split = AUTO_SPLIT if it.layout is Layout.AUTO else ""
    if it.layout is Layout.BALANCED:
        stages = count_stages(it.schedule, it.pipeline_parallel)
        placement = looping(it.pipeline_parallel, stages // it.pipeline_parallel)
        split = ",".join(map(str, layers_of_stages(it, subject, placement)))
    flags = [*it.command(subject).flags]
    for each in it.schedule_flags(str(schedule_file or it.schedule), split).items():
        flags += filter(None, each)
    flags += ["--train-iters", str(run.warmup_steps + run.measured_steps)]
    flags += loaded.cluster.flags_of_plans if schedule_file is not None else []
    if loaded.sweep.post_validation:
        flags += " ".join(POST_VALIDATION).split()
    if subject.translated:
        flags += _TRAINING
    return [run.script, *flags, *run.arguments, *it.arguments]
