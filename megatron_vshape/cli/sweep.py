"""`megatron-vshape sweep FILE.yaml`: search for the fastest way to train a model on a cluster."""

import argparse
from pathlib import Path

from megatron_vshape.cli.dry_run import add_headroom_argument, add_source_arguments
from megatron_vshape.cli.files import check_installed, check_targets
from megatron_vshape.cli.help import MODEL, OUTPUT, REQUIRED, SEARCH, group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-vshape sweep FILE.yaml [OPTIONS] [-- pretrain_gpt.py FLAGS...]"
    group(parser, MODEL).add_argument(
        "file", type=Path, metavar="FILE.yaml", help="Sweep file" + REQUIRED
    )
    parser.set_defaults(command=[])  # the words after --
    add_headroom_argument(parser)
    search = group(parser, SEARCH)
    mode = search.add_mutually_exclusive_group()
    mode.add_argument(
        "--predict-only", action="store_true", help="Predict and rank only; needs no cluster"
    )
    mode.add_argument(
        "--dry-run",
        action="store_true",
        help="Print the commands of the runs and write their plans; start none",
    )
    mode.add_argument(
        "--report",
        action="store_true",
        help="Print the results so far, also during the sweep; start none",
    )
    search.add_argument(
        "--retry-failed", action="store_true", help="Repeat runs that failed in an earlier sweep"
    )
    output = group(parser, OUTPUT)
    output.add_argument(
        "--results",
        type=Path,
        metavar="FILE.db",
        help="Results database (default: runs/sweep-NAME/results.db)",
    )
    output.add_argument(
        "--csv", type=Path, metavar="FILE.csv", help="Table of all combinations to write"
    )
    output.add_argument("--verbose", action="store_true", help="Print every dropped combination")
    add_source_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Predict, launch the promising runs, and print the results."""
    quiet = options.predict_only or options.report
    check_installed("a sweep", "sweep", "pydantic", "yaml", *([] if quiet else ["submitit"]))
    check_targets(options, {"csv": (".csv",)})  # before predicting, which needs minutes
    from megatron_vshape.cli import sweep_run

    return sweep_run.run(options)
