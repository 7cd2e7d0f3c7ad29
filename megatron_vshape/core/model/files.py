"""Read text and JSON files from any source, with one clear message for each fault."""

import json
import os
import stat
from pathlib import Path
from typing import TypeGuard

from megatron_vshape.core.model.kinds import ScheduleError

MAX_FILE_BYTES = 32 * 2**20
"""Larger files could exhaust memory; a schedule of two million passes is smaller."""

MAX_BRACKETS = 200_000
"""Maximum lists and objects in one file: each needs far more memory than its two characters."""


class UnreadableError(ScheduleError):
    """A file cannot be read on this node; it may exist on another."""


def read_text(path: str | Path, what: str, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Read the text of the file at `path`; `what` names it in errors.

    Only regular files of at most `max_bytes` are read: other paths can be endless or block the
    reader.

    Raises:
        UnreadableError: the file cannot be opened.
        ScheduleError: it is not a regular file, too large, or not UTF-8.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ScheduleError(f"{what} {path} is not a regular file")
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ScheduleError(
                f"{what} {path} is larger than the {max_bytes / 2**20:g} MiB that are read"
            )
        return data.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{what} {path} is not UTF-8 text: byte {error.start} cannot be decoded"
        ) from None
    except ScheduleError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableError(f"{what} {path} cannot be read: {reason}") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking, even a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_object(text: str, what: str) -> dict[str, object]:
    """Parse the JSON object in `text`.

    Raises:
        ScheduleError: not JSON, not an object, nested too deep, a duplicate key, NaN or infinity.
    """
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise ScheduleError(f"{what} contains more than {MAX_BRACKETS} lists and objects")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ScheduleError(f"{what} is not valid JSON: it is nested too deep") from None
    except ScheduleError:
        raise
    except ValueError as error:
        raise ScheduleError(f"{what} is not valid JSON: {fault_of(error)}") from None
    if not isinstance(data, dict):
        raise ScheduleError(f"{what} contains a JSON {_name_of(data)}; it must be an object")
    return data


def fault_of(error: Exception) -> str:
    """Format a parser's error in one line, with an explanation for numbers that are too long."""
    text = " ".join(str(error).split())
    long = text.startswith("Exceeds the limit")
    return "it has a number of more than 4300 digits" if long else f"{text:.500}"


def check_keys(data: dict[str, object], keys: tuple[str, ...], what: str) -> None:
    """Raise ScheduleError unless `data` has exactly these keys."""
    for key in keys:
        if key not in data:
            raise ScheduleError(f"the key {key!r} is missing from {what}")
    for key in data:
        if key not in keys:
            raise ScheduleError(
                f"{what} has the unknown key {key!r:.60}; supported keys: {', '.join(keys)}"
            )


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a JSON value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ScheduleError(f"the key {twice!r:.60} occurs twice in one JSON object")
    return data


def _refuse_constant(text: str) -> object:
    raise ScheduleError(f"{text} is not a number that JSON allows; write a finite one")


def _name_of(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
