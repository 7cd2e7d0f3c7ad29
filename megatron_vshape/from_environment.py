"""Register the options of the environment variable MEGATRON_VSHAPE, without changing a program.

    MEGATRON_VSHAPE="schedule=v-half,timeout_seconds=120"

The installed package's start-up file imports this module if the variable is set. That does not
import Megatron: the schedule is registered right after the program has imported it.
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
    """Import hook that registers after the import of Megatron-Core."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find Megatron-Core, and extend its loader to register after the import."""
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
    """Register now if Megatron-Core is imported, otherwise at its import."""
    if MEGATRON in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterMegatron())


if os.environ.get(VARIABLE):
    watch()
