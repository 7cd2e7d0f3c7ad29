"""Translate flags of sail-sg's zero-bubble fork of Megatron-LM to those of this package.

Sources: megatron/core/zbpp_utils.py of sail-sg/zero-bubble-pipeline-parallelism, and arguments.py
of Megatron-DeepSpeed, which has the fork's ZB-H1.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import ENDS_ARE_LAYERS, SCHEDULE, Command

_FLAGS = frozenset(
    """
    --enable-zb-runtime --no-pre-communication-optimization --enable-zero-bubble
    --zero-bubble-pipeline-timers-start-iter --zero-bubble-pipeline-timers-end-iter
    --zero-bubble-max-pending-backward --zero-bubble-adaptive-memory-limit-percentile
    --enable-optimizer-post-validation --enable-exactly-numeric-match --zero-bubble-v-schedule
    --zero-bubble-v-schedule-mem-setup --enable-1f1b-v --allow-padding-num-layers
    --num-seq-splits --profile-memory-iter --enable-zbh1-pipeline --enable-zbh1-exact-semantics
    """.split()
)
_REJECTED = ("--cpu-offload", "--interleave-group-size")
_V_SCHEDULES = {"zb": "v-zb", "half": "v-half", "min": "v-min"}


def with_zero_bubble_flags(command: Command) -> Command:
    """Replace the fork's flags by the schedule of this package that they request.

    Raises:
        ScheduleError: They request a schedule that this package does not have.
    """
    flags = [flag for flag in sorted(_FLAGS) if command.has(flag)]
    if not flags:
        return command
    if rejected := [flag for flag in _REJECTED if command.has(flag)]:
        raise ScheduleError(
            f"{' and '.join(rejected)} of the zero-bubble fork cannot be estimated. Remove them, "
            "or name a schedule of this package with --pipeline-schedule"
        )
    ranks, name = command.number("--pipeline-model-parallel-size", 1), _schedule(command)
    changes: dict[str, object] = {"pipeline_schedule": name}
    if name and command.has("--enable-optimizer-post-validation"):
        changes |= {"optimizer_post_validation": True, "rerun_mode": "disabled"}
    if (slices := command.number("--num-seq-splits", 1)) > 1:
        changes["pipeline_slices"] = slices
    if command.has("--allow-padding-num-layers") and command.layers % ranks == ranks - 2:
        changes |= _padding_changes(command.layers + 2, ranks, name)
    schedule = f"the schedule {name} of this package" if name else "Megatron's own schedule"
    note = f"Flags of the zero-bubble fork are estimated as {schedule}."
    # The fork needs 8 connections, and Megatron-Core 1.
    environment = {
        name: value
        for name, value in command.environment.items()
        if name != "CUDA_DEVICE_MAX_CONNECTIONS"
    }
    command = replace(command, notes=(*command.notes, note), environment=environment)
    return command.without(_FLAGS.__contains__).having(**changes)


def _schedule(command: Command) -> str | None:
    """Return the name of the requested schedule; None for Megatron's.

    Raises:
        ScheduleError: The memory of the V schedule is none of the fork's.
    """
    if command.has(SCHEDULE):
        return command.value(SCHEDULE)
    if command.has("--zero-bubble-v-schedule"):
        memory = command.value("--zero-bubble-v-schedule-mem-setup", "zb") or ""
        if memory not in _V_SCHEDULES:
            raise ScheduleError(
                f"--zero-bubble-v-schedule-mem-setup {memory:.20} is none of "
                f"{', '.join(_V_SCHEDULES)}"
            )
        return _V_SCHEDULES[memory]
    if command.has("--enable-1f1b-v"):
        return "1f1b-v"
    if command.has("--enable-zbh1-pipeline"):
        return "zb-h1"
    if not command.has("--enable-zero-bubble"):
        return "1f1b" if command.number("--num-seq-splits", 1) > 1 else None
    pending = command.value("--zero-bubble-max-pending-backward", "auto") or ""
    ranks = command.number("--pipeline-model-parallel-size", 1)
    # With "auto", the fork uses the memory that is free in the first steps.
    is_limited = pending.isdecimal() and int(pending) < 2 * ranks
    return "zb-h1" if is_limited else "zb-h2"


def _padding_changes(num_layers: int, ranks: int, schedule: str | None) -> dict[str, object]:
    """Return options for one layer less in the first and the last stage.

    Args:
        num_layers: number of layers with the two that are missing.
        ranks: pipeline ranks.
        schedule: name of the schedule; None for Megatron's.
    """
    changes: dict[str, object] = dict.fromkeys(ENDS_ARE_LAYERS, True)
    if schedule is not None:
        num_stages = ranks if schedule.startswith("zb-h") else 2 * ranks
        layers = [num_layers // num_stages] * num_stages
        layers[0] -= 1
        layers[-1] -= 1
        changes["pipeline_layer_split"] = ",".join(map(str, layers))
    return changes
