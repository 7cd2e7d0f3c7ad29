"""Help of the commands: option groups, and details that only `--help-all` prints."""

import argparse
from collections.abc import Sequence
from typing import Any

MODEL, SCHEDULE, MEMORY = "Model", "Schedule", "Memory"
SEARCH, OUTPUT, PROGRAM = "Search", "Output", "Program"
REQUIRED = " (required)"

_COLUMN = 27
"""Column in which the help texts start: longer option names get a separate line."""


class Formatter(argparse.HelpFormatter):
    """Formats help with one column for the option names of all commands."""

    def __init__(self, prog: str) -> None:
        """Set the column."""
        super().__init__(prog, max_help_position=_COLUMN)


class _HelpAll(argparse.Action):
    """Prints the help with rare options and all details, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        text = "Print all options with details and exit"
        super().__init__(option_strings, argparse.SUPPRESS, 0, default=argparse.SUPPRESS, help=text)
        self.details: dict[argparse.Action, str] = {}

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action, text in self.details.items():
            action.help = text
        parser.print_help()
        parser.exit()


def group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the parser's option group with this title; add it if it is missing."""
    for each in parser._action_groups:
        if each.title == title:
            return each
    return parser.add_argument_group(title)


def add_option(
    parser: argparse.ArgumentParser,
    title: str,
    *names: str,
    help: str,
    brief: str = argparse.SUPPRESS,
    among: argparse._MutuallyExclusiveGroup | None = None,
    **settings: Any,
) -> None:
    """Add an option to the group `title`, with `help` in `--help-all` and `brief` in `--help`.

    Without `brief` it is a rare option, which `--help` does not list. `among` is a group of options
    within that exclude each other.
    """
    within = group(parser, title) if among is None else among
    action = within.add_argument(*names, help=brief, **settings)
    _help_all(parser).details[action] = help


def _help_all(parser: argparse.ArgumentParser) -> _HelpAll:
    """Return the parser's `--help-all`; add it if it is missing."""
    for each in parser._actions:
        if isinstance(each, _HelpAll):
            return each
    made = parser.add_argument("--help-all", action=_HelpAll)
    assert isinstance(made, _HelpAll)
    return made
