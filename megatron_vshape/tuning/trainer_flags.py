"""Convert a configuration to the trainer's command line."""

from pathlib import Path

from megatron_vshape.core.model.layers import AUTO_SPLIT
from megatron_vshape.core.model.placement import looping
from megatron_vshape.rehearsal.command import flags_of
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
    loaded: Loaded, config: Configuration, schedule_file: Path | None = None
) -> list[str]:
    """Return the trainer's script and flags; the sweep's own flags come last to take precedence.

    `schedule_file` replaces the schedule's name, for planned schedules.
    """
    run, subject = loaded.sweep.run, loaded.subject
    split = AUTO_SPLIT if config.layout is Layout.AUTO else ""
    if config.layout is Layout.BALANCED:
        stages = count_stages(config.schedule, config.pipeline_parallel)
        placement = looping(config.pipeline_parallel, stages // config.pipeline_parallel)
        split = ",".join(map(str, layers_of_stages(config, subject, placement)))
    flags = [*config.command(subject).flags]
    for flag in config.schedule_flags(str(schedule_file or config.schedule), split).items():
        flags += filter(None, flag)
    flags += ["--train-iters", str(run.warmup_steps + run.measured_steps)]
    flags += loaded.cluster.flags_of_plans if schedule_file is not None else []
    if loaded.sweep.post_validation:
        flags += flags_of(POST_VALIDATION)
    if subject.translated:
        flags += _TRAINING
    return [run.script, *flags, *run.arguments, *config.arguments]
