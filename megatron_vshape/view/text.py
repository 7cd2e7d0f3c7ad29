"""Text picture of a timeline, with colored passes on a terminal that supports color."""

import itertools
import os
import shutil
from collections.abc import Iterable
from typing import TextIO

from megatron_vshape.core.model.kinds import KINDS, PARTS, Kind, find_kind, simple_kinds
from megatron_vshape.core.model.schedule import Timeline

_RESET = "\x1b[0m"
_PIPED_COLUMNS = 132
"""Default number of columns."""

_LEAST_COLUMNS = 20


def wants_colour(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal with color and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def columns() -> int:
    """Return the maximum width of a picture, from the terminal or from COLUMNS."""
    return shutil.get_terminal_size((_PIPED_COLUMNS, 24)).columns


def picture(timeline: Timeline, columns: int | None = None, colour: bool = False) -> str:
    """Draw one line per device, one character per shortest pass, and the legend below.

    If the picture is wider than `columns`, its middle is cut: the start and the end, where the
    devices differ, stay.
    """
    lines = timeline.draw(max_width=columns and max(columns, _LEAST_COLUMNS)).split("\n")
    if colour:
        lines = [_paint(line) for line in lines]
    return "\n".join(
        [*lines, "", legend(timeline.schedule.num_chunks, colour, timeline.schedule.kinds)]
    )


def legend(num_chunks: int, colour: bool = False, kinds: Iterable[Kind] = ()) -> str:
    """Return the legend of the letters in one line; it always includes F, B and W."""
    parts = simple_kinds((*PARTS, *kinds))
    upper = " ".join(kind[0] for kind in parts)
    lower = upper.lower()
    if colour:
        upper, lower = (" ".join(map(_paint, text.split())) for text in (upper, lower))
    meaning = ", ".join(kind.label for kind in parts)
    if num_chunks == 1:
        return f"{upper}  {meaning}"
    even, odd = ("chunk 0", "chunk 1") if num_chunks == 2 else ("even chunks", "odd chunks")
    return f"{upper}  {even}   {lower}  {odd}   ({meaning})"


def _paint(line: str) -> str:
    """Color each run of one letter like its pass."""
    return "".join(
        _start(letter) + "".join(run) + _RESET if letter.upper() in KINDS else "".join(run)
        for letter, run in itertools.groupby(line)
    )


def _start(letter: str) -> str:
    dark, light = find_kind(letter.upper()).terminal
    return f"\x1b[97;48;5;{dark}m" if letter.isupper() else f"\x1b[30;48;5;{light}m"
