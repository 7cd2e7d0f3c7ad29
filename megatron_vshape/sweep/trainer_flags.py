"""Convert a combination to the trainer's command line, and to the command to estimate."""

from pathlib import Path
from typing import Any

from megatron_vshape.core.model.layers import AUTO_SPLIT
from megatron_vshape.core.model.placement import looping
from megatron_vshape.rehearsal.flags import Command
from megatron_vshape.rehearsal.shapes import RECOMPUTE
from megatron_vshape.sweep.files import FORMATS, FULL, GIVEN, NONE, Layout, Loaded
from megatron_vshape.sweep.grid import Combination, count_stages, layers_of_stages
from megatron_vshape.sweep.subject import Subject

_FORMAT_FLAGS = "--fp8 --fp4 --bf16 --fp16".split()

_TRAINING = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --min-lr 1e-5 --lr-decay-style constant "
    "--eval-iters 0 --eval-interval 1000000 --log-interval 1 --num-workers 0"
).split()


def command_of(subject: Subject, it: Combination) -> Command:
    """Return the training command with the combination's sizes, without a schedule."""
    sizes: dict[str, Any] = {
        "seq_length": it.sequence_length,
        "max_position_embeddings": it.sequence_length,
        "micro_batch_size": it.microbatch_size,
        "global_batch_size": it.global_batch_size,
        "tensor_model_parallel_size": it.tensor_parallel,
        "pipeline_model_parallel_size": it.pipeline_parallel,
        "context_parallel_size": it.context_parallel,
    }
    if subject.experts:
        sizes["expert_model_parallel_size"] = it.expert_parallel
    if it.tensor_parallel > 1:
        sizes["sequence_parallel"] = True
    command = subject.command.of_megatron().without_chunks()
    command = command.having(**sizes, **_recompute(it.recompute))
    if it.format == GIVEN:
        return command
    plain = command.without(lambda flag: flag.startswith(tuple(_FORMAT_FLAGS)))
    return Command(plain.script, (*plain.flags, *FORMATS[it.format].split()), plain.environment)


def _recompute(setting: str) -> dict[str, Any]:
    """Return the flags of a recomputation setting; None for flags to remove."""
    if setting == GIVEN:
        return {}
    nothing = {f"recompute_{name}": None for name in RECOMPUTE} | {"recompute_activations": None}
    if setting == NONE:
        return nothing
    if setting == FULL:
        more = {"granularity": FULL, "method": "uniform", "num_layers": 1}
    else:
        more = {"granularity": "selective"}
        if setting != "selective":
            more["modules"] = setting.split(",")
    return nothing | {f"recompute_{name}": value for name, value in more.items()}


def trainer_command(
    loaded: Loaded, combination: Combination, schedule_file: Path | None = None
) -> list[str]:
    """Return the trainer's script and flags; the sweep's own flags come last to take precedence.

    `schedule_file` replaces the schedule's name, for planned schedules.
    """
    it, run, subject = combination, loaded.sweep.run, loaded.subject
    flags = [*command_of(subject, it).flags]
    flags += ["--pipeline-schedule", str(schedule_file or it.schedule)]
    flags += ["--train-iters", str(run.warmup_steps + run.measured_steps)]
    if it.layout is Layout.BALANCED:
        stages = count_stages(it.schedule, it.pipeline_parallel)
        placement = looping(it.pipeline_parallel, stages // it.pipeline_parallel)
        layers = layers_of_stages(it, subject, placement)
        flags += ["--pipeline-layer-split", ",".join(map(str, layers))]
    if it.layout is Layout.AUTO:
        flags += ["--pipeline-layer-split", AUTO_SPLIT]
    if it.vocab_parallel:
        flags.append("--pipeline-vocab-parallel")
    link = loaded.cluster.host_link
    if schedule_file is not None and link is not None and link.memory_gib is not None:
        flags += ["--pipeline-host-memory-limit", str(link.memory_gib)]
    if loaded.sweep.post_validation:
        # Megatron's rerun check would synchronize all ranks, as the gradient norm does.
        flags += "--optimizer-post-validation --rerun-mode disabled".split()
    if subject.translated:
        flags += _TRAINING
    return [run.script, *flags, *run.arguments, *it.arguments]
