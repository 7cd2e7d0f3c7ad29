"""Download the Python sources of a dry run, after asking once."""

import argparse
import sys
from collections.abc import Sequence

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.flags import Command
from megatron_vshape.rehearsal.ranks import missing_sources
from megatron_vshape.rehearsal.sources import PythonSource, cache, fetch, missing_text


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
