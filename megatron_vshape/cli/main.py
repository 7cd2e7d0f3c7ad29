"""Entry point: select and run a command, and print errors as one sentence."""

import argparse
import gc
import importlib
import io
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn

from megatron_vshape import __version__
from megatron_vshape.cli.help import Formatter
from megatron_vshape.core.budget import SEARCH
from megatron_vshape.core.model.kinds import ScheduleError

PROGRAM = "megatron-vshape"
FAILED = 2
_INTERRUPTED = 130  # exit status of a program that Ctrl-C has ended

COMMANDS = {
    "advise": "compare a training command with the best of stock Megatron and of this package",
    "trial": "run a training command for a few steps with other schedules, and compare the runs",
    "rehearse": "estimate peak memory per rank and step time of a training command (no GPU needed)",
    "schedule": "generate a schedule; print, draw, export or compare it",
    "plan": "search for the fastest schedule for given costs within a memory limit",
    "sweep": "search over schedules and parallel configurations; launch the best on a cluster",
    "doctor": "check versions, Megatron's hooks and the support of each option",
    "playground": "show, compare and plan schedules in the browser",
    "examples": "copy example configs and scripts to a directory",
}
"""Most useful first. Each is a module of this package, imported only when it is called:
`add_arguments(parser)` adds its arguments; `run(options)` runs it and returns the exit status, or
raises ScheduleError."""

_YOUNG_OBJECTS = 100_000
"""Objects allocated between garbage collections: schedules are millions of acyclic tuples."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ScheduleError(_shortened(message))


def _shortened(message: str) -> str:
    """Shorten arguments of any length: the sentence around them helps more."""
    return re.sub(r"\S{100,}", lambda match: f"{match[0][:60]}...", message)


def _unknown_arguments(
    command: str | None, words: Sequence[str], parsers: Mapping[str, argparse.ArgumentParser]
) -> str:
    """Format unknown arguments with the nearest option of the command."""
    parser = parsers.get(command or "")
    flags = {} if parser is None else {**parser._option_string_actions}
    flags.pop("--help", None)  # similar to many short options
    near = get_close_matches(words[0].partition("=")[0], flags, n=1)
    hint = f"did you mean {near[0]}?" if near else f"see {PROGRAM} {command} --help"
    return _shortened(f"unrecognized arguments: {' '.join(words)}; {hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, or 2 with one sentence on stderr."""
    gc.set_threshold(_YOUNG_OBJECTS)
    status = _status(sys.argv[1:] if arguments is None else list(arguments))
    if arguments is None and any(thread.name == SEARCH for thread in threading.enumerate()):
        # A stopped search thread may still run, and Python would wait for it at exit.
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
        return _INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        print(f"{PROGRAM}: the output cannot be written: {error}", file=sys.stderr)
        return FAILED


def _ready_output() -> None:
    """Make stdout and stderr usable: streams may be closed, terminals may support only ASCII."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _check_folder() -> None:
    """Raise ScheduleError if the working directory was deleted, which makes torch fail."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ScheduleError(
            "the current directory has been deleted: change to another one"
        ) from None


def _drop_output() -> None:
    """Discard pending output, for which Python would print an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str]) -> int:
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = _Parser(
        prog=PROGRAM,
        description="Pipeline schedules with controllable activation memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        about = f"{summary[0].upper()}{summary[1:]}."
        sub = commands.add_parser(
            name, help=summary, description=about, allow_abbrev=False, formatter_class=Formatter
        )
        if name == chosen:
            command = importlib.import_module(f"megatron_vshape.cli.{name}")
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    if chosen is not None and chosen not in COMMANDS:
        near = get_close_matches(chosen, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise ScheduleError(_shortened(f"there is no command {chosen!r}; {hint}"))
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    options, unknown = parser.parse_known_args(arguments[:separator])
    if unknown:
        raise ScheduleError(_unknown_arguments(chosen, unknown, commands.choices))
    options.words = arguments[:separator]
    if separator < len(arguments):
        if not hasattr(options, "command"):
            raise ScheduleError(f"{chosen} does not accept a command after --")
        options.command = list(arguments[separator + 1 :])
    status = options.run(options)
    sys.stdout.flush()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
