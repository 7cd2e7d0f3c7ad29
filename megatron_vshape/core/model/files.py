"""Read text and JSON files from any source, with one clear message for each fault.

The costs file is JSON with a list of one value per stage for each amount of the kinds.
"""

import json
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from megatron_vshape.core.model.kinds import (
    HELD,
    KINDS,
    OPTIONAL_AMOUNTS,
    REQUIRED_AMOUNTS,
    TIMES,
    ScheduleError,
    amounts_of,
)

MAX_FILE_BYTES = 32 * 2**20
"""Larger files could exhaust memory; a schedule of two million passes is smaller."""

_MAX_BRACKETS = 200_000
"""Maximum lists and objects in one file: each needs far more memory than its two characters."""


class UnreadableError(ScheduleError):
    """A file cannot be read on this node; it may exist on another."""


def read_text(path: str | Path, label: str, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Read the text of the file at `path`; `label` names it in errors.

    Only regular files of at most `max_bytes` are read: other paths can be endless or block the
    reader.

    Raises:
        UnreadableError: the file cannot be opened.
        ScheduleError: it is not a regular file, too large, or not UTF-8.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ScheduleError(f"{label} {path} is not a regular file")
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ScheduleError(
                f"{label} {path} is larger than the {max_bytes / 2**20:g} MiB that are read"
            )
        return data.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{label} {path} is not UTF-8 text: byte {error.start} cannot be decoded"
        ) from None
    except ScheduleError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableError(f"{label} {path} cannot be read: {reason}") from None


def parse_object(text: str, label: str) -> dict[str, object]:
    """Parse the JSON object in `text`.

    Raises:
        ScheduleError: not JSON, not an object, nested too deep, a duplicate key, NaN or infinity.
    """
    # Before parsing, which would already need the memory.
    if text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise ScheduleError(f"{label} contains more than {_MAX_BRACKETS} lists and objects")
    try:
        data = json.loads(
            text, object_pairs_hook=_dict_of_unique_keys, parse_constant=_reject_constant
        )
    except RecursionError:
        raise ScheduleError(f"{label} is not valid JSON: it is nested too deep") from None
    except ScheduleError:
        raise
    except ValueError as error:
        raise ScheduleError(f"{label} is not valid JSON: {fault_of(error)}") from None
    if not isinstance(data, dict):
        names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
        name = names.get(type(data), "number")
        raise ScheduleError(f"{label} contains a JSON {name}; it must be an object")
    return data


def fault_of(error: Exception) -> str:
    """Format a parser's error in one line, with an explanation for numbers that are too long."""
    text = " ".join(str(error).split())
    long = text.startswith("Exceeds the limit")
    return "it has a number of more than 4300 digits" if long else f"{text:.500}"


def fault_in_file(error: ScheduleError, label: str, path: str | Path) -> ScheduleError:
    """Return an error with the path of the file whose text has the error.

    >>> fault_in_file(ScheduleError("the costs file is not valid JSON"), "the costs file", "a.json")
    ScheduleError('the costs file a.json is not valid JSON')
    >>> fault_in_file(ScheduleError("send_us is -1"), "the costs file", "a.json")
    ScheduleError('the costs file a.json is not valid: send_us is -1')
    """
    text = str(error)
    if text.startswith(f"{label} "):
        return ScheduleError(f"{label} {path}{text.removeprefix(label)}")
    return ScheduleError(f"{label} {path} is not valid: {text}")


def check_keys(data: dict[str, object], keys: tuple[str, ...], label: str) -> None:
    """Raise ScheduleError unless `data` has exactly these keys."""
    for key in keys:
        if key not in data:
            raise ScheduleError(f"the key {key!r} is missing from {label}")
    for key in data:
        if key not in keys:
            raise ScheduleError(
                f"{label} has the unknown key {key!r:.60}; supported keys: {', '.join(keys)}"
            )


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a JSON value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _dict_of_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json keeps the last of several equal keys without an error.
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ScheduleError(f"the key {duplicate!r:.60} occurs twice in one JSON object")
    return data


def _reject_constant(text: str) -> object:
    raise ScheduleError(f"{text} is not a number that JSON allows; write a finite one")


logger = logging.getLogger(__name__)

_FIELDS = (*map(str, TIMES), "send_us", *map(str, HELD))
_DEVICE = "device_bytes"
_ALONE = ("layers", "host_us", "sources", _DEVICE)
HALF_DUPLEX = (
    "half_duplex"  # in schedule files, too: a shared host link, in the order of the passes
)
_REMOVED_FIELDS = ("recompute", "joint", "hidden_share", HALF_DUPLEX)
"""Recomputation, overlapped passes and shared host links in files of 0.2.0; they are ignored."""
_UNLIKE, _MORE = "by_microbatch", "more_send_us"

MEASURED, COUNTED, ASSUMED = "measured", "counted", "assumed"
"""Required prefix of the source of a value."""


def text_of(lists: Mapping[str, Sequence[float]], **fields: Any) -> str:
    """Return the text of the costs file with these lists per stage and other fields of `Costs`."""
    values = {name: value for name, value in fields.items() if value or name == "send_us"}
    values |= {} if fields["layers"] is None else {"layers": fields["layers"]}
    values |= lists
    basic = (str(amount) for amount in OPTIONAL_AMOUNTS)
    order = (*_FIELDS, "layers", *basic, "host_us", _DEVICE, "sources", _UNLIKE, _MORE, *lists)
    return json.dumps({name: values[name] for name in order if name in values}, indent=1)


def read_costs(text: str) -> dict[str, Any]:
    """Parse the text of a costs file into the arguments of `Costs.of`.

    Raises:
        ScheduleError: not JSON, a key is missing or unknown, or a value is not a number.
    """
    data = parse_object(text, "the costs file")
    layers = _layers(data.pop("layers")) if "layers" in data else None
    fields: dict[str, Any] = {"layers": layers}
    for name in ("host_us", _DEVICE):
        (fields[name],) = _numbers(name, [data.pop(name, 0.0)])
    fields["sources"] = _sources(data.pop("sources", {}))
    # Only those with a value that changes the result; an empty one is dropped silently.
    removed = [name for name in _REMOVED_FIELDS if data.pop(name, None)]
    if removed:
        logger.warning(
            "the costs file has %s, which this version does not use: ignored", ", ".join(removed)
        )
    microbatch_factors = data.pop(_UNLIKE, {})
    if not isinstance(microbatch_factors, dict):
        raise ScheduleError(
            f"{_UNLIKE} is {microbatch_factors!r:.60}; it must be an object of lists"
        )
    fields[_MORE] = _numbers(_MORE, data.pop(_MORE)) if _MORE in data else ()
    fields[_UNLIKE] = tuple(
        (name, _numbers(name, factors)) for name, factors in microbatch_factors.items()
    )
    # Optional names are popped first, so `check_keys` sees only the required ones and unknown ones.
    optional = (str(amount) for amount in amounts_of(KINDS)[len(REQUIRED_AMOUNTS) :])
    fields |= {name: _numbers(name, data.pop(name)) for name in optional if name in data}
    check_keys(data, _FIELDS, "the costs file")
    fields["send_us"] = _numbers("send_us", [data["send_us"]])[0]
    fields |= {name: _numbers(name, data[name]) for name in map(str, REQUIRED_AMOUNTS)}
    if not any(fields[str(HELD[0])]):
        raise ScheduleError(f"{HELD[0]} is 0 for every stage: at least one must be above 0")
    return fields


def _sources(sources: object) -> tuple[tuple[str, str], ...]:
    """Parse the sources; raises ScheduleError for unknown names."""
    if not isinstance(sources, dict):
        raise ScheduleError(
            f"sources is {sources!r:.60}; it must be an object with a text per name"
        )
    supported_names = (*map(str, amounts_of(KINDS)), "send_us", *_ALONE, *_REMOVED_FIELDS)
    for name, text in sources.items():
        if name not in supported_names:
            raise ScheduleError(f"sources names {name!r:.40}, which no costs file has")
        if not isinstance(text, str) or not text.startswith((MEASURED, COUNTED, ASSUMED)):
            raise ScheduleError(
                f"the source of {name} is {text!r:.60}; it must begin with "
                f"{MEASURED}, {COUNTED} or {ASSUMED}"
            )
    return tuple((name, text) for name, text in sources.items() if name not in _REMOVED_FIELDS)


def _numbers(name: str, values: object) -> tuple[float, ...]:
    """Parse a list of numbers."""
    if not isinstance(values, list) or not values:
        raise ScheduleError(f"{name} is {values!r:.60}; it must be a list with a number per stage")
    for value in values:
        if not is_number(value):
            raise ScheduleError(f"{name} holds {value!r:.60}, which is not a number")
    try:
        return tuple(map(float, values))
    except OverflowError:
        raise ScheduleError(f"{name} contains a number too large for a float") from None


def _layers(values: object) -> tuple[int, ...]:
    """Parse the number of layers of every stage."""
    if not isinstance(values, list) or not all(map(is_whole, values)):
        raise ScheduleError(f"layers is {values!r:.60}; it must be a whole number per stage")
    return tuple(values)
