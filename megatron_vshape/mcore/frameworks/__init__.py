"""Frameworks on top of megatron.core: one module each, the only code that knows the framework.

They number the stages by chunk, then rank, or know one chunk. A module replaces attributes of its
framework, if this process has loaded it. The replacements last until `unregister`.
"""

from __future__ import annotations

from argparse import Namespace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from megatron_vshape.mcore.hook import Session


class Framework:
    """A framework; the defaults do nothing."""

    def adapt(self, session: Session, config: Any) -> None:
        """Replace attributes of loaded modules, unless they are replaced already.

        Called for each config with stages, each chunk, and before recorded routing is sorted: a
        framework may load modules in between. `config` is that of a model, or None.

        Raises:
            RefusedError: The framework does not support the schedule of the session.
        """

    def saved_options(self, folder: str) -> Namespace | None:
        """Return the model's options in a checkpoint of the framework, if it is one."""
        return None


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return the frameworks of all modules of this folder."""
    names = sorted(module.name for module in iter_modules(__path__))
    return tuple(import_module(f"{__name__}.{name}").FRAMEWORK for name in names)


def adapt_frameworks(session: Session, config: Any = None) -> None:
    """Adapt the frameworks that this process has loaded to the schedule."""
    if session.pipeline is not None:
        for framework in frameworks():
            framework.adapt(session, config)
