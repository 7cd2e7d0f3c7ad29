"""Registers what the environment variable MEGATRON_VSHAPE asks for, in programs of any `main`.

    MEGATRON_VSHAPE="schedule=v-half,timeout_seconds=120"

The installed package's start-up file imports this module where the variable is set. Megatron itself
is not imported by that: the schedule is registered as soon as the program has imported it.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "MEGATRON_VSHAPE"
MEGATRON = "megatron.core"

_NUMBERS: dict[str, Callable[[str], float | str]] = {
    "timeout_seconds": float,
    "host_memory_limit_gib": float,
    "slices": lambda text: text if text == "auto" else int(text),
}
_LIMIT = "memory_limit_gib"
_STEPS = "profile_steps"
_SWITCHES = ("vocab_parallel", "post_validates")
_ON = {"true": True, "1": True, "false": False, "0": False}


def options_in(text: str) -> dict[str, Any]:
    """Return the options that the variable's text gives, `name=value` with commas between.

    Raises:
        ValueError: a part has no `=`, a number is none, or a switch neither true nor false.
    """
    options: dict[str, Any] = {}
    last = None
    for part in filter(None, map(str.strip, text.split(","))):
        name, given, value = part.partition("=")
        if given:
            options[name.strip()], last = value.strip(), name.strip()
        elif last == "layer_split":  # whose own commas stand between layers
            options[last] += f",{part}"
        else:
            raise ValueError(
                f"{VARIABLE}={text!r:.80}: {part!r:.40} is no name=value, as in schedule=v-half"
            )
    try:
        for name in filter(options.__contains__, _NUMBERS):
            options[name] = _NUMBERS[name](options[name])
        for name in filter(options.__contains__, _SWITCHES):
            if options[name].lower() not in _ON:
                raise ValueError(f"{name} is true or false, not {options[name]!r:.40}")
            options[name] = _ON[options[name].lower()]
        if options.get(_LIMIT, "x")[:1] in "+-.0123456789":  # else a schedule, whose memory it is
            options[_LIMIT] = float(options[_LIMIT])
        if _STEPS in options:
            first, steps_end = map(int, options[_STEPS].split(":"))
            options[_STEPS] = first, steps_end
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r:.80}: {error}") from None
    return options


class _AfterMegatron(MetaPathFinder):
    """Registers once Megatron-Core has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find Megatron-Core where it is, and have its own loader register after it."""
        if name != MEGATRON:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _register()

            loader.exec_module = load_and_register
        return spec


def _register() -> None:
    from megatron_vshape.mcore.hooks.registry import install
    from megatron_vshape.mcore.words import Way

    install(options_in(os.environ[VARIABLE]), Way.VARIABLE)


def watch() -> None:
    """Register when the program imports Megatron-Core, or now if it has."""
    if MEGATRON in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterMegatron())


if os.environ.get(VARIABLE):
    watch()
