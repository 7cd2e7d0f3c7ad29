"""Registers what the environment variable MEGATRON_VSHAPE asks for, in programs of any `main`.

    MEGATRON_VSHAPE="schedule=v-half,timeout_seconds=120"

The installed package's start-up file imports this module where the variable is set. Megatron itself
is not imported by that: the schedule is registered as soon as the program has imported it.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "MEGATRON_VSHAPE"
MEGATRON = "megatron.core"

_NUMBER = "timeout_seconds"
_LIMIT = "memory_limit_gib"
_STEPS = "profile_steps"


def options_in(text: str) -> dict[str, Any]:
    """Return the options that the variable's text gives, `name=value` with commas between.

    Raises:
        ValueError: a part has no `=`, or a number is none.
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
        if _NUMBER in options:
            options[_NUMBER] = float(options[_NUMBER])
        if options.get(_LIMIT, "x")[0] in "+-.0123456789":  # else a schedule, whose memory it is
            options[_LIMIT] = float(options[_LIMIT])
        if _STEPS in options:
            first, steps_end = map(int, options[_STEPS].split(":"))
            options[_STEPS] = first, steps_end
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r:.80}: {error}") from None
    return options


class _AfterMegatron(MetaPathFinder, Loader):
    """Registers once Megatron-Core has been imported."""

    _loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find Megatron-Core where it is, and have this load it."""
        if name != MEGATRON:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Import Megatron-Core, then register."""
        self._loader.exec_module(module)
        from megatron_vshape import register

        register(**options_in(os.environ[VARIABLE]))


def watch() -> None:
    """Register when the program imports Megatron-Core, or now if it has."""
    if MEGATRON in sys.modules:
        from megatron_vshape import register

        register(**options_in(os.environ[VARIABLE]))
    else:
        sys.meta_path.insert(0, _AfterMegatron())


if os.environ.get(VARIABLE):
    watch()
