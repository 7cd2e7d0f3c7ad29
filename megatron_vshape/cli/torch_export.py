"""--format torch: export for torch.distributed.pipelining, torchtitan and NeMo Automodel."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from megatron_vshape.cli.files import Output, schedule_output
from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.program.lowering import with_full_backwards
from megatron_vshape.core.program.torch_file import find_torch_name, to_torch_csv

_FLAGS = {
    "torchtitan": (
        "training.local_batch_size",
        "parallelism.pipeline_parallel_microbatch_size",
        "parallelism.pipeline_parallel_degree",
        "parallelism.pipeline_parallel_schedule",
        "parallelism.pipeline_parallel_schedule_csv",
        "parallelism.pipeline_parallel_layers_per_stage",
    ),
    "NeMo Automodel": (
        "step_scheduler.local_batch_size",
        "distributed.pipeline.pp_microbatch_size",
        "distributed.pp_size",
        "distributed.pipeline.pp_schedule",
        "distributed.pipeline.pp_schedule_csv",
        "distributed.pipeline.layers_per_stage",
    ),
}
"""Flags by program, for the same settings; the last only if _DEFAULT_CHUNKS is exceeded."""

_DEFAULT_CHUNKS = 2
"""Stages per rank of both programs by default, except for 1F1B."""


def add_export_arguments(output: argparse._ArgumentGroup) -> None:
    """Add --export with its format."""
    output.add_argument(
        "--export", type=Path, metavar="FILE", help="Schedule file to write (.json or .csv)"
    )
    output.add_argument(
        "--format",
        choices=("torch",),
        help="torch: export for torch.distributed.pipelining, torchtitan and NeMo Automodel",
    )
    output.add_argument(
        "--full-backward",
        action="store_true",
        help="Do not split the backward in --format torch",
    )


def check_export(options: argparse.Namespace) -> None:
    """Raise ScheduleError if options of the export contradict each other."""
    if options.format and (options.export is None or options.export.suffix != ".csv"):
        target = "" if options.export is None else f", not --export {options.export}"
        raise ScheduleError(f"--format torch writes a CSV file: add --export FILE.csv{target}")
    if options.full_backward and not options.format:
        raise ScheduleError("--full-backward needs --format torch: add it, with --export FILE.csv")
    for name in ("slices", "offload", "vocab_parallel"):
        # Before planning: `to_torch_csv` would reject the result of a long search.
        if options.format and getattr(options, name, None) not in (None, 1):
            flag = f"--{name.replace('_', '-')}"
            raise ScheduleError(
                f"--format torch does not support {flag}, because torch.distributed.pipelining has "
                f"no such passes: remove {flag}"
            )


def export_output(options: argparse.Namespace, schedule: Schedule) -> Output:
    """Return the output of --export.

    Raises:
        ScheduleError: torch does not support the schedule.
    """
    if not options.format:
        return schedule_output("--export", options.export, schedule)
    text = to_torch_csv(with_full_backwards(schedule) if options.full_backward else schedule)
    return Output("--export", options.export, lambda draft: draft.write_text(text, newline=""))


def print_settings(
    options: argparse.Namespace, timeline: Timeline, costs: Costs, time: Callable[[float], str]
) -> None:
    """Print the settings that torch's programs need for the file of --format torch."""
    if not options.format:
        return
    schedule = timeline.schedule
    if options.full_backward:
        makespan = simulate(with_full_backwards(schedule), costs).makespan
        print(
            f"makespan with full backwards {time(makespan)}, simulated "
            f"(as printed above: {time(timeline.makespan)})"
        )
    devices, microbatches = schedule.num_devices, schedule.num_microbatches
    name = find_torch_name(schedule.placement, devices)
    print("\nsettings for this file (microbatch size 1; for size N, N times the batch size)")
    for program, flags in _FLAGS.items():
        values = [microbatches, 1, devices, name, shlex.quote(str(options.export))]
        if schedule.num_chunks > _DEFAULT_CHUNKS:
            values.append("LAYERS")
        pairs = zip(flags, values, strict=False)
        text = " \\\n    ".join(f"--{flag} {value}" for flag, value in pairs)
        if name is None:
            text = "not supported, because no schedule name has this placement"
        print(f"  {program}: {text}")
    if name is not None and schedule.num_chunks > _DEFAULT_CHUNKS:
        print(f"  LAYERS: layers per stage, so that the model has {schedule.num_stages} stages")
    rows = enumerate(stages_of(schedule.placement, devices))
    stages = "; ".join(f"rank {rank}: {', '.join(map(str, row))}" for rank, row in rows)
    print(f"  torch: n_microbatches={microbatches}; stages of {stages}")
