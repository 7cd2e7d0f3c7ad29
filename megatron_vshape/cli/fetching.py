"""Python sources of a dry run: their options, and their download after asking once."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_vshape.cli.help import PROGRAM, group
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.flags import Command
from megatron_vshape.rehearsal.ranks import missing_sources
from megatron_vshape.rehearsal.sources import PythonSource, cache, fetch, missing_text


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the Python sources of a dry run."""
    program = group(parser, PROGRAM)
    program.add_argument(
        "--megatron",
        type=Path,
        metavar="DIR",
        help="Megatron-LM checkout (default: installed or downloaded megatron-core)",
    )
    program.add_argument(
        "--te",
        type=Path,
        metavar="DIR",
        help="Transformer Engine checkout or wheel (default: installed or downloaded)",
    )
    program.add_argument(
        "--fetch",
        action="store_true",
        help="Download the Python of Megatron and Transformer Engine if missing (3.6 MB)",
    )
    program.add_argument(  # the name in 0.2
        "--fetch-te", dest="fetch", action="store_true", help=argparse.SUPPRESS
    )


def fetch_missing(options: argparse.Namespace, command: Command) -> None:
    """Download missing sources of a dry run, if --fetch is set or the user agrees.

    Raises:
        ScheduleError: Sources are missing and not to be downloaded, or a download failed.
    """
    missing = missing_sources(command, options.megatron, options.te)
    if missing and not options.fetch and not _is_agreed(missing):
        raise ScheduleError(missing_text(missing))
    for each in missing:
        print(f"{each}: {fetch(each)}", file=sys.stderr, flush=True)


def _is_agreed(missing: Sequence[PythonSource]) -> bool:
    """Ask on a terminal; otherwise nobody can answer."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    names = " and ".join(map(str, missing))
    question = f"Download the Python of {names} to {cache()}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
