"""Register the schedule of the environment variable MEGATRON_VSHAPE in any program.

    MEGATRON_VSHAPE="schedule=v-half,timeout_seconds=120"

The installed package's start-up file imports this module if the variable is set. This does not
import Megatron: the schedule is registered as soon as the program has imported it.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "MEGATRON_VSHAPE"
MEGATRON = "megatron.core"


class _AfterMegatron(MetaPathFinder):
    """Registers the schedule after Megatron-Core has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find Megatron-Core, and make its loader register the schedule after loading."""
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
    from megatron_vshape.mcore.options import options_in

    install(options_in(os.environ[VARIABLE]))


def watch() -> None:
    """Register when the program imports Megatron-Core, or now if it has been imported."""
    if MEGATRON in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterMegatron())


if os.environ.get(VARIABLE):
    watch()
