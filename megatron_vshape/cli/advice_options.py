"""Conversion of the options of `advise`: the configurations that it compares."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron_vshape.cli.dry_run import (
    command_with_model,
    dry_run_config,
    fetch_missing,
    headroom_bytes_of,
    machine_of,
    with_batch,
)
from megatron_vshape.cli.files import check_installed
from megatron_vshape.cli.progress import report_progress
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal import accuracy, report
from megatron_vshape.rehearsal.command import Command, flag_changes, sizes_of
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.start_rules import check_batch, check_model, check_required_flags
from megatron_vshape.tuning.advice import Advice, check_schedule_flags
from megatron_vshape.tuning.comparison import Comparison, sizes_text
from megatron_vshape.tuning.configurations import (
    FLAGS,
    KEEP,
    Configuration,
    Subject,
    SweepError,
    configuration_of_command,
    faults,
    neighbors,
)
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import Counts, Predictor
from megatron_vshape.tuning.proposals import propose, proposed_command

MAX_OTHER_CONFIGURATIONS = 16
"""Maximum number of configurations to estimate besides the command's, without --grid."""


def compare(options: argparse.Namespace) -> tuple[Advice, Comparison]:
    """Estimate the configurations; return the `Advice` and its comparison of those that start.

    Raises:
        ScheduleError: the command or an option is not supported; the text contains the fix.
    """
    keep = [name for name in options.keep.split(",") if name]
    for name in keep:
        if name not in KEEP:
            raise ScheduleError(f"--keep {name!r:.40} is not one of {', '.join(KEEP)}")
    command = command_with_model(options)
    if options.grid is None:
        machine_of(options)  # its errors come before the download
    subject = Subject("", command, [command.script, *command.flags], tokens=options.vocabulary)
    for note in command.notes:
        print(report.wrap_text(note))
    check_model(command)
    check_schedule_flags(subject.command)
    fetch_missing(options, subject.command)
    proposals: list[Configuration] = []
    if options.model is not None:
        machine = machine_of(options)
        microbatch = {"micro_batch_size": subject.command.option("micro_batch_size")}
        command = with_batch(subject.command, machine.num_devices)
        if not command.has(FLAGS["pipeline_parallel"]):
            free = command.having(**microbatch)  # proposed, too, if it is not given
            proposals = propose(replace(subject, command=free), machine)
            command = proposed_command(proposals[0], subject)
            changes = ", ".join(flag_changes(subject.command, command))
            print(report.wrap_text(f"Proposed flags: {changes}"))
        subject = replace(subject, command=command)
    check_required_flags(subject.command)
    if configuration_of_command(subject, 1).pipeline_parallel < 2:
        raise ScheduleError(
            "the command has no pipeline, and advise compares pipeline schedules: set "
            "--pipeline-model-parallel-size to 2 or more, or estimate its memory with rehearse"
        )
    advice = prepare_advice(options, subject, keep, proposals)
    with report_progress(lambda us: f"{us * 1e-6:.1f} s"):
        return advice, advice.compare()


def prepare_advice(
    options: argparse.Namespace,
    subject: Subject,
    keep: Sequence[str],
    proposals: Sequence[Configuration],
) -> Advice:
    """Run the dry runs of the configurations, and return an `Advice` to compare them.

    The configurations are the command's and those of --grid, the other proposals or those next to
    the command's. Impossible ones and those that could not be estimated are left out, with reasons.
    """
    machine, grid, left_out, post_validation = _grid(options, subject)
    # The comparison starts with the command as it is, so it must run on these GPUs.
    check_batch(subject.command, sizes_of(subject.command, machine.num_devices))
    gpu, command_config = machine.gpu, configuration_of_command(subject, machine.num_devices)
    candidates = []
    nearby = proposals[1:] or neighbors(command_config, subject, machine.num_devices, keep)
    for config in () if grid else nearby:
        _, why = next(faults(config, subject, machine.num_devices, gpu.node), ("", ""))
        if why:
            left_out.append(f"{sizes_text(config, subject)}: {why}")
        else:
            candidates.append(config)
    left_out += [
        f"{sizes_text(config, subject)}: advise evaluates at most {MAX_OTHER_CONFIGURATIONS} other "
        "configurations"
        for config in candidates[MAX_OTHER_CONFIGURATIONS:]
    ]
    make_dry_run_config = partial(dry_run_config, options, subject.command, gpu)
    counts = Counts(subject, machine, make_dry_run_config)
    headroom_bytes = headroom_bytes_of(options.headroom, gpu.memory_bytes)
    predictor = Predictor(subject, machine, counts, post_validation, headroom_bytes)
    case = _case_of(subject.command, gpu)
    advice = Advice(
        predictor,
        command_config,
        case,
        options.seconds,
        make_dry_run_config,
        grid=grid,
        left_out=left_out,
        with_fsdp=options.lora_rank is None and subject.command.lora is None,
        command_name="the proposal" if proposals else "today",
    )
    with report_progress(lambda us: f"{us * 1e-6:.1f} s"):
        counts.count(
            [command_config, *grid, *candidates[:MAX_OTHER_CONFIGURATIONS]], lambda *_: None
        )
    try:
        counts.costs_of(command_config)
    except SweepError as error:
        raise ScheduleError(f"the command could not be estimated: {error}") from None
    for config in candidates[:MAX_OTHER_CONFIGURATIONS]:
        try:
            counts.costs_of(config)
            advice.neighbors.append(config)
        except SweepError as error:
            left_out.append(f"{sizes_text(config, subject)}: {error}")
    return advice


def _grid(
    options: argparse.Namespace, subject: Subject
) -> tuple[Machine, list[Configuration], list[str], bool]:
    """Return the GPUs, the configurations of --grid, and whether they use post-validation.

    The third value lists the impossible ones with the reasons, one of each kind.

    Raises:
        ScheduleError: --grid has other workloads than the command.
    """
    if options.grid is None:
        return machine_of(options), [], [], False
    check_installed("--grid", "sweep", "pydantic", "yaml")
    from megatron_vshape.tuning.files import load_sweep
    from megatron_vshape.tuning.grid import expand_grid, group_by_kind

    loaded = load_sweep(options.grid, options.command)
    has_machine_options = options.gpus is not None or options.cluster is not None
    machine = machine_of(options) if has_machine_options else Machine.of(loaded.cluster)
    # Step times of other sequence lengths or batches are not comparable with that of the command.
    sequence, batch = workload = configuration_of_command(subject, machine.num_devices).workload
    expanded = expand_grid(loaded, machine)
    grid = [config for config in expanded.possible if config.workload == workload]
    dropped = [
        rejection for rejection in expanded.dropped if rejection.configuration.workload == workload
    ]
    impossible = [
        f"{len(members)} impossible, such as {members[0].configuration}: {members[0].reason}"
        for members in group_by_kind(dropped).values()
    ]
    if not grid:
        raise ScheduleError(
            f"--grid {options.grid} has no configuration for the workload of the command "
            f"({sequence} tokens, batch {batch}): remove workloads from the file, or set "
            "--seq-length and --global-batch-size to one of them"
        )
    return machine, grid, impossible, loaded.sweep.post_validation


def _case_of(command: Command, gpu: Gpu) -> str:
    """Return the case whose published errors apply to the command."""
    ranks = command.number("--expert-model-parallel-size", 1)
    tensor = command.number("--tensor-model-parallel-size", 1)
    shards = command.number("--expert-tensor-parallel-size", tensor)
    span = (ranks - 1) * shards + 1
    return accuracy.case_of(command.has("--num-experts"), ranks, span, gpu)
