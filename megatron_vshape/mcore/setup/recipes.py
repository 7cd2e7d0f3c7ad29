"""What becomes of a configuration that somebody else has written, before anything is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.mcore.refusals import (
    BESIDE,
    CHUNK_REFUSALS,
    REFUSALS,
    Refusal,
    UnsupportedError,
    conflicts,
    is_plain,
)
from megatron_vshape.mcore.setup.choice import choice_of
from megatron_vshape.mcore.setup.translate import (
    TRANSLATIONS,
    Notice,
    Outcome,
    Translated,
    UnknownLayersError,
    translate,
    written,
)

DEVICES = "pipeline_model_parallel_size"


class Refused(NamedTuple):
    """Options that keep a configuration from starting."""

    names: tuple[str, ...]
    told: str  # with their values where it is only some that are refused
    why: str


@dataclass(frozen=True, slots=True)
class Examined:
    """What becomes of every option that a configuration sets."""

    supported: tuple[str, ...]  # names of what is taken as it is
    notices: tuple[Notice, ...]  # what is translated, and what set aside
    refused: tuple[Refused, ...]
    layer_split: str | None = None

    @property
    def starts(self) -> bool:
        """Return whether nothing is refused."""
        return not self.refused


def placement_of(schedule: str, num_devices: int) -> Placement:
    """Return which device has which stage under a schedule, a name or a file.

    Raises:
        ScheduleError: there is no such schedule.
    """
    return choice_of(schedule, num_devices, measures=True).placement


def flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of all parts of a configuration: of the model, the optimizer and so on."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat.update(flattened(value) if isinstance(value, Mapping) else {name: value})
    return flat


def examine(options: Mapping[str, Any], placement: Placement) -> Examined:
    """Return what becomes of a library's options under a schedule of this placement.

    By what a run goes by: the same refusals, the same translations.
    """
    given = SimpleNamespace(**options)
    translated, refused = _translate(given, placement)
    notices = translated.notices
    refused += [
        Refused((each.name,), _told(each, getattr(given, each.name)), each.why)
        for each in (*REFUSALS, *(() if is_plain(placement) else CHUNK_REFUSALS))
        if hasattr(given, each.name) and each.is_set(getattr(given, each.name))
    ]
    if BESIDE not in _names(notices):
        refused += [
            Refused((BESIDE,), f"{BESIDE} with {option}", why)
            for option, why in conflicts(given, placement)
        ]
    told = _names(notices) | {each.name for each in (*REFUSALS, *CHUNK_REFUSALS)}
    supported = [name for name, value in options.items() if name not in told and _is_on(value)]
    return Examined(tuple(supported), notices, tuple(refused), translated.layer_split)


def _translate(given: SimpleNamespace, placement: Placement) -> tuple[Translated, list[Refused]]:
    """Return what is translated, and what of that is refused; and the rest of it all the same."""
    try:
        return translate(copy(given), placement), []
    except (ScheduleError, UnsupportedError) as error:
        fault = error
    faulty = [rule for rule in TRANSLATIONS if rule.outcome == Outcome.TRANSLATED]
    named = {rule: rule.given(given) for rule in faulty if rule.given(given)}
    for rule in named:
        rule.clear(given)
    rest = translate(copy(given), placement)
    if not isinstance(fault, UnknownLayersError):
        names = tuple(name for each in named.values() for name in each)
        return rest, [Refused(names, ", ".join(names), str(fault))]
    notices = [
        Notice(rule, written(each), f"{rule.becomes}, which needs num_layers", rule.outcome)
        for rule, each in named.items()
    ]
    return replace(rest, notices=(*notices, *rest.notices)), []


def _told(refusal: Refusal, value: Any) -> str:
    return f"{refusal.name} {value}" if refusal.shows_value else refusal.name


def _names(notices: Iterable[Notice]) -> set[str]:
    return {name for notice in notices for name in notice.rule.names}


def _is_on(value: Any) -> bool:
    return value not in (None, False, "none")
