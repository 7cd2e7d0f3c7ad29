"""Read YAML files that include others (OmegaConf, Hydra, Primus), and resolve their references."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError


def read_with_parents(path: Path, key: str = "extends") -> dict[str, Any]:
    """Read a YAML file, merged into the files under `key`, whose paths are relative to it.

    Raises:
        ScheduleError: A file cannot be read.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text()) or {}
        if key == "extends":
            content = substitute(content, environment_value)
        entries = content.pop(key, None) or []
    except (OSError, AttributeError, yaml.YAMLError) as error:
        raise ScheduleError(f"{path} is included and cannot be read: {error}") from None
    merged: dict[str, Any] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        for name, section in _includes(entry):
            name = name if Path(name).suffix in (".yaml", ".yml") else f"{name}.yaml"
            included = read_with_parents(path.parent / name, key)
            for word in reversed(section.split(".") if section else []):
                included = {word: included}
            merged = merge(merged, included)
    return merge(merged, content)


def _includes(entry: Any) -> Iterator[tuple[str, str]]:
    """Yield the files of an entry of a list of includes, and the section for the content of each.

    With Hydra, `model: qwen` is the file model/qwen.yaml in the section `model`, unless @_here_ or
    another section follows. Settings of Hydra itself are skipped.
    """
    if not isinstance(entry, dict):
        name, separator, section = str(entry).partition("@")
        if name != "_self_":
            yield name, _section(section) if separator else ""
        return
    for words, names in entry.items():
        group, separator, section = str(words).split()[-1].partition("@")
        if not group.startswith("hydra/"):
            for name in names if isinstance(names, list) else [names] if names else []:
                yield f"{group}/{name}", _section(section) if separator else group.replace("/", ".")


def _section(name: str) -> str:
    return "" if name in ("_here_", "_global_") else name


def section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a configuration, empty if it is missing or null.

    Raises:
        ScheduleError: It has no settings.
    """
    value = content.get(name)
    if value is not None and not isinstance(value, dict):
        raise ScheduleError(f"{name}: {value!r:.40} is no section with settings: correct the file")
    return value or {}


def number(content: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return a whole number of a configuration, the default if it is missing, null or zero.

    Raises:
        ScheduleError: The value is another one.
    """
    value = content.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ScheduleError(f"{name}: {value!r:.40} is not a positive number: correct the file")
    return value or default


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base with the overrides, section by section."""
    merged = dict(base)
    for name, value in overrides.items():
        section = merged.get(name)
        is_section = isinstance(section, dict) and isinstance(value, dict)
        replaces = is_section and value.get("_override_")  # NeMo-RL's marker
        merged[name] = merge(section or {}, value) if is_section and not replaces else value
    return merged


_REFERENCE = re.compile(r"\$\{(\w[\w.]*)(?::([^{}]*))?\}")
"""A reference to a setting or variable, as in ${policy.precision}, or with a default value.

It is an inner one, without another reference in it.
"""


def substitute(value: Any, value_of: Callable[[re.Match[str]], Any]) -> Any:
    """Replace references in all texts of a configuration."""
    if isinstance(value, dict):
        return {name: substitute(entry, value_of) for name, entry in value.items()}
    if isinstance(value, list):
        return [substitute(entry, value_of) for entry in value]
    while isinstance(value, str) and "${" in value:
        if match := _REFERENCE.fullmatch(value):
            return value_of(match)
        text = _REFERENCE.sub(lambda match: str(value_of(match)), value)
        if text == value:
            break
        value = text
    return value


def with_references(value: Any, content: Mapping[str, Any]) -> Any:
    """Replace ${policy.precision} and similar by that value of the content."""

    def value_of(match: re.Match[str]) -> Any:
        """Return the value; of functions, ${mul:2, 3} and ${oc.env:NAME,default}; else None."""
        if match[1] == "oc.env":
            name, _, default = match[2].partition(",")
            return scalar(os.environ.get(name, default.strip() or "null"))
        if match[2] is not None:
            factors = match[2].replace(" ", "").split(",")
            numbers = [int(factor) for factor in factors if factor.isdecimal()]
            is_product = match[1] == "mul" and len(numbers) == len(factors)
            return prod(numbers) if is_product else None
        value: Any = content
        for name in match[1].split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return substitute(value, value_of)

    return substitute(value, value_of)


def environment_value(match: re.Match[str]) -> Any:
    """Return the variable of ${NAME:default}, or its default."""
    return scalar(os.environ.get(match[1], match[2] or match[0]))


def scalar(text: str) -> Any:
    """Return the number, truth value or null of a text; other texts as they are."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text
