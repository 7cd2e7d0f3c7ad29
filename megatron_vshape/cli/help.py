"""Help of the commands: option groups."""

import argparse

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


def group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the parser's option group with this title; add it if it is missing."""
    for option_group in parser._action_groups:
        if option_group.title == title:
            return option_group
    return parser.add_argument_group(title)
