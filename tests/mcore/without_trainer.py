"""Two ranks of a library with megatron-core and without Megatron-LM's trainer.

    python without_trainer.py FOLDER PORT

Rank N writes its record to FOLDER/N.pt.
The process imports Megatron, and forks the second rank.
"""

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
rank = 1 if os.fork() == 0 else 0
os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
os.environ["FARM_RECORD"] = f"{sys.argv[1]}/{rank}.pt"
other_trainer.start(rank, {"shape": "bridge", "schedule": "v-half"})
