"""Costs file: JSON with a list of one value per stage for each amount of the kinds."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from megatron_vshape.core.model.files import check_keys, is_number, is_whole, parse_object
from megatron_vshape.core.model.kinds import (
    HELD,
    KINDS,
    KNOWN_ALONE,
    TIMES,
    ScheduleError,
    amount_names,
    other_amounts,
)

logger = logging.getLogger(__name__)

_FIELDS = (*TIMES, "send_us", *HELD)
_DEVICE = "device_bytes"
_ALONE = ("layers", "host_us", "sources", _DEVICE)
_FORMER = ("recompute", "joint", "hidden_share", "half_duplex")
"""Recomputation, overlapped passes and shared host links in files of 0.2.0; they are ignored."""
_UNLIKE, _MORE = "by_microbatch", "more_send_us"

MEASURED, COUNTED, ASSUMED = "measured", "counted", "assumed"
"""Required prefix of the source of a value."""


def text_of(costs: Mapping[str, Any]) -> str:
    """Return the text of the costs file with these fields of `Costs`."""
    optional = ("layers", *KNOWN_ALONE)
    nonzero = {name: costs[name] or None for name in ("host_us", _DEVICE)}
    tables = {name: dict(costs[name]) or None for name in ("sources", _UNLIKE)}
    given = {name: costs[name] for name in (*_FIELDS, *optional)} | nonzero | tables
    given |= {_MORE: costs[_MORE] or None} | dict(costs["others"])
    return json.dumps({name: each for name, each in given.items() if each is not None}, indent=1)


def read_costs(text: str) -> dict[str, Any]:
    """Parse the text of a costs file into the fields of `Costs`.

    Raises:
        ScheduleError: not JSON, a key is missing or unknown, or a value is not a number.
    """
    data = parse_object(text, "the costs file")
    layers = _whole_numbers("layers", data.pop("layers")) if "layers" in data else None
    made: dict[str, Any] = {"layers": layers}
    for name in ("host_us", _DEVICE):
        (made[name],) = _numbers(name, [data.pop(name, 0.0)])
    made["sources"] = _sources(data.pop("sources", {}))
    former = [name for name in _FORMER if data.pop(name, None)]
    if former:
        logger.warning(
            "the costs file has %s, which this version does not use: ignored", ", ".join(former)
        )
    shares = data.pop(_UNLIKE, {})
    if not isinstance(shares, dict):
        raise ScheduleError(f"{_UNLIKE} is {shares!r:.60}; it must be an object of lists")
    made[_MORE] = _numbers(_MORE, data.pop(_MORE)) if _MORE in data else ()
    made[_UNLIKE] = tuple((name, _numbers(name, each)) for name, each in shares.items())
    made |= {name: _numbers(name, data.pop(name)) for name in KNOWN_ALONE if name in data}
    others = [name for name in other_amounts(KINDS) if name in data]
    made["others"] = tuple((name, _numbers(name, data.pop(name))) for name in others)
    check_keys(data, _FIELDS, "the costs file")
    made["send_us"] = _numbers("send_us", [data["send_us"]])[0]
    made |= {name: _numbers(name, data[name]) for name in (*TIMES, *HELD)}
    if not any(made[HELD[0]]):
        raise ScheduleError(f"{HELD[0]} is 0 for every stage: at least one must be above 0")
    return made


def _sources(given: object) -> tuple[tuple[str, str], ...]:
    """Parse the sources; raises ScheduleError for unknown names."""
    if not isinstance(given, dict):
        raise ScheduleError(f"sources is {given!r:.60}; it must be an object with a text per name")
    known = (*amount_names(KINDS), "send_us", *_ALONE, *_FORMER)
    for name, text in given.items():
        if name not in known:
            raise ScheduleError(f"sources names {name!r:.40}, which no costs file has")
        if not isinstance(text, str) or not text.startswith((MEASURED, COUNTED, ASSUMED)):
            raise ScheduleError(
                f"the source of {name} is {text!r:.60}; it must begin with "
                f"{MEASURED}, {COUNTED} or {ASSUMED}"
            )
    return tuple((name, text) for name, text in given.items() if name not in _FORMER)


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


def _whole_numbers(name: str, values: object) -> tuple[int, ...]:
    """Parse a list of integers."""
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(values, list) or not is_whole(value):
            raise ScheduleError(f"{name} is {values!r:.60}; it must be a whole number per stage")
    return tuple(values) if isinstance(values, list) else ()
