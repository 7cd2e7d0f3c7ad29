"""A rank of a library where megatron-core is, and Megatron-LM's trainer is not."""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class Absent(MetaPathFinder):
    """Finds no trainer."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Leave every other name to others."""
        if name.startswith("megatron.training"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())

import megatron_vshape  # noqa: E402
from megatron_vshape.mcore import cpu  # noqa: E402

cpu.install()
import other_trainer  # noqa: E402

try:
    megatron_vshape.register()
except RuntimeError as error:
    print(error, flush=True)
settings = {"shape": "bridge", "schedule": "v-half", "directory": sys.argv[1]}
other_trainer.start(int(os.environ["RANK"]), settings)
