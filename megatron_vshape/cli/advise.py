"""megatron-vshape advise: compare a run with the best of stock Megatron and of this package."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from megatron_vshape.cli.advice_options import compare
from megatron_vshape.cli.dry_run import (
    add_cluster_argument,
    add_gpus_argument,
    add_headroom_argument,
    add_program_arguments,
)
from megatron_vshape.cli.files import (
    Output,
    check_installed,
    check_targets,
    report_written,
    schedule_output,
    write_all,
)
from megatron_vshape.cli.help import MODEL, OUTPUT, SEARCH, group
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.tuning.advice_report import AdviceReport
from megatron_vshape.tuning.configurations import KEEP
from megatron_vshape.tuning.row_command import needs_file

DEFAULT_EXPORT = "plan.json"
"""Schedule file in the flags of a row, without --export."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-vshape advise --gpus 128xH100 [OPTIONS] -- pretrain_gpt.py FLAGS..."
    add_gpus_argument(parser, "(types: see rehearse); this, --cluster or --grid is required")
    add_cluster_argument(parser)
    add_headroom_argument(parser)
    group(parser, MODEL).add_argument(
        "--training-share",
        type=float,
        default=1.0,
        metavar="X",
        help="Time of training relative to a full step, below 1 with rollouts (default: 1.0)",
    )
    search = group(parser, SEARCH)
    search.add_argument(
        "--grid",
        type=Path,
        metavar="FILE.yaml",
        help="Sweep file whose grid to evaluate (default: configurations next to the command's)",
    )
    add_keep_argument(parser)
    search.add_argument(
        "--seconds",
        type=float,
        default=6.0,
        metavar="S",
        help="Time limit in seconds of the search for schedules (default: 6)",
    )
    group(parser, OUTPUT).add_argument(
        "--export",
        type=Path,
        metavar="FILE.json",
        help="Schedule file of the best configuration to write",
    )
    group(parser, OUTPUT).add_argument(
        "--write",
        type=Path,
        metavar="FILE.sh",
        help="Script to write: the whole command of the recommendation, started by torchrun; a "
        "plan is written next to it",
    )
    add_program_arguments(parser)


def add_keep_argument(parser: argparse.ArgumentParser) -> None:
    """Add --keep."""
    group(parser, SEARCH).add_argument(
        "--keep",
        default="",
        metavar="NAMES",
        help=f"Settings not to change, with commas: {', '.join(KEEP)} (default: none)",
    )


def run(options: argparse.Namespace) -> int:
    """Estimate the configurations, print the comparison and the recommendation, and return 0."""
    _check(options)
    if options.write is not None and options.export is None:
        options.export = options.write.with_suffix(".json")
    advice, comparison = compare(options)
    file = str(options.export or DEFAULT_EXPORT)
    report = AdviceReport(
        advice, comparison, file, options.export is not None, options.training_share
    )
    print("\n".join(report.lines()))
    _write(options, report)
    return 0


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.training_share <= 1:
        raise ScheduleError(
            f"--training-share {options.training_share:g} is not above 0 and at most 1: give the "
            "time of training relative to a full step, such as 0.3"
        )
    if options.grid is not None and options.keep:
        raise ScheduleError(
            f"--keep {options.keep:.60} does not work with --grid, whose file lists the "
            "configurations: remove --keep, or give the file one value for the setting"
        )
    check_installed("advise", "estimate", "torch")
    check_targets(options, {"export": (".json",), "json": (".json",), "write": (".sh",)})


def _write(options: argparse.Namespace, report: AdviceReport) -> None:
    outputs: list[Output] = []
    best, recommended = report.comparison.best, report.recommended
    if options.write is not None and (script := report.script()) is not None:
        outputs.append(Output("--write", options.write, lambda file: file.write_text(script)))
    plan_is_unused = options.write is not None and (
        options.export == options.write.with_suffix(".json")
        and not (recommended is best and best is not None and needs_file(best))
    )
    if options.export and best is not None and best.schedule is not None and not plan_is_unused:
        schedule = replace(best.schedule, name="advised")
        outputs.append(schedule_output("--export", options.export, schedule))
    if options.json is not None:
        text = json.dumps(report.to_json(), indent=1) + "\n"
        outputs.append(Output("--json", options.json, lambda file: file.write_text(text)))
    write_all(outputs)
    report_written(outputs)
