"""The entry point: finds the command, runs it, and turns what went wrong into one sentence."""

import argparse
import gc
import importlib
import io
import os
import re
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from megatron_vshape import __version__
from megatron_vshape.cli.progress import SEARCH
from megatron_vshape.core.model.kinds import ScheduleError

PROGRAM = "megatron-vshape"
FAILED = 2
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C

COMMANDS = {
    "schedule": "make a schedule, print its picture and numbers, draw, export or compare it",
    "plan": "find the fastest schedule for given costs within a memory limit",
    "profile": "measure what the stages of a model take on this device, for plan --costs",
    "advise": "compare a training command with the best of stock Megatron and of this package",
    "rehearse": "tell what every rank of a training command would allocate, without a GPU",
    "sweep": "find the best way to train a model on a cluster",
    "playground": "see, compare and plan schedules on a page in the browser",
    "examples": "write the configurations and scripts that the documents name",
    "doctor": "show what is installed, what would be hooked in Megatron, what is refused and why",
}
"""Each is a module of this package, imported when it is asked for: its `add_arguments(parser)` says
which arguments the command takes; its `run(options)` does it and returns the exit status, or raises
ScheduleError when it cannot be done.
"""

YOUNG_OBJECTS = 100_000
"""Objects from one look for cycles to the next: schedules are millions of tuples, in none."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # An argument may be of any length, and it is the sentence around it that helps.
        raise ScheduleError(re.sub(r"\S{100,}", lambda found: f"{found[0][:60]}...", message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, or 2 with one sentence on stderr."""
    gc.set_threshold(YOUNG_OBJECTS)
    status = _status(sys.argv[1:] if arguments is None else list(arguments))
    if arguments is None and any(each.name == SEARCH for each in threading.enumerate()):
        # It was stopped, and Python would wait until it has come to an end.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    return status


def _status(arguments: Sequence[str]) -> int:
    _ready_output()
    try:
        _check_folder()
        return _run(arguments)
    except ScheduleError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        print(f"{PROGRAM}: the output cannot be written: {error}", file=sys.stderr)
        return FAILED


def _ready_output() -> None:
    """Have all that is printed go somewhere: streams may be closed, terminals know ASCII alone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _check_folder() -> None:
    """Raise ScheduleError where the working directory is gone, which torch does not survive."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ScheduleError(
            "the directory that this was started in has been deleted: change to one that exists"
        ) from None


def _drop_output() -> None:
    """Let what is still to be printed go nowhere, or Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str]) -> int:
    chosen = next((each for each in arguments if not each.startswith("-")), None)
    parser = _Parser(
        prog=PROGRAM,
        description="Pipeline schedules with controllable activation memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == chosen:
            command = importlib.import_module(f"megatron_vshape.cli.{name}")
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:at])
    if at < len(arguments):
        if not hasattr(options, "command"):
            raise ScheduleError(f"{chosen} takes no command after --")
        options.command = list(arguments[at + 1 :])
    status = options.run(options)
    sys.stdout.flush()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
